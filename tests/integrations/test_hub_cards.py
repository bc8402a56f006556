"""Drafters and models on a faked hub: uploaded with a model card, and loaded again by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import author_layouts
import checkpoint_writers
import pytest
import small_checkpoint
from fake_hub import FakeHub

from underdraw import Pipeline
from underdraw.calibration import Calibration
from underdraw.errors import UnsupportedError
from underdraw.training.quality import DrafterCard, DrafterQuality


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(tmp_path / "cache").install(monkeypatch)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The model without its drafter."""
    return small_checkpoint.write(tmp_path / "bare", drafter=False)


@pytest.fixture
def trained(small_model: Path, tmp_path: Path) -> Path:
    """A folder as `underdraw train drafter` leaves it."""
    folder = shutil.copytree(small_model / "drafter", tmp_path / "trained")
    quality = DrafterQuality(2.0, ((0.5, 0.6, 0.7, 0.8),), ((0.4, 0.5, 0.6, 0.7),), Calibration())
    card = DrafterCard("small", "eagle", 4_000_000, "60 s", "underdraw train drafter", "4 samples", quality, "3.10")
    (folder / "README.md").write_text(card.markdown())
    (folder / "state.pt").write_bytes(b"moments of the optimiser")
    return folder


def uploaded_card(hub: FakeHub, name: str) -> tuple[dict[str, object], str]:
    """Metadata and text of a repository's card, as the hub reads them."""
    from huggingface_hub import ModelCard

    file = hub.files[name]["README.md"]
    assert isinstance(file, Path)
    card = ModelCard(file.read_text())
    return card.data.to_dict(), card.text


def test_uploaded_drafter_has_a_card_and_loads_by_name(hub: FakeHub, bare: Path, trained: Path) -> None:
    pipe = Pipeline.from_pretrained(bare, drafter=str(trained), tree="chain:depth=2")
    pipe.push_drafter_to_hub("me/drafter", base_model="them/small")
    assert set(hub.files["me/drafter"]) == {"README.md", "model-0.safetensors"}  # not the state of the training
    data, text = uploaded_card(hub, "me/drafter")
    assert data["base_model"] == "them/small" and data["library_name"] == "underdraw"
    assert data["pipeline_tag"] == "text-to-image" and {"drafter", "speculative-decoding"} <= set(data["tags"])
    assert "| 1 | 0.500 | 0.600 | 0.700 | 0.800 | 0.400 |" in text  # the table of acceptance by level
    assert 'Pipeline.from_pretrained("them/small", drafter="me/drafter")' in text
    again = Pipeline.from_pretrained(bare, drafter="me/drafter", tree="chain:depth=2")
    assert again("fox", seed=1).history.passes == pipe("fox", seed=1).history.passes
    assert not (trained / "README.md").read_text().startswith("---")  # the user's folder is as it was


def test_base_model_is_the_name_on_the_hub(hub: FakeHub, bare: Path, trained: Path) -> None:
    hub.add("them/small", bare)
    Pipeline.from_pretrained("them/small", drafter=str(trained)).push_drafter_to_hub("me/drafter")
    assert uploaded_card(hub, "me/drafter")[0]["base_model"] == "them/small"


def test_cards_with_metadata_stay_as_they_are(hub: FakeHub, bare: Path, trained: Path) -> None:
    text = "---\nlicense: mit\n---\n\n# Mine\n"
    (trained / "README.md").write_text(text)
    Pipeline.from_pretrained(bare, drafter=str(trained)).push_drafter_to_hub("me/drafter")
    assert uploaded_card(hub, "me/drafter") == ({"license": "mit"}, "\n# Mine\n")


def test_drafters_without_files_are_refused(hub: FakeHub, bare: Path) -> None:
    with pytest.raises(UnsupportedError, match="the drafter in use has no files"):
        Pipeline.from_pretrained(bare, drafter="jacobi").push_drafter_to_hub("me/drafter")
    assert not hub.files


