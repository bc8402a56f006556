"""Prompt files and stored runs as a hostile or clumsy user leaves them: odd columns, damaged shards, foreign files."""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpoint_writers
import pytest
import small_checkpoint
from PIL import Image
from safetensors.torch import load_file, save_file

from torture.checks import bounded_memory, run_cases, run_hostile, snapshot
from torture.mutations import SEED, case_random, damage_bytes, damage_json, damage_kind
from underdraw import Pipeline
from underdraw.errors import CheckpointError, ConfigError
from underdraw.image_store import RunStorage, Shards
from underdraw.models.pretrained import load_module
from underdraw.prompts import PromptFile
from underdraw.shards import read_shard

CASES, CI_CASES = 120, 6
FORMATS = {"tar": "webdataset", "table": "parquet", "pictures": "folder"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts, and a finished run of each format."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("files")
    small_checkpoint.write(folder / "model", side=3)
    (folder / "prompts.jsonl").write_text('{"id": "a", "prompt": "fox"}\n{"id": "b", "prompt": "red fox"}\n')
    for name in FORMATS:
        assert run_hostile(*command(folder, name, folder / name)).code == 0
    return folder


def command(base: Path, name: str, out: Path, prompts: Path | None = None) -> tuple[Any, ...]:
    words = (
        "generate",
        "-m",
        base / "model",
        "--tree",
        "none",
        "--seed",
        1,
        "--prompts",
        prompts or base / "prompts.jsonl",
    )
    return (*words, "-o", out, "--format", FORMATS[name], "--quiet")


def add_tar(path: Path, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE) -> None:
    """Replace a shard by one with a single member."""
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
        archive.addfile(member, io.BytesIO(content))


TAR_DAMAGE: dict[str, Callable[[Path], None]] = {
    "no rows": lambda path: add_tar(path, "000000000.png", b"x"),
    "a link out of it": lambda path: add_tar(path, "000000000.json", kind=tarfile.LNKTYPE),
    "a device": lambda path: add_tar(path, "000000000.json", kind=tarfile.CHRTYPE),
    "a name out of it": lambda path: add_tar(path, "../../x.json", b"{}"),
    "deep JSON": lambda path: add_tar(path, "000000000.json", b"[" * 10**5),
    "a list": lambda path: add_tar(path, "000000000.json", b"[1]"),
}


def damage_run(index: int, here: Path) -> str:
    """Damage a shard, an image or run.json of a copied run."""
    rng = case_random("shard", index)
    victims = [path for path in sorted(here.iterdir()) if path.suffix in (".tar", ".parquet", ".png", ".json")]
    victim = rng.choice(victims)
    if victim.suffix == ".tar" and rng.random() < 0.4:
        what = rng.choice(sorted(TAR_DAMAGE))
        TAR_DAMAGE[what](victim)
        return f"{victim.name}: {what}"
    damage = rng.choice(
        [damage_json, damage_json, damage_kind] if victim.suffix == ".json" else [damage_bytes] * 3 + [damage_kind]
    )
    return f"{victim.name}: {damage(rng, victim)}"


def check_case(index: int, base: Path, here: Path) -> int:
    """Verify, evaluate, encode and resume a damaged run: an answer or a sentence, and nothing of it is lost."""
    name = sorted(FORMATS)[index % len(FORMATS)]
    shutil.copytree(base / name, here)
    what = f"case {index} of seed {SEED}: {name}: {damage_run(index, here)}"
    before = snapshot(here)
    run_hostile("verify", here, "--model", base / "model", context=what)
    run_hostile("evaluate", here, "--against", base / "pictures", context=what)
    run_hostile("train", "samples", "-m", base / "model", "--images", here, "-o", f"{here}-samples", context=what)
    assert snapshot(here) == before, f"{what}: reading changed the run"
    done = run_hostile(*command(base, name, here), context=what)
    if done.code == 2:
        assert set(before) <= set(snapshot(here)), f"{what}: lost files"
    return done.code


def test_some_damaged_shards(base: Path, tmp_path: Path) -> None:
    run_cases(CI_CASES, lambda index: check_case(index, base, tmp_path / str(index)))


@pytest.mark.torture
def test_damaged_shards(base: Path, tmp_path: Path) -> None:
    with bounded_memory():
        codes = run_cases(CASES, lambda index: check_case(index, base, tmp_path / str(index)))
    print(f"{CASES} damaged runs in three formats of seed {SEED}: {codes.count(2)} refused, {codes.count(0)} resumed")


def test_unfinished_shards_are_healed(base: Path, tmp_path: Path) -> None:
    """Damaged images of an unfinished shard are drawn again; files of others stay."""
    run = tmp_path / "run"
    shutil.copytree(base / "tar", run)
    waiting = run / ".unfinished" / "000000"
    waiting.mkdir(parents=True)
    (run / "shard-000000.tar").unlink()
    for name, content in {"000000000.json": b"{", "000000000.png": b"", "000000001.json": b"[]", "x.json": b""}.items():
        (waiting / name).write_bytes(content)
    (run / "shard-mine.tar").write_text("precious")
    (run / ".unfinished" / "mine").mkdir()
    assert run_hostile(*command(base, "tar", run)).code == 0
    assert (run / "shard-000000.tar").read_bytes() == (base / "tar" / "shard-000000.tar").read_bytes()
    assert (run / "shard-mine.tar").read_text() == "precious" and (run / ".unfinished" / "mine").is_dir()


def test_a_rank_does_not_replace_a_written_shard(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank writes the shard between our look at its images and our lock."""
    from underdraw import image_store

    images = list(read_shard(base / "tar" / "shard-000000.tar"))
    ours, theirs = (Shards(tmp_path, RunStorage(2, "webdataset")) for _ in range(2))
    theirs.add(images[0])
    real = image_store._waiting_files
    looks = []

    def overtaken(folder: Path) -> list[Path]:
        files = real(folder)
        looks.append(folder)
        if len(looks) == 2:  # of ours, which sees both images
            monkeypatch.setattr(image_store, "_waiting_files", real)
            theirs.resume()
        return files

    ours.resume()
    monkeypatch.setattr(image_store, "_waiting_files", overtaken)
    ours.add(images[1])
    assert [image.index for image in read_shard(tmp_path / "shard-000000.tar")] == [0, 1]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_odd_columns_are_kept(name: str, base: Path, tmp_path: Path) -> None:
    """Numbers that JSON or Parquet cannot hold, names of our own columns, nested values: all can be read back."""
    columns = {
        "nan": math.nan,
        "inf": math.inf,
        "large": 2**70,
        "deep": {"a": [{}]},
        "index": 5,
        "file_name": "../x",
        "": 0,
    }
    prompts = tmp_path / "odd.jsonl"
    prompts.write_text(json.dumps({"id": "../../x", "prompt": "fox", **columns}) + "\n")
    assert run_hostile(*command(base, name, tmp_path / "run", prompts)).code == 0
    if name == "pictures":
        text = (tmp_path / "run" / "metadata.jsonl").read_text()
        assert "NaN" not in text and "Infinity" not in text, "other tools read no such JSON"
        row = json.loads(text)
    else:
        row = next(read_shard(next((tmp_path / "run").glob("shard-*")))).row
    assert row["large"] == 2**70 and row["deep"] == {"a": [{}]} and row["inf"] == "inf" and row["id"] == "../../x"
    assert row.get("nan") is None and row["input_index"] == 5 and not (tmp_path.parent / "x").exists()
    assert run_hostile("verify", tmp_path / "run", "--model", base / "model").code == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"id": "\\ud800", "prompt": "fox"}', "line 1 of .*surrogates"),
        ("a.jsonl", b'{"prompt": "fox", "x": "\\ud800"}', "line 1 of .*surrogates"),
        ("a.jsonl", b'{"prompt": "fox", "\\ud800": 1}', "line 1 of .*surrogates"),
        ("a.jsonl", b'{"prompt": "fox", "seed": 4611686018427387904}', "the seed 4611686018427387904"),
        ("a.csv", b"prompt,prompt\nfox,red\n", "names a column twice"),
        ("a.csv", b'prompt\n"' + b"x" * 200_000 + b'"\n', "not CSV"),
        ("a.txt", "fox\n".encode("utf-16"), "not UTF-8"),
    ],
)  # fmt: skip
def test_prompt_files_that_are_refused(name: str, content: bytes, message: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    done = run_hostile(*command(base, "tar", tmp_path / "run", tmp_path / name))
    assert done.code == 2 and not (tmp_path / "run").exists()
    assert re.search(message, done.err)


def test_prompts_do_not_change_the_metadata_of_a_png(base: Path, tmp_path: Path) -> None:
    pipe = Pipeline.from_pretrained(base / "model", tree="none")
    for prompt in ("a\nb", "a\0b", "x\0tEXtSoftware\0evil", "\u202eabc", "%s{0}<b>"):
        pipe(prompt, seed=1).save(tmp_path / "a.png")
        info = Image.open(tmp_path / "a.png").info
        assert info["prompt"] == prompt and sorted(info) == ["Software", "model", "prompt", "seed", "settings"]


def test_links_in_a_run_lead_nowhere_else(base: Path, tmp_path: Path) -> None:
    """An output folder may be a link; a link instead of an image is replaced, and what it leads to is kept."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert run_hostile(*command(base, "pictures", tmp_path / "link")).code == 0
    image = tmp_path / "real" / "00000.png"
    content = image.read_bytes()
    image.unlink()
    image.symlink_to("../precious.png")
    assert run_hostile(*command(base, "pictures", tmp_path / "link")).code == 0
    assert image.read_bytes() == content and not image.is_symlink() and not (tmp_path / "precious.png").exists()


def test_no_memory_is_one_sentence(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("underdraw.run_folder.RunFolder.open", fail)
    done = run_hostile(*command(base, "pictures", tmp_path / "run"))
    assert done.code == 2 and "not enough memory" in done.err


def test_a_model_that_changes_is_refused(base: Path, tmp_path: Path) -> None:
    """A run is resumed and verified with the weights that drew it, and no others."""
    model = tmp_path / "model"
    shutil.copytree(base / "model", model)
    words = [str(word) for word in command(base, "tar", tmp_path / "run")]
    words[words.index("-m") + 1] = str(model)
    assert run_hostile(*words).code == 0
    file = next((model / "decoder").glob("*.safetensors"))
    raw = file.read_bytes()
    file.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1, raw[-1]]))
    for arguments in (words, ["verify", tmp_path / "run"]):
        done = run_hostile(*arguments)
        assert done.code == 2 and "revision" in done.err


