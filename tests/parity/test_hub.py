"""Real checkpoints on a faked hub: what is downloaded, what is refused before that, and copies that load offline."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import checkpoint_writers
import newer_checkpoint_writers
import pytest
import torch
from commands import call
from fake_hub import FakeHub
from parity_cases import CPU

from underdraw.cli.options import stopped_by_downloads
from underdraw.errors import CapacityError, CheckpointError, ConfigError, UnsupportedError
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.hub import RepositoryFile, select_weights
from underdraw.models.inspect import inspect
from underdraw.models.loading import detect_family, load_model, open_model
from underdraw.pipeline import Pipeline

LUMINA_512, LUMINA_768 = "Alpha-VLLM/Lumina-mGPT-7B-512", "Alpha-VLLM/Lumina-mGPT-7B-768"
VQGAN = "leloy/Anole-7b-v0.1-vqvae-hf"


def files(*names: str) -> list[RepositoryFile]:
    return [RepositoryFile(name, 1) for name in names]


def names_of(selected: Iterable[RepositoryFile]) -> list[str]:
    return [file.name for file in selected]


@pytest.fixture
def lumina_hub(fake_hub: FakeHub, tmp_path: Path) -> FakeHub:
    """Lumina-mGPT as published: no text tokenizer with 512 px, and an image tokenizer in another repository."""
    for repository in (LUMINA_512, LUMINA_768):
        folder = tmp_path / "published" / repository.rpartition("/")[2]
        checkpoint_writers.write_lumina(folder, side=None)
        if repository == LUMINA_512:
            (folder / "tokenizer.json").unlink()
        fake_hub.add(repository, folder)
    vqgan = tmp_path / "published" / "vqgan"
    vqgan.mkdir()
    state = torch.load(tmp_path / "published" / "chameleon" / "tokenizer" / "vqgan.ckpt", weights_only=True)
    torch.save(state["state_dict"], vqgan / "pytorch_model.bin")
    fake_hub.add(VQGAN, vqgan)
    return fake_hub


def test_one_format_of_weights_is_selected() -> None:
    """google/flan-t5-xl holds its weights as safetensors, pickles, TensorFlow and Flax."""
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    pickles = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    listing = files("config.json", *shards, "model.safetensors.index.json", *pickles, "tf_model.h5", "flax.msgpack")
    assert names_of(select_weights(listing)) == shards
    assert names_of(select_weights(files(*pickles, "pytorch_model.bin.index.json"))) == pickles


def test_selection_by_folder() -> None:
    listing = files(
        "model.safetensors", "vae/model.safetensors", "drafter-eagle/model-0.safetensors", "companions/vqgan.ckpt"
    )
    expected = ["companions/vqgan.ckpt", "model.safetensors", "drafter-eagle/model-0.safetensors"]
    assert names_of(select_weights(listing)) == expected
    assert "vae/model.safetensors" in names_of(select_weights(listing, ["vae"]))


def test_single_file_with_the_weights_of_shards_is_not_downloaded() -> None:
    listing = files("model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors")
    assert names_of(select_weights(listing)) == ["model-00001-of-00001.safetensors"]


def test_index_of_weights_that_were_not_downloaded_is_no_obstacle(fake_hub: FakeHub, tmp_path: Path) -> None:
    """One safetensors file beside sharded pickles, whose index is among the small files."""
    checkpoint_writers.write_llamagen_converted(tmp_path / "model")
    shards = {f"pytorch_model-0000{index}-of-00002.bin": 10**18 for index in (1, 2)}
    index = {"weight_map": {"lm_head.weight": "pytorch_model-00001-of-00002.bin"}}
    (tmp_path / "model" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    fake_hub.add("owner/model", tmp_path / "model", shards)
    assert open_model("owner/model").weight_files()[0].name == "model.safetensors"
    assert not shards.keys() & set(fake_hub.downloaded("owner/model"))


def test_other_models_are_refused_before_their_weights_are_downloaded(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    fake_hub.add("owner/gpt", tmp_path / "gpt", {"model.safetensors": 34_000_000_000})
    with pytest.raises(UnsupportedError, match=r"owner/gpt \(gpt2\) is of no supported family"):
        open_model("owner/gpt")
    assert fake_hub.downloaded("owner/gpt") == ["config.json"]


def test_large_pickles_of_other_models_are_not_downloaded_to_be_inspected(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    fake_hub.add("owner/gpt", tmp_path / "gpt", {"pytorch_model.bin": 34_000_000_000})
    done = call("models", "inspect", "owner/gpt")
    assert done.code == 2 and "owner/gpt is not supported: it is neither a model" in done.err
    assert fake_hub.downloaded("owner/gpt") == ["config.json"]


def test_folders_of_a_diffusers_pipeline_are_downloaded(fake_hub: FakeHub, tmp_path: Path) -> None:
    """zai-org/GLM-Image has no config.json of its own; its parts are in subfolders."""
    (tmp_path / "glm").mkdir()
    (tmp_path / "glm" / "model_index.json").write_text(json.dumps({"_class_name": "GlmImagePipeline"}))
    weights = {
        f"{folder}/model.safetensors": 1 for folder in ("vision_language_encoder", "transformer", "vae", "other")
    }
    fake_hub.add("zai-org/GLM-Image", tmp_path / "glm", weights)
    open_model("zai-org/GLM-Image")
    assert set(fake_hub.downloaded("zai-org/GLM-Image")) == {*weights, "model_index.json"} - {"other/model.safetensors"}


def test_weights_for_pixels_are_not_downloaded_without_diffusers(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Codes need none of them."""
    newer_checkpoint_writers.write_glm_image(tmp_path / "glm")
    sizes = {f"{folder}/model.safetensors": 10**18 for folder in ("text_encoder", "transformer", "vae")}
    fake_hub.add("zai-org/GLM-Image", tmp_path / "glm", sizes)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    pipe = Pipeline.from_pretrained("zai-org/GLM-Image", drafter="jacobi", tree="none", device="cpu")
    assert pipe("a red fox", height=64, width=64, output_type="codes").images.shape == (1, 2, 2)
    assert not sizes.keys() & set(fake_hub.downloaded("zai-org/GLM-Image"))
    (warning,) = (message for message in caplog.messages if "is downloaded without" in message)
    assert "text_encoder, transformer, vae" in warning and "pip install 'underdraw[glm-image]'" in warning


