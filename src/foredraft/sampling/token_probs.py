"""Turns logits into probabilities: temperature, min-p, top-k and top-p, in that order, stored for the kept ids.

The compiled kernels (`kept_law` in kernels.cpp) keep the same ids: these are ordered by logit, equal logits by id. Logits equal to
the last of top-k are all kept; of logits equal to the last of top-p, only the lower ids are kept; min-p compares probabilities, so
equal logits are kept or dropped together.

Nothing here depends on which rows share a batch: normalisers come from per-row kernels (softmax, cumsum), never from a
reduction that may be split over threads, and each row widens its search alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.sampling.devices import to_device
from foredraft.sampling.search import kernels_for, top_rows

_FIRST_WIDTH, _FIRST_DEVICE_WIDTH = 64, 1024
"""The ids to search first. A CPU starts with few; for a GPU, searching many at once is faster than a second try."""
_WIDEN = 8
REACHED = 1 - 1e-6
"""The share of top_p at which its mass counts as reached, so that rounding does not keep one id too many if equal logits reach top_p
exactly (three of ten at 0.3)."""
_CHUNK, _DEVICE_CHUNK = 1 << 20, 1 << 26


@dataclass(frozen=True, slots=True)
class TokenProbs:
    """R distributions. probs: [R, W]; probs[r, w] belongs to ids[r, w], or to id w where ids is None (W = V).

    A row that keeps fewer than W ids is padded with probability 0.
    """

    probs: Tensor
    ids: Tensor | None = None

    def to(self, device: torch.device) -> TokenProbs:
        if self.probs.device == device:
            return self
        return TokenProbs(self.probs.to(device), None if self.ids is None else self.ids.to(device))

    def after(self, row: int) -> TokenProbs:
        """The distributions from this row on, in the same memory."""
        return TokenProbs(self.probs[row:], None if self.ids is None else self.ids[row:])

    def dense(self, vocab_size: int) -> Tensor:
        """The distributions over the whole vocabulary, [R, V]."""
        if self.ids is None:
            return self.probs
        out = self.probs.new_zeros(self.probs.shape[0], vocab_size)
        return out.scatter_add_(1, self.ids, self.probs)

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The probabilities of some ids under some of these distributions. rows: [...], columns: [..., C] ids -> [..., C]"""
        if self.ids is None:
            return self.probs[rows[..., None], columns]
        # padding must not be taken for id 0
        known, order = torch.where(self.probs > 0, self.ids, -1).sort(dim=-1)
        places = torch.searchsorted(known[rows], columns.contiguous()).clamp(max=known.shape[1] - 1)
        places = order[rows].gather(-1, places)
        probs = self.probs[rows].gather(-1, places)
        return torch.where(self.ids[rows].gather(-1, places) == columns, probs, 0)

    def id_at(self, columns: Tensor) -> Tensor:
        """The id at one column of each row. [R] -> [R]"""
        return columns if self.ids is None else self.ids.gather(1, columns[:, None])[:, 0]

    def checked_id_at(self, columns: Tensor) -> Tensor:
        """The same, but -1 where a row is not a distribution (NaN)."""
        return torch.where(self.probs[:, 0].isnan(), -1, self.id_at(columns))


def joined(parts: Sequence[TokenProbs]) -> TokenProbs:
    """The rows of all parts in order; with ids if any part has them."""
    if len(parts) == 1:
        return parts[0]
    if all(part.ids is None for part in parts):
        return TokenProbs(torch.cat([part.probs for part in parts]))
    width = max(part.probs.shape[1] for part in parts)
    probs, ids = [], []
    for part in parts:
        columns = torch.arange(part.probs.shape[1], device=part.probs.device).expand(part.probs.shape)
        filling = (0, width - part.probs.shape[1])
        probs.append(torch.nn.functional.pad(part.probs, filling))
        ids.append(torch.nn.functional.pad(columns if part.ids is None else part.ids, filling))
    return TokenProbs(torch.cat(probs), torch.cat(ids))


def tempered(logits: Tensor, temperatures: Tensor) -> Tensor:
    """softmax(logits / T), at least in float32. logits: [R, V]; temperatures: [R], above 0 -> [R, V]"""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return torch.softmax(logits / temperatures.to(logits.dtype)[:, None], dim=-1)


def token_probs_under(
    logits: Tensor, temperatures: Sequence[float], truncation: tuple[int, float, float] | None
) -> TokenProbs:
    """softmax(logits / T), truncated by (top_k, top_p, min_p) unless that is None. logits: [R, V], temperatures: R"""
    each = to_device(temperatures, logits.device, torch.float64)
    if truncation is None:
        return TokenProbs(tempered(logits, each))
    top_k, top_p, min_p = truncation
    return truncated(logits, each, top_k=top_k, top_p=top_p, min_p=min_p)


