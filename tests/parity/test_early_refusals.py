"""What a model cannot do is refused before its weights are downloaded, or before they are read from a disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import author_layouts
import checkpoint_writers
import newer_checkpoint_writers
import pytest
from commands import call
from fake_hub import FakeHub
from parity_cases import ParityCase

from underdraw.distributed.planned_images import WorkerOptions
from underdraw.distributed.worker import ImageWorker
from underdraw.errors import CapacityError, CheckpointError, ConfigError, UnsupportedError
from underdraw.models import loading, weight_map
from underdraw.models.loading import CheckImages, UnloadedModel
from underdraw.pipeline import Pipeline

ANOLE, GLM_IMAGE = "leloy/Anole-7b-v0.1-hf", "zai-org/GLM-Image"
WRITERS: dict[str, Callable[[Path], Any]] = {
    ANOLE: checkpoint_writers.write_anole,
    "Alpha-VLLM/Lumina-mGPT-7B-768": lambda folder: checkpoint_writers.write_lumina(folder, side=None),
    "Alpha-VLLM/Lumina-mGPT-2.0": newer_checkpoint_writers.write_lumina2,
    "deepseek-community/Janus-Pro-1B": checkpoint_writers.write_janus,
    "Emu3-community/Emu3-Gen-hf": checkpoint_writers.write_emu3,
    GLM_IMAGE: newer_checkpoint_writers.write_glm_image,
    "jadohu/LlamaGen-T2I": checkpoint_writers.write_llamagen_converted,
    "Daniel0724/SimpleAR-0.5B-RL": newer_checkpoint_writers.write_simplear,
}
UNUSUAL = {"height": 100, "width": 36}  # pixels


def publish(hub: FakeHub, name: str, folder: Path) -> None:
    WRITERS[name](folder / name.rpartition("/")[2])
    hub.add(name, folder / name.rpartition("/")[2])


def fetched_weights(hub: FakeHub, name: str) -> list[str]:
    return [file for file in hub.downloaded(name) if file.endswith((".safetensors", ".bin", ".pt"))]


@pytest.mark.parametrize("name", WRITERS)
def test_unsupported_size_is_refused_before_the_download(fake_hub: FakeHub, tmp_path: Path, name: str) -> None:
    publish(fake_hub, name, tmp_path)
    done = call("generate", "a red fox", "-m", name, "--height", 100, "--width", 36, "-o", tmp_path / "a.png")
    assert done.code == 2 and f"{name} cannot generate 100x36 (height x width) pixels; use " in done.err
    assert fake_hub.downloads and not fetched_weights(fake_hub, name)


@pytest.mark.parametrize("command", [("--n", 2), ("--n", 2, "--workers", 1)])
def test_folders_of_images_are_refused_before_the_download(
    fake_hub: FakeHub, tmp_path: Path, command: tuple[object, ...]
) -> None:
    """A worker process has no faked hub; it is called in this one."""
    publish(fake_hub, ANOLE, tmp_path)
    if "--workers" in command:
        with pytest.raises(ConfigError, match="cannot generate 100x36"):
            ImageWorker.load(WorkerOptions({"model": ANOLE, "device": "cpu"}, UNUSUAL))
    else:
        done = call("generate", "a fox", "-m", ANOLE, "--height", 100, "--width", 36, "-o", tmp_path / "out", *command)
        assert done.code == 2 and "cannot generate 100x36" in done.err
    assert fake_hub.downloads and not fetched_weights(fake_hub, ANOLE)


def test_unsupported_size_is_refused_before_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_writers.write_anole(tmp_path / "anole")
    monkeypatch.setattr(weight_map, "copy_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match="cannot generate 100x36"):
        Pipeline.from_pretrained(tmp_path / "anole", check=CheckImages(**UNUSUAL))


def test_unknown_size_is_refused_before_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_writers.write_lumina(tmp_path / "mine", side=None)
    monkeypatch.setattr(weight_map, "copy_weights", lambda *_: pytest.fail("weights are read"))
    done = call("generate", "a fox", "-m", tmp_path / "mine", "-o", tmp_path / "a.png")
    assert done.code == 2 and "do not say which image size it was trained for" in done.err


def test_pickles_are_checked_after_the_download(fake_hub: FakeHub, tmp_path: Path, janus: ParityCase) -> None:
    """Their tensors, which say what Janus is, cannot be listed before."""
    author_layouts.write_deepseek_janus(tmp_path / "janus", janus.reference)
    fake_hub.add("deepseek-ai/Janus-Pro-1B", tmp_path / "janus")
    words = ("-m", "deepseek-ai/Janus-Pro-1B", "--height", 100, "--width", 36, "-o", tmp_path / "a.png")
    done = call("generate", "a red fox", *words)
    assert done.code == 2 and "cannot generate 100x36" in done.err


def test_hub_that_sends_no_headers_is_no_obstacle(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no ranges")

    publish(fake_hub, ANOLE, tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "parse_safetensors_file_metadata", fail)
    pipe = Pipeline.from_pretrained(ANOLE, drafter="jacobi", tree="none", device="cpu", check=CheckImages(64, 64))
    assert pipe.model.family == "anole"


def test_images_without_their_decoder_are_refused_before_the_download(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(fake_hub, GLM_IMAGE, tmp_path)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    done = call("generate", "a red fox", "-m", GLM_IMAGE, "-o", tmp_path / "a.png")
    assert done.code == 2 and "pip install 'underdraw[glm-image]'" in done.err
    assert call("serve", "-m", GLM_IMAGE, "--port", 0).code == 2
    assert not fetched_weights(fake_hub, GLM_IMAGE) and not caplog.messages


WITH_TOKENIZER = [name for name in WRITERS if "LlamaGen" not in name and "Lumina-mGPT-7B" not in name]


@pytest.mark.parametrize("name", WITH_TOKENIZER)
def test_missing_text_tokenizer_is_refused_before_the_download(fake_hub: FakeHub, tmp_path: Path, name: str) -> None:
    publish(fake_hub, name, tmp_path)
    for file in ("tokenizer.json", "vocab.json", "processor/tokenizer.json"):
        fake_hub.files[name].pop(file, None)
    with pytest.raises(CheckpointError, match=r"has no (text tokenizer|tokenizer\.json); put"):
        Pipeline.from_pretrained(name, device="cpu")
    assert fake_hub.downloads and not fetched_weights(fake_hub, name)


@pytest.mark.parametrize("name", WITH_TOKENIZER)
def test_missing_text_tokenizer_is_refused_before_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    WRITERS[name](tmp_path / "model")
    for file in ("tokenizer.json", "vocab.json", "processor/tokenizer.json"):
        (tmp_path / "model" / file).unlink(missing_ok=True)
    monkeypatch.setattr(weight_map, "copy_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(CheckpointError, match=r"has no (text tokenizer|tokenizer\.json); put"):
        Pipeline.from_pretrained(tmp_path / "model", device="cpu")


@pytest.mark.parametrize("name", WITH_TOKENIZER)
def test_missing_package_is_refused_before_the_download(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    publish(fake_hub, name, tmp_path)
    for package in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'underdraw\[families\]'"):
        Pipeline.from_pretrained(name, device="cpu")
    assert fake_hub.downloads and not fetched_weights(fake_hub, name)


def test_weights_larger_than_the_memory_are_not_downloaded(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(fake_hub, ANOLE, tmp_path)
    monkeypatch.setattr(loading, "physical_memory", lambda: 1_700_000)
    advice = r"weights in float32 and this machine has 0\.0 GiB on cpu; use dtype bfloat16"
    with pytest.raises(CapacityError, match=advice):
        Pipeline.from_pretrained(ANOLE, device="cpu")
    monkeypatch.setattr(loading, "free_bytes", lambda _: 1_700_000)
    with pytest.raises(CapacityError, match=r"0\.0 GiB are free on cpu; use"):
        Pipeline.from_pretrained(ANOLE, device="cpu")
    assert not fetched_weights(fake_hub, ANOLE)
    Pipeline.from_pretrained(ANOLE, device="cpu", dtype="bfloat16", drafter="jacobi")


def test_training_refuses_weights_larger_than_the_memory(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(fake_hub, ANOLE, tmp_path)
    (tmp_path / "prompts.txt").write_text("a red fox\n")
    monkeypatch.setattr(loading, "physical_memory", lambda: 1_700_000)
    words = ("--prompts", tmp_path / "prompts.txt", "-o", tmp_path / "samples", "--device", "cpu")
    done = call("train", "samples", "-m", ANOLE, *words)
    assert done.code == 2 and "use dtype bfloat16" in done.err
    assert not fetched_weights(fake_hub, ANOLE)


def test_quantised_copy_is_not_downloaded_for_another_format(fake_hub: FakeHub, tmp_path: Path) -> None:
    checkpoint_writers.write_anole(tmp_path / "anole")
    pipe = Pipeline.from_pretrained(tmp_path / "anole", device="cpu", drafter="jacobi", weights="int8")
    fake_hub.add("me/anole-int8", pipe.save_pretrained(tmp_path / "copy"))
    with pytest.raises(ConfigError, match="was saved with int8 weights and cannot be loaded with int4"):
        Pipeline.from_pretrained("me/anole-int8", device="cpu", weights="int4")
    assert not fetched_weights(fake_hub, "me/anole-int8")


@pytest.mark.parametrize(("name", "file"), [(ANOLE, "config.json"), (GLM_IMAGE, "vision_language_encoder/config.json")])
def test_formats_of_other_quantisers_are_refused_before_the_download(
    fake_hub: FakeHub, tmp_path: Path, name: str, file: str
) -> None:
    """Their tensors have other names, which was noticed after the download."""
    publish(fake_hub, name, tmp_path)
    folder = tmp_path / name.rpartition("/")[2]
    changes = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))
    for source in (name, folder):
        with pytest.raises(UnsupportedError, match=r"was quantised by bitsandbytes, whose formats are not supported"):
            Pipeline.from_pretrained(source, device="cpu")
    assert fake_hub.downloaded(name) and not fetched_weights(fake_hub, name)


def test_words_are_listed_without_a_download_of_weights(fake_hub: FakeHub, tmp_path: Path) -> None:
    publish(fake_hub, ANOLE, tmp_path)
    done = call("models", ANOLE, "--words")
    assert done.code == 2 and f"{ANOLE} has no list of words; it reads any text." in done.err
    (tmp_path / "words.json").write_text(json.dumps({"colours": ["red"], "words": ["a", "red", "fox"]}))
    fake_hub.files["me/words"] = {"words.json": tmp_path / "words.json", "model.safetensors": 10**18}
    assert "red" in call("models", "me/words", "--words").out
    fake_hub.files["me/weights"] = {"model.safetensors": 10**18}
    assert "has no list of words" in call("models", "me/weights", "--words").err
    assert fake_hub.downloads and not any(fetched_weights(fake_hub, name) for name in fake_hub.files)


def test_damaged_configuration_is_one_sentence(fake_hub: FakeHub, tmp_path: Path) -> None:
    publish(fake_hub, ANOLE, tmp_path)
    config = tmp_path / "Anole-7b-v0.1-hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": 5}))
    for name in (ANOLE, config.parent):
        done = call("generate", "a red fox", "-m", name, "-o", tmp_path / "a.png")
        assert done.code == 2 and "cannot be loaded, its files do not match (TypeError" in done.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("drafter", "eagel", "there is no drafter 'eagel'"),
        ("drafter", "jacobi:windows=3", "unknown option of drafter jacobi 'windows'"),
        ("tree", "adjacenci", "unknown policy 'adjacenci'"),
        ("verifier", "exacto", "unknown verifier 'exacto'"),
        ("proposal", "top", "unknown proposal 'top'"),
        ("compile", "on", "compile 'on' needs a CUDA device"),
        ("numerics", "fast", "unknown numerics 'fast'"),
        ("weights", "int3", "unknown weights 'int3'"),
        ("weights", "int8", "leave out numerics 'fastest'"),
    ],
)
def test_wrong_choices_are_refused_before_the_download(
    fake_hub: FakeHub, tmp_path: Path, option: str, value: str, message: str
) -> None:
    publish(fake_hub, ANOLE, tmp_path)
    choices: dict[str, Any] = {"numerics": "fastest" if value == "int8" else "row-invariant", option: value}
    with pytest.raises(ConfigError, match=message):
        Pipeline.from_pretrained(ANOLE, device="cpu", **choices)
    assert not fetched_weights(fake_hub, ANOLE)


def test_drafter_that_the_hub_lacks_is_refused_before_the_download(fake_hub: FakeHub, tmp_path: Path) -> None:
    publish(fake_hub, ANOLE, tmp_path)
    with pytest.raises(CheckpointError, match="jadohu/anole_draftr could not be downloaded"):
        Pipeline.from_pretrained(ANOLE, device="cpu", drafter="jadohu/anole_draftr")
    assert fake_hub.downloads and not fetched_weights(fake_hub, ANOLE)


def test_wrong_methods_of_a_benchmark_are_refused_before_the_download(fake_hub: FakeHub, tmp_path: Path) -> None:
    publish(fake_hub, ANOLE, tmp_path)
    (tmp_path / "prompts.txt").write_text("a red fox\n")
    words = ("-m", ANOLE, "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "run")
    for choice, message in ((("--tree", "adjacenci"), "unknown policy"), (("--drafter", "eagel"), "no drafter")):
        done = call("bench", *words, *choice)
        assert done.code == 2 and message in done.err
    assert not fake_hub.downloads


def test_check_is_called_once(fake_hub: FakeHub, tmp_path: Path) -> None:
    """Before the download, or with the files that are there already."""
    publish(fake_hub, ANOLE, tmp_path)
    seen: list[UnloadedModel] = []
    options: dict[str, Any] = {"drafter": "jacobi", "tree": "none", "device": "cpu", "check": seen.append}
    for name in (ANOLE, tmp_path / "Anole-7b-v0.1-hf"):
        Pipeline.from_pretrained(name, **options)
    assert [type(model.checkpoint).__name__ for model in seen] == ["RemoteCheckpoint", "Checkpoint"]
    assert all(model.family.name == "anole" for model in seen)
