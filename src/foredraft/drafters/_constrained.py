"""Holding what a model wrote freely to the constraint of its text."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.sampling import Row, TokenProbs, inverse_cdf, refused_ids, uniforms_for


def held(row: Row, ids: list[int], token_probs: TokenProbs | None) -> list[int]:
    """The tokens that a model wrote behind a row, up to the first that may not come.

    laws: what they were drawn from, row i for ids[i]; None: nothing was drawn. A law is written over with what it is given
    that its token may come, q'; and the one that may not is drawn again, from q'. So each is drawn from q':
    q(x) + q(those that may not come) q'(x) = q'(x) for every x that may. What was written behind it is lost.
    """
    sampler, history, _ = row
    count = sampler.num_allowed(history, ids)
    if token_probs is None or sampler.constraint is None:
        return ids[:count]
    try:
        masks = [sampler.constraint.allowed(history, ids[:i]) for i in range(min(count + 1, len(ids)))]
    except Exception:  # the row that would need to know says so itself: it is no other text's affair
        return []
    with torch.inference_mode():
        mass = _given(token_probs, len(masks), refused_ids(masks, _width(token_probs)))
        if count == len(ids) or not mass[count] > 0:
            return ids[:count]
        uniforms = uniforms_for(sampler.generator, 1, token_probs.probs.device)
        column = inverse_cdf(token_probs.probs[count : count + 1], uniforms)
        return [*ids[:count], int(column[0] if token_probs.ids is None else token_probs.ids[count, column[0]])]


def _width(token_probs: TokenProbs) -> int:
    return token_probs.probs.shape[1] if token_probs.ids is None else int(token_probs.ids.amax()) + 1


def _given(token_probs: TokenProbs, count: int, refused: Tensor) -> list[float]:
    """Condition the first `count` laws on what is not refused -> how much of each there was. refused: [count, V]"""
    probs = token_probs.probs[:count]
    refused = refused.to(probs.device)
    probs.masked_fill_(refused if token_probs.ids is None else refused.gather(1, token_probs.ids[:count]), 0)
    mass = probs.sum(-1, dtype=torch.float64)
    probs.div_(torch.where(mass > 0, mass, 1)[:, None])
    return list(mass.tolist())
