"""Verification of a whole ragged batch; the one place where rows are parted by the rule they run under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kernels import RULES as NATIVE_RULES
from foredraft.kernels import Docket, Kernels, Way
from foredraft.proposal import CERTAIN, Proposal, Verdict, tensor_of
from foredraft.sampling import Laws, Row, Sampler, adjusted, choose, laws_of, report_failed, report_nan, uniforms_for
from foredraft.sampling.search import kernels_for
from foredraft.verify.block import block_law
from foredraft.verify.coupled import walk
from foredraft.verify.law import Case, OutcomeLaw, Rule, draw, next_weights
from foredraft.verify.rejection import rejection_law

RULES: Mapping[str, Rule] = MappingProxyType({"rejection": rejection_law, "block": block_law})

__all__ = [
    "RULES",
    "Case",
    "OutcomeLaw",
    "Rule",
    "Verifier",
    "block_law",
    "draw",
    "next_weights",
    "rejection_law",
    "verify",
    "walk",
]


class Verifier(Protocol):
    """What an engine asks for a verdict: `verify`, or what a test puts in its place."""

    def __call__(
        self,
        logits: Tensor,
        proposal: Proposal,
        samplers: Sequence[Sampler],
        histories: Sequence[Sequence[int]],
        *,
        near_tie: float = 0.0,
    ) -> tuple[Verdict, Tensor]:
        """See verify."""
        ...


def verify(
    logits: Tensor,
    proposal: Proposal,
    samplers: Sequence[Sampler],
    histories: Sequence[Sequence[int]],
    *,
    near_tie: float = 0.0,
    rules: Mapping[str, Rule] | None = None,
) -> tuple[Verdict, Tensor]:
    """What the target says to each proposal.

    logits: [sum(lens + 1), V], the target's rows, sequence after sequence: row i of sequence b follows its history and
    its first i draft tokens. near_tie: count chosen tokens whose `log p + noise` beats the next by less than this.
    rules: by the name that a request asks for; None takes RULES, or the kernels' own of that name.
    -> (Verdict of B rows, which of their K + 1 possible tokens would be near ties [B, K + 1] bool)
    """
    rows, starts = _rows(proposal, samplers, histories)
    by_ratio = [b for b in range(len(samplers)) if _needs_ratio(proposal, samplers[b], b)]
    if not by_ratio:
        num_accepted, next_ids, ties = _walk(logits, rows, None, proposal, near_tie)
        return Verdict(num_accepted, next_ids), ties
    by_walk = sorted(set(range(len(samplers))) - set(by_ratio))
    outcomes: dict[int, tuple[int, int]] = {}
    ties = torch.zeros(len(samplers), proposal.ids.shape[1] + 1, dtype=torch.bool)
    if by_walk:
        part = [r for b in by_walk for r in range(starts[b], starts[b + 1])]
        accepted, ids, part_ties = _walk(logits, rows, (part, by_walk), proposal, near_tie)
        outcomes |= zip(by_walk, zip(accepted.tolist(), ids.tolist(), strict=True), strict=True)
        ties[by_walk, : part_ties.shape[1]] = part_ties
    for group in _ratio_groups(samplers, by_ratio):
        outcomes |= zip(group, _draw_by_ratio(logits, rows, starts, proposal, group, rules), strict=True)
    num_accepted, next_ids = (tensor_of([outcomes[b][i] for b in range(len(samplers))]) for i in range(2))
    return Verdict(num_accepted, next_ids), ties


def _rows(
    proposal: Proposal, samplers: Sequence[Sampler], histories: Sequence[Sequence[int]]
) -> tuple[list[Row], list[int]]:
    rows: list[Row] = []
    starts = [0]
    for sampler, history, ids, length in zip(
        samplers, histories, proposal.ids.tolist(), proposal.lens.tolist(), strict=True
    ):
        rows.extend(Row(sampler, history, ids[:i]) for i in range(length + 1))
        starts.append(len(rows))
    return rows, starts


def _needs_ratio(proposal: Proposal, sampler: Sampler, b: int) -> bool:
    """Greedy rows, shared noise and certain drafts only compare ids; sampled drafts weigh p against q."""
    if proposal.probs is None or sampler.is_greedy or sampler.shares_noise:
        return False
    return any(row != CERTAIN for row in proposal.prob_rows[b].tolist()[: int(proposal.lens[b])])


def _walk(
    logits: Tensor, rows: list[Row], part: tuple[list[int], list[int]] | None, proposal: Proposal, near_tie: float
) -> tuple[Tensor, Tensor, Tensor]:
    """part: the rows of logits and the sequences that walk; None where all do."""
    lens, draft_ids = proposal.lens, proposal.ids
    if part is not None:
        selected, batch = part
        logits, rows = logits[selected], [rows[r] for r in selected]
        lens, draft_ids = lens[batch], draft_ids[batch]
    choice = choose(logits, rows, margins=near_tie > 0)
    own_ids, margins = choice.ids, choice.margins
    width = max(lens.tolist()) + 1
    ties = torch.zeros(len(lens), width, dtype=torch.bool)
    if len(rows) == ties.numel():  # every draft is as long as the longest
        own_ids = own_ids.view(ties.shape)
        if margins is not None:
            ties = margins.view(ties.shape) < near_tie
    else:
        place = torch.arange(width)[None] <= lens[:, None]
        own_ids = torch.zeros(place.shape, dtype=torch.int64).masked_scatter_(place, own_ids)
        if margins is not None:
            ties[place] = margins < near_tie
    if draft_ids.shape[1] >= width:
        draft_ids = draft_ids[:, : width - 1]
    return *walk(own_ids, draft_ids, lens), ties


def _ratio_groups(samplers: Sequence[Sampler], batch: list[int]) -> list[list[int]]:
    groups: dict[tuple[str, tuple[int, float, float] | None], list[int]] = {}
    for b in batch:
        groups.setdefault((samplers[b].params.verifier, samplers[b].truncation), []).append(b)
    return list(groups.values())


def _draw_by_ratio(
    logits: Tensor,
    rows: list[Row],
    starts: list[int],
    proposal: Proposal,
    batch: list[int],
    rules: Mapping[str, Rule] | None,
) -> list[tuple[int, int]]:
    """-> (how many draft tokens stand, the next token) of each sequence in `batch`"""
    part = [r for b in batch for r in range(starts[b], starts[b + 1])]
    part_rows = [rows[r] for r in part]
    selected = adjusted(logits if len(part) == len(rows) else logits[part], part_rows)
    sampler = part_rows[0].sampler
    uniforms = uniforms_for(sampler.generator, 2 * len(batch), logits.device).reshape(-1, 2)
    kernels = kernels_for(selected)
    if rules is None and kernels is not None and sampler.params.verifier in NATIVE_RULES:
        return _judged(kernels, selected, part_rows, proposal, batch, uniforms)
    target = laws_of(selected, part_rows)
    if report_nan(target.probs[:, 0], part_rows):
        # such a row ends its sequence if it is reached; until then it must not spoil the rows before it
        target = replace(target, probs=target.probs.nan_to_num())
    case, columns_to_ids = _case(target, proposal, batch)
    law = (RULES if rules is None else rules)[sampler.params.verifier](case)
    stop, column = draw(case, law, uniforms)
    batch_rows = torch.arange(len(batch), device=stop.device)
    next_ids = column if columns_to_ids is None else columns_to_ids[batch_rows, stop, column]
    return list(zip(stop.tolist(), next_ids.tolist(), strict=True))


def _judged(
    kernels: Kernels, logits: Tensor, rows: list[Row], proposal: Proposal, batch: list[int], uniforms: Tensor
) -> list[tuple[int, int]]:
    """The same laws and the same draw, in one call. Float64, and what runs elsewhere, takes the way above."""
    assert proposal.probs is not None
    all_lens = proposal.lens.tolist()
    lens = [all_lens[b] for b in batch]
    first_rows = list(accumulate((length + 1 for length in lens[:-1]), initial=0))
    samplers = [rows[first].sampler for first in first_rows]
    found = kernels.judge(
        logits,
        Docket(
            first_rows,
            lens,
            batch,
            [Way(sampler.temperature, sampler.truncation) for sampler in samplers],
            [sampler.params.verifier for sampler in samplers],
            proposal.ids,
            proposal.prob_rows,
            proposal.probs,
            proposal.kept_ids,
            uniforms.flatten().tolist(),
        ),
    )
    report_failed(rows, found.bad_rows)
    return list(zip(found.num_accepted, found.next_ids, strict=True))


def _case(target: Laws, proposal: Proposal, batch: list[int]) -> tuple[Case, Tensor | None]:
    """Lay the target's rows out as [B, K+1, W] and read the drafts' laws on the ids those keep."""
    device = target.probs.device
    lens = proposal.lens[batch].to(device)
    width = int(lens.max())
    drafted = proposal.drafted
    ids = torch.where(drafted, proposal.ids, 0)[batch][:, :width].to(device)
    prob_rows = torch.where(drafted, proposal.prob_rows, CERTAIN)[batch][:, :width].to(device)
    place = torch.arange(width + 1, device=device)[None] <= lens[:, None]
    p = target.probs.new_zeros(*place.shape, target.probs.shape[1])
    p[place] = target.probs
    kept = None
    if target.ids is not None:
        kept = target.ids.new_zeros(p.shape)
        kept[place] = target.ids
    drafts = _Drafts(ids, prob_rows, proposal.laws)
    columns = None if kept is None else kept[:, :width]
    p_draft = _read_at(p[:, :width], ids, columns)
    return Case(p, drafts.laws(p[:, :width], columns), p_draft, drafts.own(p.dtype), lens), kept


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Draft tokens [B, K] and the laws they were drawn from."""

    ids: Tensor
    prob_rows: Tensor
    drawn_from: Laws | None

    def own(self, dtype: torch.dtype) -> Tensor:
        """q of each draft token, 1 where it was certain. [B, K]"""
        if self.drawn_from is None:
            return torch.ones(self.ids.shape, dtype=dtype, device=self.ids.device)
        own = self._at(self.ids[..., None])[..., 0].to(dtype)
        return torch.where(self.prob_rows == CERTAIN, 1, own)

    def laws(self, like: Tensor, columns: Tensor | None) -> Tensor:
        """q on the ids in columns ([B, K, W]; None: every id), a point mass where it was certain. like: [B, K, W]"""
        certain = self.prob_rows == CERTAIN
        out = torch.zeros_like(like)
        if self.drawn_from is not None:
            if columns is None:
                out = self.drawn_from.dense(like.shape[2]).to(like.device)[self.prob_rows.clamp(min=0)].to(like.dtype)
            else:
                out = self._at(columns).to(like.dtype)
        if bool(certain.any()):
            ids = self.ids[certain][:, None]
            out[certain] = (
                torch.zeros_like(like[certain]).scatter_(1, ids, 1)
                if columns is None
                else (columns[certain] == ids).to(like.dtype)
            )
        return out

    def _at(self, columns: Tensor) -> Tensor:
        """[B, K, C] ids -> their probabilities under each place's law"""
        assert self.drawn_from is not None
        return self.drawn_from.to(self.ids.device).at(self.prob_rows.clamp(min=0), columns)


def _read_at(laws: Tensor, ids: Tensor, columns: Tensor | None) -> Tensor:
    """The probability of one id per law. laws: [B, K, W], ids: [B, K] -> [B, K]"""
    if columns is None:
        return laws.gather(2, ids[..., None])[..., 0]
    if laws.shape[1] == 0:
        return laws[..., 0]
    return torch.where(columns == ids[..., None], laws, 0).amax(-1)
