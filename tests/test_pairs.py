"""Law 5: whatever a request combines, and whichever drafter it has, the text is plain decoding's. Hypothesis finds the combinations.

A longer search: pytest tests/test_pairs.py --hypothesis-profile=thorough
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft import LLM, SamplingParams, StructuredOutputs
from foredraft.drafters import REGISTRY
from foredraft.vocabulary import METHODS as VOCABULARY_METHODS
from tests.draft_servers import remote_settings
from tests.heads.random_heads import head_settings
from tests.methods import all_methods
from tests.vocabulary.permuted import permuted_draft

LONG = 30
QUICK = 10

PROMPTS = [
    "Once upon a time",
    "def mean(values):",
    "the cat and the dog and the cat and the dog and the",
    'A record: {"name": "Bob", "age": 12}, {"name": "',
    "x = [1, 2, 3, 1, 2, 3, 1, 2,",
]
FORMS = [
    StructuredOutputs(regex=r"(name of the [a-z ]{3,8}: the cat of the day is [a-z ]{3,10}; ){4}"),
    StructuredOutputs(regex=r"([a-z]{2,9} the ){2,6}end"),
    StructuredOutputs(choice=["the quick brown fox jumps over the dog", "the quick brown fox sleeps", "no"]),
    StructuredOutputs(grammar='start: "the " start "end " | "cat "'),
    StructuredOutputs(
        json={
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "kinds": {"type": "array", "items": {"enum": ["the red cat", "the green cat"]}, "maxItems": 3},
            },
            "required": ["name", "kinds"],
            "additionalProperties": False,
        }
    ),
]
WORDS = ["the", " the", " cat", "time", " upon a", ":", "return", ", there"]


def favour_repeats(prefix: list[int], logits: Tensor) -> Tensor:
    """Change many logits, as a pure function of the whole prefix."""
    out = logits.clone()
    out[torch.tensor(sorted(set(prefix)))] += 1.5
    return out


def every_third_less(prefix: list[int], logits: Tensor) -> Tensor:
    out = logits.clone()
    out[sum(prefix[-2:]) % 3 :: 3] -= 2.0
    return out


NOISE = st.one_of(
    st.just({"temperature": 0.0}),
    st.fixed_dictionaries({"temperature": st.sampled_from([0.6, 0.9, 1.3]), "seed": st.integers(0, 99)}),
)
PENALTIES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "presence_penalty": st.sampled_from([-0.7, 0.6]),
    "frequency_penalty": st.sampled_from([-0.5, 0.4]),
}
WARPS: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.dictionaries(st.integers(3, 900), st.sampled_from([-100.0, -3.0, 4.0]), min_size=1, max_size=4),
    "bad_words": st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True),
    "logits_processors": st.sampled_from([(favour_repeats,), (every_third_less,), (favour_repeats, every_third_less)]),
}
TRUNCATION: dict[str, st.SearchStrategy[Any]] = {
    "top_p": st.sampled_from([0.6, 0.95]),
    "top_k": st.sampled_from([2, 40]),
    "min_p": st.sampled_from([0.02, 0.2]),
}
OTHER: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(2, 3),
    "stop": st.sampled_from([["."], ["cat", "\n\n"], [" and"]]),
    "stop_token_ids": st.lists(st.integers(3, 400), min_size=1, max_size=3),
    "include_stop_str_in_output": st.just(True),
    "logprobs": st.sampled_from([0, 2]),
    "prompt_logprobs": st.just(1),
    "prefix_caching": st.just(False),
}
FORM = {"structured_outputs": st.sampled_from(FORMS)}
NO_FORM = {"min_tokens": st.integers(1, 10), "ignore_eos": st.just(True)}


@st.composite
def request_settings(draw: st.DrawFn) -> dict[str, Any]:
    """All settings of a request except the number of draft tokens."""
    form_or_not = draw(st.sampled_from([FORM, NO_FORM]))
    optional = {**PENALTIES, **WARPS, **TRUNCATION, **OTHER, **form_or_not}
    found: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=optional))
    return {"max_tokens": draw(st.integers(10, 60)), **draw(NOISE), **found}


BATCHES = st.lists(st.tuples(st.sampled_from(PROMPTS), request_settings()), min_size=1, max_size=4)
GAMMAS = st.one_of(st.integers(1, 10), st.just("auto"))


def written(llm: LLM, batch: Sequence[tuple[str, dict[str, Any]]], gammas: Sequence[int | str]) -> list[Any]:
    """The outputs of every text of every request, without times and draft statistics. A request may fail; the others go on."""
    requests = [
        llm.frontend.prepare(prompt, SamplingParams(**wanted, speculative_tokens=gamma))
        for (prompt, wanted), gamma in zip(batch, gammas, strict=True)
    ]
    for request in requests:
        llm.frontend.start(request)
    while llm.engine.has_work:
        llm.engine.step()
    return [
        (text.token_ids, text.text, text.finish_reason, text.stop_reason, text.error, text.logprobs, text.text_offsets)
        for request in requests
        for text in request.output().outputs
    ]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(method="none")


@pytest.fixture(scope="module", params=[*all_methods({*REGISTRY, "suffix+draft_model"} - {"none"}), "slem", "tli"])
def drafting(request: pytest.FixtureRequest) -> LLM:
    if request.param in VOCABULARY_METHODS:
        return LLM(draft_model=permuted_draft(), heterogeneous_vocab=request.param)
    return LLM(method=request.param, **head_settings(request.param), **remote_settings(request.param))


def assert_invisible(plain: LLM, drafting: LLM, batch: list[tuple[str, dict[str, Any]]], gammas: list[Any]) -> None:
    expected = written(plain, batch, [0] * len(batch))
    assert written(drafting, batch, gammas) == expected
    for llm in (plain, drafting):
        assert llm.engine.pool.used == llm.engine.pool.bytes_retained


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[str, dict[str, Any]]], list[Any]]:
    batch = draw(BATCHES)
    return batch, [draw(GAMMAS) for _ in batch]


CHECKS = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@given(cases())
@settings(CHECKS, max_examples=QUICK)
def test_no_combination_of_parameters_reveals_drafts(plain: LLM, drafting: LLM, case: Any) -> None:
    assert_invisible(plain, drafting, *case)


@pytest.mark.slow
@given(cases())
@settings(CHECKS, max_examples=LONG)
def test_no_combination_of_parameters_reveals_drafts_in_a_long_search(plain: LLM, drafting: LLM, case: Any) -> None:
    assert_invisible(plain, drafting, *case)


@pytest.mark.parametrize("noise", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": -0.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3}]
)
def test_penalties_do_not_count_forced_tokens_before_they_are_written(
    plain: LLM, drafting: LLM, noise: dict[str, Any], penalty: dict[str, Any]
) -> None:
    """Drafters continue after forced tokens, which are not yet part of the history."""
    wanted = {"max_tokens": 100, "structured_outputs": FORMS[0], **noise, **penalty}
    assert_invisible(plain, drafting, [("Once upon a time", wanted)], [8])