def test_uploaded_model_has_a_card_and_loads_by_name(hub: FakeHub, bare: Path) -> None:
    hub.add("them/small", bare)
    pipe = Pipeline.from_pretrained("them/small", drafter="jacobi", tree="chain:depth=3", weights="int8")
    pipe.push_to_hub("me/mine")
    data, text = uploaded_card(hub, "me/mine")
    assert data["base_model"] == "them/small" and data["base_model_relation"] == "quantized"
    assert data["library_name"] == "underdraw" and data["pipeline_tag"] == "text-to-image"
    assert {"underdraw", "tiny", "int8", "speculative-decoding"} <= set(data["tags"]) and "license" not in data
    assert "| tree | `chain:depth=3` |" in text and 'Pipeline.from_pretrained("me/mine")' in text
    again = Pipeline.from_pretrained("me/mine")
    assert again.tree_name == "chain:depth=3" and again.weights == "int8"
    assert again("fox", seed=1).history.tokens.tolist() == pipe("fox", seed=1).history.tokens.tolist()


def test_cards_name_the_licence_of_published_models(hub: FakeHub) -> None:
    """The embedded model has no base model on the hub; its licence is no identifier of the hub."""
    Pipeline.from_pretrained("tiny", drafter="jacobi").push_to_hub("me/tiny")
    data, _ = uploaded_card(hub, "me/tiny")
    assert "base_model" not in data and data["license"] == "other"
    assert data["license_name"] == "cc-by-4.0-and-cc0-1.0-and-mit" and "license_link" not in data


def test_cards_of_published_models(hub: FakeHub, tmp_path: Path) -> None:
    """Licences that are no identifiers of the hub are linked, and files of others are named."""
    author_layouts.write_deepseek_janus(tmp_path / "janus", checkpoint_writers.write_janus(tmp_path / "converted"))
    hub.add("deepseek-ai/Janus-Pro-1B", tmp_path / "janus")
    Pipeline.from_pretrained("deepseek-ai/Janus-Pro-1B", drafter="jacobi").push_to_hub("me/janus")
    data, text = uploaded_card(hub, "me/janus")
    assert data["base_model"] == "deepseek-ai/Janus-Pro-1B" and data["license_name"] == "deepseek-model-license"
    assert data["license_link"] == "https://huggingface.co/deepseek-ai/Janus-Pro-1B" and "companions" not in text
    author_layouts.write_baai_emu3(tmp_path / "emu3", tmp_path / "images")
    hub.add("BAAI/Emu3-Gen", tmp_path / "emu3")
    hub.add("BAAI/Emu3-VisionTokenizer", tmp_path / "images")
    Pipeline.from_pretrained("BAAI/Emu3-Gen", drafter="jacobi").push_to_hub("me/emu3")
    data, text = uploaded_card(hub, "me/emu3")
    assert data["license"] == "apache-2.0" and "emu3" in data["tags"]
    assert "`companions` holds files of `BAAI/Emu3-VisionTokenizer`, under their own licences." in text


def test_model_cards_with_metadata_stay_as_they_are(hub: FakeHub, bare: Path) -> None:
    (bare / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    Pipeline.from_pretrained(bare, drafter="jacobi").push_to_hub("me/mine")
    assert uploaded_card(hub, "me/mine") == ({"license": "mit"}, "\n# Mine\n")


def test_documented_upload_runs(
    hub: FakeHub, bare: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of docs/integrations.md, with a small model under the published name."""
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    block = page.partition("## The Hugging Face hub")[2].partition("```py\n")[2].partition("```")[0]
    hub.add("deepseek-community/Janus-Pro-1B", bare)
    monkeypatch.chdir(tmp_path)
    trained.rename("drafter")
    names: dict[str, Pipeline] = {}
    exec(compile(block, "docs/integrations.md", "exec"), names)
    assert uploaded_card(hub, "me/janus-drafter")[0]["base_model"] == "deepseek-community/Janus-Pro-1B"
    assert names["pipe"].drafter_name == "me/janus-drafter"
