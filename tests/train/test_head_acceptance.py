"""Evaluation of heads on texts: it agrees with their drafters, and predicts the engine's τ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.engine.proposal import DraftRequest, Features
from foredraft.model import EMBEDDED
from foredraft.testing.requests import request_for
from foredraft.train.evaluate import measured_tau
from foredraft.train.expected import Expectation, expect
from foredraft.train.head_acceptance import HeadOnTexts
from foredraft.train.text_acceptance import acceptance_on, draft_of
from tests.heads.fitted_heads import fitted_settings
from tests.heads.random_heads import BLOCK_KINDS, embedded_block_head, embedded_head

PROMPTS = ("def add(a, b):", "Once upon a time there was a", "class Node:\n    def __init__(self", "The dog and the")
NUM_HEADS = 3


@pytest.fixture(scope="module", params=("eagle", "peagle", "medusa", "dflash", "dspark-rnn"))
def llm(request: pytest.FixtureRequest) -> LLM:
    is_block = request.param in BLOCK_KINDS
    head = embedded_block_head(request.param) if is_block else embedded_head(request.param)
    return LLM(EMBEDDED / "target", head, speculative_tokens=3, num_threads=1)


def drafted_probs(llm: LLM, ids: list[int], features: Tensor, position: int, place: int) -> Tensor:
    """[V], the drafter's own q for the token at this position of the text, at this place of its draft."""
    made = request_for(100 * position + place, ids[:position], 1, temperature=0.7)
    known = Features(features[: position - place - 1])
    request = DraftRequest(made.seq_id, made.tokens, 1, made.sampler, known, place)
    proposal = llm.drafters[llm.method].propose([request])
    llm.drafters[llm.method].forget([made.seq_id])
    assert proposal.token_probs is not None
    return proposal.token_probs.dense(4096)[0]


def test_every_position_of_a_draft_has_the_probabilities_of_the_drafter(llm: LLM) -> None:
    ids = list(llm.text_tokenizer("def add(a, b):\n    return a + b\n")["input_ids"])
    assert llm.head is not None
    (features,) = llm.target.read_features([ids], llm.head.config.taps)
    places = list(HeadOnTexts(llm).logits(ids, NUM_HEADS))
    assert len(places) == NUM_HEADS
    for place, logits in enumerate(places):
        for position in range(2 + place, len(ids), 3):
            q = torch.softmax(logits[position].float() / 0.7, -1)
            theirs = drafted_probs(llm, ids, features, position, place)
            assert float((q - theirs).abs().sum()) < 0.05  # in bfloat16


def test_the_steps_of_greedy_text_are_predicted() -> None:
    """Nothing is drawn, so predictions are exact except for near ties. The position of a head in the draft matters."""
    llm = LLM(
        EMBEDDED / "target", fitted_settings("medusa")["draft_model"], speculative_tokens=NUM_HEADS, num_threads=1
    )
    prompts = [llm.text_tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    total = Expectation.zero(NUM_HEADS)
    for prompt, output in zip(prompts, llm.with_drafter("none").generate(prompts, params), strict=True):
        ids = [*prompt, *output.outputs[0].token_ids]
        of_tokens, _ = acceptance_on(llm.target, draft_of(llm), ids, 0.0, first=len(prompt), depth=NUM_HEADS)
        total += expect(of_tokens.numpy(), NUM_HEADS, num_undrafted=1)
    measured = measured_tau(llm, prompts, params, NUM_HEADS)
    assert measured > 1.05
    assert measured == pytest.approx(total.tau, rel=0.03)
