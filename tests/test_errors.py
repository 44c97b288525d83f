"""Errors and values are formatted in one line."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.errors import ForedraftError, message_of, one_line, shown


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("and this is why")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3"),
        ("two\nlines", r"'two\nlines'"),
        (10**5000, "int that cannot be printed"),
        (Unprintable(), "Unprintable that cannot be printed"),
        ("x" * 1000, "'" + "x" * 79 + "..."),
    ],
    ids=["number", "lines", "digits", "unprintable", "long"],
)
def test_a_value_is_shown_in_one_short_line(value: Any, expected: str) -> None:
    assert shown(value) == expected


def test_an_error_is_shown_in_one_line() -> None:
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(ValueError("in this field:\n  it is odd\nthird")) == "ValueError: in this field: it is odd"
    assert one_line(KeyError()) == "KeyError: no message"
    assert one_line(Unprintable()) == "Unprintable: no message"
    assert message_of(ForedraftError("ours")) == "ours"
    assert message_of(KeyError("a")) == "KeyError: 'a'"