def test_configuration_of_the_working_directory_is_not_the_repositorys(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository of one file and nothing else, asked for in a folder that happens to hold another model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    monkeypatch.chdir(tmp_path)
    path, _ = checkpoint_writers.write_llamagen(tmp_path / "c2i", "c2i")
    fake_hub.add("owner/c2i")
    fake_hub.files["owner/c2i"] = {"c2i_XL_64.pt": path}
    assert detect_family(open_model("owner/c2i")).name == "llamagen"
    assert "model, llamagen" in call("models", "inspect", "owner/c2i").out


def test_several_models_in_one_repository_need_a_file_name(fake_hub: FakeHub) -> None:
    sizes = {"t2i_XL_stage1_256.pt": 3, "t2i_XL_stage2_512.pt": 3, "vq_ds16_t2i.pt": 1}
    fake_hub.add("peizesun/llamagen_t2i", sizes=sizes)
    with pytest.raises(ConfigError, match=r"several models.*peizesun/llamagen_t2i/t2i_XL_stage1_256\.pt") as error:
        open_model("peizesun/llamagen_t2i")
    assert "vq_ds16_t2i.pt" not in str(error.value)
    assert not fake_hub.downloads


def test_one_model_beside_its_image_tokenizer_is_not_several(fake_hub: FakeHub, tmp_path: Path) -> None:
    path, _ = checkpoint_writers.write_llamagen(tmp_path / "c2i", "c2i")
    fake_hub.files["owner/c2i"] = {"c2i_XL_64.pt": path, "vq_ds16_c2i.pt": path.parent / "vq_ds16_c2i.pt"}
    assert load_model(open_model("owner/c2i"), CPU).family == "llamagen"
    assert fake_hub.downloaded("owner/c2i") == ["c2i_XL_64.pt", "vq_ds16_c2i.pt"]


def test_download_larger_than_the_disk_is_refused(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text(json.dumps({"model_type": "emu3"}))
    fake_hub.add("owner/big", tmp_path / "big", {"model.safetensors": 10**18})
    with pytest.raises(CapacityError, match=r"owner/big needs 1000000000\.0 GB of downloads, but .* GB free"):
        open_model("owner/big")
    assert fake_hub.downloaded("owner/big") == ["config.json"]


def test_download_says_its_size(lumina_hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    open_model(LUMINA_768)
    assert any(f"MB of {LUMINA_768} (2 files)" in message for message in caplog.messages)


def test_spinner_of_commands_makes_room_for_progress_bars(lumina_hub: FakeHub) -> None:
    stops: list[str] = []
    with stopped_by_downloads(lambda: stops.append("stopped")):
        open_model(LUMINA_768)
        assert stops == ["stopped"]
    open_model(LUMINA_512)
    assert stops == ["stopped"]


def test_download_of_one_file_says_its_size(fake_hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    fake_hub.add("peizesun/llamagen_t2i", sizes={"t2i_XL_stage1_256.pt": 3_100_000_000, "vq_ds16_t2i.pt": 10**18})
    open_checkpoint("peizesun/llamagen_t2i/t2i_XL_stage1_256.pt")
    assert any("3.1 GB of peizesun/llamagen_t2i (t2i_XL_stage1_256.pt)" in message for message in caplog.messages)
    with pytest.raises(CapacityError, match=r"llamagen_t2i needs 1000000000\.0 GB of downloads"):
        open_checkpoint("peizesun/llamagen_t2i/vq_ds16_t2i.pt")
    with pytest.raises(CheckpointError, match=r"has no file t2i_XL\.pt but t2i_XL_stage1_256\.pt, vq_ds16_t2i\.pt"):
        open_checkpoint("peizesun/llamagen_t2i/t2i_XL.pt")
    assert fake_hub.downloaded("peizesun/llamagen_t2i") == ["t2i_XL_stage1_256.pt"]


def test_lumina_512_takes_its_text_tokenizer_from_768(lumina_hub: FakeHub) -> None:
    model = load_model(open_model(LUMINA_512), CPU)
    assert lumina_hub.downloaded(LUMINA_768) == ["tokenizer.json"]
    assert str(model.sizes[0]) == "512x512" and model.make_prompt("a fox", None, model.sizes[0]).condition


def test_saved_copy_loads_offline(lumina_hub: FakeHub, tmp_path: Path) -> None:
    """Image and text tokenizers come from other repositories; a copy has them, and remembers the image size."""
    original = Pipeline.from_pretrained(LUMINA_512)
    copy = original.save_pretrained(tmp_path / "renamed")
    lumina_hub.files.clear()
    shutil.rmtree(lumina_hub.cache)
    loaded = load_model(open_checkpoint(copy), CPU)
    assert str(loaded.resolve_size(None, None)) == "512x512"
    codes = torch.arange(16).view(1, 4, 4)
    assert torch.equal(loaded.image_tokenizer.decode(codes), original.model.image_tokenizer.decode(codes))


def test_lumina_of_unknown_size_is_not_guessed(tmp_path: Path) -> None:
    checkpoint_writers.write_lumina(tmp_path / "mine", side=None)
    model = load_model(open_checkpoint(tmp_path / "mine"), CPU)
    with pytest.raises(ConfigError, match=r"which image size.*768x768, 512x512, 1024x1024"):
        model.resolve_size(None, None)
    assert str(model.resolve_size(512, 512)) == "512x512" and str(model.resolve_size(1024, 1024)) == "1024x1024"
    assert "do not name the image size" in call("models", "inspect", str(tmp_path / "mine")).out


def test_size_of_a_renamed_folder_can_be_recorded(tmp_path: Path) -> None:
    """For commands that have no option for it, such as `train` and `bench`."""
    checkpoint_writers.write_lumina(tmp_path / "mine", side=None)
    prompts, record = tmp_path / "prompts.txt", tmp_path / "mine" / "underdraw.json"
    prompts.write_text("a red fox\n")
    done = call("bench", "-m", tmp_path / "mine", "--prompts", prompts, "--out", tmp_path / "run")
    assert done.code == 2 and 'write a file underdraw.json into its folder that says {"size": "768x768"}' in done.err
    record.write_text('{"size": "512x512"}')
    assert str(load_model(open_checkpoint(tmp_path / "mine"), CPU).resolve_size(None, None)) == "512x512"
    for size in ("500x500", "512x768", "large"):
        record.write_text(json.dumps({"size": size}))
        with pytest.raises(ConfigError, match=f"has the size '{size}', which is no square of a multiple of 32 pixels"):
            load_model(open_checkpoint(tmp_path / "mine"), CPU)


def test_square_sizes_are_named_first(lumina_hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match=r"cannot generate 500x512 .* use 512x512, 768x768, 1024x1024, "):
        load_model(open_model(LUMINA_512), CPU).resolve_size(500, 512)


def test_lumina_of_unknown_size_can_be_measured(tmp_path: Path) -> None:
    """For servers, and for calls of many images: costs are those of one of its sizes."""
    checkpoint_writers.write_lumina(tmp_path / "mine", side=None)
    request = Pipeline.from_pretrained(tmp_path / "mine", device="cpu").sample_request(2)
    assert str(request.size) == "768x768" and len(request.prompts) == 2


def test_largest_lumina_image_fits_its_positions(tmp_path: Path) -> None:
    """1024 x 1024 pixels are 4,160 tokens, the configuration says 4,096 positions; the authors have no limit."""
    checkpoint_writers.write_lumina(tmp_path / "mine", side=1024)
    model = load_model(open_checkpoint(tmp_path / "mine"), CPU)
    size = model.resolve_size(None, None)
    layout = model.make_layout(size)
    assert layout.steps > 4096
    model.target.open([model.make_prompt("a fox", None, size)], layout, guidance=1.0)


WRITERS = {
    "leloy/Anole-7b-v0.1-hf": checkpoint_writers.write_anole,
    "deepseek-community/Janus-Pro-1B": checkpoint_writers.write_janus,
    "Emu3-community/Emu3-Gen-hf": checkpoint_writers.write_emu3,
    "zai-org/GLM-Image": newer_checkpoint_writers.write_glm_image,
    "jadohu/LlamaGen-T2I": checkpoint_writers.write_llamagen_converted,
}


@pytest.mark.parametrize("name", WRITERS)
def test_inspecting_a_repository_downloads_no_weights(fake_hub: FakeHub, tmp_path: Path, name: str) -> None:
    """The report is that of the downloaded files: shapes come from headers, sizes from the list of files."""
    folder = tmp_path / name.rpartition("/")[2]
    WRITERS[name](folder)
    fake_hub.add(name, folder)
    done = call("models", "inspect", name, "--json")
    report = json.loads(done.out)
    assert done.code == 0 and not done.err
    assert not [file for file in fake_hub.downloaded(name) if file.endswith(".safetensors")]
    expected = inspect(open_checkpoint(folder)).json()
    assert {**report, "name": "", "drafters": []} == {**expected, "name": "", "drafters": []}
    assert report["bytes"] > 0 and report["memory"]["bfloat16"]["weights"] > 0


def test_inspecting_an_uploaded_copy_downloads_no_companions(lumina_hub: FakeHub) -> None:
    """Its image tokenizer is a pickle, but not what is inspected."""
    Pipeline.from_pretrained(LUMINA_512).push_to_hub("me/lumina")
    assert "me/lumina: model, lumina" in call("models", "inspect", "me/lumina").out
    assert not [name for name in lumina_hub.downloaded("me/lumina") if name.endswith((".safetensors", ".bin"))]


def test_drafters_on_the_hub_are_inspected_as_drafters(fake_hub: FakeHub, tmp_path: Path) -> None:
    """Their configuration is that of a model; only the tensors tell, here of a pickle, which has to be downloaded."""
    checkpoint_writers.write_drafter(tmp_path / "head", "anole")
    fake_hub.add("jadohu/anole_drafter", tmp_path / "head")
    assert "jadohu/anole_drafter: drafter, eagle" in call("models", "inspect", "jadohu/anole_drafter").out
    checkpoint_writers.write_drafter(tmp_path / "other", "anole", suffix="safetensors")
    fake_hub.add("jadohu/other_drafter", tmp_path / "other")
    assert "jadohu/other_drafter: drafter, eagle" in call("models", "inspect", "jadohu/other_drafter").out
    assert fake_hub.downloaded("jadohu/other_drafter") == ["config.json"]


def test_missing_repository_is_one_sentence(fake_hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="nobody/nothing could not be downloaded"):
        open_model("nobody/nothing")


def test_codes_and_pixels_can_be_used_in_autograd(tmp_path: Path) -> None:
    """They are ordinary tensors; those of torch's inference mode raise errors in a backward pass."""
    checkpoint_writers.write_lumina(tmp_path / "lumina")
    pipe = Pipeline.from_pretrained(tmp_path / "lumina", tree="none")
    request = pipe.request("a fox", seed=0)
    weight = torch.ones(8192, 2, requires_grad=True)
    codes, pixels = (pipe.generate(request, output_type=kind).images for kind in ("codes", "pt"))
    (weight[codes].sum() * pixels.mean()).backward()
    assert weight.grad is not None and int(weight.grad[:, 0].sum() / pixels.mean() + 0.5) == codes.numel()
