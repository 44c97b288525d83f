"""Trees of tokens that are looked up rather than computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from foredraft.engine.token_tree import ROOT, TreeShape

Node = TypeVar("Node")


def look_up_tree(
    shape: TreeShape, root: Node, children_of: Callable[[Node], Iterable[tuple[int, Node]]]
) -> tuple[list[int], list[int], list[Node]]:
    """-> tokens and parents, as in Proposal, and the node of each token

    children_of: for a node, the tokens of its children, each once and best first, and their nodes. If it yields fewer children than
    the shape has, the others are left out, with their descendants.
    """
    ids: list[int] = []
    parents: list[int] = []
    nodes: list[Node] = []
    grown = {ROOT: (ROOT, root)}
    for parent, children in shape.children.items():
        if parent not in grown:
            continue
        place, node = grown[parent]
        for child, (token, behind) in zip(children, children_of(node), strict=False):
            grown[child] = (len(ids), behind)
            ids.append(token)
            parents.append(place)
            nodes.append(behind)
    return ids, parents, nodes


def token_at(text: Sequence[int], path: Sequence[int], place: int) -> int | None:
    """The token at this place of the text followed by the path; None past the end of both."""
    size = len(text)
    if place < size:
        return text[place]
    return path[place - size] if place - size < len(path) else None