def test_unreachable_ray_clusters_answer_soon(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "x.invalid:6379", "", "here", "a b:1"):
        done = run_hostile(*command(base, "tar", tmp_path / "run"), "--ray", address)
        assert done.code == 2 and "Ray cluster" in done.err


def test_permissions_follow_the_umask(base: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert run_hostile(*command(base, "pictures", tmp_path / "run")).code == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o600}


def test_damaged_costs_of_a_plan(tmp_path: Path) -> None:
    """Every value of the file of times is replaced in turn."""
    from underdraw.bench.capacity import read_costs

    good = {"model": "m", "tokens": 9, "pass_ms": {"1": 1.0, "8": 2.0}, "prefill_ms": {"1": 1.0}, "pixels_ms": 1.0}
    good |= {"png_ms": {"noise": 1.0}, "png_bytes": {"noise": 5}}
    for key in good:
        for value in (None, "x", -1, math.nan, math.inf, [], {}, {"1": None}, {"0": 1.0}, {"x": 1.0}, {"noise": "x"}):
            record = {"machine": {"device": "d"}, "results": [{**good, key: value}]}
            (tmp_path / "costs.json").write_text(json.dumps(record))
            done = run_hostile("plan", "--model", "m", "--costs", tmp_path / "costs.json", "--nodes", 8, "--json")
            assert done.code == 2 or all(math.isfinite(row["hours"]) for row in done.record["rows"]), (key, value)
    with pytest.raises(ConfigError):
        read_costs("m", tmp_path / "costs.json")


