"""The independent pass: a text read whole, from its first token, with nothing of what the engine held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foredraft.certificate.trial import Text
from foredraft.engine.engine import NEAR_TIE
from foredraft.model import LanguageModel, Read
from foredraft.sampling import Row

_ROWS = 512
_LOGITS = 1 << 22
"""Numbers that one pass's logits may have: a large vocabulary gets fewer rows."""


def read_whole(model: LanguageModel, texts: Sequence[Text]) -> Iterator[tuple[list[Text], Tensor]]:
    """Some texts at a time, with the rows that decided their tokens: [sum of output lengths, V], text after text.

    Texts without output are left out.
    """
    for batch in _batches([text for text in texts if text.output_ids], model.traits.vocab_size):
        cache = model.scratch_cache([len(text.tokens) for text in batch])
        reads = [Read(i, text.tokens[:-1], len(text.output_ids)) for i, text in enumerate(batch)]
        yield batch, model.read(reads, cache)


@contextmanager
def one_thread() -> Iterator[None]:
    """For arithmetic in many small calls: threads that wait for each other make it several times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rows_of(texts: Sequence[Text]) -> list[Row]:
    """One for each output token of each text, with its own prefix."""
    rows = []
    for text in texts:
        sampler, prompt = text.fresh_sampler(), text.tokens[: text.prompt_len]
        rows += [Row(sampler, prompt, text.output_ids[:i]) for i in range(len(text.output_ids))]
    return rows


def row_noise(model: LanguageModel, ids: Sequence[int]) -> float:
    """By how much a logit changes with the company of its row: the text whole against the text token by token. 0 where
    loading found rows exact, and NEAR_TIE at least elsewhere."""
    if model.traits.row_exact:
        return 0.0
    whole = model.read([Read(0, ids, len(ids))], model.scratch_cache([len(ids)]))
    cache = model.scratch_cache([len(ids)])
    alone = [model.read([Read(0, [token], 1)], cache)[0] for token in ids]
    differences = [float((a.float() - b.float()).abs().max()) for a, b in zip(whole, alone, strict=True)]
    return max(NEAR_TIE, *differences)


def _batches(texts: Sequence[Text], vocab_size: int) -> Iterator[list[Text]]:
    batch: list[Text] = []
    for text in texts:
        grown = [*batch, text]
        num_rows = sum(len(one.tokens) for one in grown)
        num_logits = sum(len(one.output_ids) for one in grown) * vocab_size
        if batch and (num_rows > _ROWS or num_logits > _LOGITS):
            yield batch
            grown = [text]
        batch = grown
    if batch:
        yield batch
