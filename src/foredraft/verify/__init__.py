"""Verification of a whole ragged batch; the one place where rows are parted by the rule they run under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal, Verdict, tensor_of
from foredraft.errors import ForedraftError
from foredraft.kernels import RULES as NATIVE_RULES
from foredraft.kernels import DrawSpec, Kernels, VerificationBatch
from foredraft.sampling import (
    VERIFICATIONS,
    Choice,
    Chosen,
    Row,
    Sampler,
    adjusted,
    choose,
    chosen_of,
    report_failed,
    select,
    token_probs_of,
    uniforms_for,
)
from foredraft.sampling.search import kernels_for
from foredraft.verify.block import block_law
from foredraft.verify.case import case_of, of_row
from foredraft.verify.coupled import walk
from foredraft.verify.law import Case, OutcomeLaw, Rule, draw, next_weights, what_is_wrong
from foredraft.verify.rejection import rejection_law

RULES: Mapping[str, Rule] = MappingProxyType({"rejection": rejection_law, "block": block_law})
NO_RULES: Mapping[str, Rule] = MappingProxyType({})

__all__ = [
    "NO_RULES",
    "RULES",
    "Case",
    "OutcomeLaw",
    "Rule",
    "Verifier",
    "block_law",
    "checked_rules",
    "draw",
    "next_weights",
    "rejection_law",
    "verify",
    "walk",
]


def checked_rules(rules: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """Rules of a user's own, by name. Raises ForedraftError for a name that is taken, and for what cannot be called."""
    for name, rule in rules.items():
        if not isinstance(name, str) or not name or name in VERIFICATIONS:
            raise ForedraftError(f"a verification rule needs a name of its own, not {name!r}")
        if not callable(rule):
            raise ForedraftError(
                f"the verification rule {name!r} must be a function of a Case, not {type(rule).__name__}"
            )
    return MappingProxyType(dict(rules))


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
    rules: Mapping[str, Rule] = NO_RULES,
) -> tuple[Verdict, Tensor]:
    """What the target says to each proposal.

    logits: [sum(lens + 1), V], the target's rows, sequence after sequence: row i of sequence b follows its history and
    its first i draft tokens. near_tie: count chosen tokens whose `log p + noise` beats the next by less than this.
    rules: by the name that a request asks for, before those of RULES and the kernels' own. A request whose rule raises or
    returns no law fails alone.
    -> (Verdict of B rows, which of their K + 1 possible tokens would be near ties [B, K + 1] bool)
    """
    rows, starts = _rows(proposal, samplers, histories)
    by_ratio = [b for b in range(len(samplers)) if _needs_ratio(proposal, samplers[b], b)]
    margins = near_tie > 0
    if not by_ratio:
        choice = choose(logits, rows, margins=margins)
        num_accepted, next_ids, ties = _walked(choice, proposal.lens, proposal.ids, near_tie)
        return Verdict(num_accepted, next_ids), ties
    weighed = [_weighed(logits, rows, starts, proposal, group, rules) for group in _ratio_groups(samplers, by_ratio)]
    by_walk = sorted(set(range(len(samplers))) - set(by_ratio))
    part = _rows_of(by_walk, starts)
    chosen = chosen_of(select(logits, part), [rows[r] for r in part], margins=margins) if part else None
    told, walk_choice = _told(weighed, chosen)
    ties = torch.zeros(len(samplers), proposal.ids.shape[1] + 1, dtype=torch.bool)
    outcomes = {b: outcome for own in told for b, outcome in own}
    if walk_choice is not None:
        accepted, ids, part_ties = _walked(walk_choice, proposal.lens[by_walk], proposal.ids[by_walk], near_tie)
        outcomes |= zip(by_walk, zip(accepted.tolist(), ids.tolist(), strict=True), strict=True)
        ties[by_walk, : part_ties.shape[1]] = part_ties
    num_accepted, next_ids = (tensor_of([outcomes[b][i] for b in range(len(samplers))]) for i in range(2))
    return Verdict(num_accepted, next_ids), ties


def _told(weighed: list[_Weighed], chosen: Chosen | None) -> tuple[list[list[tuple[int, _Outcome]]], Choice | None]:
    found = [own.found for own in weighed]
    if chosen is not None:
        found.append(chosen.found.flatten())
    told = _here(found)
    outcomes = [
        own.told(part.to(torch.int64).tolist()) for own, part in zip(weighed, told[: len(weighed)], strict=True)
    ]
    return outcomes, None if chosen is None else chosen.told(told[-1].view(chosen.found.shape))


def _here(found: list[Tensor]) -> Sequence[Tensor]:
    """In one copy: each waits for the device. [N] each"""
    if found[0].device.type == "cpu":
        return found
    return torch.split(torch.cat(found).cpu(), [len(own) for own in found])


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
    if proposal.probs is None or sampler.is_greedy or sampler.is_coupled:
        return False
    return any(row != CERTAIN for row in proposal.prob_rows[b].tolist()[: int(proposal.lens[b])])


