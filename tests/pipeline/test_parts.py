"""Assigning drafter, tree, verifier and proposal; moving a pipeline; the `auto` tree."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
import torch
import toy_models

from underdraw import Pipeline
from underdraw.drafters.eagle import Eagle
from underdraw.drafters.jacobi import Jacobi
from underdraw.errors import ConfigError, UnderdrawError
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.budget import Budget, format_costs
from underdraw.policies.cost import Cost
from underdraw.policies.fixed import Chain, NoTree
from underdraw.policies.trunk import Trunk
from underdraw.verifiers.exact import Exact
from underdraw.verifiers.lantern import Lantern


def draw(pipe: Pipeline) -> bytes:
    return pipe("fox", seed=2).images[0].tobytes()


def test_tree_and_verifier_by_name_or_object(pipe: Pipeline) -> None:
    pipe.drafter, pipe.tree = toy_models.near(pipe.model.target), "adjacency:init=both,nodes=16"
    assert isinstance(pipe.tree, Adjacency) and pipe.tree.init == "both"
    out = pipe("fox", seed=2)
    assert out.history.accepted.max() > 0
    pipe.tree = Adjacency(init="both", nodes=16)
    assert out.history.depth.tolist() == pipe("fox", seed=2).history.depth.tolist()
    pipe.verifier = "rejection"
    assert draw(pipe) != out.images[0].tobytes()
    pipe.verifier = "lantern:delta=0.2"
    assert pipe("fox", seed=2).complete, "LANTERN gets the neighbours of the model's codebook"
    pipe.verifier = Exact()
    assert draw(pipe) == out.images[0].tobytes()


def test_drafter_by_name_or_object(pipe: Pipeline) -> None:
    expected = draw(pipe)
    assert isinstance(pipe.drafter, Eagle) and pipe.drafter_name == "drafter"
    pipe.drafter = "jacobi:window=4"
    assert pipe.drafter == Jacobi(window=4) and pipe.drafter_name == "jacobi:window=4"
    assert draw(pipe) == expected
    pipe.drafter = Jacobi(init="left")
    assert pipe.drafter_name.startswith("jacobi:") and draw(pipe) == expected
    pipe.drafter = "auto"
    assert isinstance(pipe.drafter, Eagle) and draw(pipe) == expected


def test_failed_assignment_changes_nothing(pipe: Pipeline) -> None:
    before = repr(pipe), pipe.drafter, pipe.tree, pipe.verifier, pipe.proposal
    for name, value in [
        ("drafter", "someone"),
        ("drafter", "jacobi:window=0"),
        ("drafter", 3),
        ("tree", "bush"),
        ("tree", "chain:depth=-1"),
        ("tree", 3),
        ("verifier", "maybe"),
        ("verifier", "lantern:delta=7"),
        ("verifier", None),
        ("proposal", "guess"),
    ]:
        with pytest.raises(UnderdrawError):
            setattr(pipe, name, value)
        assert (repr(pipe), pipe.drafter, pipe.tree, pipe.verifier, pipe.proposal) == before, (name, value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("treee", "none", "did you mean pipe.tree?"),
        ("verifer", "exact", "did you mean pipe.verifier?"),
        ("temperature", 0.5, r"pipe\(prompt, temperature=0.5\)"),
        ("scheduler", None, "no noise scheduler"),
        ("drafter", "none", "the tree 'none' .* draws without speculation"),
        ("tree", None, "the tree 'none' .* draws without speculation"),
        ("device", "cuda", r"device cannot be assigned; use pipe.to\(device, dtype\)"),
        ("weights", "int8", r"weights cannot be assigned; .*from_pretrained\(MODEL, weights='int8'\)"),
        ("max_batch", 0, "max_batch 0 is impossible; it must be a whole number from 1 to"),
    ],
)
def test_wrong_assignments_are_refused(pipe: Pipeline, name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setattr(pipe, name, value)


def test_attributes_of_other_libraries(pipe: Pipeline) -> None:
    for name, advice in (
        ("cuda", r'pipe.to\("cuda"\)'),
        ("enable_vae_slicing", "leave it out"),
        ("unet", "components"),
    ):
        with pytest.raises(AttributeError, match=advice):
            getattr(pipe, name)
    assert not hasattr(pipe, "eval") and copy.copy(pipe).model is pipe.model
    pipe.note = "mine"  # type: ignore[attr-defined]
    assert pipe.note == "mine"  # type: ignore[attr-defined]


def test_repr_names_the_parts(pipe: Pipeline) -> None:
    pipe.verifier = "rejection"
    text = repr(pipe)
    assert text.startswith("Pipeline(model=") and text.endswith("device='cpu', dtype='float32')")
    assert "family='tiny', drafter='drafter', tree='chain:depth=2', verifier='rejection'" in text


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16}, {"dtype": torch.bfloat16}])
def test_dtype_of_from_pretrained(small_model: Path, options: dict[str, object]) -> None:
    pipe = Pipeline.from_pretrained(small_model, **options)  # type: ignore[arg-type]
    assert pipe.dtype == torch.bfloat16


def test_equal_dtype_and_torch_dtype_are_accepted(small_model: Path) -> None:
    assert Pipeline.from_pretrained(small_model, dtype="float32", torch_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    "arguments",
    [(torch.bfloat16,), ("cpu", torch.bfloat16), ("cpu", "bfloat16"), (torch.device("cpu"), torch.bfloat16)],
)
def test_to_changes_the_dtype(pipe: Pipeline, arguments: tuple[object, ...]) -> None:
    pipe.verifier = "lantern"
    assert pipe.to(*arguments) is pipe  # type: ignore[arg-type]
    assert pipe.dtype == torch.bfloat16 and str(pipe.device) == "cpu"
    assert pipe.components["drafter"].fc.weight.dtype == torch.bfloat16
    assert pipe.verifier_name == "lantern" and pipe("fox", seed=1).complete


def test_to_without_arguments_or_with_a_device_changes_nothing(pipe: Pipeline) -> None:
    expected = draw(pipe)
    assert draw(pipe.to("cpu")) == expected and draw(pipe.to()) == expected


def test_to_with_two_dtypes(pipe: Pipeline) -> None:
    with pytest.raises(ConfigError, match="two dtypes"):
        pipe.to(torch.bfloat16, torch.float16)


@pytest.fixture
def model_with_table(small_model: Path, tmp_path: Path) -> Path:
    """A model whose drafter comes with a table of nearest codes that is not the codebook's."""
    folder = tmp_path / "with-table"
    shutil.copytree(small_model, folder)
    codes = small_checkpoint.IMAGES.codes
    table = np.stack([np.roll(np.arange(codes), -1 - code)[: codes - 1] for code in range(codes)])
    np.save(folder / "drafter" / f"top_{codes - 1}_indices.npy", table)
    return folder


