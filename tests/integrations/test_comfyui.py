"""The ComfyUI nodes, run by a stub of ComfyUI's V3 API (tests/comfy_stub.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from comfy_stub import ComfyStub, InterruptProcessingException
from PIL import Image

from underdraw import Pipeline
from underdraw.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "integrations" / "comfyui"


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> ComfyStub:
    return ComfyStub().install(monkeypatch, FOLDER)


@pytest.fixture
def model(comfy: ComfyStub, small_model: Path) -> Pipeline:
    (model,) = comfy.execute("UnderdrawLoadModel", model=str(small_model), tree="chain:depth=2", device="cpu")
    return model


def test_images_are_those_of_the_pipeline(comfy: ComfyStub, model: Pipeline, pipe: Pipeline) -> None:
    images, maps, statistics = comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3, images=2)
    expected = pipe("fox", seed=3, num_images_per_prompt=2, output_type="np")
    assert torch.equal(images, torch.from_numpy(expected.images)) and images.shape[0] == 2  # (B, H, W, 3) in [0, 1]
    assert maps.shape == images.shape and maps.dtype == torch.float32 and 0 <= maps.min() <= maps.max() <= 1
    assert statistics.startswith(f"{expected.stats.tokens_per_pass:.2f} tokens per pass, {expected.stats.passes} ")


def test_acceptance_map_shows_what_was_accepted(comfy: ComfyStub, model: Pipeline) -> None:
    """Cells of one acceptance have one colour, and a cell is as large as its code."""
    _, maps, _ = comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3, images=1)
    accepted = model("fox", seed=3).history.grid("accepted").clip(min=0)
    size = maps.shape[1] // accepted.shape[0]
    cells = maps[0, ::size, ::size]
    assert torch.equal(cells.repeat_interleave(size, 0).repeat_interleave(size, 1), maps[0])
    colours = {
        (int(count), tuple(cell)) for count, cell in zip(accepted.flat, cells.flatten(0, 1).tolist(), strict=True)
    }
    assert len(colours) == len({count for count, _ in colours}) == len({colour for _, colour in colours}) > 1


def test_sampling_options_reach_the_model(comfy: ComfyStub, model: Pipeline, pipe: Pipeline) -> None:
    options = {"temperature": 0.5, "top_k": 8, "top_p": 0.9}
    images, _, _ = comfy.execute(
        "UnderdrawDraw", model=model, prompt="fox", negative_prompt="house", seed=1, guidance=3.0, **options
    )
    expected = pipe("fox", negative_prompt="house", seed=1, guidance_scale=3.0, output_type="np", **options)
    assert torch.equal(images, torch.from_numpy(expected.images))


def test_progress_and_previews(comfy: ComfyStub, model: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress grows to its total; every second pass but the last shows the image so far, if there is time."""
    monkeypatch.setattr(comfy.module, "PREVIEW_SHARE", 1.0)
    images, _, _ = comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3, preview_every=2)
    values = [value for value, _, _ in comfy.progress]
    assert values == sorted(values) and values[-1] == comfy.progress[0][1]
    previews = [preview for _, _, preview in comfy.progress]
    last = len(previews) - 1
    assert [preview is not None for preview in previews] == [
        index % 2 == 1 and index < last for index in range(last + 1)
    ]
    kind, first, _ = previews[1]
    assert kind == "JPEG" and isinstance(first, Image.Image) and first.size == (images.shape[2], images.shape[1])
    for share, every, count in ((0.0, 2, 1), (1.0, 0, 0)):
        monkeypatch.setattr(comfy.module, "PREVIEW_SHARE", share)
        comfy.progress.clear()
        comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3, preview_every=every)
        assert sum(preview is not None for _, _, preview in comfy.progress) == count


def test_cancel_ends_the_drawing(comfy: ComfyStub, model: Pipeline) -> None:
    comfy.cancel_after = 2
    with pytest.raises(InterruptProcessingException):
        comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3)
    assert len(comfy.progress) == 2
    comfy.cancel_after = None
    after, _, _ = comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3)
    again, _, _ = comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3)
    assert torch.equal(after, again)


def test_wrong_size_is_one_sentence(comfy: ComfyStub, model: Pipeline) -> None:
    for sides, size in (({"width": 33}, "12x33"), ({"height": 33}, "33x12")):
        with pytest.raises(ConfigError, match=f"cannot generate {size}"):
            comfy.execute("UnderdrawDraw", model=model, prompt="fox", seed=3, **sides)
    assert not comfy.progress


def test_loaded_weights_can_be_trained(model: Pipeline) -> None:
    """ComfyUI runs nodes in inference mode, whose tensors raise errors in autograd."""
    assert not any(parameter.is_inference() for parameter in model.model.target.net.parameters())


def test_documented_workflow_runs(comfy: ComfyStub, small_model: Path) -> None:
    """The workflow of docs/integrations.md, with a small model instead of the embedded one."""
    page = (FOLDER.parents[1] / "docs" / "integrations.md").read_text()
    workflow = json.loads(
        page.partition("```json\n")[2].partition("```")[0].replace('"tiny"', json.dumps(str(small_model)))
    )
    images, maps, statistics = comfy.run(workflow)["2"]
    assert images.shape == maps.shape and images.shape[0] == 2 and "tokens per pass" in statistics


def test_package_is_described_for_the_registry() -> None:
    """Dependencies are in pyproject.toml for the registry and pip, in requirements.txt for ComfyUI-Manager."""
    described = pytest.importorskip("tomllib").loads((FOLDER / "pyproject.toml").read_text())
    assert described["project"]["dependencies"] == ["underdraw[families]"]
    assert (FOLDER / "requirements.txt").read_text().split() == described["project"]["dependencies"]
    assert described["tool"]["comfy"].keys() >= {"PublisherId", "DisplayName"}
    assert described["tool"]["setuptools"] == {"packages": [], "py-modules": []}  # pip installs no module `nodes`
