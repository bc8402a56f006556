"""Command lines from a grammar of options with hostile values: never a traceback, and no file is lost."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import small_checkpoint

from torture.checks import bounded_memory, run_cases, run_hostile, snapshot
from torture.mutations import SEED, case_random

CASES, CI_CASES = 420, 30
NUMBERS = (
    "nan", "inf", "-inf", "-1", "0", "1", "2", "0.5", "1e39", "1e308", "1e400", "-0.0", "1e-9", "99999999999999999999",
    "4611686018427387903", "4611686018427387904", "1000000000000", "0x10", "1_0", "٣", "", "abc", "1,5", " 1", "True",
)  # fmt: skip
PATHS = (
    "", ".", "..", "/dev/null", "/dev/full", "/dev/zero", "/dev/stdin", "/proc/self/environ", "~nosuchuser/x", "loop",
    "fifo", "fifo.txt", "dangling.png", "folder", "photo.png", "photo.jpg", "notes.txt", "prompts.txt", "notes.txt/x",
    "no/such/folder/x.png", "x.png", "x.jpg", "x.json", "new", "new/", "folder/x.png", "n" * 300, "n" * 300 + ".png",
    "ü" * 130 + ".png", "a b\n.png", "\udcff.png", "-", "--", "*", "a\u2028b.png", "run", "run/00000.png", "model",
    "binary.txt", "deep.json", "huge.txt", "prompts.tsv",
)  # fmt: skip
SPECS = (
    "", ":", "auto", "none", "chain", "chain:depth=0", "chain:depth=-1", "chain:depth=1e9", "chain:depth=999999999",
    "adjacency:init=both,nodes=12", "adjacency:beta=nan", "adjacency:nodes=", "confidence:top_k=0", "cost:node=nan",
    "cost:plain=inf", "static:shape=deep.json", "static:shape=fifo", "static:shape=prompts.txt", "static", "trunk",
    "trunk:nodes=2", "trunk:base=inf", "lantern:k=0", "lantern:k=99999999", "lantern", "rejection", "exact", "jacobi",
    "jacobi-tree", "jacobi:window=0", "neighbour", "forced", "model/drafter", "model/decoder", "owner/na me", "💥",
    "a" * 999,
)  # fmt: skip
WORDS = (
    "fox",
    "red fox",
    "",
    " ",
    "\n",
    "fox " * 50,
    "\0x"[1:],
    "\udcff",
    "💥" * 30,
    "--",
    "-x",
    "a\u2028b",
    "x" * 5000,
)
DEVICES = ("cpu", "auto", "cuda:99", "cuda:-1", "meta", "gpu", "", "mps", "cpu:0", "cpu:7")
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "float64", "")
MODELS = (
    "model",
    "model/decoder",
    "model/config.json",
    "",
    "/dev/null",
    "fifo",
    "loop",
    "nowhere",
    "~nosuchuser/m",
    "..",
)
SAMPLING = {
    "--seed": NUMBERS, "--guidance": NUMBERS, "--temperature": NUMBERS, "--top-k": NUMBERS, "--top-p": NUMBERS,
}  # fmt: skip
PARTS = {
    "--tree": SPECS,
    "--verifier": SPECS,
    "--drafter": SPECS,
    "--device": DEVICES,
    "--dtype": DTYPES,
    "--model": MODELS,
}
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "generate": (
        ("fox", "-m", "model", "--tree", "none"),
        {
            **SAMPLING, **PARTS, "-o": PATHS, "--heatmap": PATHS, "--trace": PATHS, "--compare-image": PATHS,
            "--height": NUMBERS, "--width": NUMBERS, "--negative": WORDS, "--n": ("1", "2", "0", "-3", "1000000000"),
            "--sheet": PATHS, "--batch": NUMBERS,
        },
    ),
    "generate --prompts": (
        ("-m", "model", "--tree", "none", "--limit", "2"),
        {
            **SAMPLING, **PARTS, "--prompts": PATHS, "-o": PATHS, "--sheet": PATHS, "--limit": NUMBERS,
            "--batch": NUMBERS, "--data": PATHS,
        },
    ),
    "bench": (
        ("-m", "model", "--limit", "1", "--tree", "chain:depth=2", "--seed", "1"),
        {
            **SAMPLING, **PARTS, "--prompts": PATHS, "--out": PATHS, "--repeats": ("0", "-1", "abc", "1000000000000"),
            "--proposal": ("auto", "topk", "x", ""), "--preset": ("nope", ""), "--overlong": ("skip", "x"),
        },
    ),
    "train samples": (
        ("-m", "model", "--batch", "2", "--count", "2"),
        {
            "--prompts": PATHS, "--images": PATHS, "--out": PATHS, "--seed": NUMBERS, "--temperature": NUMBERS,
            "--count": ("0", "-1", "abc", "1000000000", "inf", "2"), "--batch": ("0", "-1", "abc", "99999999999", "1"),
            "--device": DEVICES, "--dtype": DTYPES, "--model": MODELS,
        },
    ),
    "train drafter": (
        ("-m", "model", "--pause", "0.02", "--held-out", "1", "--batch", "1"),
        {
            "--samples": PATHS, "--out": PATHS, "--seconds": NUMBERS, "--learning-rate": NUMBERS,
            "--report-every": NUMBERS,
            "--layers": ("0", "-1", "abc", "1000000000", "1"), "--depth": ("0", "-1", "100000", "2"),
            "--ffn": ("-1", "1000000000", "8"), "--kv-heads": ("-1", "3", "100000000"), "--seed": NUMBERS,
            "--kind": ("eagle", "block", "x"), "--held-out": ("0", "-5", "99999", "1"), "--device": DEVICES,
        },
    ),
    "evaluate": ((), {"FOLDER": PATHS, "--against": PATHS, "--metrics": ("exact", "test", "fid", "x", "", ",")}),
    "evaluate statistics": (
        ("-m", "model", "--limit", "1", "--temperature", "0"),
        {**PARTS, "--prompts": PATHS, "--out": PATHS, "--temperature": NUMBERS, "--seed": NUMBERS, "--limit": NUMBERS},
    ),
    "models inspect": ((), {"PATH": (*PATHS, *MODELS)}),
    "models": ((), {"MODEL": MODELS, "--words": ("",), "--jsno": ("",)}),
    "plot": ((), {"FOLDER": PATHS, "--page": PATHS}),
}  # fmt: skip
REQUIRED = {"--prompts": "prompts.txt", "--out": "new", "--samples": "samples", "FOLDER": "run", "PATH": "model"}
FLAGS = ("--force", "--json", "--quiet", "--compare", "--words", "--nope", "-h")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint.write(tmp_path_factory.mktemp("lines") / "model", side=3)


def prepare(here: Path, model: Path) -> None:
    """Files of every kind that the grammar names."""
    here.mkdir()
    (here / "model").symlink_to(model)
    (here / "folder").mkdir()
    for name in ("photo.png", "photo.jpg", "notes.txt", "folder/old.txt"):
        (here / name).write_text("precious")
    (here / "prompts.txt").write_text("a red fox\na fox\n", encoding="utf-8")
    (here / "prompts.tsv").write_text("Prompt\tCategory\n")
    (here / "binary.txt").write_bytes(bytes(range(256)))
    (here / "deep.json").write_text("[" * 5000 + "]" * 5000)
    with (here / "huge.txt").open("wb") as file:
        file.truncate(2**31)  # sparse
    for name in ("fifo", "fifo.txt"):
        os.mkfifo(here / name)
    (here / "loop").symlink_to("loop")
    (here / "dangling.png").symlink_to("nowhere.png")
    (here / "run").mkdir()
    (here / "run" / "00000.png").write_text("precious")


def make_line(rng: random.Random, command: str) -> list[str]:
    """A command with two to four options of its grammar."""
    base, grammar = COMMANDS[command]
    words = [*command.removesuffix(" --prompts").split(), *base]
    options = dict.fromkeys(rng.sample(sorted(grammar), min(len(grammar), rng.randint(2, 4))))
    options |= {name: None for name in grammar if name in REQUIRED and name not in options and rng.random() < 0.8}
    for name in options:
        value = rng.choice(grammar[name]) if rng.random() < 0.8 else REQUIRED.get(name, rng.choice(grammar[name]))
        words += [value] if name.isupper() else [name, value]
    if rng.random() < 0.3:
        words.append(rng.choice(FLAGS))
    return [word for word in words if "\0" not in word]


def check_case(index: int, model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    rng = case_random("line", index)
    prepare(here, model)
    monkeypatch.chdir(here)
    line = make_line(rng, list(COMMANDS)[index % len(COMMANDS)])
    if "huge.txt" not in line:  # 2 GiB are not hashed every time
        (here / "huge.txt").unlink()
    before = snapshot(here) if "huge.txt" not in line else {}
    what = f"case {index} of seed {SEED}: underdraw {line}"
    done = run_hostile(*line, context=what)
    if before:
        after = snapshot(here)
        lost = {name for name, content in before.items() if after.get(name) != content}
        assert not lost or "--force" in line or "-f" in line, f"{what}: changed {lost}"
        assert done.code == 0 or set(after) <= set(before) or "--force" in line, (
            f"{what}: left {set(after) - set(before)}"
        )
    return done.code


def test_some_command_lines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cases(CI_CASES, lambda index: check_case(index, model, tmp_path / str(index), monkeypatch))


@pytest.mark.torture
def test_command_lines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bounded_memory():
        codes = run_cases(CASES, lambda index: check_case(index, model, tmp_path / str(index), monkeypatch))
    print(f"{CASES} command lines of seed {SEED}: {codes.count(2)} refused, {codes.count(0)} done")
