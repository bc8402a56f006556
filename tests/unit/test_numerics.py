"""Numerics: what is resolved, recorded and refused; the kernels themselves are tested in tests/gpu."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import toy_models

from underdraw import Pipeline
from underdraw.engine.cuda_graphs import make_graph_cache
from underdraw.errors import ConfigError
from underdraw.nn.layer_functions import EAGER
from underdraw.nn.numerics import eager_backend, resolve_numerics
from underdraw.plan import MAX_DEPTH

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_is_row_invariant_without_other_kernels() -> None:
    assert resolve_numerics("row-invariant", CPU) == "row-invariant"
    assert eager_backend("row-invariant", CPU) == (EAGER, "sdpa")
    assert toy_models.target().open(toy_models.prompts(1), toy_models.PLAIN, guidance=1.0).max_depth == MAX_DEPTH


def test_a_gpu_without_the_kernels_falls_back_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("underdraw.nn.numerics.triton_available", lambda device: False)
    resolve_numerics.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [resolve_numerics("row-invariant", GPU) for _ in range(2)] == ["fastest", "fastest"]
    assert caplog.text.count("row-invariant numerics need triton") == 1
    graphs = make_graph_cache(GPU, "capture", "row-invariant")
    assert graphs is not None and graphs.layer_functions is EAGER and graphs.attention_backend == "auto"
    resolve_numerics.cache_clear()


def test_records_name_the_numerics(small_model: Path) -> None:
    pipe = Pipeline.from_pretrained(small_model, tree="chain:depth=2", numerics="fastest")
    assert pipe.settings(pipe.request("fox", seed=1))["numerics"] == "fastest"
    assert pipe.plain().numerics == "fastest"
    assert Pipeline.from_pretrained(small_model).numerics == "row-invariant"


def test_unknown_numerics_are_refused(small_model: Path) -> None:
    with pytest.raises(ConfigError, match="unknown numerics 'exact'"):
        Pipeline.from_pretrained(small_model, numerics="exact")  # type: ignore[arg-type]
