"""A draft model: its drafts are what it would write itself, and its cache follows every history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import CERTAIN, DraftRequest, Proposal
from foredraft.engine.sources import TokenSource
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.sampling import Row, Sampler, adjusted, choose, token_probs_of
from foredraft.testing.requests import request_for
from tests.model.zoo import ENCODER_DECODERS, random_model

PROMPTS = [[5, 900, 77, 300], [40, 41, 42], list(range(100, 130))]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1, "seed": 3},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5},
]


def drafter_of(model: LanguageModel, memory: int = 1 << 28, **settings: Any) -> DraftModelDrafter:
    return DraftModelDrafter(model, model.traits.vocab_size, MemoryPool(memory), **settings)


def logits_after(model: LanguageModel, tokens: list[int]) -> Tensor:
    """[1, V], the logits after these tokens, with a new cache."""
    cache = model.new_cache(MemoryPool(1 << 28))
    assert cache.reserve(0, len(tokens))
    return model.read([Read(0, tokens, 1)], cache)


def expected_draft(model: LanguageModel, request: DraftRequest) -> list[int]:
    """The expected draft, each token from a fresh pass."""
    ids: list[int] = []
    while len(ids) < request.max_len:
        logits = logits_after(model, [*request.tokens, *ids])
        ids.append(choose(logits, [Row(request.sampler, request.tokens, list(ids))]).ids[0])
    return ids


def drafts_of(drafter: DraftModelDrafter, requests: list[DraftRequest]) -> Proposal:
    with torch.inference_mode():
        return drafter.propose(requests)


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_greedy_and_seeded_drafts_are_certain_and_the_models_own_text(
    params: dict[str, Any], draft: LanguageModel
) -> None:
    if not draft.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    requests = [request_for(b, prompt, 3 + b, **params) for b, prompt in enumerate(PROMPTS)]
    proposal = drafts_of(drafter_of(draft), requests)
    assert proposal.draft_ids == [expected_draft(draft, request) for request in requests]
    assert {row for rows in proposal.draft_prob_rows for row in rows} == {CERTAIN}
    assert proposal.probs is None


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.5, "logit_bias": {300: 4.0, 77: -5.0}},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4, "top_k": 5},
]


@pytest.mark.parametrize("params", ADJUSTED, ids=str)
def test_adjusted_drafts_written_in_one_call_equal_those_of_single_passes(
    params: dict[str, Any], draft: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (draft.can_adjust and draft.traits.row_exact):
        pytest.skip("this machine has no compiled kernels, or none with exact rows")

    def drafted() -> Proposal:
        return drafts_of(drafter_of(draft), [request_for(3, PROMPTS[0] * 2, 6, **params)])

    at_once = drafted()
    monkeypatch.setattr(Sampler, "has_adjustments", lambda *_: False)
    one_by_one = drafted()
    assert at_once.draft_ids == one_by_one.draft_ids
    laws = [None if each.token_probs is None else each.token_probs.dense(4096) for each in (at_once, one_by_one)]
    assert (laws[0] is None) == ("seed" in params or "temperature" not in params)
    if laws[0] is not None and laws[1] is not None:
        torch.testing.assert_close(laws[0], laws[1], rtol=1e-5, atol=1e-7)


SHAPES = (
    TreeShape((ROOT, ROOT, ROOT, 0, 0, 1, 3, 3, 5, 6)),
    TreeShape.chain(4),
    TreeShape((ROOT, ROOT, 0, 1, 2, 3, 4)),
)


@pytest.mark.parametrize(
    "params", [*KINDS, *ADJUSTED[:2], {"temperature": 0.9}, {"temperature": 1.2, "seed": 4, "top_k": 3}], ids=str
)
def test_trees_grown_in_one_call_equal_those_grown_level_by_level(
    params: dict[str, Any], draft: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache that the next step finds does not depend on how they were grown either."""
    if not (draft.can_grow and draft.traits.row_exact):
        pytest.skip("this machine has no compiled kernels, or none with exact rows")
    asked = [request_for(b, prompt, 10, **params) for b, prompt in enumerate(PROMPTS)]
    first = [replace(each, shape=shape) for each, shape in zip(asked, SHAPES, strict=True)]
    after = [
        replace(each, tokens=[*each.tokens, 7, 8], shape=shape) for each, shape in zip(asked, SHAPES[::-1], strict=True)
    ]

    def trees() -> list[tuple[list[list[int]], Any]]:
        drafter = drafter_of(draft)
        return [(each.draft_ids, each.draft_parents) for each in (drafts_of(drafter, first), drafts_of(drafter, after))]

    at_once = trees()
    monkeypatch.setattr(draft, "_growing", None)
    assert trees() == at_once
    is_cut = {"top_k", "top_p"} & params.keys()
    assert is_cut or [len(ids) for ids in at_once[0][0]] == [10, 4, 7]


