"""The training objective of a draft model that drafts several tokens in one pass: the target's distribution at every position of its
drafts, predicted at mask tokens, with conditional drop of tokens (PARD, arXiv:2504.18583)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.errors import ForedraftError
from foredraft.model.mask_token import MASK_TOKEN, mask_token_of
from foredraft.train.blocks import IGNORED, draft_generator
from foredraft.train.losses import DistillationLoss, LossSums

_KEPT, _LEAST_KEPT = 0.7, 0.2
"""The share of drafts that continue from one draft position to the next, and the least share of all drafts: the paper's values."""

_ROWS_OF_EMBEDDINGS = 16


def with_mask_token(student: PreTrainedModel, num_tokens: int) -> PreTrainedModel:
    """Give the student a mask token, unless it has one: an id after the tokenizer's num_tokens, so that no text contains it. Its
    embedding begins as the mean of all embeddings."""
    if mask_token_of(student.config.to_dict()) is not None:
        return student
    student.config.update({MASK_TOKEN: num_tokens, "spd_type": "pard"})
    if student.get_input_embeddings().weight.shape[0] <= num_tokens:
        student.resize_token_embeddings(num_tokens + 1, pad_to_multiple_of=_ROWS_OF_EMBEDDINGS, mean_resizing=False)
    for layer in (student.get_input_embeddings(), student.get_output_embeddings()):
        rows = layer.weight.data
        rows[num_tokens:] = rows[:num_tokens].mean(0)
    return student


def kept_shares(num_places: int) -> list[float]:
    """For each draft position, the share of a text's positions whose drafts are trained there."""
    return [1.0, *(max(_KEPT**place, _LEAST_KEPT) for place in range(1, num_places))]


@dataclass(frozen=True, slots=True)
class ParallelDistillation:
    """target: the model that drafts are compared with. num_places: tokens of a draft. mask_token: the student's."""

    target: PreTrainedModel
    num_places: int
    mask_token: int
    loss: DistillationLoss

    def __call__(self, student: PreTrainedModel, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        """ids, next_ids: [B, L]. -> sums over the positions that have a next token; a position's numbers are means over the
        positions in all drafts"""
        rows = draft_rows(ids, self.num_places, draft_generator(ids, progress if student.training else 0.0))
        is_predicted = next_ids != IGNORED
        with torch.no_grad():
            target_logits = self.target(input_ids=ids, use_cache=False).logits[is_predicted]
        logits = _read(student, ids, rows, self.mask_token)
        predicts = rows.predicting(is_predicted)
        width = min(logits.shape[-1], target_logits.shape[-1])
        distributions = self.loss.distribution(target_logits[:, :width])
        numbers = (is_predicted.flatten().cumsum(0) - 1).view_as(is_predicted)
        wanted = numbers.gather(1, rows.positions.clamp(max=ids.shape[1] - 1))[predicts]
        sums = self.loss(logits[predicts][:, :width], distributions.select(wanted), progress)
        num_positions = int(is_predicted.sum())
        share = num_positions / sums.num_rows
        return LossSums(sums.loss * share, sums.acceptance * share, sums.agreement * share, num_positions)

    def shapes(self, student: PreTrainedModel, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        batch, length = ids.shape
        num_rows = length + sum(_num_kept(share, length) for share in kept_shares(self.num_places)[1:])
        logits: Tensor = student(
            input_ids=torch.zeros(batch, num_rows, dtype=torch.int64),
            attention_mask=torch.zeros(batch, 1, num_rows, num_rows, dtype=student.dtype),
            use_cache=False,
        ).logits
        yield logits.flatten(0, 1)


class DraftRows(NamedTuple):
    """What a student reads: the L rows of each text, then mask tokens. anchors, positions, places: [B, S]. A row at place 0 is the
    text's token at its position, which is its anchor. A row at place j is the j-th mask after its anchor, at position anchor + j,
    and predicts the token after that: the draft token with j others before it."""

    anchors: Tensor
    positions: Tensor
    places: Tensor

    def predicting(self, is_predicted: Tensor) -> Tensor:
        """[B, S]: whether the token that a row predicts exists and counts. is_predicted: [B, L], where the next token counts"""
        length = is_predicted.shape[1]
        return (self.positions < length) & is_predicted.gather(1, self.positions.clamp(max=length - 1))

    def mask(self) -> Tensor:
        """[B, 1, S, S] bool, what each row attends to: the text up to its anchor, and the masks of its own draft up to itself."""
        to_text = self.places[:, None] == 0
        sees_text = to_text & (self.anchors[:, None] <= self.anchors[..., None])
        same_draft = ~to_text & (self.anchors[:, None] == self.anchors[..., None])
        return (sees_text | (same_draft & (self.places[:, None] <= self.places[..., None])))[:, None]


def draft_rows(ids: Tensor, num_places: int, generator: torch.Generator) -> DraftRows:
    """Drafts from all positions of texts, ids [B, L], random ones of which continue at each further draft position."""
    batch, length = ids.shape
    order = torch.rand(batch, length, generator=generator).argsort(1)
    anchors, places = [torch.arange(length).expand(batch, -1)], [torch.zeros(batch, length, dtype=torch.int64)]
    for place, share in list(enumerate(kept_shares(num_places)))[1:]:
        kept = order[:, : _num_kept(share, length)]
        anchors.append(kept)
        places.append(torch.full_like(kept, place))
    joined = [torch.cat(parts, dim=1).to(ids.device) for parts in (anchors, places)]
    return DraftRows(joined[0], joined[0] + joined[1], joined[1])


def _num_kept(share: float, length: int) -> int:
    return max(1, round(share * length))


def _read(student: PreTrainedModel, ids: Tensor, rows: DraftRows, mask_token: int) -> Tensor:
    """[B, S, V]"""
    masks = torch.full((len(ids), rows.places.shape[1] - ids.shape[1]), mask_token, device=ids.device)
    hidden = ~rows.mask()
    bias = torch.zeros(hidden.shape, dtype=student.dtype, device=ids.device)
    logits: Tensor = student(
        input_ids=torch.cat([ids, masks], dim=1),
        position_ids=rows.positions.clamp(max=_last_position(student, rows)),
        attention_mask=bias.masked_fill_(hidden, torch.finfo(student.dtype).min),
        use_cache=False,
    ).logits
    return logits


def _last_position(student: PreTrainedModel, rows: DraftRows) -> int:
    """The largest valid position: rows beyond the context predict nothing, but still need a position that the model supports."""
    longest = getattr(student.config.get_text_config(), "max_position_embeddings", None)
    return int(rows.positions.max()) if longest is None else longest - 1


def check_window(student: PreTrainedModel, context: int) -> None:
    """Raises ForedraftError for a student whose attention window is shorter than a block: the drafts' mask does not support windows."""
    config = student.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < context:
        raise ForedraftError(f"--context {context} is longer than the draft's attention window: give at most {window}")
