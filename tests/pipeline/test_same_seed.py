"""The same seed gives the same image: command line, Python, any batch, every policy and drafter, T = 0 and T = 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call
from PIL import Image

from underdraw import Pipeline
from underdraw.registry import policies

SMALLER_TREES = {  # than the defaults, to save time
    "chain": "chain:depth=3",
    "static": "static:shape=reverse_balanced_25",
    "confidence": "confidence:depth=3,top_k=4,nodes=12",
    "adjacency": "adjacency:init=both,nodes=16",
}
TREES = ["auto", *(SMALLER_TREES.get(name, name) for name in policies.names())]
PROMPTS = ("a red fox", "a blue house", "狐", "a tree")


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["T=0", "T=1"])
def temperature(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(scope="module")
def expected(small_model: Path, temperature: float) -> list[bytes]:
    """The images of plain decoding, one at a time; the seed has an effect exactly when the temperature is not 0."""
    pipe = Pipeline.from_pretrained(small_model, tree="none")
    images = [pipe(text, seed=20 + i, temperature=temperature).images[0].tobytes() for i, text in enumerate(PROMPTS)]
    other = pipe(PROMPTS[0], seed=99, temperature=temperature).images[0].tobytes()
    assert (other == images[0]) == (temperature == 0)
    assert len(set(images)) == len(PROMPTS)
    return images


@pytest.mark.parametrize("tree", TREES)
def test_policy_alone_and_in_a_batch(pipe: Pipeline, expected: list[bytes], temperature: float, tree: str) -> None:
    pipe.tree = tree
    alone = pipe(PROMPTS[2], seed=22, temperature=temperature)
    batch = pipe(list(PROMPTS), seed=20, temperature=temperature)
    assert alone.images[0].tobytes() == expected[2]
    assert [image.tobytes() for image in batch.images] == expected


@pytest.mark.parametrize("drafter", ["jacobi", "jacobi-tree", "neighbour", "forced"])
def test_drafter(small_model: Path, expected: list[bytes], temperature: float, drafter: str) -> None:
    pipe = Pipeline.from_pretrained(small_model, drafter=drafter, tree="confidence:depth=3,top_k=4,nodes=12")
    batch = pipe(list(PROMPTS), seed=20, temperature=temperature)
    assert [image.tobytes() for image in batch.images] == expected


def test_command_line_alone_and_in_a_batch(
    small_model: Path, expected: list[bytes], temperature: float, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    common = ("-m", small_model, "--temperature", temperature, "--tree", "chain:depth=3")
    call("generate", PROMPTS[1], *common, "--seed", 21, "-o", tmp_path / "one.png")
    assert Image.open(tmp_path / "one.png").tobytes() == expected[1]
    for batch in (1, 4):
        folder = tmp_path / str(batch)
        call("generate", "--prompts", prompts, *common, "--seed", 20, "--batch", batch, "-o", folder)
        assert [Image.open(folder / f"{i:05d}.png").tobytes() for i in range(4)] == expected
