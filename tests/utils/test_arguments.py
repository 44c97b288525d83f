"""Which arguments are accepted, and which are refused in one line with the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foredraft.errors import ForedraftError
from foredraft.utils import arguments
from foredraft.utils.arguments import (
    check_autocast,
    check_budget,
    check_draft_len,
    check_numbers,
    check_precision,
    check_threads,
    check_thresholds,
    check_verification,
)

GOOD: list[Callable[[], Any]] = [
    lambda: check_numbers(seed=(0, 0), max_num_seqs=(None, 1), many=(2**63 - 1, 1)),
    lambda: check_threads(None),
    lambda: check_threads(4 * arguments.usable_cores()),
    lambda: check_draft_len("auto"),
    lambda: check_draft_len(0),
    lambda: check_thresholds(None, None),
    lambda: check_thresholds(0, 0),
    lambda: check_thresholds(1.0, 10),
    lambda: check_precision("auto", None),
    lambda: check_precision("bfloat16", "int8", "none"),
    lambda: check_precision("auto", "int4", "int4-all"),
    lambda: check_verification(None),
    lambda: check_autocast("float32"),
    lambda: check_budget(None),
    lambda: check_budget(0.5),
]
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: check_numbers(seed=(-1, 0)), "seed must be an integer of at least 0, not -1"),
    (lambda: check_numbers(seed=(1.0, 0)), "seed must be an integer of at least 0, not 1.0"),  # type: ignore[arg-type]
    (lambda: check_numbers(seed=(True, 0)), "not True"),
    (lambda: check_numbers(seed=(2**63, 0)), r"seed must be at most 2\^63 - 1"),
    (lambda: check_threads(0), "num_threads must be an integer of at least 1, not 0"),
    (lambda: check_threads(4 * arguments.usable_cores() + 1), "is too many: this process may use"),
    (lambda: check_draft_len(-1), "speculative_tokens must be an integer of at least 0, not -1"),
    (lambda: check_draft_len("many"), "speculative_tokens must be a number or \"auto\", not 'many'"),
    (lambda: check_thresholds(1.1, None), "min_acceptance_rate must be a share between 0 and 1, not 1.1"),
    (lambda: check_thresholds(True, None), "min_acceptance_rate must be a share"),
    (lambda: check_thresholds(None, -1), "max_draft_memory must be a number of bytes, not -1"),
    (lambda: check_thresholds(None, 1.5), "max_draft_memory must be a number of bytes"),  # type: ignore[arg-type]
    (lambda: check_precision("float12", None), "dtype must be one of auto, float32, bfloat16, float16, not 'float12'"),
    (lambda: check_precision("auto", "int3"), "quantization must be one of int8, int4, int4-all, none, not 'int3'"),
    (lambda: check_precision("auto", None, "int3"), "quantization must be one of int8, int4, int4-all, none"),
    (lambda: check_verification("magic"), "verification must be one of .*, not 'magic'"),
    (lambda: check_autocast("float16"), "--dtype must be one of float32, bfloat16, not 'float16'"),
    (lambda: check_budget(0), "budget must be more than 0 seconds, not 0"),
    (lambda: check_budget(float("nan")), "budget must be more than 0 seconds, not nan"),
    (lambda: check_budget(float("inf")), "budget must be more than 0 seconds, not inf"),
]


@pytest.mark.parametrize("check", GOOD)
def test_valid_arguments_are_accepted(check: Callable[[], Any]) -> None:
    assert check() is None


@pytest.mark.parametrize(("check", "message"), BAD)
def test_invalid_arguments_are_refused_in_one_line(check: Callable[[], Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        check()
    assert "\n" not in str(caught.value)


def test_a_checked_verification_rule_is_returned() -> None:
    assert check_verification("block") == "block"
