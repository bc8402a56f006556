"""A batch that cannot fit is refused before it starts, in one sentence that says what would fit."""

from __future__ import annotations

import re

import pytest
import torch
import toy
from tape import Tape

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.errors import CapacityError
from underdraw.nn import memory
from underdraw.nn.kv_cache import KVCache
from underdraw.registry import policies


def test_the_cache_is_counted_to_the_byte() -> None:
    of = toy.target()
    cache = KVCache(of.net, 6, 256)
    held = sum(part.numel() * 4 for part in (cache.keys, cache.values[..., : of.net.arch.width]))
    more = memory.needed(of.net.arch, 6, 512, 8, 4) - memory.needed(of.net.arch, 6, 256, 8, 4)
    scores = 6 * memory.MAX_NODES * of.net.arch.heads * 256 * 4
    noise = 6 * 256 * of.net.head.weight.shape[0] * 4
    assert more - scores - noise == held


@pytest.mark.parametrize("share", [0.99, 0.5, 0.0])
def test_what_does_not_fit_is_refused(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    of = toy.target()
    monkeypatch.setattr(memory, "_CAPTURED", 0)  # it would dwarf a toy
    longest = 11 + toy.PLAIN.cells
    whole = memory.needed(of.net.arch, 8, longest + memory.MAX_NODES, 11, 4)
    monkeypatch.setattr(memory, "free", lambda device: int(share * whole))
    with pytest.raises(CapacityError) as caught:
        toy.run(of, toy.eagle(of), policies.build("chain"), seeds=(1, 2, 3, 4), guidance=2.0)
    said = str(caught.value)
    assert "4 pictures at once need" in said and "are missing" in said
    found = re.search(r"draw (\d) at once", said)
    if share == 0.0:
        assert found is None and "smaller model" in said
    else:
        assert found is not None
        fitting = int(found[1])
        toy.run(of, toy.eagle(of), policies.build("chain"), seeds=tuple(range(fitting)), guidance=2.0)


def test_kept_buffers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    of, graphs = toy.target(), GraphCache(capture=Tape, span_multiple=64)
    own, tree = toy.eagle(of), policies.build("none")
    toy.run(of, own, tree, graphs=graphs)
    plain = toy.plain(of)
    monkeypatch.setattr(memory, "free", lambda device: 0 if graphs.runners else 2**40)
    toy.run(of, own, tree, graphs=graphs, temperature=0.5)
    assert len(graphs.runners) == 1
    assert torch.equal(toy.run(of, own, tree, graphs=graphs)[0], plain)
