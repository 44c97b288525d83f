"""What target and draft thought of each token of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal
from foredraft.engine.step import Outcome
from foredraft.sampling import Row, Sampler, adjusted, choose, to_device, token_probs_of


class TargetSays(NamedTuple):
    """Of the draft tokens and, last, the token after them: after all warps, and before any. None: no number came out."""

    p: list[float | None]
    p_raw: list[float | None]


def target_says(
    outcome: Outcome, sampler: Sampler, history: Sequence[int], drafted: Sequence[int], own: int | None
) -> TargetSays:
    """history: the tokens before the step. drafted: all draft tokens, in order. own: the target's token, which stands
    in the row after the accepted draft tokens; None leaves it out."""
    places, ids = list(range(len(drafted))), list(drafted)
    if own is not None:
        places.append(outcome.num_accepted)
        ids.append(own)
    if not ids:
        return TargetSays([], [])
    with torch.inference_mode():
        device = outcome.logits.device
        logits = outcome.logits.index_select(0, to_device(places, device, torch.int64))
        tokens = to_device(ids, device, torch.int64)
        rows = [Row(sampler, history, drafted[:place]) for place in places]
        raw = torch.softmax(logits.float(), dim=-1).gather(1, tokens[:, None])[:, 0]
        return TargetSays(_numbers(_warped(logits, rows, tokens)), _numbers(raw))


def _warped(logits: Tensor, rows: list[Row], tokens: Tensor) -> Tensor:
    """Each row's probability of its token under the law it is verified by: one-hot where it is greedy."""
    if rows[0].sampler.is_greedy:
        return (choose(logits, rows).ids == tokens.cpu()).float()
    token_probs = token_probs_of(adjusted(logits, rows), rows)
    return token_probs.at(torch.arange(len(rows), device=tokens.device), tokens[:, None])[:, 0]


def draft_said(proposal: Proposal, row: int, drafted: Sequence[int]) -> list[float | None]:
    """With which probability each was drafted: 1 where it was certain. row: the sequence's row of the proposal."""
    found: list[float | None] = [1.0] * len(drafted)
    token_probs, rows = proposal.token_probs, proposal.prob_rows[row, : len(drafted)]
    places = (rows != CERTAIN).nonzero()[:, 0].tolist()
    if token_probs is None or not places:
        return found
    device = token_probs.probs.device
    tokens = to_device([drafted[place] for place in places], device, torch.int64)
    drawn = token_probs.at(to_device(rows[places], device, torch.int64), tokens[:, None])[:, 0]
    for place, value in zip(places, _numbers(drawn), strict=True):
        found[place] = value
    return found


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    """Rounded to what a reader can use; a sum in float32 may pass 1 by a hair."""
    return float(f"{min(value, 1.0):.6g}") if math.isfinite(value) else None
