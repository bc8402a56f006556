"""LANTERN: the relaxation against slow references, greedy and sampling; its mass stays among the codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from tables import TableDrafter, TableTarget, draw, tables
from torch import Tensor

from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.registry import policies
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import DraftTree, Proposal, grow_tree
from underdraw.verifiers.exact import Exact
from underdraw.verifiers.lantern import Lantern, nearest_neighbours

CODES = 6
ROW_ENDS = Layout(2, 2, range(4, 4 + CODES), prologue=(1,), row_end=20, epilogue=(2,))
CODEBOOK = torch.tensor([[0.0], [1.0], [2.1], [3.3], [4.6], [6.0]])


def relaxed(law: list[float], x: int, near: list[int], delta: float, ratio: float | None) -> list[float]:
    """LANTERN's rule in plain Python: the longest prefix of neighbours whose mass is within the bounds moves to x."""
    out, moved = list(law), 0.0
    for code in near:
        if moved + law[code] > delta or (ratio is not None and moved + law[code] > (ratio - 1) * law[x]):
            break
        moved += law[code]
        out[code] = 0.0
    out[x] = law[x] + moved
    return out


@pytest.mark.parametrize("delta", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("ratio", [None, 1.0, 1.5, 6.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_relax_matches_a_slow_reference(delta: float, ratio: float | None, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    token_stats = torch.randn(60, 9, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    token_stats[::3, ::2] = 0  # what residuals look like
    token_stats /= token_stats.sum(-1, keepdim=True)
    x = torch.randint(9, (60,), generator=generator)
    lantern = Lantern(delta=delta, ratio=ratio, k=k).bind(torch.randn(9, 4, generator=generator))
    assert lantern.neighbours is not None
    near = lantern.neighbours[:, :k].tolist()
    expected = [relaxed(law, c, near[c], delta, ratio) for law, c in zip(token_stats.tolist(), x.tolist(), strict=True)]
    torch.testing.assert_close(lantern.relax(token_stats, x), torch.tensor(expected, dtype=torch.float64))


def test_relaxed_mass_never_leaves_the_code_range() -> None:
    """Invariant 8: the row end neither gives nor takes mass, and all images are well formed."""
    lantern = Lantern(delta=1.0, k=5).bind(CODEBOOK)
    law = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.15, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]).double()
    out = lantern.relax(law, torch.tensor([2, 6]))
    torch.testing.assert_close(out.sum(-1), torch.ones(2, dtype=torch.float64))
    assert out[:, 6].tolist() == [0.0, 1.0]
    assert torch.equal(lantern.relax(law[:1], torch.tensor([6])), law[:1]), "a row end has no neighbours"
    target, draft = tables(ROW_ENDS, seed=2)
    for proposal in Lantern.proposals:
        for temperature in (0.0, 1.0):
            tokens, _ = draw(
                TableTarget(target), TableDrafter(draft), policies.build("confidence"), lantern, ROW_ENDS,
                range(300), proposal=proposal, temperature=temperature,
            )  # fmt: skip
            assert tokens[:, [0, 3, 6, 7]].tolist() == [[1, 20, 20, 2]] * 300
            assert ((ROW_ENDS.grid(tokens) >= 0) & (ROW_ENDS.grid(tokens) < CODES)).all()


@dataclass(frozen=True)
class Greedy:
    """A batch of trees with the target's logits at every node, where the first child of every node is likely."""

    tree: DraftTree
    logits: Tensor
    noise_window: NoiseWindow


def greedy_batch(codes: int, proposal: Proposal, batch: int = 64) -> Greedy:
    generator = torch.Generator().manual_seed(codes)
    noise_window = Sampler(Layout(4, 4, range(codes)), range(batch), temperature=0).noise_window(
        torch.zeros(batch).long(), 4
    )
    tree = grow_tree(
        lambda level: torch.randn(*level.tokens.shape, codes, generator=generator),
        torch.zeros(batch, dtype=torch.int64), TreePlan(3, 3, 5, 20), noise_window, proposal=proposal,
    )  # fmt: skip
    logits = torch.randn(batch, tree.size, codes, generator=generator)
    boost = 1 + math.sqrt(2 * math.log(codes))
    for node in range(1, tree.size):
        likely = boost * ((tree.ranks[:, node] == 0) & (tree.depths[:, node] > 0))
        logits[torch.arange(batch), tree.parents[:, node], tree.tokens[:, node]] += likely
    return Greedy(tree, logits, noise_window)


@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize("codes", [6, 1024])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_greedy_lantern_without_room_equals_exact(proposal: Proposal, codes: int, ties: bool) -> None:
    """Also where logits are equal, which is common in bfloat16."""
    given = greedy_batch(codes, proposal)
    logits = given.logits.round() if ties else given.logits
    lantern = Lantern(delta=0, k=2).bind(torch.randn(codes, 2)).verify(given.tree, logits, given.noise_window)
    exact = Exact().verify(given.tree, logits, given.noise_window)
    assert exact.length.double().mean() > 0.5
    assert torch.equal(lantern.length, exact.length)
    assert torch.equal(lantern.path, exact.path)
    assert torch.equal(lantern.next_token, exact.next_token)


@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize(("delta", "ratio"), [(0.1, None), (0.4, None), (1.0, None), (1.0, 2.0)])
def test_greedy_lantern_matches_a_slow_walk(proposal: Proposal, delta: float, ratio: float | None) -> None:
    """The first child that is the most likely code once its neighbours' mass is its own; else the target's choice."""
    given = greedy_batch(CODES, proposal)
    lantern = Lantern(delta=delta, ratio=ratio, k=3).bind(CODEBOOK)
    accepted_path = lantern.verify(given.tree, given.logits, given.noise_window)
    assert lantern.neighbours is not None
    near = lantern.neighbours[:, :3].tolist()
    token_stats = given.logits.double().softmax(-1).tolist()
    for row in range(len(token_stats)):
        tokens, parents, depths, ranks = (
            column[row].tolist()
            for column in (given.tree.tokens, given.tree.parents, given.tree.depths, given.tree.ranks)
        )
        path = [0]
        while True:
            law = token_stats[row][path[-1]]
            children = sorted((ranks[n], n) for n in range(len(tokens)) if depths[n] > 0 and parents[n] == path[-1])
            relaxed_laws = ((n, relaxed(law, tokens[n], near[tokens[n]], delta, ratio)) for _, n in children)
            accepted = [n for n, new in relaxed_laws if max(new) == new[tokens[n]]]
            if not accepted:
                break
            path.append(accepted[0])
        assert accepted_path.path[row, : len(path)].tolist() == path
        assert accepted_path.length[row] == len(path) - 1
        assert accepted_path.next_token[row] == max(range(CODES), key=lambda code, law=law: law[code])  # type: ignore[misc]


@pytest.mark.parametrize(("count", "k"), [(2, 1), (7, 3), (7, 50), (30, 29), (1500, 12)])
def test_nearest_finds_the_nearest_others(count: int, k: int) -> None:
    codebook = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    check_nearest(codebook, k)


def test_nearest_tells_close_codes_apart() -> None:
    """Codes that lie close together, far from the origin, as in a codebook with clusters."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 8, generator=generator) * 10
    check_nearest(centres.repeat_interleave(5, 0) + torch.randn(200, 8, generator=generator) * 1e-3, 4)


def check_nearest(codebook: Tensor, k: int) -> None:
    found = nearest_neighbours(codebook, k)
    count = len(codebook)
    assert found.shape == (count, min(k, count - 1))
    assert found.dtype == torch.int64
    assert not (found == torch.arange(count)[:, None]).any(), "a code is not its own neighbour"
    assert all(len(set(row)) == len(row) for row in found.tolist())
    distance = (codebook[:, None].double() - codebook[None].double()).square().sum(-1).sqrt()
    distance.fill_diagonal_(torch.inf)
    expected = distance.sort(-1).values[:, : found.shape[1]]
    torch.testing.assert_close(distance.gather(1, found), expected, rtol=1e-3, atol=1e-6)