@pytest.mark.parametrize("params", [{}, {"top_k": 7}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "min_p": 0.01}])
def test_a_drawn_token_names_the_distribution_it_was_drawn_from(params: dict[str, Any], draft: LanguageModel) -> None:
    requests = [request_for(b, prompt, 3, temperature=0.9, **params) for b, prompt in enumerate(PROMPTS)]
    for request in requests[1:]:
        request.sampler.generator = requests[0].sampler.generator
    proposal = drafts_of(drafter_of(draft), requests)
    token_probs = proposal.token_probs
    assert token_probs is not None
    dense = token_probs.dense(draft.traits.vocab_size)
    named = [row for rows in proposal.draft_prob_rows for row in rows]
    assert CERTAIN not in named
    assert len(set(named)) == len(named) == 9
    for request, ids, prob_rows in zip(requests, proposal.draft_ids, proposal.draft_prob_rows, strict=True):
        for i, (token, prob_row) in enumerate(zip(ids, prob_rows, strict=True)):
            row = [Row(request.sampler, request.tokens, ids[:i])]
            logits = adjusted(logits_after(draft, [*request.tokens, *ids[:i]]), row).logits
            expected = token_probs_of(logits, row).dense(draft.traits.vocab_size)[0]
            assert float(dense[prob_row, token]) > 0
            torch.testing.assert_close(dense[prob_row].float(), expected.float(), rtol=0.05, atol=2e-3)


def test_its_cache_follows_accepted_and_rejected_drafts(draft: LanguageModel) -> None:
    if not draft.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    drafter, history = drafter_of(draft), list(PROMPTS[0])
    for taken, own in ((4, 17), (0, 18), (2, 19), (4, 20), (1, 21)):
        request = request_for(0, history, 4)
        (ids,) = drafts_of(drafter, [request]).draft_ids
        assert ids == expected_draft(draft, request)
        history = [*history, *ids[:taken], own]


def test_reading_a_long_history_in_several_passes_changes_no_draft(draft: LanguageModel) -> None:
    if not draft.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    requests = [request_for(b, prompt, 4) for b, prompt in enumerate(PROMPTS)]
    whole, parts = (drafts_of(drafter_of(draft, max_rows=size), requests) for size in (512, 5))
    assert whole.draft_ids == parts.draft_ids


def test_a_draft_ends_before_a_row_that_fails(draft: LanguageModel) -> None:
    def fails_late(prefix: list[int], logits: Tensor) -> Tensor:
        if len(prefix) == len(PROMPTS[0]) + 2:
            raise ValueError("late")
        return logits

    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"seed": 1, "temperature": 1.0}):
        failing = request_for(0, PROMPTS[0], 5, logits_processors=[fails_late], **params)
        proposal = drafts_of(drafter_of(draft), [failing, request_for(1, PROMPTS[2], 5)])
        assert proposal.lens.tolist() == [2, 5], params


def test_without_context_known_ids_or_memory_there_is_no_draft(draft: LanguageModel) -> None:
    context_len, vocab_size = draft.traits.context_len, draft.traits.vocab_size
    past = request_for(0, [7] * (context_len + 1), 4)
    at_the_end = request_for(1, [7] * context_len, 4)
    unknown = request_for(2, [5, vocab_size, 6], 4)
    nothing_asked = request_for(3, [5, 6], 0)
    drafter = drafter_of(draft)
    assert drafts_of(drafter, [past, at_the_end, unknown, nothing_asked]).lens.tolist() == [0, 1, 0, 0]
    short_of_memory = drafter_of(draft, memory=1)
    assert drafts_of(short_of_memory, [request_for(0, PROMPTS[0], 4)]).lens.tolist() == [0]
    assert short_of_memory.bytes_held == 0


