"""Applying a text's constraint to tokens that a model drafted without it."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.sampling import Row, TokenProbs, inverse_cdf, refused_ids, to_device


def held(row: Row, ids: list[int], token_probs: TokenProbs | None, first: int = 0) -> list[int]:
    """The tokens that a model drafted after a row, up to the first one that is not allowed.

    token_probs: the distributions they were drawn from, row first + i for ids[i]; None: nothing was drawn. A distribution q is overwritten
    with q', which is q conditioned on allowed tokens, and the first token that is not allowed is drawn again, from q'. So each is
    drawn from q': q(x) + q(not allowed) q'(x) = q'(x) for every allowed x. The tokens after a redrawn one are discarded.
    """
    sampler, history = row.sampler, row.history
    count = sampler.num_allowed(history, ids)
    if not ids or token_probs is None or sampler.constraint is None:
        return ids[:count]
    token_probs = token_probs.after(first)
    try:
        masks = [sampler.constraint.allowed(history, ids[:i]) for i in range(min(count + 1, len(ids)))]
    except Exception:  # the row that depends on the constraint fails with that error; other texts are not affected
        return []
    with torch.inference_mode():
        mass = _given(token_probs, len(masks), refused_ids(masks, _width(token_probs)))
        if count == len(ids) or not mass[count] > 0:
            return ids[:count]
        uniforms = to_device(sampler.uniforms(1), token_probs.probs.device, torch.float64)
        column = inverse_cdf(token_probs.probs[count : count + 1], uniforms)
        return [*ids[:count], int(column[0] if token_probs.ids is None else token_probs.ids[count, column[0]])]


def _width(token_probs: TokenProbs) -> int:
    return token_probs.probs.shape[1] if token_probs.ids is None else int(token_probs.ids.amax()) + 1


def _given(token_probs: TokenProbs, count: int, refused: Tensor) -> list[float]:
    """Condition the first `count` distributions on the ids that are not refused -> the mass these had. refused: [count, V]"""
    probs = token_probs.probs[:count]
    refused = refused.to(probs.device)
    probs.masked_fill_(refused if token_probs.ids is None else refused.gather(1, token_probs.ids[:count]), 0)
    mass = probs.sum(-1, dtype=torch.float64)
    probs.div_(torch.where(mass > 0, mass, 1)[:, None])
    return list(mass.tolist())
