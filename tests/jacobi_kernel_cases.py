"""Cases of the kernels for Jacobi trees, compared with torch: growing trees, and moving accepted nodes together."""

from __future__ import annotations

import torch
from tree_checks import check_well_formed, nodes_of

from underdraw.drafters import trunk_tree
from underdraw.tree import DraftTree

GROWN = ((1, 33, 8, 64), (3, 17, 8, 32), (2, 64, 8, 128), (2, 6, 3, 16), (1, 2, 1, 8))  # trees, levels, ranks, nodes
PATHS = (  # accepted nodes of two rows; the rest of a row is padding
    ([0, 1, 2, 3, 4], [0, 2, 5, 6, 9]),
    ([0, 5, 6, 7, 12], [0, 1, 0, 0, 0]),
    ([0, 0, 0, 0, 0], [0, 1, 2, 7, 8]),
)


def node_paths(tree: DraftTree, image: int) -> set[tuple[tuple[int, int], ...]]:
    """The nodes of a tree, each as the (token, rank) pairs of its path from the root."""
    paths: list[tuple[tuple[int, int], ...]] = []
    for token, parent, depth, rank in nodes_of(tree, image):
        paths.append((*(paths[parent] if parent >= 0 else ()), (token, rank)) if depth >= 0 else ())
    return set(paths)


def check_trunk_tree(case: tuple[int, int, int, int], device: torch.device) -> None:
    """Trees of the kernel have the nodes of those that torch grows, in any order behind the trunk."""
    from underdraw.kernels.trunk_tree import trunk_trees

    batch, levels, ranks, size = case
    generator = torch.Generator().manual_seed(levels)
    logits = 2 * torch.randn(batch, levels, ranks + 1, generator=generator)
    logits[..., 0] += 2
    logits[:, 0] = -torch.inf
    logits[:, 0, 0] = 0.0
    logits[:, ::5, 2:] = -torch.inf  # steps with fewer candidates
    logits[:, 0, 0] = 0.0
    log_probs = logits.log_softmax(-1)[..., :ranks]
    tokens = torch.arange(batch * levels * ranks).view(batch, levels, ranks)
    trunk = (levels - 1 - torch.arange(batch) * 3).clamp(min=1)
    nodes = (size - torch.arange(batch) * 5).maximum(trunk + 1)
    expected = trunk_tree.grow_trunk_tree(tokens, log_probs, size, trunk=trunk, nodes=nodes)
    parts = [part.to(device) for part in (tokens, log_probs, trunk, nodes)]
    bounds = {"least": trunk_tree._LEAST, "most": trunk_tree._MOST}
    drafted, parents, depths, node_ranks, ancestors = (
        part.cpu() for part in trunk_trees(parts[0], parts[1], size, parts[2], parts[3], **bounds)
    )
    grown = DraftTree(drafted, parents, depths, ancestors, node_ranks, ranks)
    check_well_formed(grown)
    for image in range(batch):
        assert grown.depths[image, : trunk[image] + 1].tolist() == list(range(int(trunk[image]) + 1)), (
            "the trunk is first"
        )
        assert node_paths(grown, image) == node_paths(expected, image)


def check_compact(dtype: torch.dtype, device: torch.device) -> None:
    """Accepted nodes are moved together; committed slots, and those behind the accepted nodes' places, stay."""
    from underdraw.kernels.compact import compact

    for paths in PATHS:
        keys, values = (
            torch.randn(2, 2, 3, 40, 12, generator=torch.Generator().manual_seed(s)).to(device, dtype) for s in (0, 1)
        )
        path, lengths = torch.tensor(paths, device=device), torch.tensor([7, 20], device=device)
        counts = torch.tensor(
            [1 + max((i for i, node in enumerate(row) if node), default=0) for row in paths], device=device
        )
        expected = [part.clone() for part in (keys, values)]
        for row in range(2):
            for index in range(int(counts[row])):
                for moved, source in zip(expected, (keys, values), strict=True):
                    moved[:, row, :, lengths[row] + index] = source[:, row, :, lengths[row] + path[row, index]]
        compact(keys, values, path, counts, lengths)
        assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
