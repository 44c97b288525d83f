"""The shape of a draft that is a tree: which alternatives are tried after which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from foredraft.errors import ForedraftError

ROOT = -1
"""The parent of a token that follows the pending token."""


@dataclass(frozen=True)
class TreeShape:
    """parents: for each node its parent, an earlier node, or ROOT. The first child of a node is the most likely token, the next the
    second most likely, and so on.

    A chain is a shape in which no node has more than one child. Raises ForedraftError for a parent that is not an earlier node.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ForedraftError(f"the parent of node {node} of a tree must be an earlier node, not {parent}")

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]]) -> TreeShape:
        """The shape with these paths. paths: for each node the ranks of its ancestors and its own among their siblings, as in the trees
        of Medusa and vLLM: [(0,), (1,), (0, 0)] is two tokens, and one after the first. Raises ForedraftError for a path whose parent
        or more likely sibling is missing."""
        nodes: dict[tuple[int, ...], int] = {(): ROOT}
        for path in sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path)):
            before = path[:-1] if not path or not path[-1] else (*path[:-1], path[-1] - 1)
            if not path or path[:-1] not in nodes or before not in nodes:
                raise ForedraftError(f"a tree with the path {path} must also have {path[:-1]} and {before}")
            nodes[path] = len(nodes) - 1
        return cls(tuple(nodes[path[:-1]] for path in nodes if path))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        return cls(tuple(range(ROOT, length - 1)))

    def __len__(self) -> int:
        return len(self.parents)

    def cut(self, num_nodes: int) -> TreeShape:
        """The shape of the first num_nodes nodes."""
        return self if num_nodes >= len(self) else TreeShape(self.parents[:num_nodes])

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self) - 1))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of ROOT and of each node that has any, in order of rank."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    @cached_property
    def depths(self) -> list[int]:
        """The depth of each node: 1 after the pending token."""
        return depths_of(self.parents)

    @property
    def depth(self) -> int:
        """The number of tokens on the longest branch."""
        return max(self.depths, default=0)

    @cached_property
    def first_branch(self) -> int:
        """The number of tokens on the branch of first children."""
        return len(self.fans([0] * self.depth))

    def path(self, ranks: Iterable[int]) -> list[int]:
        """The nodes on the path that starts at ROOT and follows the children of these ranks, up to the last that the tree has."""
        path: list[int] = []
        for rank in ranks:
            children = self.children.get(path[-1] if path else ROOT, ())
            if rank >= len(children):
                break
            path.append(children[rank])
        return path

    def fans(self, ranks: Iterable[int]) -> list[int]:
        """The number of children of ROOT and of each node on the path of these ranks, up to the first without children."""
        return [len(self.children[node]) for node in (ROOT, *self.path(ranks)) if node in self.children]


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node of a tree: 1 after the pending token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def tokens_to(ids: Sequence[int], parents: Sequence[int] | None, node: int) -> list[int]:
    """The tokens of the nodes from the root to this one. parents, node: see path_to"""
    return list(ids[: node + 1]) if parents is None else [ids[i] for i in path_to(parents, node)]


def path_to(parents: Sequence[int] | None, node: int) -> list[int]:
    """The nodes from the root to this one. parents: None for a chain. node: ROOT gives an empty path"""
    if parents is None:
        return list(range(node + 1))
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