def _rows_of(batch: list[int], starts: list[int]) -> list[int]:
    return [r for b in batch for r in range(starts[b], starts[b + 1])]


def _walked(choice: Choice, lens: Tensor, draft_ids: Tensor, near_tie: float) -> tuple[Tensor, Tensor, Tensor]:
    """choice: of the rows of these sequences. -> (how many draft tokens stand [B], the next token [B], near ties [B, K + 1])"""
    own_ids, margins = choice.ids, choice.margins
    width = max(lens.tolist()) + 1
    ties = torch.zeros(len(lens), width, dtype=torch.bool)
    if len(own_ids) == ties.numel():  # every draft is as long as the longest
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


_Outcome = tuple[int, int]
"""How many draft tokens stand, and the next token."""


@dataclass(frozen=True, slots=True)
class _Weighed:
    """Outcomes that nobody has been told of yet. batch: the sequences. found: where the logits are, int64: how many draft tokens
    stand, the next tokens, and, where it is not noted yet, which of the rows are no law."""

    batch: list[int]
    found: Tensor
    rows: list[Row]

    def told(self, found: list[int]) -> list[tuple[int, _Outcome]]:
        """found: as it is here. -> the outcome of each sequence"""
        count = len(self.batch)
        report_failed(self.rows, [r for r, is_bad in enumerate(found[2 * count :]) if is_bad])
        return list(zip(self.batch, zip(found[:count], found[count : 2 * count], strict=True), strict=True))


def _weighed(
    logits: Tensor,
    rows: list[Row],
    starts: list[int],
    proposal: Proposal,
    batch: list[int],
    rules: Mapping[str, Rule],
) -> _Weighed:
    """Sequences of one rule and one truncation. But for what a truncated law keeps, nothing waits for the device."""
    part = _rows_of(batch, starts)
    part_rows = [rows[r] for r in part]
    selected = adjusted(select(logits, part), part_rows)
    sampler = part_rows[0].sampler
    uniforms = uniforms_for(sampler.generator, 2 * len(batch), logits.device).reshape(-1, 2)
    kernels = kernels_for(selected)
    name = sampler.params.verifier
    if name not in rules and kernels is not None and name in NATIVE_RULES:
        return _judged(kernels, selected, part_rows, proposal, batch, uniforms)
    target = token_probs_of(selected, part_rows)
    # such a row ends its sequence if it is reached; until then it must not spoil the rows before it
    is_bad = target.probs[:, 0].isnan()
    case, columns_to_ids = case_of(replace(target, probs=target.probs.nan_to_num()), proposal, batch)
    law = _checked(name, rules[name], case, part_rows) if name in rules else RULES[name](case)
    stop, column = draw(case, law, uniforms)
    next_ids = column if columns_to_ids is None else of_row(columns_to_ids, stop).gather(1, column[:, None])[:, 0]
    return _Weighed(batch, torch.cat([stop, next_ids, is_bad.to(torch.int64)]), part_rows)


def _checked(name: str, rule: Rule, case: Case, rows: Sequence[Row]) -> OutcomeLaw:
    """The law of a rule that is not ours. Where it is none, the rows have failed, and any law will do for them."""
    try:
        law = rule(case)
        wrong = what_is_wrong(law, case)
    except Exception as error:
        law, wrong = None, f"raised {type(error).__name__}: {error}"
    if law is not None and wrong is None:
        return law
    for row in rows:
        row.sampler.fail(row.prefix_len, f"the verification rule {name!r} {wrong}")
    return rejection_law(case)


def _judged(
    kernels: Kernels, logits: Tensor, rows: list[Row], proposal: Proposal, batch: list[int], uniforms: Tensor
) -> _Weighed:
    """The same laws and the same draw, in one call. Float64, and what runs elsewhere, takes the way above."""
    assert proposal.probs is not None
    all_lens = proposal.lens.tolist()
    lens = [all_lens[b] for b in batch]
    first_rows = list(accumulate((length + 1 for length in lens[:-1]), initial=0))
    samplers = [rows[first].sampler for first in first_rows]
    found = kernels.verify(
        logits,
        VerificationBatch(
            first_rows,
            lens,
            batch,
            [DrawSpec(sampler.temperature, sampler.truncation) for sampler in samplers],
            [sampler.params.verifier for sampler in samplers],
            proposal.ids,
            proposal.prob_rows,
            proposal.probs,
            proposal.kept_ids,
            uniforms.flatten().tolist(),
        ),
    )
    report_failed(rows, found.bad_rows)
    return _Weighed(batch, tensor_of([*found.num_accepted, *found.next_ids]), rows)
