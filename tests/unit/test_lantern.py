"""LANTERN: the relaxation against slow references, greedy and sampled; probability stays among the codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from lookup_models import TableDrafter, TableTarget, decode_tokens, random_tables
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


def reference_relax(probs: list[float], x: int, near: list[int], delta: float, ratio: float | None) -> list[float]:
    """LANTERN's rule in plain Python: the longest prefix of neighbours within the bounds gives its probability to x."""
    relaxed, moved = list(probs), 0.0
    for code in near:
        if moved + probs[code] > delta or (ratio is not None and moved + probs[code] > (ratio - 1) * probs[x]):
            break
        moved += probs[code]
        relaxed[code] = 0.0
    relaxed[x] = probs[x] + moved
    return relaxed


@pytest.mark.parametrize("delta", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("ratio", [None, 1.0, 1.5, 6.0])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_relax_matches_reference(delta: float, ratio: float | None, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    probs = torch.randn(60, 9, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    probs[::3, ::2] = 0  # as residuals have
    probs /= probs.sum(-1, keepdim=True)
    x = torch.randint(9, (60,), generator=generator)
    lantern = Lantern(delta=delta, ratio=ratio, k=k).bind(torch.randn(9, 4, generator=generator))
    assert lantern.neighbours is not None
    near = lantern.neighbours[:, :k].tolist()
    rows = zip(probs.tolist(), x.tolist(), strict=True)
    expected = [reference_relax(row, code, near[code], delta, ratio) for row, code in rows]
    torch.testing.assert_close(lantern.relax(probs, x), torch.tensor(expected, dtype=torch.float64))


def test_relaxed_probability_stays_among_the_codes() -> None:
    """The row end neither gives nor takes probability, and all images are well formed."""
    lantern = Lantern(delta=1.0, k=5).bind(CODEBOOK)
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.15, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]).double()
    relaxed = lantern.relax(probs, torch.tensor([2, 6]))
    torch.testing.assert_close(relaxed.sum(-1), torch.ones(2, dtype=torch.float64))
    assert relaxed[:, 6].tolist() == [0.0, 1.0]
    assert torch.equal(lantern.relax(probs[:1], torch.tensor([6])), probs[:1]), "a row end has no neighbours"
    target, draft = random_tables(ROW_ENDS, seed=2)
    for proposal in Lantern.proposals:
        for temperature in (0.0, 1.0):
            tokens, _ = decode_tokens(
                TableTarget(target), TableDrafter(draft), policies.build("confidence"), lantern, ROW_ENDS,
                range(300), proposal=proposal, temperature=temperature,
            )  # fmt: skip
            assert tokens[:, [0, 3, 6, 7]].tolist() == [[1, 20, 20, 2]] * 300
            assert ((ROW_ENDS.grid(tokens) >= 0) & (ROW_ENDS.grid(tokens) < CODES)).all()


@dataclass(frozen=True)
class GreedyBatch:
    """A batch of trees with the target's logits at every node; the first child of every node is likely."""

    tree: DraftTree
    logits: Tensor
    noise_window: NoiseWindow


def greedy_batch(codes: int, proposal: Proposal, batch: int = 64) -> GreedyBatch:
    generator = torch.Generator().manual_seed(codes)
    noise_window = Sampler(Layout(4, 4, range(codes)), range(batch), temperature=0).noise_window(
        torch.zeros(batch).long(), 4
    )
    tree = grow_tree(
        lambda frontier: torch.randn(*frontier.tokens.shape, codes, generator=generator),
        torch.zeros(batch, dtype=torch.int64), TreePlan(3, 3, 5, 20), noise_window, proposal=proposal,
    )  # fmt: skip
    logits = torch.randn(batch, tree.size, codes, generator=generator)
    boost = 1 + math.sqrt(2 * math.log(codes))
    for node in range(1, tree.size):
        likely = boost * ((tree.ranks[:, node] == 0) & (tree.depths[:, node] > 0))
        logits[torch.arange(batch), tree.parents[:, node], tree.tokens[:, node]] += likely
    return GreedyBatch(tree, logits, noise_window)


@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize("codes", [6, 1024])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_greedy_lantern_with_delta_zero_equals_exact(proposal: Proposal, codes: int, ties: bool) -> None:
    """Also with equal logits, which are common in bfloat16."""
    batch = greedy_batch(codes, proposal)
    logits = batch.logits.round() if ties else batch.logits
    lantern = Lantern(delta=0, k=2).bind(torch.randn(codes, 2)).verify(batch.tree, logits, batch.noise_window)
    exact = Exact().verify(batch.tree, logits, batch.noise_window)
    assert exact.length.double().mean() > 0.5
    assert torch.equal(lantern.length, exact.length)
    assert torch.equal(lantern.path, exact.path)
    assert torch.equal(lantern.next_token, exact.next_token)


@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize(("delta", "ratio"), [(0.1, None), (0.4, None), (1.0, None), (1.0, 2.0)])
def test_greedy_lantern_matches_reference(proposal: Proposal, delta: float, ratio: float | None) -> None:
    """Accepts the first child that is the most likely code after relaxation, else takes the target's choice."""
    batch = greedy_batch(CODES, proposal)
    lantern = Lantern(delta=delta, ratio=ratio, k=3).bind(CODEBOOK)
    accepted_path = lantern.verify(batch.tree, batch.logits, batch.noise_window)
    assert lantern.neighbours is not None
    near = lantern.neighbours[:, :3].tolist()
    probs = batch.logits.double().softmax(-1).tolist()
    for row in range(len(probs)):
        tokens, parents, depths, ranks = (
            column[row].tolist()
            for column in (batch.tree.tokens, batch.tree.parents, batch.tree.depths, batch.tree.ranks)
        )
        path = [0]
        while True:
            node_probs = probs[row][path[-1]]
            children = sorted((ranks[n], n) for n in range(len(tokens)) if depths[n] > 0 and parents[n] == path[-1])
            relaxed = [(n, reference_relax(node_probs, tokens[n], near[tokens[n]], delta, ratio)) for _, n in children]
            accepted = [n for n, child_probs in relaxed if max(child_probs) == child_probs[tokens[n]]]
            if not accepted:
                break
            path.append(accepted[0])
        assert accepted_path.path[row, : len(path)].tolist() == path
        assert accepted_path.length[row] == len(path) - 1
        assert accepted_path.next_token[row] == max(range(CODES), key=node_probs.__getitem__)


@pytest.mark.parametrize(("count", "k"), [(2, 1), (7, 3), (7, 50), (30, 29), (1500, 12)])
def test_nearest_neighbours(count: int, k: int) -> None:
    codebook = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    check_neighbours(codebook, k)


def test_nearest_neighbours_in_tight_clusters() -> None:
    """Codes that are close together and far from the origin."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 8, generator=generator) * 10
    check_neighbours(centres.repeat_interleave(5, 0) + torch.randn(200, 8, generator=generator) * 1e-3, 4)


def check_neighbours(codebook: Tensor, k: int) -> None:
    neighbours = nearest_neighbours(codebook, k)
    count = len(codebook)
    assert neighbours.shape == (count, min(k, count - 1))
    assert neighbours.dtype == torch.int64
    assert not (neighbours == torch.arange(count)[:, None]).any(), "a code is not its own neighbour"
    assert all(len(set(row)) == len(row) for row in neighbours.tolist())
    distance = (codebook[:, None].double() - codebook[None].double()).square().sum(-1).sqrt()
    distance.fill_diagonal_(torch.inf)
    expected = distance.sort(-1).values[:, : neighbours.shape[1]]
    torch.testing.assert_close(distance.gather(1, neighbours), expected, rtol=1e-3, atol=1e-6)
