"""The same seed gives the same picture: command line, Python, any batch, every policy and drafter, T = 0 and T = 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call
from PIL import Image

from underdraw import Pipeline
from underdraw.registry import policies

SMALLER = {  # than by default, where that saves time
    "chain": "chain:depth=3",
    "static": "static:shape=reverse_balanced_25",
    "confidence": "confidence:depth=3,top_k=4,nodes=12",
    "adjacency": "adjacency:init=both,nodes=16",
}
TREES = ["auto", *(SMALLER.get(name, name) for name in policies.names())]
WORDS = ("a red fox", "a blue house", "狐", "a tree")


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["T=0", "T=1"])
def temperature(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(scope="module")
def expected(small_model: Path, temperature: float) -> list[bytes]:
    """What plain sampling draws, one picture at a time; the seeds make a difference exactly when something is drawn."""
    pipe = Pipeline.from_pretrained(small_model, tree="none")
    pictures = [pipe(text, seed=20 + i, temperature=temperature).images[0].tobytes() for i, text in enumerate(WORDS)]
    other = pipe(WORDS[0], seed=99, temperature=temperature).images[0].tobytes()
    assert (other == pictures[0]) == (temperature == 0)
    assert len(set(pictures)) == len(WORDS)
    return pictures


@pytest.mark.parametrize("tree", TREES)
def test_every_policy_alone_and_in_a_batch(
    pipe: Pipeline, expected: list[bytes], temperature: float, tree: str
) -> None:
    pipe.tree = tree
    alone = pipe(WORDS[2], seed=22, temperature=temperature)
    batch = pipe(list(WORDS), seed=20, temperature=temperature)
    assert alone.images[0].tobytes() == expected[2]
    assert [image.tobytes() for image in batch.images] == expected


@pytest.mark.parametrize("drafter", ["jacobi", "neighbour", "forced"])
def test_every_drafter(small_model: Path, expected: list[bytes], temperature: float, drafter: str) -> None:
    pipe = Pipeline.from_pretrained(small_model, drafter=drafter, tree="confidence:depth=3,top_k=4,nodes=12")
    batch = pipe(list(WORDS), seed=20, temperature=temperature)
    assert [image.tobytes() for image in batch.images] == expected


def test_command_line(small_model: Path, expected: list[bytes], temperature: float, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(WORDS), encoding="utf-8")
    common = ("-m", small_model, "--temperature", temperature, "--tree", "chain:depth=3")
    call("generate", WORDS[1], *common, "--seed", 21, "-o", tmp_path / "one.png")
    assert Image.open(tmp_path / "one.png").tobytes() == expected[1]
    for batch in (1, 4):
        folder = tmp_path / str(batch)
        call("generate", "--prompts", prompts, *common, "--seed", 20, "--batch", batch, "-o", folder)
        assert [Image.open(folder / f"{i:05d}.png").tobytes() for i in range(4)] == expected