def truncated(logits: Tensor, temperatures: Tensor, *, top_k: int, top_p: float, min_p: float) -> TokenProbs:
    """softmax(logits / T), truncated and renormalised: of the ids with at least min_p times the top probability, keep the top_k (and all
    logits equal to the last of them), and of those the fewest whose mass is at least top_p of the mass that is left.

    logits: [R, V], temperatures: [R] -> R distributions over W kept ids, most likely first, equal ones by id
    """
    kernels = kernels_for(logits)
    if kernels is not None:
        return TokenProbs(*kernels.token_probs(logits, temperatures.tolist(), (top_k, top_p, min_p)))
    num_rows, vocab_size = logits.shape
    width = min(vocab_size, max(top_k + 16, _FIRST_WIDTH if logits.device.type == "cpu" else _FIRST_DEVICE_WIDTH))
    probs, ids, is_done, needed = _tried(logits, temperatures, width, (top_k, top_p, min_p))
    # one copy for both, since each copy waits for the device
    *done, most = torch.cat([is_done.to(torch.int64), needed]).tolist()
    if all(done):
        return TokenProbs(probs[:, :most], ids[:, :most])
    parts = [(torch.arange(num_rows, device=logits.device)[is_done], probs[is_done], ids[is_done])]
    pending = (~is_done).nonzero()[:, 0]
    while pending.numel():
        width = min(vocab_size, width * _WIDEN)
        probs, ids, is_done, _ = _tried(logits[pending], temperatures[pending], width, (top_k, top_p, min_p))
        parts.append((pending[is_done], probs[is_done], ids[is_done]))
        pending = pending[~is_done]
    return _gather_rows(parts, num_rows)


def _tried(
    logits: Tensor, temperatures: Tensor, width: int, truncation: tuple[int, float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Truncate to the `width` most likely ids: probabilities and ids [R, width], whether no id beyond those could be kept [R], and how
    many columns the longest row needs [1]. Sums are over the whole width: over fewer columns a device might add in another order."""
    probs, values, ids = _top(logits, temperatures, width)
    keep, complete = _kept(probs, values, *truncation)
    is_done = complete if width < logits.shape[1] else torch.ones_like(complete)
    kept = torch.where(keep, probs, 0)
    return kept / kept.cumsum(-1)[:, -1:], ids, is_done, keep.sum(-1).amax().clamp(min=1)[None]


def _top(logits: Tensor, temperatures: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` largest logits of each row, in descending order: their probabilities under softmax(logits / T), the logits, and their
    ids, [R, width] each. A few rows at a time reuse the same memory: with a large vocabulary, a batch of dense distributions would not
    fit into a CPU's caches, and would cost more in fresh memory than in arithmetic."""
    num_rows, vocab_size = logits.shape
    size = min(num_rows, max(1, (_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK) // vocab_size))
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    wide = torch.empty(size, vocab_size, dtype=dtype, device=logits.device)
    probs = torch.empty_like(wide)
    parts = []
    for r in range(0, num_rows, size):
        some = slice(0, min(size, num_rows - r))
        wide[some].copy_(logits[r : r + size])
        values, ids = top_rows(wide[some], width)
        wide[some].div_(temperatures[r : r + size].to(dtype)[:, None])
        torch.softmax(wide[some], dim=-1, out=probs[some])
        parts.append((probs[some].gather(1, ids), values, ids))
    top_probs, top_values, top_ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return top_probs, top_values, top_ids


def _kept(top: Tensor, values: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """top, values: probabilities and logits, [R, W] descending -> (which are kept [R, W], whether no id beyond these W could be kept
    [R])"""
    keep = torch.ones_like(top, dtype=torch.bool)
    complete = torch.zeros_like(top[:, 0], dtype=torch.bool)
    bounds = [(top, min_p * top[:, 0])] if min_p > 0 else []
    if 0 < top_k <= top.shape[1]:
        # masked ids are never kept
        bounds.append((values, values[:, top_k - 1].clamp(min=torch.finfo(values.dtype).min)))
    for of, bound in bounds:
        keep &= of >= bound[:, None]
        complete |= of[:, -1] < bound
    if top_p < 1:
        mass = torch.where(keep, top, 0).to(torch.float64)
        reached = mass.cumsum(-1)
        # without min-p and top-k the mass is 1; with them it is what they keep
        total = reached[:, -1:] if bounds else torch.ones_like(reached[:, -1:])
        keep &= reached - mass < REACHED * top_p * total
        if not bounds:
            complete |= reached[:, -1] >= REACHED * top_p
    # NaN rows compare false everywhere: let them pass, since the draw reports them
    return keep, complete | top[:, 0].isnan()


def _gather_rows(parts: list[tuple[Tensor, Tensor, Tensor]], num_rows: int) -> TokenProbs:
    width = max(max(int((kept > 0).sum(-1).amax()) for _, kept, _ in parts if kept.numel()), 1)
    first_kept, first_ids = parts[0][1], parts[0][2]
    probs = first_kept.new_zeros(num_rows, width)
    ids = first_ids.new_zeros(num_rows, width)
    for rows, kept, kept_ids in parts:
        w = min(width, kept.shape[1])
        probs[rows, :w] = kept[:, :w]
        ids[rows, :w] = kept_ids[:, :w]
    return TokenProbs(probs, ids)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a column with probability proportional to its weight. weights: [R, W], uniforms: [R] in [0, 1) -> [R]

    A column of weight 0 is never drawn.
    """
    cumulated = weights.to(torch.float64).cumsum(-1)
    total = cumulated[:, -1:]
    at = torch.minimum(uniforms.to(torch.float64)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulated, at, right=True)[:, 0]
    return column.clamp(max=weights.shape[1] - 1)
