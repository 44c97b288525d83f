"""The index against a search through everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foredraft.cache import common_prefix
from foredraft.prefix import BLOCK, PrefixIndex

texts = st.lists(st.integers(0, 1), max_size=5).flatmap(
    lambda head: st.integers(0, BLOCK - 1).map(lambda tail: [t for bit in head for t in [bit] * BLOCK] + [7] * tail)
)
"""Few blocks to choose from, so that texts share some, and a tail that fills none."""


def num_blocks(text: list[int], other: list[int]) -> int:
    return common_prefix(text, other) // BLOCK


@given(steps=st.lists(st.tuples(st.booleans(), texts), max_size=30), wanted=texts)
def test_it_finds_who_has_most_blocks_and_keeps_nobody_who_has_no_own(
    steps: list[tuple[bool, list[int]]], wanted: list[int]
) -> None:
    index, held = PrefixIndex[int](), dict[int, list[int]]()
    for name, (is_added, text) in enumerate(steps):
        if not is_added and held:
            oldest = next(iter(held))
            index.remove(held.pop(oldest))
            continue
        displaced = index.add(text, name)
        held[name] = text
        if displaced is not None:
            gone = held.pop(displaced)
            rest = len(gone) // BLOCK
            assert rest == 0 or any(num_blocks(gone, other) == rest for other in held.values())
    for name, text in held.items():
        others = [other for key, other in held.items() if key != name]
        assert all(num_blocks(text, other) < len(text) // BLOCK for other in others), "nobody says what another says"
    found = index.find(wanted)
    most = max((num_blocks(text, wanted) for text in held.values()), default=0)
    assert (found is None) == (most == 0)
    assert found is None or num_blocks(held[found], wanted) == most


def test_an_empty_index_keeps_nothing_of_what_was_there() -> None:
    index = PrefixIndex[str]()
    text = list(range(10 * BLOCK))
    assert index.add(text, "a") is None
    index.remove(text)
    assert index.find(text) is None
    assert index.add(text[: 2 * BLOCK], "b") is None
    assert index.find(text) == "b"


def test_what_fills_no_block_is_not_kept() -> None:
    index = PrefixIndex[str]()
    assert index.add([1] * (BLOCK - 1), "a") == "a"
    assert index.find([1] * BLOCK) is None
