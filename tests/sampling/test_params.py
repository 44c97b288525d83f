"""Which sampling parameters are accepted, and how bad ones are refused."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from foredraft.errors import ForedraftError, shown
from foredraft.sampling import SamplingParams

NAN, INF = math.nan, math.inf
UNPRINTABLE = 10**5000
"""An integer with more digits than Python prints."""

BAD: dict[str, list[Any]] = {
    "n": [0, -1, 1.5, True, None, "2", 2**20, UNPRINTABLE],
    "temperature": [-0.1, NAN, INF, "hot", True, 1e39, UNPRINTABLE],
    "top_p": [0, 0.0, -0.5, 1.01, NAN, "1", True],
    "top_k": [-2, 1.5, True, "5", 2**63, UNPRINTABLE, -UNPRINTABLE],
    "min_p": [-0.1, 1.1, NAN, "0"],
    "repetition_penalty": [0, -1.0, NAN, INF, "1", 1e-300, 1e300],
    "presence_penalty": [-2.1, 2.1, NAN, None, "0"],
    "frequency_penalty": [-2.1, 2.1, NAN, None, "0"],
    "logit_bias": [
        *({3: value} for value in (NAN, "x", None, INF, 1e39, -1e39, UNPRINTABLE)),
        *({token: 1.0} for token in ("3", 1.5, -1, 2**63, UNPRINTABLE)),
        [3],
        3,
    ],
    "bad_words": ["word", [""], [3], None, 3],
    "min_tokens": [-1, 1.5, True, None, "1", 2**63],
    "max_tokens": [-1, 2.0, True, "16", 2**63, UNPRINTABLE],
    "stop": ["", [""], [3], 3, ["a", None], b"x", "\ud800", ["a", "b\udfff"]],
    "allowed_token_ids": [[], ["a"], [1.5], [None], 3, "12", [-1], [2**63], [True]],
    "stop_token_ids": [["a"], [1.5], [None], 3, "12", [-1], [2**63], [UNPRINTABLE]],
    "seed": [1.5, "x", True, 2**64, -(2**63) - 1, UNPRINTABLE],
    "logprobs": [-1, 1.5, True, "1", 2**63],
    "prompt_logprobs": [-1, 1.5, True, 2**63],
    "logits_processors": [[3], ["f"], [None], 3],
    "speculative_tokens": [-1, 1.5, True, "4", 2**63, UNPRINTABLE],
    "verification": ["", 3],
    **{
        name: [None, 1, "false"]
        for name in ("prefix_caching", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
    },
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=shown
)
def test_a_bad_value_is_refused_in_one_line_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ForedraftError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert name in message
    assert "\n" not in message


GOOD: dict[str, list[Any]] = {
    "n": [1, 5],
    "temperature": [None, 0, 0.0, 1e-9, 2, 1e4],
    "top_p": [None, 1, 1e-9, 5e-324],
    "top_k": [None, -1, 0, 1, 10**9, 2**63 - 1],
    "min_p": [None, 0, 1],
    "repetition_penalty": [None, 0.1, 5],
    "presence_penalty": [-2, 2.0],
    "logit_bias": [None, {}, {3: -INF, 5: 2}],
    "bad_words": [(), ["a", "b c"]],
    "allowed_token_ids": [None, [3], (1, 2, 2)],
    "max_tokens": [None, 0, 1, 2**63 - 1],
    "stop": ["END", [], ["a", "b"]],
    "stop_token_ids": [(), [1, 2]],
    "seed": [None, 0, -5, -(2**63), 2**64 - 1],
    "logprobs": [None, 0, 20, 2**63 - 1],
    "speculative_tokens": [None, 0, 16, 2**63 - 1],
    "verification": [None, "block", "rejection"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_good_value_is_accepted_and_resolved(name: str, value: Any) -> None:
    resolved = SamplingParams(**{name: value}).resolve({})
    for filled in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(resolved, filled) is not None


def test_contradictory_combinations_are_refused() -> None:
    with pytest.raises(ForedraftError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    for rule in ("block", "rejection"):
        with pytest.raises(ForedraftError, match="seed"):
            SamplingParams(seed=1, verification=rule)
    with pytest.raises(ForedraftError, match="seed"):
        SamplingParams(verification="coupled")
    assert SamplingParams(seed=1, verification="coupled").verifier == "coupled"
    assert SamplingParams(temperature=0, verification="coupled").is_greedy


def test_checkpoint_defaults_only_fill_unset_parameters() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "max_tokens": 3, "eos_token_id": 7}
    resolved = SamplingParams(top_p=0.5).resolve(defaults)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.6, 0.5, 20)
    assert (resolved.min_p, resolved.repetition_penalty) == (0.0, 1.0)
    assert resolved.max_tokens == SamplingParams().max_tokens
    assert SamplingParams(temperature=0).resolve(defaults).is_greedy


def test_params_are_normalised_and_immutable() -> None:
    params = SamplingParams(stop="END", top_k=-1)
    assert params.stop_strings == ("END",)
    assert params.top_k == 0
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_very_low_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-9).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_minus_one_is_no_seed_as_in_vllm() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-1, verification="block").verifier == "block"
