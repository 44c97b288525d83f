"""Lays out draft tokens and target probabilities as a Case for a rule. Nothing here waits for a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal
from foredraft.sampling import TokenProbs, to_device
from foredraft.verify.law import Case


def case_of(target: TokenProbs, proposal: Proposal, batch: list[int]) -> tuple[Case, Tensor | None]:
    """Lay out the target's rows as [B, K+1, W] and read the draft probabilities of the ids that these keep. -> the case; the kept ids
    [B, K+1, W], or None if all are kept"""
    device = target.probs.device
    lens = proposal.lens[batch]
    width = int(lens.max())
    drafted = proposal.drafted
    ids = torch.where(drafted, proposal.ids, 0)[batch][:, :width]
    prob_rows = torch.where(drafted, proposal.prob_rows, CERTAIN)[batch][:, :width]
    place = torch.arange(width + 1)[None] <= lens[:, None]
    p = _laid_out(target.probs, place)
    kept = None if target.ids is None else _laid_out(target.ids, place)
    drafts = _Drafts.on(device, ids, prob_rows, proposal.token_probs)
    columns = None if kept is None else kept[:, :width]
    p_draft = _read_at(p[:, :width], drafts.ids, columns)
    own_lens = to_device(lens, device, torch.int64)
    return Case(p, drafts.token_probs(p[:, :width], columns), p_draft, drafts.own(p.dtype), own_lens), kept


def of_row(x: Tensor, places: Tensor) -> Tensor:
    """x: [B, K, W], places: [B] -> [B, W]"""
    return x.gather(1, places[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


def _laid_out(rows: Tensor, place: Tensor) -> Tensor:
    """rows: [R, W], one for each True element of place [B, K + 1], in order -> [B, K + 1, W], 0 elsewhere"""
    if len(rows) == place.numel():  # every draft is as long as the longest
        return rows.view(*place.shape, -1)
    out = rows.new_zeros(place.numel(), rows.shape[1])
    places = to_device(place.flatten().nonzero()[:, 0], rows.device, torch.int64)
    return out.index_copy_(0, places, rows).view(*place.shape, -1)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Draft tokens [B, K] and the distributions that they were drawn from. has_certain: whether any was not drawn."""

    ids: Tensor
    prob_rows: Tensor
    drawn_from: TokenProbs | None
    has_certain: bool

    @classmethod
    def on(cls, device: torch.device, ids: Tensor, prob_rows: Tensor, drawn_from: TokenProbs | None) -> _Drafts:
        """ids, prob_rows: on the CPU."""
        return cls(
            to_device(ids, device, torch.int64),
            to_device(prob_rows, device, torch.int64),
            None if drawn_from is None else drawn_from.to(device),
            CERTAIN in prob_rows.flatten().tolist(),
        )

    def own(self, dtype: torch.dtype) -> Tensor:
        """The q of each draft token, 1 for a certain one. [B, K]"""
        if self.drawn_from is None:
            return torch.ones(self.ids.shape, dtype=dtype, device=self.ids.device)
        own = self._at(self.ids[..., None])[..., 0].to(dtype)
        return torch.where(self.prob_rows == CERTAIN, 1, own)

    def token_probs(self, like: Tensor, columns: Tensor | None) -> Tensor:
        """q of the ids in columns ([B, K, W]; None: every id), a point mass for a certain token. like: [B, K, W]"""
        drawn = torch.zeros_like(like)
        if self.drawn_from is not None:
            drawn = (self._whole(like.shape[2]) if columns is None else self._at(columns)).to(like.dtype)
        if not self.has_certain:
            return drawn
        certain = (self.prob_rows == CERTAIN)[..., None]
        if columns is not None:
            return torch.where(certain, (columns == self.ids[..., None]).to(like.dtype), drawn)
        return drawn.masked_fill(certain, 0).scatter_add_(2, self.ids[..., None], certain.to(like.dtype))

    def _whole(self, vocab_size: int) -> Tensor:
        """The q of every id. [B, K, V]"""
        assert self.drawn_from is not None
        rows = self.prob_rows.clamp(min=0)
        return self.drawn_from.dense(vocab_size).index_select(0, rows.flatten()).view(*rows.shape, -1)

    def _at(self, columns: Tensor) -> Tensor:
        """[B, K, C] ids -> their probabilities under the distribution of each position"""
        assert self.drawn_from is not None
        return self.drawn_from.at(self.prob_rows.clamp(min=0), columns)


def _read_at(token_probs: Tensor, ids: Tensor, columns: Tensor | None) -> Tensor:
    """The probability of one id under each distribution. token_probs: [B, K, W], ids: [B, K] -> [B, K]"""
    if columns is None:
        return token_probs.gather(2, ids[..., None])[..., 0]
    if token_probs.shape[1] == 0:
        return token_probs[..., 0]
    return torch.where(columns == ids[..., None], token_probs, 0).amax(-1)
