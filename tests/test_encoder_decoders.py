"""Encoder-decoders through the public API: plain decoding gives transformers' text, and no drafter changes a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import foredraft
from foredraft.errors import ForedraftError, ModelError
from foredraft.kernels import load_kernels, why_none
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from tests.model.zoo import ENCODER_DECODERS, SPECIES, VOCAB_SIZE, random_model

NUM_TOKENS = 24
PADDING = (0, 1)
"""Ids that no trained model writes. If a random model does, some families in transformers skip the position or mask the token."""

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")

METHODS = ("none", "ngram", "suffix", "draft_model")


@cache
def made(name: str, seed: int = 0) -> PreTrainedModel:
    species = ENCODER_DECODERS.get(name) or SPECIES[name]
    return random_model(species.config(), seed)


def sources(number: int, seed: int = 3) -> list[list[int]]:
    """Sources of 1 to 60 ids; some contain repeats, so that drafters that copy have something to draft."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 60, (number,), generator=generator).tolist()
    drawn = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lens]
    return [ids if i % 3 else [*ids[:20], *ids[:20]] for i, ids in enumerate(drawn)]


def of_generate(model: PreTrainedModel, source: Sequence[int], **settings: Any) -> list[int]:
    """transformers' own greedy text, without its cache, which some families allocate for the wrong number of layers."""
    ids = torch.tensor([source])
    settings = {"max_new_tokens": NUM_TOKENS, "use_cache": False, "eos_token_id": None, **settings}
    quiet = {"pad_token_id": 1, "encoder_no_repeat_ngram_size": 0, "do_sample": False, "num_beams": 1}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **{**quiet, **settings})
    return out[0].tolist()


def texts(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params})
    outputs = llm.generate([list(p) for p in prompts], wanted)
    return [list(text.token_ids) for output in outputs for text in output.outputs]