def test_published_lantern_table_survives_to(model_with_table: Path) -> None:
    pipe = Pipeline.from_pretrained(model_with_table, verifier="lantern:k=5", tree="chain:depth=2")
    assert isinstance(pipe.verifier, Lantern) and pipe.verifier.neighbours is not None
    table = pipe.verifier.neighbours.clone()
    assert table[0].tolist() == [1, 2, 3, 4, 5]
    pipe.to("cpu")
    assert isinstance(pipe.verifier, Lantern) and torch.equal(pipe.verifier.neighbours, table)  # type: ignore[arg-type]
    assert pipe.verifier_name == "lantern:k=5"


def test_lantern_table_comes_with_the_drafter(model_with_table: Path) -> None:
    """Whether the drafter is chosen before the verifier or after it."""
    pipe = Pipeline.from_pretrained(model_with_table, drafter="jacobi", verifier="lantern:k=5")
    assert isinstance(pipe.verifier, Lantern) and pipe.verifier.neighbours[0].tolist() != [1, 2, 3, 4, 5]  # type: ignore[index]
    pipe.drafter = "drafter"
    assert isinstance(pipe.verifier, Lantern) and pipe.verifier.neighbours[0].tolist() == [1, 2, 3, 4, 5]  # type: ignore[index]


@pytest.mark.parametrize("drafter", ["jacobi", "jacobi-tree"])
def test_auto_tree_of_jacobi_follows_measured_costs(
    drafter: str, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERDRAW_CACHE", str(tmp_path))
    pipe = Pipeline.from_pretrained(small_model, drafter=drafter)
    assert isinstance(pipe.tree, Budget) and pipe.tree_name == "auto"
    (costs,) = json.loads((tmp_path / "costs.json").read_text()).values()
    assert pipe.tree.chain == format_costs(tuple(map(tuple, costs["chain"])))
    assert bool(pipe.tree.tree) == bool(costs["tree"]) and not (drafter == "jacobi" and costs["tree"])
    assert isinstance(pipe.tree_for_batch(64), Chain | NoTree | Trunk), "all images of a batch have trees of one size"
    pipe.tree = "chain:depth=3"
    assert pipe.tree == pipe.tree_for_batch(64) == Chain(3)


def test_auto_tree_of_a_trained_drafter_follows_measured_costs(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UNDERDRAW_CACHE", str(tmp_path))
    pipe = Pipeline.from_pretrained(small_model)
    with caplog.at_level(logging.WARNING):
        out = pipe("fox", seed=1)
    (record,) = [record for record in caplog.records if "costs.json" in record.message]
    assert record.levelname == "WARNING" and str(tmp_path / "costs.json") in record.message
    (costs,) = json.loads((tmp_path / "costs.json").read_text()).values()
    policy = pipe.tree
    assert policy == Cost(costs["plain"], costs["base"], costs["node"], costs["level"])
    assert out.complete and pipe.tree_name == "auto"
    caplog.clear()
    assert Pipeline.from_pretrained(small_model).tree == policy and not caplog.records, "costs are measured once"
    measured = pipe.measure_costs()
    assert str(tmp_path / "costs.json") in caplog.text, "measuring again is logged too"
    (again,) = json.loads((tmp_path / "costs.json").read_text()).values()
    assert again["plain"] == measured.plain
    with pytest.raises(ConfigError, match="num_images_per_prompt is 0; use at least 1"):
        pipe.measure_costs(0)
