"""Loading checkpoints from disk and the hub: error messages, companions, and how much memory it takes."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_writers
import parity_cases
import pytest
import torch
from parity_cases import ParityCase
from safetensors.torch import load_file, save_file

from underdraw.errors import CheckpointError, ConfigError, UnsupportedError
from underdraw.extras import require_package
from underdraw.models import chameleon, emu3, janus
from underdraw.models.checkpoint import Checkpoint, open_checkpoint
from underdraw.models.family import ImageSize
from underdraw.models.hub import HubOptions, is_hub_id
from underdraw.models.loading import load_model
from underdraw.nn.linear import Linear
from underdraw.nn.quantized_weight import WeightFormat
from underdraw.pipeline import Pipeline
from underdraw.registry import families


@pytest.fixture
def folder(tmp_path: Path, anole: ParityCase) -> Path:
    return shutil.copytree(anole.path, tmp_path / "anole")


def edit_shards(folder: Path, change: Any) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        state = load_file(path)
        change(state)
        save_file(state, path)


def test_missing_tensors_are_named(folder: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state.pop("model.layers.1.self_attn.q_proj.weight", None)

    edit_shards(folder, change)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.q_proj\.weight; it is incomplete"):
        parity_cases.load(folder)


def test_unexpected_tensors_are_named(folder: Path) -> None:
    edit_shards(folder, lambda state: state.update({f"model.extra.{i}": torch.zeros(1) for i in range(9)}))
    with pytest.raises(CheckpointError, match=r"has unexpected model\.extra\.0, .*model\.extra\.5 and 3 more; it is"):
        parity_cases.load(folder)


def test_wrong_shapes_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"has the shape \(\d+, \d+\), but its configuration says"):
        parity_cases.load(folder)


@pytest.mark.parametrize("weights", ["full", "int8"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.vqmodel.decoder.conv_in.weight"])
def test_integers_without_scales_are_an_error(folder: Path, name: str, weights: WeightFormat) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        if name in state:
            state[name] = (state[name] * 40).to(torch.int8)

    edit_shards(folder, change)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} of .* holds int8 values without scales; it is inc"):
        load_model(open_checkpoint(folder), replace(parity_cases.CPU, weights=weights))


@pytest.mark.parametrize("keep", [0, 7, 1000, -1])
def test_truncated_safetensors_are_an_error(folder: Path, keep: int) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        CheckpointError, match=rf"{path.name} cannot be read \(.*damaged or incomplete: download it again"
    ):
        parity_cases.load(folder)


@pytest.mark.parametrize("keep", [0, 100, -100])
def test_truncated_pickles_are_an_error(tmp_path: Path, keep: int) -> None:
    path, _ = checkpoint_writers.write_llamagen(tmp_path, "c2i")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"c2i_XL_64\.pt cannot be read"):
        parity_cases.load(path)


class CodeInPickle:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this ran",))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_pickles_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], zipped: bool) -> None:
    torch.save({"model": CodeInPickle()}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="not weights, and running them would not be safe"):
        parity_cases.load(tmp_path / "m.pt")
    (tmp_path / "n.pt").write_bytes(pickle.dumps(CodeInPickle(), protocol=2))
    with pytest.raises(CheckpointError):
        parity_cases.load(tmp_path / "n.pt")
    assert "this ran" not in capsys.readouterr().out


def test_old_pickle_format_loads(tmp_path: Path, c2i: ParityCase) -> None:
    """Files from before torch's zip format cannot be memory-mapped."""
    path, written = checkpoint_writers.write_llamagen(tmp_path, "c2i")
    torch.save({"model": written}, path, _use_new_zipfile_serialization=False)
    state, expected = parity_cases.load(path).target.net.state_dict(), c2i.model.target.net.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_unsupported_family_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(
        UnsupportedError, match=rf"\(mamba\) is of no supported family; supported are {', '.join(families.names())}\."
    ):
        parity_cases.load(tmp_path)
    torch.save({"model": {"weight": torch.zeros(1)}}, tmp_path / "other.pt")
    with pytest.raises(UnsupportedError, match="of no supported family"):
        parity_cases.load(tmp_path / "other.pt")


def test_unsupported_configuration_is_an_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"attention_bias": True}, "has attention_bias"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r"scales its rotary positions \(linear\)"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UnsupportedError, match=message):
            parity_cases.load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(CheckpointError, match=r"configuration of .* is incomplete or damaged"):
        parity_cases.load(folder)


def test_unsupported_image_size_is_an_error(anole: ParityCase, lumina: ParityCase) -> None:
    with pytest.raises(ConfigError, match=r"cannot generate 500x64 \(height x width\) pixels; use 64x64"):
        anole.model.resolve_size(500, None)
    with pytest.raises(ConfigError, match=r"use 128x128, .*96x160"):
        lumina.model.resolve_size(128, 256)
    assert lumina.model.resolve_size(96, 160) == ImageSize(96, 160)
    assert lumina.model.resolve_size(None, None) == ImageSize(128, 128)