def test_damaged_prompt_files(base: Path, tmp_path: Path) -> None:
    """Prompt files of every type with damaged bytes: rows, or a sentence."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": str(index), "prompt": f"a red fox {index}", "seed": index, "size": {"w": [1]}} for index in range(9)]
    caption = {"image_id": 1, "id": 2, "caption": "fox"}
    texts = {
        ".txt": "a red fox\nred\n" * 5,
        ".csv": 'id,prompt\n"a",fox\n' * 5,
        ".jsonl": "".join(f"{json.dumps(row)}\n" for row in rows),
        ".json": json.dumps({"annotations": [caption] * 5}),
        ".tsv": "Prompt\tCategory\tChallenge\tNote\nfox\ta\tb\tc\n",
    }
    read = 0
    for suffix in (*texts, ".parquet"):
        for index in range(20):
            path = tmp_path / f"{index}{suffix}"
            if suffix == ".parquet":
                parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            else:
                path.write_text(texts[suffix])
            damage_bytes(case_random("prompts", suffix, index), path)
            with suppress(ConfigError):
                read += len(list(PromptFile(str(path))))
    assert read > 0, "some damage leaves rows that can be read"


def test_no_reader_runs_code_or_follows_pickles() -> None:
    """torch.load and np.load refuse objects, and nothing else unpickles or reads JSON without limits."""
    source = Path(__file__).parents[2] / "src" / "underdraw"
    calls = {"torch.load": "weights_only", "np.load": "allow_pickle"}
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in (
                *calls,
                "json.load",
                "pickle.load",
                "pickle.loads",
            ):
                assert name in calls, f"{path} calls {name}"
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get(calls[name]) == str(name == "torch.load"), (
                    f"{path} calls {name} without {calls[name]}"
                )


@pytest.mark.parametrize("damage", ["missing", "nan", "cut", "config"])
def test_damaged_text_encoders_are_refused(damage: str, tmp_path: Path) -> None:
    """transformers itself would draw random weights for missing ones."""
    transformers = pytest.importorskip("transformers")
    checkpoint_writers.write_flan_t5(tmp_path)
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    if damage == "missing":
        del state[sorted(state)[0]]
    if damage == "nan":
        state[sorted(state)[0]].view(-1)[0] = math.nan
    save_file(state, weights, {"format": "pt"})
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    if damage == "config":
        (tmp_path / "config.json").write_text("[" * 500)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        load_module(transformers.T5EncoderModel, tmp_path, "a T5 encoder")
