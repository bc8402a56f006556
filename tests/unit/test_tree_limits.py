"""Trees end at the last token of an image, and leave out unlikely nodes."""

from __future__ import annotations

import pytest
import torch
from lookup_models import TableDrafter, TableTarget, decode_tokens, random_tables
from torch import Tensor
from tree_checks import check_well_formed, nodes_of

from underdraw.calibration import Calibration
from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.registry import policies
from underdraw.sampling import Sampler
from underdraw.tree import (
    DraftTree,
    Frontier,
    grow_tree,
)
from underdraw.verifiers.exact import Exact


@pytest.mark.parametrize(
    "layout", [Layout(3, 4, range(4, 10)), Layout(3, 3, range(4, 10), (1, 2), 20, (3,))], ids=["plain", "row-ends"]
)
@pytest.mark.parametrize("policy", ["chain:depth=30", "static", "confidence", "adjacency", "adjacency:init=random"])
@pytest.mark.parametrize("proposal", ["coupled", "topk", "sampled"])
def test_trees_never_reach_past_the_last_token(layout: Layout, policy: str, proposal: str) -> None:
    """The deepest node leaves one step for the target's sample, and finished images get no tree.

    A row end is drafted where the layout forces it and nowhere else.
    """
    target, draft = random_tables(layout, seed=1)
    drafter = TableDrafter(draft)
    seeds = [1, 2, 3, 4]
    tokens, _ = decode_tokens(
        TableTarget(target), drafter, policies.build(policy), Exact(), layout, seeds, proposal=proposal
    )
    plain, _ = decode_tokens(TableTarget(target), TableDrafter(draft), policies.build("none"), Exact(), layout, seeds)
    assert tokens.tolist() == plain.tolist()
    for request, tree in drafter.drafted:
        check_well_formed(tree)
        steps = request.steps[:, None] + tree.depths
        assert (steps.amax(-1) <= request.steps.clamp(min=layout.stop - 2)).all()
        is_drafted = tree.depths > 0
        if layout.row_end is not None:
            assert torch.equal((tree.tokens == layout.row_end)[is_drafted], layout.is_row_end(steps)[is_drafted])


@pytest.mark.parametrize("min_probability", [0.01, 0.1, 0.4])
def test_min_probability_drops_only_unlikely_nodes(min_probability: float) -> None:
    """A tree with a min_probability is the tree without one, less the nodes below it and their descendants."""
    sampler, calibration = Sampler(Layout(4, 4, range(4, 16)), [11]), Calibration(1.5, (0.0, -0.2), 0.1)
    noise_window = sampler.noise_window(torch.tensor([2]), 4)

    def logits(depth: int, token: int) -> Tensor:  # depends on the node only, not on the tree
        return torch.randn(12, generator=torch.Generator().manual_seed(100 * depth + token)) * 2

    def tree(min_probability: float) -> DraftTree:
        def expand(frontier: Frontier) -> Tensor:
            return torch.stack([logits(frontier.depth, token) for token in frontier.tokens[0].tolist()])[None]

        plan = TreePlan(3, 12, 12, 128, min_probability=min_probability)
        return grow_tree(expand, torch.tensor([4]), plan, noise_window, calibration=calibration)

    all_nodes, probabilities = nodes_of(tree(0.0), 0), [1.0]
    for _, parent, depth, rank in all_nodes[1:]:
        scores = noise_window.level_scores(logits(depth - 1, all_nodes[parent][0])[None, None], depth)
        scores = scores.sort(descending=True).values
        log_probability = calibration.log_acceptance_probability(scores, has_forced_tokens=False)[0, 0, rank]
        probabilities.append(probabilities[parent] * float(log_probability.exp()))
    kept = [
        (token, depth, rank)
        for (token, _, depth, rank), probability in zip(all_nodes, probabilities, strict=True)
        if probability >= min_probability
    ]
    pruned = [(token, depth, rank) for token, _, depth, rank in nodes_of(tree(min_probability), 0)]
    assert sorted(pruned) == sorted(kept)
    assert 1 < len(kept) < len(all_nodes)
