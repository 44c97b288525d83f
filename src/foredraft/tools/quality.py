"""Measures what a precision costs in quality: the model as it would run, against the same checkpoint in float32, on a text.

There are two figures. Perplexity: how much less likely the text becomes. Agreement: how often both predict the same next
token, which is what greedy decoding depends on.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError, ModelError
from foredraft.model import LanguageModel, LoadOptions, Read, load_model, load_tokenizer
from foredraft.model.context import context_len_of
from foredraft.model.loading import load_config
from foredraft.text.tokenizing import encode_prompt

LEAST_TOKENS = 64
"""With fewer tokens, perplexity depends more on the choice of text than on the model."""

_ROWS = 512
"""The most rows of a window and of a pass: as many as a prefill reads at once."""

_LOGIT_ROWS = 64
"""Rows whose logits are converted to float64 together: 512 rows of a large vocabulary would take a gigabyte."""

_LONGEST_TOKEN = 32
"""Upper bound of the mean characters per token, so that a huge file is not tokenised whole."""


class Window(NamedTuple):
    """read: [L] ids, read from an empty KV cache. predicted: [L] ids, the one that follows each of them."""

    read: list[int]
    predicted: list[int]


@dataclass(frozen=True, slots=True)
class Predictions:
    """One model's predictions on a text. loss: [N] float64, in nats, of each token given the earlier ones in its window.
    likeliest: [N] int64, the id with the largest logit."""

    loss: Tensor
    likeliest: Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean loss; 1 is certainty."""
        return float(self.loss.mean().exp())


@dataclass(frozen=True, slots=True)
class QualityReport:
    """A run compared with its reference, on the same tokens of a text.

    dtype, quantization: of the run; the reference is float32. num_tokens: predicted, in windows of at most window_len.
    perplexity_increase: of the run over the reference, in percent; negative if the run did better.
    agreement: the percentage of positions at which both find the same token likeliest.
    """

    dtype: str
    quantization: str | None
    num_tokens: int
    window_len: int
    reference_perplexity: float
    perplexity: float
    perplexity_increase: float
    agreement: float


def measure_quality(
    source: str | os.PathLike[str], text: str, options: LoadOptions, *, max_tokens: int
) -> QualityReport:
    """Load the checkpoint in float32, then, after freeing that, with the options, and read the text with each.

    max_tokens: the most tokens of the text to use.

    Raises ForedraftError, one line: for a text of fewer than LEAST_TOKENS tokens, and for a checkpoint that cannot be
    loaded, with the options or in float32.
    """
    name = os.fspath(source)
    window_len = min(_ROWS, context_len_of(load_config(name, options), name))
    windows = cut(*tokens_of(text, load_tokenizer(name, options), max_tokens), window_len)
    try:
        reference, _ = _loaded_and_read(name, windows, replace(options, dtype="float32", quantization=None))
    except ModelError as error:
        raise ModelError(f"the float32 reference cannot be measured here: {error}") from error
    run, dtype = _loaded_and_read(name, windows, options)
    return QualityReport(
        dtype=dtype,
        quantization=options.quantization,
        num_tokens=len(run.loss),
        window_len=window_len,
        reference_perplexity=reference.perplexity,
        perplexity=run.perplexity,
        perplexity_increase=100 * (run.perplexity / reference.perplexity - 1),
        agreement=100 * float((run.likeliest == reference.likeliest).double().mean()),
    )


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[list[int], list[int]]:
    """-> the ids that every window begins with (the tokenizer's beginning-of-text token, if it adds one), and the ids of the
    text, at most max_tokens. Raises ForedraftError if there are fewer than LEAST_TOKENS.
    """
    if max_tokens < LEAST_TOKENS:
        raise ForedraftError(f"quality is measured on at least {LEAST_TOKENS} tokens, not on {max_tokens}")
    text = text[: _LONGEST_TOKEN * max_tokens]
    ids = encode_prompt(tokenizer, text) if text else []
    begins = [ids[0]] if ids and ids[0] == tokenizer.bos_token_id else []
    ids = ids[len(begins) :][:max_tokens]
    if len(ids) < LEAST_TOKENS:
        raise ForedraftError(
            f"the text is too short to measure quality on: it has {len(ids)} tokens, but at least {LEAST_TOKENS} are needed"
        )
    return begins, ids


def cut(begins: Sequence[int], ids: Sequence[int], window_len: int) -> list[Window]:
    """Windows of at most window_len ids to read, each of which starts with `begins`. Every id is predicted once, except the
    very first if `begins` is empty."""
    step = window_len - len(begins)
    windows = []
    for start in range(0 if begins else 1, len(ids), step):
        predicted = list(ids[start : start + step])
        before = list(begins) or [ids[start - 1]]
        windows.append(Window([*before, *predicted[:-1]], predicted))
    return windows


def predict(model: LanguageModel, windows: Sequence[Window]) -> Predictions:
    """Read the windows as the engine reads prompts. Raises ModelError if the model has no logit for an id."""
    largest = max(max(window.read + window.predicted) for window in windows)
    if largest >= model.traits.vocab_size:
        raise ModelError(
            f"{model.traits.name}: its tokenizer produces token {largest}, but its logits are only "
            f"{model.traits.vocab_size} wide"
        )
    parts = [_read(model, batch) for batch in _batches(windows)]
    return Predictions(torch.cat([p.loss for p in parts]), torch.cat([p.likeliest for p in parts]))


def _loaded_and_read(name: str, windows: Sequence[Window], options: LoadOptions) -> tuple[Predictions, str]:
    """-> the predictions, and the dtype of the model, which is freed"""
    model = load_model(name, options)
    try:
        return predict(model, windows), str(model.hf.dtype).removeprefix("torch.")
    finally:
        del model
        gc.collect()  # models contain reference cycles


def _batches(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Batches of windows, each as many as fit the rows of a pass."""
    batch: list[Window] = []
    for window in windows:
        if batch and sum(len(each.read) for each in [*batch, window]) > _ROWS:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _read(model: LanguageModel, batch: Sequence[Window]) -> Predictions:
    """One pass, with a KV cache of its own."""
    cache = model.scratch_cache([len(window.read) for window in batch])
    logits = model.read([Read(i, window.read, len(window.read)) for i, window in enumerate(batch)], cache)
    return _scored(logits, [token for window in batch for token in window.predicted])


def _scored(logits: Tensor, predicted: list[int]) -> Predictions:
    """logits: [N, V]; predicted: [N]"""
    target_ids = torch.tensor(predicted, device=logits.device)
    losses = [
        torch.nn.functional.cross_entropy(rows.double(), ids, reduction="none")
        for rows, ids in zip(torch.split(logits, _LOGIT_ROWS), torch.split(target_ids, _LOGIT_ROWS), strict=True)
    ]
    return Predictions(torch.cat(losses).cpu(), logits.argmax(dim=-1).cpu())
