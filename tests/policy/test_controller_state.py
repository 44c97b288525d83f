"""A controller's state survives the way through JSON, and nothing else is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.policy import ControllerState, CostModel
from foredraft.policy.acceptance import FIRST_LEVEL, AcceptanceEstimator


def state() -> ControllerState:
    costs, acceptance = CostModel(), AcceptanceEstimator(4)
    for _ in range(10):
        costs.record_step(1, 1, 0.010, sampled=True)
        costs.record_draft("a", 1, 4, 0, 0.003, sampled=True)
        acceptance.record(FIRST_LEVEL, 4, 3, 2)
    return ControllerState(costs.known(), {"a": acceptance.levels()}, {"a": acceptance.levels(), "b": []})


@pytest.mark.parametrize("one", [state(), ControllerState()], ids=["measured", "empty"])
def test_a_state_is_the_same_after_json(one: ControllerState) -> None:
    assert ControllerState.from_dict(json.loads(json.dumps(one.as_dict()))) == one


@pytest.mark.parametrize("key", ["costs", "chains", "trees"])
@pytest.mark.parametrize("value", [None, 3, "x", {"a": 1}, {"a": [1]}, {"a": [[1]]}, {"a": [[["x"]]]}, {"a": [[[-1]]]}])
def test_input_that_as_dict_cannot_write_is_refused(key: str, value: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        ControllerState.from_dict({**state().as_dict(), key: value})
