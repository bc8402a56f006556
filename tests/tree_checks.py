"""Checks of draft trees that several tests make."""

from __future__ import annotations

from underdraw.tree import DraftTree


def nodes_of(tree: DraftTree, row: int) -> list[tuple[int, int, int, int]]:
    """(token, parent, depth, rank) of each node of one tree."""
    return list(
        zip(*(column[row].tolist() for column in (tree.tokens, tree.parents, tree.depths, tree.ranks)), strict=True)
    )


def check_well_formed(tree: DraftTree) -> None:
    """Indices, depths, ranks and ancestor masks of every tree of a batch are consistent."""
    for row in range(tree.tokens.shape[0]):
        nodes = nodes_of(tree, row)
        assert nodes[0][1:3] == (-1, 0), "node 0 is the root"
        siblings: dict[int, list[tuple[int, int]]] = {}
        for index, (token, parent, depth, rank) in enumerate(nodes[1:], start=1):
            assert parent < index, "a parent comes before its children"
            if depth == -1:
                continue
            assert nodes[parent][2] >= 0, "the parent of a real node is no padding"
            assert depth == nodes[parent][2] + 1, "a node lies one level below its parent"
            siblings.setdefault(parent, []).append((rank, token))
        for children in siblings.values():
            assert len({token for _, token in children}) == len(children), "siblings hold different tokens"
            assert len({rank for rank, _ in children}) == len(children), "siblings have different ranks"
        for index, (_, parent, depth, _) in enumerate(nodes):
            if depth == -1:
                continue
            line = {index}
            while parent >= 0:
                line.add(parent)
                parent = nodes[parent][1]
            assert set(tree.ancestors[row, index].nonzero().flatten().tolist()) == line
