"""The longest common prefix of a sequence with many others: a tree of blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

BLOCK = 16
"""Tokens per block. Shorter common prefixes are not found: computing them costs less than copying them."""

T = TypeVar("T")


class _Node(Generic[T]):
    """A leaf has an item, every other node has children."""

    __slots__ = ("children", "item")

    def __init__(self) -> None:
        self.children: dict[tuple[int, ...], _Node[T]] = {}
        self.item: T | None = None


class PrefixIndex(Generic[T]):
    """Stores items by their tokens. Every operation costs O(len(tokens)), however many items there are.

    No item's blocks are a prefix of another's: of two such items only the longer one stays. Tokens that do not fill a
    block are ignored.
    """

    def __init__(self) -> None:
        self._root = _Node[T]()

    def __bool__(self) -> bool:
        """Whether there is an item."""
        return bool(self._root.children)

    def find(self, tokens: Sequence[int]) -> T | None:
        """An item with the longest common prefix, in blocks, with `tokens`; None if no item has the first block."""
        node = self._root
        for block in _blocks(tokens):
            child = node.children.get(block)
            if child is None:
                break
            node = child
        if node is self._root:
            return None
        while node.item is None:
            node = next(iter(node.children.values()))
        return node.item

    def add(self, tokens: Sequence[int], item: T) -> T | None:
        """Add an item. -> an item left out of the index, since another has all of its blocks: an earlier one, or this one"""
        node, displaced = self._root, None
        for block in _blocks(tokens):
            if node.item is not None:
                displaced, node.item = node.item, None
            node = node.children.setdefault(block, _Node())
        if node.children or node is self._root:
            return item
        if node.item is not None:
            displaced = node.item
        node.item = item
        return displaced

    def remove(self, tokens: Sequence[int]) -> None:
        """Remove the item with exactly these blocks, which must be in the index."""
        path: list[tuple[_Node[T], tuple[int, ...]]] = []
        node = self._root
        for block in _blocks(tokens):
            path.append((node, block))
            node = node.children[block]
        node.item = None
        for parent, block in reversed(path):
            del parent.children[block]
            if parent.children:
                break


def _blocks(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield tuple(tokens[start : start + BLOCK])


def common_prefix(a: Sequence[int], b: Sequence[int], *, start: int = 0, limit: int | None = None) -> int:
    """The length of the common prefix of a and b, at most `limit`; the first `start` tokens are known to agree."""
    end = min(len(a), len(b), len(b) if limit is None else limit)
    low = min(start, end)
    b = b if isinstance(b, list) else list(b)  # slices of two types never compare equal
    # binary search on slices: comparing a slice runs at C speed
    while low < end:
        middle = (low + end + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            end = middle - 1
    return low