def test_missing_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        UnsupportedError, match=r"needs the package tokenizers; install it with: pip install 'underdraw\[fam"
    ):
        parity_cases.load(folder)
    with pytest.raises(UnsupportedError, match="needs the package no_such_package"):
        require_package("no_such_package", "families", "a test")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("leloy/Anole-7b-v0.1-hf", True),
        ("peizesun/llamagen_t2i/t2i_XL_stage1_256.pt", True),
        ("owner/name/more", False),
        ("models/c2i_B_256.pt", False),
        ("name", False),
        ("./a/b", False),
        ("/a/b", False),
        ("a//b", False),
    ],
)
def test_hub_ids_are_recognised(name: str, expected: bool) -> None:
    """A dot in a repository's name does not make it a file."""
    assert is_hub_id(name) == expected


def test_hub_options_reach_the_download(monkeypatch: pytest.MonkeyPatch, anole: ParityCase) -> None:
    import huggingface_hub

    requests: list[tuple[Any, ...]] = []

    def snapshot(name: str, **options: Any) -> str:
        requests.append((name, options))
        return str(anole.path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    hub = HubOptions(revision="v1", token="secret", cache_dir="/cache", local_files_only=True)
    checkpoint = open_checkpoint("leloy/Anole-7b-v0.1-hf", hub)
    name, options = requests[0]
    assert name == "leloy/Anole-7b-v0.1-hf" and checkpoint.path == anole.path
    expected = {"revision": "v1", "token": "secret", "cache_dir": "/cache", "local_files_only": True}
    assert {key: options[key] for key in expected} == expected
    checkpoint.find_or_download(["missing"], "leloy/Anole-7b-v0.1-vqvae-hf")
    assert requests[1][1]["revision"] is None and requests[1][1]["token"] == "secret"


def test_model_is_opened_from_the_hub_cache(tmp_path: Path, anole: ParityCase) -> None:
    repository = tmp_path / "models--leloy--Anole-7b-v0.1-hf"
    shutil.copytree(anole.path, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    hub = HubOptions(cache_dir=str(tmp_path), local_files_only=True)
    assert open_checkpoint("leloy/Anole-7b-v0.1-hf", hub).config["model_type"] == "chameleon"
    with pytest.raises(CheckpointError, match="nobody/nothing could not be downloaded"):
        open_checkpoint("nobody/nothing", hub)


def test_cache_with_one_format_of_weights_is_enough_offline(tmp_path: Path) -> None:
    """The hub's cache lists all files of a repository; pickles that repeat the weights were not downloaded."""
    checkpoint_writers.write_llamagen_converted(tmp_path / "converted" / "LlamaGen-T2I")
    repository, commit = tmp_path / "models--google--flan-t5-xl", "b" * 40
    snapshot = shutil.copytree(tmp_path / "converted" / "t5" / "flan-t5-xl", repository / "snapshots" / commit)
    shutil.rmtree(tmp_path / "converted" / "t5")
    names = [*(path.name for path in snapshot.iterdir()), "pytorch_model-00001-of-00002.bin"]
    files = {name: {"size": 1, "blob_id": "c" * 40} for name in names}
    (repository / "trees").mkdir()
    (repository / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    hub = HubOptions(cache_dir=str(tmp_path), local_files_only=True)
    model = load_model(open_checkpoint(tmp_path / "converted" / "LlamaGen-T2I", hub), parity_cases.CPU)
    assert isinstance(model.make_prompt("a red fox", None, model.sizes[0]).condition, torch.Tensor)


@pytest.mark.parametrize("status", [429, 503])
def test_unavailable_hub_is_treated_as_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anole: ParityCase, status: int
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    class BusyApi:
        def __init__(self, **_: Any) -> None: ...

        def model_info(self, *_: Any, **__: Any) -> Any:
            raise HfHubHTTPError("later", response=SimpleNamespace(status_code=status, headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "HfApi", BusyApi)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(anole.path))
    assert open_checkpoint("leloy/Anole-7b-v0.1-hf").path == anole.path


def test_environment_names_folders_of_companions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "vqgan.ckpt").touch()
    (tmp_path / "near" / "model").mkdir(parents=True)
    checkpoint = Checkpoint(tmp_path / "near" / "model", "m")
    assert checkpoint.find_companion(["vqgan.ckpt"]) is None
    monkeypatch.setenv("UNDERDRAW_FILES", f"/nowhere:{tmp_path / 'far'}")
    assert checkpoint.find_companion(["vqgan.ckpt"]) == tmp_path / "far" / "vqgan.ckpt"


def test_missing_companion_is_an_error(tmp_path: Path) -> None:
    checkpoint_writers.write_anole(tmp_path / "model", decoder=False)
    (tmp_path / "model" / "vqgan.ckpt").unlink()
    checkpoint = open_checkpoint(
        tmp_path / "model", HubOptions(cache_dir=str(tmp_path / "cache"), local_files_only=True)
    )
    with pytest.raises(CheckpointError, match=r"also needs vqgan\.ckpt, .*UNDERDRAW_FILES; and leloy/Anole"):
        load_model(checkpoint, parity_cases.CPU)


def test_folder_called_tokenizer_is_no_text_tokenizer(tmp_path: Path) -> None:
    """LANTERN's folder of that name holds an image tokenizer; only whole repositories are saved as folders."""
    checkpoint_writers.write_anole(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(CheckpointError, match=r"has no text tokenizer; put its tokenizer\.json"):
        parity_cases.load(tmp_path / "model")
    (tmp_path / "decoder").mkdir()
    hub = HubOptions(cache_dir=str(tmp_path / "cache"), local_files_only=True)
    with pytest.raises(CheckpointError, match=r"also needs decoder\.jit"):
        Checkpoint(tmp_path / "model", "m", hub=hub).find_or_download(["decoder.jit"], "nvidia/Cosmos/decoder.jit")


def test_every_family_has_a_small_checkpoint() -> None:
    assert {*parity_cases.FIXTURES.values(), "tiny"} == set(families.names())


@pytest.mark.parametrize("name", parity_cases.FIXTURES)
def test_weights_are_stored_in_row_invariant_layouts(request: pytest.FixtureRequest, name: str) -> None:
    """Input-major, or packed for MKL (three dimensions) or oneDNN."""
    target = request.getfixturevalue(name).model.target
    weights = [layer.weight for layer in target.net.modules() if isinstance(layer, Linear)]
    assert weights
    for weight in weights:
        assert weight.is_mkldnn or weight.ndim == 3 or weight.stride() == (1, weight.shape[0])


def test_defaults_match_transformers_configurations() -> None:
    """Configurations leave out what equals the defaults of their class, so ours have to be the same."""
    from transformers import ChameleonConfig, Emu3TextConfig, Emu3VQVAEConfig, LlamaConfig

    for ours, config in (
        (chameleon.DEFAULTS, ChameleonConfig()),
        (emu3.DEFAULTS, Emu3TextConfig()),
        (emu3.IMAGE_DEFAULTS, Emu3VQVAEConfig()),
        (janus.DEFAULTS, LlamaConfig()),
    ):
        for key, value in ours.items():
            theirs = config.rope_parameters["rope_theta"] if key == "rope_theta" else getattr(config, key)
            assert value == theirs or key == "bos_token_id", key


def test_loaded_pipeline_changes_dtype(t2i: ParityCase) -> None:
    """Text features follow the new dtype."""
    pipe = Pipeline(parity_cases.load(t2i.path), drafter="jacobi", tree="none").to(dtype="bfloat16")
    assert pipe("a red fox", seed=1, output_type="codes").complete


MEMORY = """
import sys, torch
from pathlib import Path
from underdraw.models.loading import load_model
from underdraw.models import weight_map
from underdraw.models.checkpoint import Checkpoint, open_checkpoint
from underdraw.models.family import Placement
from underdraw.nn import linear, onednn

torch.set_num_threads(1)
if sys.argv[2] == "unpacked":
    linear.prefers_onednn = lambda dtype: False
onednn._PROBED_ROWS = (2,)  # the kernels of all of them take 28 MB for a shape of any size
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

peaks, match_shape = [], weight_map._match_shape
def watched(*args):
    out = match_shape(*args)
    peaks.append(anonymous())
    return out

weight_map._match_shape = watched
with torch.device("meta"):
    torch.nn.Embedding(3, 3).to_empty(device="cpu")  # torch allocates 70 MB the first time
before = anonymous()
model = load_model(open_checkpoint(Path(sys.argv[1])), Placement(torch.device("cpu"), torch.float32))
size = sum(p.nbytes for m in (model.target.net, model.image_tokenizer) for p in m.parameters())
has_packed = any(p.is_mkldnn for p in model.target.net.parameters())
print(max(peaks) - before, anonymous() - before, size, int(has_packed))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize("layout", ["packed", "unpacked"])
def test_loading_needs_the_weights_and_a_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Private memory of a process that loads 230 MB of float32, measured at every tensor; mapped files do not count."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 5, "num_attention_heads": 12}
    monkeypatch.setattr(
        checkpoint_writers, "CHAMELEON", {**checkpoint_writers.CHAMELEON, **sizes, "num_key_value_heads": 12}
    )
    checkpoint_writers.write_anole(tmp_path, rows=12)
    words = [sys.executable, "-c", MEMORY, str(tmp_path), layout]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, after, size, is_packed = map(int, done.stdout.split())
    assert size > 200e6 and not (is_packed and layout == "unpacked")
    assert peak < 1.1 * size and after < 1.1 * size + is_packed * 100e6  # oneDNN's code and buffers
