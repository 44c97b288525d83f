"""Whisper through the public API: plain decoding gives transformers' text, no drafter changes a text, and audio is seen only by the
requests that gave it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import foredraft
from foredraft.aio import AsyncLLM
from foredraft.errors import ForedraftError, ModelError
from foredraft.kernels import load_kernels, why_none
from foredraft.llm import LLM
from foredraft.model.encoder_inputs import FeatureShape
from foredraft.sampling import SamplingParams
from foredraft.text.outputs import RequestOutput
from tests.model.zoo import ENCODER_DECODERS, SPECIES, VOCAB_SIZE, WHISPER, Species, random_model, sound

NUM_TOKENS = 24
SHAPE = FeatureShape(16, 80)
METHODS = ("none", "ngram", "suffix", "draft_model")

END, NO_TIMESTAMPS = 50, VOCAB_SIZE - 1
"""Ids above NO_TIMESTAMPS would be timestamps, at which generate begins another segment."""

SMALLER = Species(
    "whisper",
    {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_attention_heads": 4},
    base={**WHISPER.base, **WHISPER.settings},
)
"""A draft model that reads the same features."""

GENERATION: dict[str, Any] = {
    "decoder_start_token_id": 2,
    "lang_to_id": {"<|en|>": 70, "<|de|>": 71},
    "task_to_id": {"transcribe": 75, "translate": 76},
    "is_multilingual": True,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "suppress_tokens": [9, 82, 70, 71, 75, 76, NO_TIMESTAMPS],
    "begin_suppress_tokens": [85, END],
    "eos_token_id": END,
    "pad_token_id": END,
}


@cache
def made(seed: int = 0, species: str = "whisper") -> PreTrainedModel:
    """A random model with a default language and task."""
    return with_settings(
        random_model({"whisper": WHISPER, "smaller": SMALLER}[species].config(), seed), language="de", task="translate"
    )


def with_settings(model: PreTrainedModel, **settings: str) -> PreTrainedModel:
    """The model with the generation config of a multilingual checkpoint."""
    model.generation_config = GenerationConfig(**GENERATION, **settings)
    return model


def llm_with(method: str, **settings: Any) -> LLM:
    return LLM(made(), made(1, "smaller") if method == "draft_model" else None, method=method, **settings)


def sounds(number: int, seed: int = 0) -> list[dict[str, Tensor]]:
    return [{"input_features": sound(SHAPE, 100 * seed + i)} for i in range(number)]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **settings})


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(text.token_ids) for output in outputs for text in output.outputs]


def of_generate(prompt: dict[str, Tensor], **settings: Any) -> list[int]:
    """transformers' own greedy text, start tokens included."""
    settings = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, **settings}
    return made().generate(prompt["input_features"][None], **settings).sequences[0].tolist()


@cache
def twenty_of_generate() -> list[list[int]]:
    return [of_generate(prompt) for prompt in sounds(20)]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_of_generate_with_every_drafter(method: str) -> None:
    """With the forced and suppressed ids of the checkpoint, and texts that end."""
    expected = twenty_of_generate()
    assert {tuple(text[:4]) for text in expected} == {(2, 71, 76, NO_TIMESTAMPS)}
    assert len({len(text) for text in expected}) > 1
    llm = llm_with(method, speculative_tokens=3)
    outputs = llm.generate(sounds(20), params(ignore_eos=False))
    assert token_ids(outputs) == [text[4:] for text in expected]
    assert [output.prompt_token_ids for output in outputs] == [[2, 71, 76, NO_TIMESTAMPS]] * 20
    assert (llm.engine.stats.num_draft_tokens > 0) == (method != "none")


def test_a_prompt_may_set_its_language_and_task() -> None:
    (prompt,) = sounds(1, seed=2)
    llm = llm_with("none")
    (output,) = llm.generate(
        {**prompt, "decoder_prompt_token_ids": [2, 70, 75, NO_TIMESTAMPS]}, params(ignore_eos=False)
    )
    expected = of_generate(prompt, language="en", task="transcribe")
    assert expected[:4] == [2, 70, 75, NO_TIMESTAMPS]
    assert output.outputs[0].token_ids == expected[4:]
    assert output.outputs[0].token_ids != of_generate(prompt)[4:]


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"seed": 11, "temperature": 0.8, "top_p": 0.9, "n": 2},
}


