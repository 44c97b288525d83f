"""How a refused run is told apart from the one in its folder."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.train.run_arguments import difference


@pytest.mark.parametrize(
    ("stored", "given", "expected"),
    [
        ({"seconds": 40.0}, {"seconds": 60.0}, "with --budget 40s, not --budget 60s"),
        ({"steps": None, "seconds": 40.0}, {"steps": 1, "seconds": None}, "with --budget 40s, not --steps 1"),
        ({"command": "head"}, {"command": "distill"}, "of train head, not of train distill"),
        ({"init": None}, {"init": "a draft"}, "without --init 'a draft'"),
        ({"own_head": True}, {"own_head": False}, "with --own-head"),
        (
            {"temperatures": [0.0, 1.0]},
            {"temperatures": [1.0]},
            "with --temperature 0 --temperature 1, not --temperature 1",
        ),
        (
            {"validation": {"code": "a.txt"}},
            {"validation": {"code": "b.txt"}},
            "with --validation code=a.txt, not --validation code=b.txt",
        ),
        (
            {"rates": {"matrices": 0.02, "others": 0.002}},
            {"rates": {"matrices": 0.05, "others": 0.002}},
            "with --muon-learning-rate 0.02, not --muon-learning-rate 0.05",
        ),
        ({"num_steps": 5, "taps": None}, {"num_heads": 4}, "with --unroll 5"),
        ({"data": {"a.txt": "1"}}, {"data": {"b.txt": "1"}}, "with other data: a.txt, not b.txt"),
        ({"data": {"a.txt": "1"}}, {"data": {"a.txt": "2"}}, "with other contents of a.txt"),
        ({"seed": 0}, {"seed": 0}, None),
    ],
)
def test_the_first_difference_is_told_by_its_option(
    stored: dict[str, Any], given: dict[str, Any], expected: str | None
) -> None:
    assert difference(stored, given) == expected
