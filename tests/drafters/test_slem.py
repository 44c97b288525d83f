"""Draft models with another vocabulary, by "slem" and "tli": what they draft, and that they change no text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.drafters import DrafterContext, build
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import CERTAIN, Drafter, Proposal
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.testing import check_drafter
from foredraft.testing.requests import request_for
from foredraft.vocabulary import VocabularyPair, pair_of
from foredraft.vocabulary.byte_vocabulary import num_pending, num_whole
from tests.text.toy_tokenizers import MODELS
from tests.vocabulary.permuted import permuted_draft

PROMPTS = ["def mean(values):", "Once upon a time there was a little girl", "class Queue:\n    def"]
STORIES = [
    "Once upon a time there was a little girl named Lily. She",
    "One day, a boy named Tim went to the park with his",
    "The old dog liked to",
    "Sara and Ben were playing in the",
]
KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}]
METHODS = ["slem", "tli"]


@pytest.fixture(scope="module")
def permuted() -> LanguageModel:
    return load_model(permuted_draft(), LoadOptions(device="cpu", dtype="bfloat16"))


@cache
def permuted_pair(method: str) -> VocabularyPair:
    target, own = (load_tokenizer(folder, LoadOptions()) for folder in (EMBEDDED / "target", permuted_draft()))
    return pair_of(target, own, method)


def context_for(draft: LanguageModel, method: str, pair: VocabularyPair | None = None) -> DrafterContext:
    return DrafterContext(4096, MemoryPool(1 << 30), draft, vocabularies=pair or permuted_pair(method))


def ids_of(text: str) -> list[int]:
    ids: list[int] = load_tokenizer(EMBEDDED / "target", LoadOptions())(text)["input_ids"]
    return ids


def drafts_of(drafter: Drafter, requests: list[Any]) -> Proposal:
    with torch.inference_mode():
        return drafter.propose(requests)


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_tli_drafts_what_the_same_model_drafts_in_the_targets_ids(
    params: dict[str, Any], draft: LanguageModel, permuted: LanguageModel
) -> None:
    if not draft.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    requests = [request_for(b, ids_of(text), 5, **params) for b, text in enumerate(PROMPTS)]
    plain = build("draft_model", DrafterContext(4096, MemoryPool(1 << 30), draft))
    tli = build("draft_model", context_for(permuted, "tli"))
    assert drafts_of(tli, requests).draft_ids == drafts_of(plain, requests).draft_ids


def test_tli_names_a_distribution_over_the_targets_ids(permuted: LanguageModel) -> None:
    requests = [request_for(b, ids_of(text), 3, temperature=0.8) for b, text in enumerate(PROMPTS)]
    for request in requests[1:]:
        request.sampler.generator = requests[0].sampler.generator
    proposal = drafts_of(build("draft_model", context_for(permuted, "tli")), requests)
    token_probs = proposal.token_probs
    assert token_probs is not None
    dense = token_probs.dense(4096)
    torch.testing.assert_close(dense.sum(-1), torch.ones(dense.shape[0], dtype=dense.dtype))
    for ids, rows in zip(proposal.draft_ids, proposal.draft_prob_rows, strict=True):
        assert CERTAIN not in rows
        assert all(dense[row, token] > 0 for row, token in zip(rows, ids, strict=True))


def test_slem_drafts_greedily_whatever_the_request_is(draft: LanguageModel, permuted: LanguageModel) -> None:
    if not draft.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    plain = build("draft_model", DrafterContext(4096, MemoryPool(1 << 30), draft))
    greedy = drafts_of(plain, [request_for(b, ids_of(text), 5) for b, text in enumerate(PROMPTS)]).draft_ids
    for params in (*KINDS, {"temperature": 0.7}):
        slem = build("draft_model", context_for(permuted, "slem"))
        proposal = drafts_of(slem, [request_for(b, ids_of(text), 5, **params) for b, text in enumerate(PROMPTS)])
        assert proposal.probs is None
        # the last id may be part of a longer one, and a model's own ids are not always the encoding of its text
        for ids, expected in zip(proposal.draft_ids, greedy, strict=True):
            assert ids[:3] == expected[:3], params


@pytest.mark.parametrize("method", METHODS)
def test_its_cache_follows_accepted_and_rejected_drafts(method: str, permuted: LanguageModel) -> None:
    if not permuted.traits.row_exact:
        pytest.skip("this machine's kernels do not give exact rows")
    drafter, history = build("draft_model", context_for(permuted, method)), ids_of(PROMPTS[0])
    for taken, own in ((4, 317), (0, 318), (2, 319), (4, 320), (1, 321)):
        (ids,) = drafts_of(drafter, [request_for(0, list(history), 4)]).draft_ids
        fresh = build("draft_model", context_for(permuted, method))
        assert ids == drafts_of(fresh, [request_for(0, list(history), 4)]).draft_ids[0]
        history = [*history, *ids[:taken], own]


@pytest.mark.parametrize("method", METHODS)
def test_after_an_incomplete_character_the_draft_completes_it_or_is_empty(method: str, permuted: LanguageModel) -> None:
    context = context_for(permuted, method)
    assert context.vocabularies is not None
    target = context.vocabularies.target
    history = [*ids_of("a "), *(target.single_byte_ids[byte] for byte in "😀".encode()[:2])]
    (ids,) = drafts_of(build("draft_model", context), [request_for(0, history, 4)]).draft_ids
    written = target.joined([*history, *ids])
    assert ids == [] or num_whole(written) + num_pending(written) == len(written) > 4


@pytest.mark.parametrize("method", METHODS)
def test_forget_frees_the_memory(method: str, permuted: LanguageModel) -> None:
    context = context_for(permuted, method)
    drafter: Any = build("draft_model", context)
    drafts_of(drafter, [request_for(b, ids_of(text), 4) for b, text in enumerate(PROMPTS)])
    assert drafter.bytes_held > 0
    drafter.forget([0, 1, 2, 99])
    assert (drafter.bytes_held, context.pool.used) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_it_keeps_the_contract(method: str, permuted: LanguageModel) -> None:
    def make(vocab_size: int) -> Drafter:
        return build("draft_model", replace(context_for(permuted, method), vocab_size=vocab_size))

    check_drafter(make, vocab_size=4096, invisible=False)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(method="none")


@pytest.fixture(scope="module", params=METHODS)
def drafting(request: pytest.FixtureRequest) -> LLM:
    return LLM(draft_model=permuted_draft(), heterogeneous_vocab=request.param)


def texts(llm: LLM, params: SamplingParams) -> list[Any]:
    return [[each.token_ids for each in output.outputs] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("gamma", [1, 4, 9, "auto"])
@pytest.mark.parametrize("params", [*KINDS, {"temperature": 0.8, "seed": 2, "n": 3, "stop": ["self"]}], ids=str)
def test_the_text_is_plain_decodings(plain: LLM, drafting: LLM, params: dict[str, Any], gamma: Any) -> None:
    expected = texts(plain, SamplingParams(max_tokens=40, speculative_tokens=0, **params))
    assert texts(drafting, SamplingParams(max_tokens=40, speculative_tokens=gamma, **params)) == expected


def test_drafts_are_accepted(drafting: LLM) -> None:
    outputs = drafting.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=60, speculative_tokens=4))
    stats = [output.metrics.speculative_decoding for output in outputs]
    assert sum(each.num_accepted_draft_tokens for each in stats) > 60


def test_preemption_and_shared_beginnings_change_nothing(plain: LLM, drafting: LLM) -> None:
    small = LLM(
        draft_model=permuted_draft(),
        heterogeneous_vocab=drafting.vocabularies.method if drafting.vocabularies else None,
        cache_memory=3 << 20,
        max_num_batched_tokens=48,
    )
    prompts = [f"{PROMPTS[1]} named {name} who liked to sing." * 3 for name in ("Ann", "Bo", "Cy", "Di", "Ed", "Flo")]
    params = SamplingParams(temperature=0.0, max_tokens=48, speculative_tokens=5)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    for _ in range(2):
        assert [output.outputs[0].token_ids for output in small.generate(prompts, params)] == expected
    assert small.engine.pool.used == small.engine.pool.bytes_retained


def test_the_choice_is_an_argument_and_the_default_is_by_overlap(drafting: LLM) -> None:
    assert drafting.vocabularies is not None
    assert LLM(draft_model=permuted_draft()).vocabularies.method == "tli"  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_third_party_model_drafts_stories_for_the_embedded_target(plain: LLM) -> None:
    if not MODELS.is_dir():
        pytest.skip("needs ../shared/models/stories260K")
    llm = LLM(draft_model=MODELS / "stories260K")
    assert llm.vocabularies is not None
    assert llm.vocabularies.method == "slem"
    params = SamplingParams(temperature=0.0, max_tokens=60, speculative_tokens=8)
    outputs, expected = (each.generate(STORIES, params) for each in (llm, plain))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    stats = [output.metrics.speculative_decoding for output in outputs]
    steps = sum(each.num_spec_steps for each in stats)
    assert 1 + sum(each.num_accepted_draft_tokens for each in stats) / steps >= 2.5


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="smollm2 drafts"),
        pytest.param(True, id="gemma drafts"),
    ],
)
def real_pair(request: pytest.FixtureRequest, smollm2: Path, gemma3: Path) -> LLM:
    return LLM(smollm2, gemma3) if request.param else LLM(gemma3, smollm2)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("params", KINDS, ids=str)
def test_real_models_draft_for_each_other(real_pair: LLM, params: dict[str, Any]) -> None:
    llm = real_pair
    assert llm.vocabularies is not None
    assert llm.vocabularies.method == "slem"
    prompts = ["The capital of France is", "def add(a, b):\n", "Die Brücke über den Fluss 😀 ist"]
    plain, drafted = (
        llm.generate(prompts, SamplingParams(max_tokens=32, speculative_tokens=gamma, **params)) for gamma in (0, 5)
    )
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in drafted) > 0