def test_forget_frees_the_memory(draft: LanguageModel) -> None:
    pool = MemoryPool(1 << 28)
    drafter = DraftModelDrafter(draft, draft.traits.vocab_size, pool)
    drafts_of(drafter, [request_for(b, prompt, 4) for b, prompt in enumerate(PROMPTS)])
    held = drafter.bytes_held
    assert held > 0
    drafter.forget([0])
    assert 0 < drafter.bytes_held < held
    drafter.forget([1, 2, 99])
    assert (drafter.bytes_held, pool.used) == (0, 0)


def test_logits_beyond_the_targets_vocabulary_are_cut_and_missing_ids_never_drafted(draft: LanguageModel) -> None:
    vocab_size = draft.traits.vocab_size
    for size in (200, vocab_size + 50):
        drafter = DraftModelDrafter(draft, size, MemoryPool(1 << 28))
        requests = [request_for(b, [5, 6, 7 + b], 4, temperature=5.0, repetition_penalty=1.1) for b in range(3)]
        for request in requests[1:]:
            request.sampler.generator = requests[0].sampler.generator
        proposal = drafts_of(drafter, requests)
        assert max(token for ids in proposal.draft_ids for token in ids) < min(size, vocab_size)
        assert proposal.probs is not None
        assert proposal.probs.shape[1] == size


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 7}])
def test_an_encoder_decoder_drafts_from_the_source_that_its_own_encoder_read(params: dict[str, Any]) -> None:
    hf = random_model(ENCODER_DECODERS["t5"].config())
    model = load_model(hf, LoadOptions())
    sources = [tuple(range(5, 40)), (90, 7, 7), tuple(range(60, 71))]
    texts = [[0, 8, 9], [0], [0, *range(20, 30)]]
    made = [request_for(b, text, 3, **params) for b, text in enumerate(texts)]
    requests = [replace(request, source=TokenSource(source)) for request, source in zip(made, sources, strict=True)]
    drafter = drafter_of(model)
    proposal = drafts_of(drafter, requests)
    for request, ids, prob_rows in zip(requests, proposal.draft_ids, proposal.draft_prob_rows, strict=True):
        assert len(ids) == 3
        tokens = torch.tensor([[*request.tokens, *ids]])
        with torch.inference_mode():
            logits = hf(input_ids=torch.tensor([request.source.ids]), decoder_input_ids=tokens, use_cache=False).logits[
                0
            ]
        for place, (token, prob_row) in enumerate(zip(ids, prob_rows, strict=True)):
            row = logits[len(request.tokens) - 1 + place][None]
            if prob_row == CERTAIN:
                assert token == int(row.argmax())
                continue
            law = token_probs_of(row.clone(), [Row(request.sampler, request.tokens, ids[:place])])
            of_target = law.at(torch.tensor([0]), torch.arange(model.traits.vocab_size)[None])
            assert proposal.token_probs is not None
            named = proposal.token_probs.at(torch.tensor([prob_row]), torch.arange(model.traits.vocab_size)[None])
            assert float((named - of_target).abs().max()) <= 1e-4
    drafter.forget([0, 1, 2])
    assert drafter.bytes_held == 0


def test_a_source_that_the_encoder_cannot_read_gets_no_draft() -> None:
    model = load_model(random_model(ENCODER_DECODERS["bart"].config()), LoadOptions())
    drafter = drafter_of(model, memory=200_000)
    for source in (
        tuple([5] * 257),
        (5, 96),
        tuple([5] * 200),
    ):  # too long, with an unknown id, too large for the memory
        assert drafts_of(drafter, [replace(request_for(0, [2, 8], 3), source=TokenSource(source))]).draft_ids == [[]]
    assert drafts_of(drafter, [replace(request_for(0, [2, 8], 3), source=TokenSource((5, 6)))]).lens.tolist() == [3]