@cache
def plain_texts(kind: str) -> list[list[int]]:
    return token_ids(llm_with("none").generate(sounds(8, seed=4), params(**KINDS[kind])))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS[1:])
def test_speculation_with_preemption_writes_plain_decodings_text(method: str, kind: str) -> None:
    frontend = llm_with(method, speculative_tokens=4).frontend
    requests = [frontend.prepare(prompt, params(**KINDS[kind])) for prompt in sounds(8, seed=4)]
    for step, _ in enumerate(frontend.steps(requests)):
        running = [s for request in requests for s in request.sequences if s.num_output and not s.is_finished]
        if step in (3, 6) and running:
            frontend.engine.preempt(running[step % len(running)])
    sequences = [s for request in requests for s in request.sequences]
    assert [s.output_ids for s in sequences] == plain_texts(kind)
    assert sum(s.num_preemptions for s in sequences) > 0
    assert frontend.engine.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS[1:])
def test_speculation_in_bfloat16_writes_exactly_plain_decodings_text(
    method: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Plain decoding runs each sound alone."""
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    for model, folder in zip((made(), made(1, "smaller")), folders, strict=True):
        copy.deepcopy(model).bfloat16().save_pretrained(folder)
    llm = LLM(folders[0], folders[1] if method == "draft_model" else None, method=method, speculative_tokens=4)
    assert llm.target.traits.row_exact
    prompts, plain = sounds(8, seed=4), llm.with_drafter("none")
    expected = [text for prompt in prompts for text in token_ids(plain.generate(prompt, params(**KINDS[kind])))]
    assert token_ids(llm.generate(prompts, params(**KINDS[kind]))) == expected
    assert llm.engine.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_cache_too_small_for_all_sounds_changes_no_text(method: str) -> None:
    traits = made_traits()
    room = 3 * (64 * traits.bytes_per_token + traits.source_len * traits.bytes_per_source_token)
    llm = llm_with(method, speculative_tokens=4, cache_memory=room, max_num_batched_tokens=30)
    for kind, settings in KINDS.items():
        assert token_ids(llm.generate(sounds(8, seed=4), params(**settings))) == plain_texts(kind)
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained <= room


@cache
def made_traits() -> Any:
    return llm_with("none").target.traits


def test_a_draft_equal_to_the_target_is_always_right_and_encodes_the_sound_itself() -> None:
    for settings in ({}, {"temperature": 1.0}):
        llm = LLM(made(), made(), speculative_tokens=3, seed=1)
        llm.generate(sounds(6), params(**settings))
        assert (llm.engine.stats.conditional_acceptance or 0) >= 0.97
    other = LLM(made(), made(1), speculative_tokens=3)
    other.generate(sounds(6), params())
    assert (other.engine.stats.conditional_acceptance or 0) < 0.6


def test_requests_with_equal_sounds_share_the_encoding_and_others_do_not() -> None:
    """Two requests with different sounds run at the same time, and write what each writes alone."""
    llm = llm_with("none")
    first, other = sounds(2, seed=9)
    alone = [token_ids(llm_with("none").generate(prompt, params()))[0] for prompt in (first, other)]
    assert alone[0] != alone[1]
    of_a_sound = made_traits().source_len * made_traits().bytes_per_source_token
    outputs = llm.generate([first, other], params())
    assert token_ids(outputs) == alone
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0]
    num_held = llm.engine.cache.bytes_held
    (again,) = llm.generate([{"input_features": first["input_features"].clone()}], params(n=3))
    assert again.metrics.num_cached_tokens >= made_traits().source_len
    assert token_ids([again]) == [alone[0]] * 3
    assert llm.engine.cache.bytes_held < num_held + of_a_sound
    nearly = first["input_features"].clone()
    nearly[3, 3] += 1e-6
    (third,) = llm.generate([{"input_features": nearly}], params(max_tokens=1))
    assert third.metrics.num_cached_tokens == 0
    (private,) = llm.generate([first], params(max_tokens=1, prefix_caching=False))
    assert private.metrics.num_cached_tokens == 0
    assert llm.engine.pool.used == llm.engine.cache.bytes_held
    llm.engine.drop_retained()
    assert llm.engine.pool.used == 0


def test_a_caller_may_overwrite_the_features_once_they_are_given() -> None:
    (prompt,) = sounds(1, seed=12)
    expected = token_ids(llm_with("none").generate(prompt, params()))
    frontend = llm_with("none").frontend
    request = frontend.prepare(prompt, params())
    prompt["input_features"].zero_()
    frontend.run([request])
    assert [s.output_ids for s in request.sequences] == expected


def test_a_checkpoint_in_a_directory_is_served_by_asyncllm_too(tmp_path: Path) -> None:
    made().save_pretrained(tmp_path)
    prompts = sounds(2, seed=5)
    expected = token_ids(LLM(tmp_path, method="none").generate(prompts, params()))
    assert expected == token_ids(llm_with("none").generate(prompts, params()))

    async def ask() -> list[RequestOutput]:
        async with AsyncLLM(tmp_path, tmp_path, speculative_tokens=3) as llm:
            return await asyncio.gather(*(llm.generate(prompt, params()) for prompt in prompts))

    assert token_ids(asyncio.run(ask())) == expected


def test_a_warning_says_that_timestamps_are_not_honoured(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(WHISPER.config())
    model.generation_config.return_timestamps = True
    LLM(model, method="none")
    assert any("return_timestamps=True, which is not supported" in record.message for record in caplog.records)


def test_refusals_are_one_line() -> None:
    llm, bart = llm_with("none"), random_model(ENCODER_DECODERS["bart"].config())
    (prompt,) = sounds(1)
    for bad, message in (
        ("some words", 'reads audio, not text: give {"input_features": ...}'),
        ([2, 3], "reads audio, not text"),
        ({"input_features": prompt["input_features"][None]}, "give one recording"),
        ({**prompt, "prompt": "hello"}, "give input_features or a prompt"),
        ({**prompt, "decoder_prompt_token_ids": [VOCAB_SIZE]}, "valid ids are 0 to 95"),
        ({**prompt, "decoder_prompt_token_ids": []}, "the prompt is empty"),
    ):
        with pytest.raises(ForedraftError) as caught:
            llm.generate(bad, params())
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    for reader_of_text in (bart, random_model(SPECIES["llama"].config())):
        with pytest.raises(ForedraftError, match=r"input_features are for models that read audio, but .* reads text"):
            LLM(reader_of_text, method="none").generate(prompt, params())
    with pytest.raises(ForedraftError, match="LLM takes input_features"):
        foredraft.generate(made(), {"input_features": prompt["input_features"][None]})
    other_shape = random_model(Species("whisper", {**WHISPER.settings, "num_mel_bins": 8}, base=WHISPER.base).config())
    for draft in (bart, other_shape):
        with pytest.raises(
            ModelError, match=r"of shape \[16, 80\]: a draft model must read the same sources as the target"
        ):
            LLM(made(), draft)


def test_a_draft_without_an_encoder_reads_only_the_text() -> None:
    llm = LLM(made(), random_model(SPECIES["llama"].config()), speculative_tokens=4)
    assert token_ids(llm.generate(sounds(8, seed=4), params())) == plain_texts("greedy")
    assert llm.engine.stats.num_draft_tokens > 0


def test_a_language_that_is_not_set_must_be_given() -> None:
    llm, (prompt,) = LLM(with_settings(random_model(WHISPER.config())), method="none"), sounds(1)
    with pytest.raises(ForedraftError, match="does not specify the language: give decoder_prompt_token_ids"):
        llm.generate(prompt, params())
    (output,) = llm.generate(
        {**prompt, "decoder_prompt_token_ids": [2, 71, 76, NO_TIMESTAMPS]}, params(ignore_eos=False)
    )
    assert output.outputs[0].token_ids == of_generate(prompt)[4:]
