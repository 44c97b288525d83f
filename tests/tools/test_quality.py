"""The quality loss compared with float32: it equals an independent computation, and is zero where nothing is lost."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft import ForedraftError, ModelError
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.tools.quality import LEAST_TOKENS, Window, cut, measure_quality, predict, tokens_of

DRAFT = EMBEDDED / "draft"
FLOAT32 = LoadOptions(dtype="float32", device="cpu")
TEXT = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))[:12_000]


class Letters:
    """A tokenizer without a start token: one id per character."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    return cut(*tokens_of(TEXT, load_tokenizer(DRAFT, FLOAT32), 1000), 300)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model(DRAFT, FLOAT32)


def losses_of_the_library(windows: Sequence[Window]) -> torch.Tensor:
    """The losses of each window alone, with transformers' own forward pass and loss."""
    hf = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    parts = []
    for window in windows:
        with torch.no_grad():
            logits = hf(torch.tensor([window.read])).logits[0]
        parts.append(-logits.log_softmax(-1)[torch.arange(len(window.read)), torch.tensor(window.predicted)])
    return torch.cat(parts)


def test_float32_against_itself_loses_nothing() -> None:
    found = measure_quality(DRAFT, TEXT, FLOAT32, max_tokens=500)
    assert found.num_tokens == 500
    assert found.perplexity == found.reference_perplexity
    assert found.perplexity_increase == 0
    assert found.agreement == 100
    assert (found.dtype, found.quantization) == ("float32", None)


def test_perplexity_is_that_of_transformers() -> None:
    found = measure_quality(DRAFT, TEXT, FLOAT32, max_tokens=1200)
    tokenizer = AutoTokenizer.from_pretrained(DRAFT)
    ids = tokenizer(TEXT)["input_ids"][:1201]
    # computed directly: 512 rows at a time, each window with the start token
    steps = [ids[1:][i : i + 511] for i in range(0, 1200, 511)]
    expected = losses_of_the_library([Window([ids[0], *step[:-1]], step) for step in steps])
    assert found.num_tokens == len(expected) == 1200
    assert found.window_len == 512
    assert found.reference_perplexity == pytest.approx(float(expected.double().mean().exp()), rel=1e-3)


def test_losses_and_argmaxes_are_those_of_transformers_at_each_position(
    model: LanguageModel, windows: list[Window]
) -> None:
    found = predict(model, windows)
    torch.testing.assert_close(found.loss, losses_of_the_library(windows).double(), rtol=1e-3, atol=1e-3)
    assert found.likeliest.shape == found.loss.shape


def test_windows_that_share_a_pass_are_independent(model: LanguageModel) -> None:
    windows = cut(*tokens_of(TEXT, load_tokenizer(DRAFT, FLOAT32), 400), 60)
    together = predict(model, windows)
    alone = [predict(model, [window]) for window in windows]
    torch.testing.assert_close(together.loss, torch.cat([one.loss for one in alone]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_bfloat16_costs_little_but_something() -> None:
    found = measure_quality(DRAFT, TEXT, LoadOptions(dtype="bfloat16", device="cpu"), max_tokens=2000)
    assert found.dtype == "bfloat16"
    assert 95 < found.agreement < 100
    assert 0 < abs(found.perplexity_increase) < 1
    ratio = found.perplexity / found.reference_perplexity
    assert found.perplexity_increase == pytest.approx(100 * (ratio - 1))


@pytest.mark.slow
def test_int8_costs_a_little_more() -> None:
    options = LoadOptions(device="cpu", quantization="int8")
    found = measure_quality(DRAFT, TEXT, options, max_tokens=2000)
    assert found.quantization == "int8"
    assert 85 < found.agreement < 100
    assert 0 < abs(found.perplexity_increase) < 5


def test_the_perplexity_of_a_uniform_model_is_the_vocabulary_size(model: LanguageModel) -> None:
    ignorant = LanguageModel(AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32), model.traits)
    with torch.no_grad():
        ignorant.hf.model.norm.weight.zero_()
    found = predict(ignorant, [Window([0, 5, 6], [5, 6, 7])])
    assert found.perplexity == pytest.approx(model.traits.vocab_size)
    assert float(found.loss[0]) == pytest.approx(math.log(model.traits.vocab_size))


@pytest.mark.slow
def test_there_is_never_more_than_one_model_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[LoadOptions, int]] = []
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def load(source: str, options: LoadOptions) -> LanguageModel:
        seen.append((options, len(alive)))
        loaded = load_model(source, options)
        alive.add(loaded.hf)
        return loaded

    monkeypatch.setattr("foredraft.tools.quality.load_model", load)
    options = LoadOptions(dtype="bfloat16", device="cpu")
    measure_quality(DRAFT, TEXT, options, max_tokens=100)
    assert seen == [(replace(options, dtype="float32"), 0), (options, 0)]
    gc.collect()
    assert not alive


@given(
    begins=st.lists(st.just(-1), max_size=1),
    num_ids=st.integers(LEAST_TOKENS, 300),
    window_len=st.integers(2, 400),
)
def test_every_token_is_predicted_once_from_the_tokens_before_it(
    begins: list[int], num_ids: int, window_len: int
) -> None:
    ids = list(range(num_ids))
    windows = cut(begins, ids, window_len)
    predicted = [token for window in windows for token in window.predicted]
    assert predicted == (ids if begins else ids[1:])
    for window in windows:
        assert 1 <= len(window.read) == len(window.predicted) <= window_len
        assert window.read[1:] == window.predicted[:-1]
        assert window.read[0] == (begins[0] if begins else window.predicted[0] - 1)


def test_windows_begin_with_a_start_token_only_if_the_tokenizer_adds_one() -> None:
    tokenizer = load_tokenizer(DRAFT, FLOAT32)
    begins, ids = tokens_of(TEXT, tokenizer, 200)
    assert begins == [tokenizer.bos_token_id]
    assert ids == tokenizer(TEXT, add_special_tokens=False)["input_ids"][:200]
    begins, ids = tokens_of("a" * 80, Letters(), 70)  # type: ignore[arg-type]
    assert begins == []
    assert ids == [ord("a")] * 70


@pytest.mark.parametrize("text", ["", "Too short.", "\n"])
def test_a_text_that_is_too_short_is_refused_before_anything_is_loaded(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("foredraft.tools.quality.load_model")
    with pytest.raises(ForedraftError, match=f"too short.*{LEAST_TOKENS}"):
        measure_quality(DRAFT, text, FLOAT32, max_tokens=500)


def test_too_few_allowed_tokens_are_refused() -> None:
    with pytest.raises(ForedraftError, match="at least 64 tokens, not on 5"):
        measure_quality(DRAFT, TEXT, FLOAT32, max_tokens=5)


def test_ids_beyond_the_logits_are_refused(model: LanguageModel) -> None:
    with pytest.raises(ModelError, match="token 4096, but its logits are only 4096 wide"):
        predict(model, [Window([0, 1], [1, 4096])])


def test_a_reference_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.model.memory.available_memory", lambda device: 5 * 2**20)
    with pytest.raises(ModelError, match=r"float32 reference cannot be measured here: .* GiB") as caught:
        measure_quality(DRAFT, TEXT, LoadOptions(dtype="bfloat16", device="cpu"), max_tokens=500)
    assert "\n" not in str(caught.value)
