"""A small decoder over an encoder-decoder's own encoder, as a kind of head to train.

The target's decoder and the draft's attend to the same encoded source, which is computed once and is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from foredraft.engine.sources import TokenSource
from foredraft.errors import ForedraftError
from foredraft.heads.decoder_draft import decoder_to_train, new_decoder, num_decoder_layers, save_decoder
from foredraft.model import LanguageModel, Read
from foredraft.train.blocks import IGNORED, ROW_MULTIPLE
from foredraft.train.head_kinds import MakeObjective
from foredraft.train.losses import DistillationLoss, LossSums
from foredraft.train.model_card import Student, distilled_by
from foredraft.train.pairs import PairReader, padded_pairs, start_id_of
from foredraft.train.recipe import Recipe
from foredraft.train.students import copy_weights, spread_layers


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """layers: of the decoder. init: a decoder to train further."""

    layers: int = 1
    init: str | None = None
    reads_pairs: ClassVar[bool] = True
    kernels: ClassVar[str] = "torch"  # it copies layers of the target, which compiled kernels would pack

    def new(self, target: LanguageModel, texts: Sequence[Sequence[int]], seed: int) -> PreTrainedModel:
        """See HeadKind. Its layers begin as the target's, evenly spread from the first to the last (if one: the first)."""
        decoder = new_decoder(target, self.layers)
        layers = spread_layers(num_decoder_layers(target.hf.config), self.layers)
        copy_weights(decoder.get_decoder(), target.hf.get_decoder(), layers)
        return decoder

    def load(self, source: str, target: LanguageModel) -> PreTrainedModel:
        """See HeadKind."""
        decoder = decoder_to_train(source, target)
        num_layers = num_decoder_layers(decoder.config)
        if num_layers != self.layers:
            raise ForedraftError(f"{source}: its number of layers is {num_layers}, but --layers is {self.layers}")
        return decoder

    def num_logits(self, head: PreTrainedModel, target: LanguageModel) -> int:
        """See HeadKind."""
        return round(target.traits.vocab_size * PairReader().predicted_share)

    def objectives(self, head: PreTrainedModel, target: LanguageModel) -> MakeObjective:
        """See HeadKind."""
        return lambda loss: DecoderDistillation(target, loss)

    def save(
        self, head: PreTrainedModel, target: LanguageModel, target_name: str, folder: Path, dtype: torch.dtype
    ) -> None:
        """See HeadKind."""
        save_decoder(head, folder, target_name, dtype)

    def describe(self, head: PreTrainedModel, target_name: str, recipe: Recipe) -> Student:
        """See HeadKind."""
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return Student(
            "head",
            f"A decoder of {layers} over the encoder of `{target_name}`",
            f"{layers} of the target's decoder" if self.init is None else f"`{self.init}`",
            ("tags: [speculative-decoding, shared-encoder]",),
            distilled_by(recipe),
        )


@dataclass(frozen=True, slots=True)
class DecoderDistillation:
    """Distillation from the target's distribution after every token of a text, given its source."""

    target: LanguageModel
    loss: DistillationLoss

    def __call__(self, student: PreTrainedModel, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        """See Objective. ids, next_ids: of blocks of pairs."""
        pairs = padded_pairs(ids, start_id_of(student.config))
        half, width = ids.shape[1] // 2, pairs.decoder_ids.shape[1]
        mask = next_ids[:, half : half + width] != IGNORED
        with torch.no_grad():
            encoded, target_logits = self._read(ids, mask.sum(1).tolist(), pairs.sources.shape[1])
        outputs = student(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=pairs.attention_mask,
            decoder_input_ids=pairs.decoder_ids,
            use_cache=False,
        )
        logits = outputs.logits[mask]
        return self.loss(logits, self.loss.distribution(target_logits[:, : logits.shape[1]]), progress)

    def shapes(self, student: PreTrainedModel, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        batch, half = ids.shape[0], ids.shape[1] // 2
        encoded = torch.empty(batch, half, self.target.hf.get_encoder().config.hidden_size)
        outputs = student(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            decoder_input_ids=torch.zeros(batch, half, dtype=torch.int64),
            use_cache=False,
        )
        yield outputs.logits.flatten(0, 1)

    def _read(self, ids: Tensor, text_lens: Sequence[int], source_len: int) -> tuple[Tensor, Tensor]:
        """Run the target as when it serves. -> its encoder's output [B, source_len, width], padded, and its logits [R, V] after the start
        id and each token of a text but the last; float32"""
        halves = ids.chunk(2, dim=1)
        sources = [TokenSource(tuple(row[row != IGNORED].tolist())) for row in halves[0]]
        start_id = start_id_of(self.target.hf.config)
        texts = [[start_id, *row[: length - 1].tolist()] for row, length in zip(halves[1], text_lens, strict=True)]
        num_pairs, num_rows = len(texts), sum(text_lens)
        # one more pair, so that products have a multiple of ROW_MULTIPLE rows
        sources.append(TokenSource((start_id,) * _missing_rows(sum(map(len, sources)))))
        texts.append([start_id] * _missing_rows(num_rows))
        cache = self.target.scratch_cache([len(text) for text in texts], sources=sources, keeps_encoded=True)
        logits = self.target.read([Read(i, text, len(text)) for i, text in enumerate(texts)], cache)[:num_rows]
        found = [source.encoded for i in range(num_pairs) if (source := cache.source(i)) is not None]
        encoded = [rows for rows in found if rows is not None]
        padded = torch.nn.utils.rnn.pad_sequence(encoded, batch_first=True).float()
        return functional.pad(padded, (0, 0, 0, source_len - padded.shape[1])), logits.float()


def _missing_rows(num_rows: int) -> int:
    """At least one more, up to a multiple of ROW_MULTIPLE."""
    return ROW_MULTIPLE - num_rows % ROW_MULTIPLE
