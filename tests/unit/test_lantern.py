"""LANTERN: the relaxation against slow references, greedy and sampled; probability stays among the codes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from lookup_models import TableDrafter, TableTarget, decode_tokens, random_tables
from scipy import stats
from torch import Tensor

from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.registry import policies, verifiers
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


# ---------------------------------------------------------------------- the authors' rule, in plain Python


def raised_prob(probs: list[float], x: int, near: list[int], delta: float, ratio: float | None) -> tuple[float, bool]:
    """p'(x), and whether any neighbour is within the bound."""
    bound = delta if ratio is None else min(delta, (ratio - 1) * probs[x])
    sums = list(itertools.accumulate(probs[code] for code in near))
    within = [total for total in sums if total <= bound]
    return probs[x] + (within[-1] if within else 0.0), bool(within)


def after_rejection(
    rule: str, probs: list[float], q: list[float] | None, x: int, near: list[int], bounds: tuple[float, float | None]
) -> tuple[float, list[float]]:
    """p'(x), and the normalised residual; `near` are k + 1 neighbours, the last one only for the published rule."""
    if rule == "consistent":
        relaxed = reference_relax(probs, x, near[:-1], *bounds)
        raised, source = relaxed[x], relaxed
        left = [0.0 if c == x else p for c, p in enumerate(source)]
    else:
        raised, is_relaxed = raised_prob(probs, x, near[:-1], *bounds)
        removed = set(near) if is_relaxed else set()
        source = probs
        left = [0.0 if c == x or c in removed else p for c, p in enumerate(probs)]
        q = None if q is None else [0.0 if c in removed else value for c, value in enumerate(q)]
    if q is not None:
        left = [max(p - value, 0.0) for p, value in zip(source, q, strict=True)]
    total = sum(left)
    return raised, [p / total for p in left] if total else [1 / CODES] * CODES


def enumerate_next(
    rule: str, p: list[float], q: list[float] | None, children: tuple[int, ...], near: list[list[int]], bounds: Any
) -> list[float]:
    """The distribution of the token after a node whose children, in this order, are tried one after the other."""
    out, reach, q_left = [0.0] * CODES, 1.0, q
    for x in children:
        raised, residual = after_rejection(rule, p, q_left, x, near[x], bounds)
        accept = min(1.0, raised / (1.0 if q_left is None else q_left[x]))
        out[x] += reach * accept
        reach *= 1 - accept
        p = residual if accept < 1 else p
        if q_left is not None:
            rest = [0.0 if code == x else value for code, value in enumerate(q_left)]
            q_left = [value / sum(rest) for value in rest]
    return [value + reach * left for value, left in zip(out, p, strict=True)]


def enumerate_sampled(rule: str, p: list[float], q: list[float], near: list[list[int]], bounds: Any) -> list[float]:
    """The same, averaged over two children drawn from q without replacement."""
    out = [0.0] * CODES
    for first, second in itertools.permutations(range(CODES), 2):
        weight = q[first] * q[second] / (1 - q[first])
        pair = enumerate_next(rule, p, q, (first, second), near, bounds)
        out = [total + weight * value for total, value in zip(out, pair, strict=True)]
    return out


@dataclass(frozen=True)
class Binary:
    """Every node has two children."""

    def plan(self, history: object, step: int) -> TreePlan:
        return TreePlan.from_shape((-1, 0, 0, 1, 1, 2, 2))


