"""The target's and the drafter's probabilities of the tokens of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal
from foredraft.engine.step import Outcome
from foredraft.engine.token_tree import ROOT, tokens_to
from foredraft.sampling import Row, Sampler, adjusted, choose, to_device, token_probs_of


class TargetProbabilities(NamedTuple):
    """Of the draft tokens and, last, the target's own token. p: after all logits processing; p_raw: before it. None: not finite."""

    p: list[float | None]
    p_raw: list[float | None]


def target_probabilities(
    outcome: Outcome, sampler: Sampler, history: Sequence[int], target_id: int | None
) -> TargetProbabilities:
    """The target's probabilities of the tokens of a round.

    history: the tokens before the step. target_id: the target's own token, whose logits are in the row of the last accepted
    token; None leaves it out.
    """
    drafted, parents, ids = outcome.draft_ids, outcome.parents, list(outcome.draft_ids)
    before = list(range(ROOT, len(ids) - 1)) if parents is None else list(parents)
    if target_id is not None:
        before.append(outcome.path[-1] if outcome.path else ROOT)
        ids.append(target_id)
    if not ids:
        return TargetProbabilities([], [])
    is_tree = parents is not None
    with torch.inference_mode():
        device = outcome.logits.device
        logits = outcome.logits.index_select(0, to_device([node + 1 for node in before], device, torch.int64))
        tokens = to_device(ids, device, torch.int64)
        prefixes = [tokens_to(drafted, parents, node) for node in before]
        rows = [Row(sampler, history, prefix, is_tree) for prefix in prefixes]
        raw = torch.softmax(logits.float(), dim=-1).gather(1, tokens[:, None])[:, 0]
        return TargetProbabilities(_numbers(_processed(logits, rows, tokens)), _numbers(raw))


def _processed(logits: Tensor, rows: list[Row], tokens: Tensor) -> Tensor:
    """Each row's probability of its token in the distribution that verification uses: one-hot if the sampler is greedy."""
    if rows[0].sampler.is_greedy:
        return (torch.tensor(choose(logits, rows).ids) == tokens.cpu()).float()
    token_probs = token_probs_of(adjusted(logits, rows).logits, rows)
    return token_probs.at(torch.arange(len(rows), device=tokens.device), tokens[:, None])[:, 0]


def draft_probabilities(proposal: Proposal, row: int, drafted: Sequence[int]) -> list[float | None]:
    """The probability with which each token was drafted; 1 if deterministic. row: the sequence's row in the proposal."""
    q: list[float | None] = [1.0] * len(drafted)
    token_probs, rows = proposal.token_probs, proposal.prob_rows[row, : len(drafted)]
    positions = (rows != CERTAIN).nonzero()[:, 0].tolist()
    if token_probs is None or not positions:
        return q
    device = token_probs.probs.device
    tokens = to_device([drafted[position] for position in positions], device, torch.int64)
    drawn = token_probs.at(to_device(rows[positions], device, torch.int64), tokens[:, None])[:, 0]
    for position, value in zip(positions, _numbers(drawn), strict=True):
        q[position] = value
    return q


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    """Rounded to 6 digits and at most 1, which a float32 sum may exceed by rounding; None if not finite."""
    return float(f"{min(value, 1.0):.6g}") if math.isfinite(value) else None
