"""Stop strings in pieces of text: which one is found, where it begins, and how much text may still become one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.text.stop_strings import StopStrings


def search(strings: list[str], pieces: list[str]) -> tuple[int, str] | None:
    """Search pieces of text. -> where in the whole text the first stop string begins, and which it is"""
    stop, num_before = StopStrings(strings), 0
    for piece in pieces:
        hit = stop.find(piece, "")
        if hit is not None:
            return num_before + hit[0], hit[1]
        stop.advance(piece, "")
        num_before += len(piece)
    return None


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), st.text("ab.", max_size=12))
def test_character_by_character_the_first_string_that_completes_is_found(strings: list[str], text: str) -> None:
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(strings))]
    longest = max((s for s in strings if ends and text[: ends[0]].endswith(s)), key=len, default=None)
    expected = None if longest is None else (ends[0] - len(longest), longest)
    assert search(strings, list(text)) == expected


def test_within_one_piece_the_string_that_begins_first_is_found() -> None:
    assert search(["cd", "bcde"], ["abcdef"]) == (1, "bcde")
    assert search(["bc", "b"], ["abc"]) == (1, "b")  # of several that begin there, the shortest one


def test_a_string_may_begin_in_an_earlier_piece() -> None:
    stop = StopStrings(["bcd"])
    stop.advance("ab", "")
    stop.advance("c", "")
    assert stop.find("d.", "") == (-2, "bcd")


def test_the_tail_is_searched_only_once() -> None:
    stop = StopStrings(["x"])
    assert stop.find("a", "x") == (1, "x")
    stop.advance("a", "x")  # the match was ignored
    assert stop.find("", "x") is None
    assert stop.find("xb", "") is None
    assert stop.find("xbx", "") == (2, "x")


def test_without_strings_nothing_is_found() -> None:
    stop = StopStrings([])
    assert not stop
    assert stop.find("text", "") is None
    assert stop.num_ambiguous("text") == 0


@pytest.mark.parametrize(("text", "expected"), [("xa", 1), ("xab", 2), ("xb", 1), ("x", 0), ("", 0), ("aa", 1)])
def test_the_length_of_a_possible_beginning_of_a_stop_string_is_counted(text: str, expected: int) -> None:
    assert StopStrings(["abc", "bd"]).num_ambiguous(text) == expected
