"""Pairs of a source and a text, to train an encoder-decoder on.

A block is a pair: its first half the source's ids, its second half the text's. Both are padded at their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.text.tokenizing import encode_prompt
from foredraft.train.blocks import IGNORED, Blocks
from foredraft.train.corpus import Pair

_WIDTH_STEP = 16
"""Sources and texts are padded to a multiple of this many tokens, because CPU libraries compile a matrix product for every shape."""


class PairIds(NamedTuple):
    """source: the ids that the encoder reads. text: the ids after the decoder's start id, including the end-of-sequence token."""

    source: list[int]
    text: list[int]


class PaddedPairs(NamedTuple):
    """sources: [B, S], with attention_mask 0 at padding. decoder_ids: [B, L], each row the start id and the text without its last id."""

    sources: Tensor
    attention_mask: Tensor
    decoder_ids: Tensor


def tokenize_pairs(pairs: Iterable[Pair], tokenizer: PreTrainedTokenizerBase) -> list[PairIds]:
    """The ids of each pair; the source is encoded like a prompt."""
    end_id = tokenizer.eos_token_id

    def with_end(ids: list[int]) -> list[int]:
        return ids if end_id is None or ids[-1] == end_id else [*ids, end_id]

    return [
        PairIds(encode_prompt(tokenizer, pair.source), with_end(encode_prompt(tokenizer, pair.text))) for pair in pairs
    ]


def pair_blocks(pairs: Sequence[PairIds], half: int) -> Blocks:
    """half: the most tokens of a source, and of a text; longer ones are cut. Raises ForedraftError if there is no pair."""
    if not pairs:
        raise ForedraftError("there is no text to train on: the files contain no pairs")
    ids = torch.full((len(pairs), 2 * half), IGNORED, dtype=torch.int32)
    for row, pair in zip(ids, pairs, strict=True):
        source, text = pair.source[:half], pair.text[:half]
        row[: len(source)] = torch.tensor(source, dtype=torch.int32)
        row[half : half + len(text)] = torch.tensor(text, dtype=torch.int32)
    next_ids = ids.clone()
    next_ids[:, :half] = IGNORED
    return Blocks(ids, next_ids)


@dataclass(frozen=True, slots=True)
class PairReader:
    """Reads blocks of pairs with an encoder-decoder. See BlockReader."""

    predicted_share: float = 0.5

    def __call__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
        """See BlockReader."""
        pairs = padded_pairs(ids, start_id_of(model.config))
        width = pairs.decoder_ids.shape[1]
        half = ids.shape[1] // 2
        return _read(model, pairs)[mask[:, half : half + width]]

    def all_logits(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """See BlockReader."""
        sources, texts = ids.chunk(2, dim=1)
        return _read(model, PaddedPairs(sources, torch.ones_like(sources), texts)).flatten(0, 1)


def padded_pairs(ids: Tensor, start_id: int) -> PaddedPairs:
    """ids: [B, L] of blocks. Padding beyond the longest source and the longest text is cut, up to a multiple of _WIDTH_STEP."""
    sources, texts = (_without_padding(half) for half in ids.chunk(2, dim=1))
    decoder_ids = torch.cat([texts.new_full((len(texts), 1), start_id), texts[:, :-1]], dim=1)
    return PaddedPairs(sources.clamp(min=0), (sources != IGNORED).long(), decoder_ids.clamp(min=0))


def start_id_of(config: Any) -> int:
    """The id that the decoder begins with. Raises ForedraftError if the configuration lacks it."""
    start_id = getattr(config, "decoder_start_token_id", None)
    if start_id is None:
        raise ForedraftError("the model's configuration lacks decoder_start_token_id, with which its decoder begins")
    return int(start_id)


def _without_padding(ids: Tensor) -> Tensor:
    longest = int((ids != IGNORED).sum(1).max())
    return ids[:, : longest + -longest % _WIDTH_STEP]


def _read(model: PreTrainedModel, pairs: PaddedPairs) -> Tensor:
    """[B, L, V]"""
    logits: Tensor = model(
        input_ids=pairs.sources,
        attention_mask=pairs.attention_mask,
        decoder_input_ids=pairs.decoder_ids,
        use_cache=False,
    ).logits
    return logits
