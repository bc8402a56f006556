"""A batch that cannot fit is refused before it starts, with one sentence that says what would fit."""

from __future__ import annotations

import re

import pytest
import torch
import toy_models
from replay_tape import Tape

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.errors import CapacityError
from underdraw.nn import memory
from underdraw.nn.kv_cache import KVCache
from underdraw.registry import policies


def test_required_bytes_count_the_kv_cache_exactly() -> None:
    of = toy_models.target()
    arch = of.net.arch
    cache = KVCache(arch, 6, 256, of.net.head.weight)
    cache_bytes = sum(part.numel() * 4 for part in (cache.keys, cache.values[..., : arch.head_width]))
    growth = memory.required_bytes(arch, 6, 512, 8, 4) - memory.required_bytes(arch, 6, 256, 8, 4)
    scores = 6 * memory.MAX_NODES * arch.heads * 256 * 4
    noise = 6 * 256 * of.net.head.weight.shape[0] * 4
    assert growth - scores - noise == cache_bytes


@pytest.mark.parametrize("share", [0.99, 0.5, 0.0])
def test_a_batch_that_does_not_fit_is_refused(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    of = toy_models.target()
    monkeypatch.setattr(memory, "_GRAPH_POOL", 0)  # larger than everything else of a toy model
    longest = 11 + toy_models.PLAIN.cells
    required = memory.required_bytes(of.net.arch, 8, longest + memory.MAX_NODES, 11, 4)
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(share * required))
    with pytest.raises(CapacityError) as caught:
        toy_models.run_decode(of, toy_models.eagle(of), policies.build("chain"), seeds=(1, 2, 3, 4), guidance=2.0)
    message = str(caught.value)
    assert "4 images at once need" in message and "are missing" in message
    advice = re.search(r"draw (\d) at once", message)
    if share == 0.0:
        assert advice is None and "smaller model" in message
    else:
        assert advice is not None
        fitting = int(advice[1])
        toy_models.run_decode(
            of, toy_models.eagle(of), policies.build("chain"), seeds=tuple(range(fitting)), guidance=2.0
        )


def test_cached_graphs_are_dropped_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    of, graphs = toy_models.target(), GraphCache(capture=Tape, span_multiple=64)
    drafter, tree = toy_models.eagle(of), policies.build("none")
    toy_models.run_decode(of, drafter, tree, graphs=graphs)
    plain = toy_models.plain_tokens(of)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0 if graphs.runners else 2**40)
    toy_models.run_decode(of, drafter, tree, graphs=graphs, temperature=0.5)
    assert len(graphs.runners) == 1
    assert torch.equal(toy_models.run_decode(of, drafter, tree, graphs=graphs)[0], plain)
