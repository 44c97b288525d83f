"""Texts with a hybrid of a lookup and a model are plain decoding's, whichever of the two drafts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.engine import Engine
from foredraft.engine.token_tree import TreeShape
from foredraft.policy import FixedPolicy
from tests.engine.test_trees import run

PROMPTS = ["def count_words(text):", "Once upon a time", "one two three one two three one two", "x = [1, 1, 1, 1,"]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "top_k": 20, "seed": 3, "logit_bias": {10: 2.0}},
)


@pytest.fixture(scope="module", params=["suffix+draft_model", "eagle+ngram"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(method=request.param, dtype="bfloat16", num_threads=1)


def always_hybrid(llm: LLM, shape: TreeShape | None) -> tuple[Engine, Counter[str]]:
    """An engine that drafts with the hybrid alone, and in how many steps it did."""
    engine = llm._builder.engine(llm.drafters, llm.engine.pool, FixedPolicy("hybrid", shape))
    asked = Counter[str]()
    engine.observers.append(SimpleNamespace(observe=lambda step: asked.update(step.draft_times.keys())))
    return engine, asked


def texts_of(engine: Engine, llm: LLM, gammas: list[int], preempted: int | None = None) -> list[list[int]]:
    assert llm.tokenizer is not None
    sequences = []
    for place, prompt in enumerate(PROMPTS):
        for kind in KINDS:
            params = SamplingParams(
                max_tokens=40, speculative_tokens=gammas[place % len(gammas)], ignore_eos=True, **kind
            )
            sequences.append(engine.add(llm.tokenizer.encode(prompt), params.resolve({})))
    return run(sequences, engine, preempted)


@pytest.mark.parametrize("shape", [None, TreeShape((-1, -1, 0, 0, 1, 2, 2))], ids=["chains", "trees"])
@pytest.mark.parametrize(("gammas", "preempted"), [([4], None), ([1, 8, 0, 3], 5)], ids=str)
def test_texts_are_plain_decodings(llm: LLM, gammas: list[int], preempted: int | None, shape: TreeShape | None) -> None:
    plain = texts_of(llm.with_drafter("none").engine, llm, [0])
    engine, asked = always_hybrid(llm, shape)
    assert texts_of(engine, llm, gammas, preempted) == plain
    assert asked["hybrid"] > 10
    assert engine.stats.num_accepted_tokens > 50
    assert not engine._policy.fallbacks