@pytest.mark.parametrize("rule", ["consistent", "published"])
@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize("bounds", [(0.3, None), (1.0, 2.5)], ids=["delta", "ratio"])
def test_images_have_the_enumerated_distribution(rule: Any, proposal: Proposal, bounds: Any) -> None:
    """Both rules, against the distribution of whole images by their definition; with `topk` the rules differ."""
    layout, count, k = Layout(1, 4, range(CODES)), 5_000, 2
    target, draft = random_tables(layout, seed=4, error=0.7)
    lantern = Lantern(*bounds, k, rule).bind(CODEBOOK)
    near = nearest_neighbours(CODEBOOK, k + 1).tolist()
    decoded, histories = decode_tokens(
        TableTarget(target), TableDrafter(draft), Binary(), lantern, layout, range(count), proposal=proposal
    )
    observed = np.zeros((CODES,) * 3)
    np.add.at(observed, tuple(decoded[:, :3].T), 1)  # the last cell is never drafted

    def joint(name: str) -> np.ndarray:
        after = np.zeros((3, CODES, CODES))  # by step and code before it
        for step, code in itertools.product((1, 2), range(CODES)):
            p, q = (table[step, code].double().softmax(-1).tolist() for table in (target, draft))
            best = tuple(sorted(range(CODES), key=lambda x: -q[x])[:2])
            after[step, code] = (
                enumerate_next(name, p, None, best, near, bounds)
                if proposal == "topk"
                else enumerate_sampled(name, p, q, near, bounds)
            )
        first = target[0, 0].double().softmax(-1).numpy()
        return first[:, None, None] * after[1][:, :, None] * after[2][None]

    def p_value(expected: np.ndarray) -> float:
        rare = expected * count < 8
        counts = np.append(observed[~rare], observed[rare].sum())
        means = np.append(expected[~rare], expected[rare].sum()) * count
        return float(stats.chisquare(counts[means > 0], means[means > 0]).pvalue)

    assert joint(rule).sum() == pytest.approx(1)
    assert np.mean([history.passes for history in histories]) < 2.9, "something is accepted"
    assert p_value(joint(rule)) > 1e-4
    if proposal == "topk":  # sampled children are often accepted at once, and the rules differ after rejections only
        assert p_value(joint("published" if rule == "consistent" else "consistent")) < 1e-6


@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize(("delta", "ratio"), [(0.0, None), (0.1, None), (0.4, None), (1.0, 2.0)])
def test_published_greedy_rule_keeps_the_longest_path(proposal: Proposal, delta: float, ratio: float | None) -> None:
    batch = greedy_batch(CODES, proposal)
    lantern = Lantern(delta, ratio, 3, "published").bind(CODEBOOK)
    accepted_path = lantern.verify(batch.tree, batch.logits, batch.noise_window)
    near = nearest_neighbours(CODEBOOK, 3).tolist()
    probs = batch.logits.double().softmax(-1).tolist()
    longer = 0
    for row in range(len(probs)):
        tokens, parents, depths = (c[row].tolist() for c in (batch.tree.tokens, batch.tree.parents, batch.tree.depths))
        paths: dict[int, list[int]] = {0: [0]}  # by accepted node
        for node in range(1, len(tokens)):
            if depths[node] < 1 or parents[node] not in paths:
                continue
            p, x = probs[row][parents[node]], tokens[node]
            if raised_prob(p, x, near[x], delta, ratio)[0] > max(v for code, v in enumerate(p) if code != x):
                paths[node] = [*paths[parents[node]], node]
        best = max(paths.values(), key=len)
        assert accepted_path.length[row] == len(best) - 1
        assert accepted_path.path[row, : len(best)].tolist() == best
        assert accepted_path.next_token[row] == max(range(CODES), key=probs[row][best[-1]].__getitem__)
        longer += len(best)
    consistent = replace(lantern, rule="consistent").verify(batch.tree, batch.logits, batch.noise_window)
    assert longer - len(probs) >= int(consistent.length.sum()), "the longest path is at least as long as the first one"


def test_published_rule_accepts_more_than_the_consistent_one_where_neighbours_are_drafted() -> None:
    """Removing what neighbours had and renormalising raises the probabilities of the children that are tried later."""
    probs, q = [0.3, 0.25, 0.2, 0.15, 0.05, 0.05], None
    near = nearest_neighbours(CODEBOOK, 3).tolist()
    left = {rule: after_rejection(rule, probs, q, 0, near[0], (0.3, None))[1] for rule in ("consistent", "published")}
    assert left["published"][1:4] == [0.0, 0.0, 0.0] and left["published"][4] > left["consistent"][4]


def test_table_has_one_neighbour_more_for_the_published_rule() -> None:
    assert [Lantern(k=3, rule=rule).bind(CODEBOOK).neighbours.shape[1] for rule in ("consistent", "published")] == [
        3,
        4,
    ]
    assert verifiers.build("lantern:rule=published,k=3") == Lantern(k=3, rule="published")
