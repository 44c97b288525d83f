"""An error ends only the items that cause it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import ForedraftError
from foredraft.utils.isolation import Shield, brief, run_isolated


def run(bad: set[int], items: Sequence[int]) -> list[int]:
    if bad & set(items):
        raise ZeroDivisionError
    return list(items)


@given(st.sets(st.integers(0, 20)), st.integers(1, 20))
def test_exactly_the_bad_items_fail_and_the_rest_keeps_its_order(bad: set[int], num_items: int) -> None:
    failed: list[int] = []
    results, unexplained = run_isolated(
        range(num_items),
        lambda items: run(bad, items),
        lambda items: run(bad, items),
        lambda item, _: failed.append(item),
    )
    assert unexplained is None
    assert failed == [item for item in range(num_items) if item in bad]
    assert [item for result in results for item in result] == [i for i in range(num_items) if i not in bad]


def test_one_bad_item_costs_few_runs() -> None:
    num_runs = 0

    def counting(items: Sequence[int]) -> list[int]:
        nonlocal num_runs
        num_runs += 1
        return run({37}, items)

    run_isolated(range(64), counting, counting, lambda *_: None)
    assert num_runs <= 2 + 2 * 6


def test_without_an_error_all_run_together_once() -> None:
    def never(*_: object) -> list[int]:
        raise AssertionError

    assert run_isolated([1, 2], lambda items: run(set(), items), never, never) == ([[1, 2]], None)


def test_an_error_that_no_single_item_causes_is_returned() -> None:
    raised, failed = KeyError("together"), list[int]()

    def together(items: Sequence[int]) -> list[int]:
        raise raised

    def fail(item: int, error: Exception) -> None:
        failed.append(item)

    assert run_isolated([1, 2], together, lambda items: run(set(), items), fail) == ([[1, 2]], raised)
    assert run_isolated([1, 2], together, lambda items: run({2}, items), fail) == ([[1]], None)
    assert failed == [2]
    with pytest.raises(KeyError):  # no item is responsible
        run_isolated([], together, together, fail)


def test_a_shield_returns_the_default_and_logs_each_object_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> int:
        raise ZeroDivisionError("a prompt")

    shield, first, second = Shield(), object(), object()
    assert shield.call(first, lambda: 3, 0) == 3
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert [shield.call(owner, fail, 0) for owner in (first, first, second)] == [0, 0, 0]
    assert len(caplog.records) == 2
    assert all("object failed: ZeroDivisionError at test_isolation.py:" in r.getMessage() for r in caplog.records)
    assert "a prompt" not in caplog.text


def test_a_brief_error_has_no_foreign_message() -> None:
    assert brief(KeyError("a prompt")) == "KeyError"
    assert brief(ForedraftError("ours")) == "ours"