QUICK = {"t5", "bart", "m2m_100", "t5gemma"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENCODER_DECODERS]
)
def test_greedy_text_is_that_of_generate_with_every_drafter(name: str) -> None:
    model, prompts = made(name), sources(20)
    expected = [of_generate(model, source, suppress_tokens=PADDING)[1:] for source in prompts]
    assert len({tuple(text) for text in expected}) > 1
    for method in METHODS:
        draft = made(name, 1) if method == "draft_model" else None
        llm = LLM(model, draft, method=method, speculative_tokens=3)
        assert texts(llm, prompts, logit_bias=dict.fromkeys(PADDING, -math.inf)) == expected
        assert (llm.engine.stats.num_draft_tokens > 0) == (method != "none")


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 11, "temperature": 0.8, "top_p": 0.9, "n": 2},
}


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """bfloat16(name): a checkpoint of that architecture, in bfloat16."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("bfloat16")
        random_model(ENCODER_DECODERS[name].config()).bfloat16().save_pretrained(folder)
        return folder

    return make


@cache
def plain_texts(name: str, kind: str) -> list[list[int]]:
    return texts(LLM(made(name), method="none"), sources(8, seed=4), **KINDS[kind])


def assert_preempted_texts_are_plain_decodings(llm: LLM, name: str, kind: str) -> None:
    """Eight sources of different lengths; some texts are preempted midway by the test."""
    frontend = llm.frontend
    wanted = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **KINDS[kind])
    requests = [frontend.prepare(source, wanted) for source in sources(8, seed=4)]
    for step, _ in enumerate(frontend.steps(requests)):
        running = [s for request in requests for s in request.sequences if s.num_output and not s.is_finished]
        if step in (3, 6) and running:
            frontend.engine.preempt(running[step % len(running)])
    sequences = [s for request in requests for s in request.sequences]
    assert [s.output_ids for s in sequences] == plain_texts(name, kind)
    assert sum(s.num_preemptions for s in sequences) > 0
    assert frontend.engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("name", ["t5", "bart", "m2m_100", "t5gemma"])
def test_speculation_with_preemption_writes_plain_decodings_text(name: str, method: str, kind: str) -> None:
    draft = made(name, 1) if method == "draft_model" else None
    assert_preempted_texts_are_plain_decodings(LLM(made(name), draft, method=method, speculative_tokens=4), name, kind)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "quantization", "method"),
    [
        ("t5", None, "suffix"),
        ("t5", "int8", "draft_model"),
        pytest.param("t5", None, "draft_model", marks=pytest.mark.slow),
        pytest.param("t5", "int8", "self-int8", marks=pytest.mark.slow),
        pytest.param("bart", "int8", "draft_model", marks=pytest.mark.slow),
        pytest.param("m2m_100", "int8", "suffix", marks=pytest.mark.slow),
        pytest.param("t5gemma", "int4", "draft_model", marks=pytest.mark.slow),
    ],
)
def test_low_precision_speculation_writes_exactly_plain_decodings_text(
    name: str, quantization: str | None, method: str, kind: str, bfloat16: Callable[[str], Path]
) -> None:
    """Near ties are no excuse: rows are bit-exact. Plain decoding runs each source alone; with speculation the texts share every pass,
    and two of them are preempted."""
    target, draft = (made(name, seed) if quantization else bfloat16(name) for seed in (0, 2))
    llm = LLM(
        target,
        draft if method == "draft_model" else None,
        method=method,
        speculative_tokens=4,
        quantization=quantization,
    )
    assert llm.target.traits.row_exact
    prompts, wanted = sources(8, seed=4), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **KINDS[kind])
    requests = [llm.frontend.prepare(source, wanted) for source in prompts]
    for step, _ in enumerate(llm.frontend.steps(requests)):
        running = [s for request in requests for s in request.sequences if s.num_output and not s.is_finished]
        if step in (2, 4) and running:
            llm.frontend.engine.preempt(running[step % len(running)])
    sequences = [s for request in requests for s in request.sequences]
    assert sum(s.num_preemptions for s in sequences) > 0
    assert llm.engine.stats.num_draft_tokens > 0
    plain = llm.with_drafter("none")
    assert [s.output_ids for s in sequences] == [
        text for source in prompts for text in texts(plain, [source], **KINDS[kind])
    ]


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_too_small_for_all_sources_changes_no_text(method: str) -> None:
    traits = LLM(made("bart"), method="none").target.traits
    room = 3 * (64 * traits.bytes_per_token + 60 * traits.bytes_per_source_token)
    draft = made("bart", 1) if method == "draft_model" else None
    llm = LLM(made("bart"), draft, method=method, speculative_tokens=4, cache_memory=room, max_num_batched_tokens=40)
    for kind, settings in KINDS.items():
        assert texts(llm, sources(8, seed=4), **settings) == plain_texts("bart", kind)
    assert llm.engine.stats.num_steps > 0
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained <= room


def test_a_draft_equal_to_the_target_is_always_right_and_encodes_the_source_itself() -> None:
    llm = LLM(made("t5"), made("t5"), speculative_tokens=3)
    texts(llm, sources(6))
    acceptance = llm.engine.stats.conditional_acceptance
    assert acceptance is not None
    assert acceptance >= 0.97
    sampled = LLM(made("t5"), made("t5"), speculative_tokens=3, seed=1)
    texts(sampled, sources(6), temperature=1.0)
    acceptance = sampled.engine.stats.conditional_acceptance
    assert acceptance is not None
    assert acceptance >= 0.97
    other_source = LLM(made("t5"), made("t5", 1), speculative_tokens=3)
    texts(other_source, sources(6))
    assert (other_source.engine.stats.conditional_acceptance or 0) < 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_without_an_encoder_reads_only_the_text(kind: str) -> None:
    """Its cache is shared by requests with different sources and the same beginning of the text."""
    llm = LLM(made("t5"), made("llama"), speculative_tokens=4)
    assert texts(llm, sources(8, seed=4), **KINDS[kind]) == plain_texts("t5", kind)
    assert llm.engine.stats.num_draft_tokens > 0
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained


def test_ngram_copies_from_the_source() -> None:
    """There is something to copy before the text repeats itself."""
    llm = LLM(made("bart"), method="ngram", speculative_tokens=2)
    source = [*range(3, 40), *llm.target.traits.start_ids, *range(40, 50)]
    texts(llm, [source], max_tokens=1)
    assert llm.engine.stats.num_draft_tokens == 0  # with one token to write there is no room for a draft
    texts(llm, [source], max_tokens=2)
    assert llm.engine.stats.num_draft_tokens > 0


def test_requests_with_the_same_source_share_it_and_others_do_not() -> None:
    llm = LLM(made("t5"), method="none")
    first, other = sources(2, seed=9)
    alone = texts(LLM(made("t5"), method="none"), [first, other])
    (output,) = llm.generate([first], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
    assert output.metrics.num_cached_tokens == 0
    (again,) = llm.generate([first], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
    assert again.metrics.num_cached_tokens == len(first)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids == alone[0]
    assert texts(llm, [other]) == alone[1:]
    (private,) = llm.generate([first], SamplingParams(temperature=0.0, max_tokens=4, prefix_caching=False))
    assert private.metrics.num_cached_tokens == 0
    pool = llm.engine.pool
    assert pool.used == llm.engine.cache.bytes_held
    llm.engine.drop_retained()
    assert pool.used == 0


def test_id_rules_of_generation_config_are_honoured() -> None:
    model = random_model(ENCODER_DECODERS["bart"].config(), 2)
    prompts = sources(8, seed=6)
    free = [of_generate(model, source)[1:] for source in prompts]
    config = model.generation_config
    config.forced_bos_token_id = 0
    config.forced_eos_token_id = 5
    config.suppress_tokens = [free[0][2], free[1][2]]
    config.begin_suppress_tokens = [free[2][0], free[3][0]]
    config.bad_words_ids = [[free[4][3]], free[5][3:5], [2]]
    config.eos_token_id = 2
    expected = [of_generate(model, source, eos_token_id=2)[2:] for source in prompts]
    llm = LLM(model, method="suffix", speculative_tokens=3)
    assert llm.target.traits.start_ids == (2, 0)
    assert texts(llm, prompts, max_tokens=NUM_TOKENS - 1, ignore_eos=False) == expected
    assert all(text[-1] in (2, 5) for text in expected)


def test_a_prompt_may_set_the_decoders_start_tokens() -> None:
    model, (source,) = made("m2m_100"), sources(1, seed=12)
    llm = LLM(model, method="none")
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=dict.fromkeys(PADDING, -math.inf)
    )
    (output,) = llm.generate([{"prompt_token_ids": source, "decoder_prompt_token_ids": [2, 77]}], params)
    expected = of_generate(model, source, decoder_input_ids=torch.tensor([[2, 77]]), suppress_tokens=PADDING)
    assert output.outputs[0].token_ids[:-1] == expected[2:-1]  # the last token is forced
    assert output.prompt_token_ids == source
    with pytest.raises(ForedraftError, match="is for encoder-decoders"):
        LLM(made("llama"), method="none").generate([{"prompt_token_ids": [3], "decoder_prompt_token_ids": [2]}], params)


def test_unsupported_generation_settings_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(ENCODER_DECODERS["bart"].config(), 2)
    model.generation_config.num_beams = 4
    model.generation_config.no_repeat_ngram_size = 3
    llm = LLM(model, method="none")
    texts(llm, sources(2))
    said = [record.message for record in caplog.records if "not supported" in record.message]
    assert len(said) == 1
    assert "num_beams=4, no_repeat_ngram_size=3" in said[0]


def test_generate_for_loaded_models_is_that_of_transformers() -> None:
    for name in ("t5", "bart", "m2m_100"):
        model, prompts = made(name), sources(5, seed=8)
        width = max(map(len, prompts))
        ids = torch.tensor([[*source, *[1] * (width - len(source))] for source in prompts])
        mask = torch.tensor([[1] * len(source) + [0] * (width - len(source)) for source in prompts])
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        settings |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
        for draft in (None, made(name, 1)):
            out = foredraft.generate(model, {"input_ids": ids, "attention_mask": mask}, draft_model=draft, **settings)
            expected = [of_generate(model, source, **settings) for source in prompts]
            assert out.tolist() == expected
        several = foredraft.generate(model, ids[:1, : len(prompts[0])], do_sample=True, num_return_sequences=3, seed=1)
        assert len(several) == 3
        assert len({tuple(row) for row in several.tolist()}) > 1


def test_refusals_are_one_line() -> None:
    t5, llama = made("t5"), made("llama")
    with pytest.raises(
        ModelError, match=r"is an encoder-decoder, but .* is not: the draft's encoder would have nothing to read"
    ):
        LLM(llama, t5)
    with pytest.raises(ModelError, match="heads, early exits and draft servers draft only for decoder-only models"):
        LLM(t5, exit_layer=1)
    with pytest.raises(ModelError, match="heads, early exits and draft servers draft only for decoder-only models"):
        foredraft.generate(t5, torch.tensor([[4, 5]]), exit_layer=1)
    ids = torch.tensor([[4, 5]])
    with pytest.raises(ForedraftError, match=r"call foredraft\.generate\(model, inputs\)"):
        t5.generate(ids, custom_generate=foredraft.custom_generate)
    llm = LLM(t5, method="none")
    for prompt, params, message in (
        ([3] * 2049, {}, "the prompt has 2049 tokens, but the encoder reads at most 2048"),
        ([VOCAB_SIZE], {}, "valid ids are 0 to 95"),
        ([3], {"prompt_logprobs": 1}, "prompt_logprobs is not supported: an encoder reads"),
    ):
        with pytest.raises(ForedraftError, match=message):
            llm.generate([prompt], SamplingParams(**params))
    with pytest.raises(ForedraftError, match="budget"):
        LLM(t5, method="none", cache_memory=100_000).generate([[3] * 100], SamplingParams(max_tokens=4))
