"""Negative controls: verifiers that are broken on purpose, one mistake each, which the tests have to reject.

Each is made of the real `verify` and changes what goes in, what comes out, or the rule in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from foredraft.certificate.drafts import law_of
from foredraft.certificate.report import DRAWN, GREEDY, SAMPLED, SEEDED
from foredraft.engine.cache import KVCache, MemoryPool
from foredraft.engine.proposal import CERTAIN, Proposal, Verdict
from foredraft.model import LanguageModel
from foredraft.sampling import Row, Sampler, adjusted, inverse_cdf, token_probs_of
from foredraft.verify import RULES, Case, OutcomeLaw, Rule, Verifier, block_law, verify
from foredraft.verify.law import drafted

Histories: TypeAlias = Sequence[Sequence[int]]
Mutation = Callable[[Tensor, Proposal, Sequence[Sampler], Histories], Verdict]

_LIKELY_ENOUGH = 0.1
_LENIENCE = 2.0
_LOW = 0.5
_COOLER = 0.8
_WARMER = 1.02
_DEEP = 3
"""Draft tokens that stand before one that falls late."""
_FAR = 68
"""Tokens of a text."""
_FAR_ENOUGH = 96
"""Tokens of a text in which something that begins behind _FAR has room to show."""
_MILD = 0.2
"""A penalty too small to change many texts."""


@dataclass(frozen=True, slots=True)
class Control:
    """One mistake. tests: the kinds of text in which it shows. needs: "" or what must happen for it to make a difference:
    "drafts"; "sampled": drafts drawn from a law; "block": those, under that rule; "deep": those, long ones; "far drafts": in long
    texts; "penalties"; "rows in step": steps that use their noise in the same order.
    verifier: the broken one. target: what else is broken, given the target.
    """

    name: str
    says: str
    tests: tuple[str, ...]
    needs: str = ""
    verifier: Verifier = verify
    target: Callable[[LanguageModel], LanguageModel] | None = None


def _verifier(mutation: Mutation) -> Verifier:
    def broken(
        logits: Tensor,
        proposal: Proposal,
        samplers: Sequence[Sampler],
        histories: Histories,
        *,
        near_tie: float = 0.0,
    ) -> tuple[Verdict, Tensor]:
        width = proposal.ids.shape[1] + 1
        return mutation(logits, proposal, samplers, histories), torch.zeros(len(samplers), width, dtype=torch.bool)

    return broken


# --- what comes out -----------------------------------------------------------------------------------------------


def accepts_everything(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    return _standing(proposal.lens, logits, proposal, samplers, histories)


def accepts_what_is_likely_enough(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    """As in "typical acceptance" (arXiv:2401.10774), which is quick and not lossless."""
    p = _raw_laws(logits, proposal)
    likely = p.gather(2, proposal.ids[..., None])[..., 0] >= _LIKELY_ENOUGH
    stands = (likely & proposal.drafted).long().cumprod(1).sum(1)
    return _standing(stands, logits, proposal, samplers, histories)


def accepts_one_too_many(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    right, _ = verify(logits, proposal, samplers, histories)
    more = torch.minimum(right.num_accepted + 1, proposal.lens)
    return _standing(more, logits, proposal, samplers, histories)


def takes_the_bonus_one_row_early(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    right, _ = verify(logits, proposal, samplers, histories)
    early = _own_tokens((proposal.lens - 1).clamp(min=0), logits, proposal, samplers, histories)
    is_bonus = (right.num_accepted == proposal.lens) & (proposal.lens > 0)
    return replace(right, next_ids=torch.where(is_bonus, early, right.next_ids))


def drops_a_token(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories) -> Verdict:
    """The last draft token that stands never reaches the text."""
    right, _ = verify(logits, proposal, samplers, histories)
    return replace(right, num_accepted=(right.num_accepted - 1).clamp(min=0))


def forgets_the_residual(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    """After a rejection it draws from p, in place of what q left of it."""
    right, _ = verify(logits, proposal, samplers, histories)
    own = _own_tokens(right.num_accepted, logits, proposal, samplers, histories)
    return replace(right, next_ids=torch.where(right.num_accepted < proposal.lens, own, right.next_ids))


def forgets_the_residual_late(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    """The same, but only where the fourth draft token or a later one is the first that falls."""
    right, _ = verify(logits, proposal, samplers, histories)
    own = _own_tokens(right.num_accepted, logits, proposal, samplers, histories)
    is_late = (right.num_accepted >= _DEEP) & (right.num_accepted < proposal.lens)
    return replace(right, next_ids=torch.where(is_late, own, right.next_ids))


class ReusesNoise:
    """A verifier that draws with the uniform numbers of the step before in every second step."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._used: Tensor | None = None

    def __call__(
        self,
        logits: Tensor,
        proposal: Proposal,
        samplers: Sequence[Sampler],
        histories: Histories,
        *,
        near_tie: float = 0.0,
    ) -> tuple[Verdict, Tensor]:
        generator = samplers[0].generator
        own = generator.get_state()
        if generator is not self._generator or self._used is None:
            self._generator, self._used = generator, own
            return verify(logits, proposal, samplers, histories, near_tie=near_tie)
        generator.set_state(self._used)
        self._used = None
        try:
            return verify(logits, proposal, samplers, histories, near_tie=near_tie)
        finally:
            generator.set_state(own)


def exchanges_p_and_q(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories) -> Verdict:
    """After a rejection it draws from max(q - p, 0)."""
    right, _ = verify(logits, proposal, samplers, histories)
    next_ids = right.next_ids.clone()
    starts = _starts(proposal)
    for b, stop in enumerate(right.num_accepted.tolist()):
        row = int(proposal.prob_rows[b, stop]) if stop < proposal.lens[b] else CERTAIN
        if row == CERTAIN or proposal.probs is None:
            continue
        rows = [Row(samplers[b], histories[b], proposal.ids[b, :stop].tolist())]
        at = int(starts[b]) + stop
        p = token_probs_of(adjusted(logits[at : at + 1], rows), rows).dense(logits.shape[1])[0]
        wrong = (law_of(proposal, row).dense(len(p))[0].to(p) - p).clamp(min=0)
        if bool(wrong.any()):
            uniform = torch.rand(1, generator=samplers[b].generator, dtype=torch.float64)
            next_ids[b] = inverse_cdf(wrong[None], uniform.to(wrong.device))[0]
    return replace(right, next_ids=next_ids)


# --- what goes in -------------------------------------------------------------------------------------------------


def weighs_by_another_law(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    """q as it was before the drafter's temperature, or a softmax for a draft that was the argmax."""
    probs = proposal.probs
    if probs is not None:
        flat = probs.sqrt()
        proposal = replace(proposal, probs=flat / flat.sum(-1, keepdim=True))
    return verify(logits, proposal, samplers, histories)[0]


def weighs_at_another_temperature(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    """q as it would be at a temperature 2 % higher."""
    probs = proposal.probs
    if probs is not None:
        warm = probs.double().pow(1 / _WARMER)
        proposal = replace(proposal, probs=(warm / warm.sum(-1, keepdim=True)).to(probs.dtype))
    return verify(logits, proposal, samplers, histories)[0]


def counts_ahead(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories) -> Verdict:
    """Each row's penalties count the whole draft, and not only what stands before the row."""
    logits = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    for sampler, start, ids, length in zip(
        samplers, _starts(proposal).tolist(), proposal.ids.tolist(), proposal.lens.tolist(), strict=True
    ):
        penalty = sampler.params.frequency_penalty + sampler.params.presence_penalty
        for row in range(length):
            for token in ids[row:length]:
                logits[start + row, token] -= penalty
    return verify(logits, proposal, samplers, histories)[0]


def drops_unlikely_drafts(
    logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    """A draft is cut before its first token whose own q is below half of the largest, after that token was drawn."""
    token_probs = proposal.token_probs
    if token_probs is None:
        return verify(logits, proposal, samplers, histories)[0]
    token_probs = token_probs.to(proposal.ids.device)
    rows, ids = proposal.prob_rows.clamp(min=0), torch.where(proposal.drafted, proposal.ids, 0)
    share = token_probs.at(rows, ids[..., None])[..., 0] / token_probs.probs.amax(1)[rows]
    own = torch.where(proposal.prob_rows == CERTAIN, 1, share)
    lens = ((own >= _LOW) & proposal.drafted).long().cumprod(1).sum(1)
    kept = torch.cat([torch.arange(int(s), int(s) + int(n) + 1) for s, n in zip(_starts(proposal), lens, strict=True)])
    return verify(logits[kept.to(logits.device)], replace(proposal, lens=lens), samplers, histories)[0]


def _with_params(**changes: Any) -> Mutation:
    """Each request's parameters, changed behind its back. A callable gets the old value."""

    def mutation(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories) -> Verdict:
        others = [_changed(sampler, history, changes) for sampler, history in zip(samplers, histories, strict=True)]
        return verify(logits, proposal, others, histories)[0]

    return mutation


def _changed(sampler: Sampler, history: Sequence[int], changes: Mapping[str, Any]) -> Sampler:
    old = sampler.params
    values = {name: change(getattr(old, name)) if callable(change) else change for name, change in changes.items()}
    return sampler.fresh(history[: sampler.prompt_len], replace(old, **values))


# --- the rule -----------------------------------------------------------------------------------------------------


def lenient(rule: Rule, case: Case) -> OutcomeLaw:
    """Draft tokens stand with min(1, 2 p/q)."""
    return rule(replace(case, p_draft=case.p_draft * _LENIENCE))


def stops_at_first_failure(case: Case) -> OutcomeLaw:
    """Block verification that does not try the later places."""
    right = block_law(case)
    holds = _holds_of(right.stop, case)
    ones = torch.ones_like(holds[:, :1])
    reached = torch.cat([ones, holds.cumprod(1)], dim=1)
    return OutcomeLaw(reached * torch.cat([1 - holds, ones], dim=1), right.scale)


def token_residual(case: Case) -> OutcomeLaw:
    """Block verification with the residual max(p - q, 0) of single tokens."""
    return OutcomeLaw(block_law(case).stop, torch.ones_like(case.p[..., 0]))


def uncapped_scale(case: Case) -> OutcomeLaw:
    """Block verification whose product of ratios may go above 1 on the way."""
    ratios = case.p_draft / torch.where(drafted(case), case.q_draft, 1)
    return OutcomeLaw(block_law(case).stop, torch.cat([torch.ones_like(ratios[:, :1]), ratios.cumprod(1)], dim=1))


def _holds_of(stop: Tensor, case: Case) -> Tensor:
    """h_1 .. h_K again, out of stop_i = h_i * prod_{j > i} (1 - h_j)."""
    held_by_none_later = stop.flip(1).cumsum(1).flip(1)[:, 1:]
    missed = torch.cat([1 - held_by_none_later, torch.ones_like(stop[:, :1])], dim=1)[:, 1:]
    holds = stop[:, 1:] / torch.where(missed > 0, missed, 1)
    return torch.where(drafted(case), holds, 0)


def _by(**rules: Rule) -> Verifier:
    return partial(verify, rules=rules)


LENIENT: Mapping[str, Rule] = MappingProxyType({name: partial(lenient, rule) for name, rule in RULES.items()})


# --- the cache ----------------------------------------------------------------------------------------------------


class StaleCache(KVCache):
    """Keeps the keys and values of the first rejected token where they are; what follows is read one place later."""

    def __init__(self, pool: MemoryPool, bytes_per_token: int, max_len: int) -> None:
        super().__init__(pool, bytes_per_token, max_len)
        self._num_stale: dict[int, int] = {}

    def num_held(self, seq_id: int) -> int:
        return super().num_held(seq_id) - self._num_stale.get(seq_id, 0)

    def keep_prefix_of(self, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        region, held = self.region(seq_id), self.num_held(seq_id)
        most = len(wanted) if at_most is None else at_most
        num_stale = self._num_stale.get(seq_id, 0)
        if held > most and len(region.tokens) < self.max_len // 2:
            num_stale += 1
        kept = min(held, most)
        del region.tokens[kept + num_stale :]
        self._num_stale[seq_id] = num_stale
        return len(wanted) - kept

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        return super().reserve(seq_id, num_tokens + self._num_stale.get(seq_id, 0))

    def drop(self, seq_ids: Sequence[int]) -> None:
        super().drop(seq_ids)
        for seq_id in seq_ids:
            self._num_stale.pop(seq_id, None)


class FarStaleCache(KVCache):
    """Keeps the keys and values of the token before in the place of the last one, where a whole draft stood and more than
    _FAR tokens are held."""

    def __init__(self, pool: MemoryPool, bytes_per_token: int, max_len: int) -> None:
        super().__init__(pool, bytes_per_token, max_len)
        self._num_kept: dict[int, int] = {}

    def keep_prefix_of(self, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        held, before = self.num_held(seq_id), self._num_kept.get(seq_id, 0)
        missing = super().keep_prefix_of(seq_id, wanted, at_most)
        kept = self._num_kept[seq_id] = self.num_held(seq_id)
        if kept == held > _FAR and before and kept > before + 1:
            region = self.region(seq_id)
            for layer in region.layers:
                for rows in region.layer(layer):
                    rows[:, -1] = rows[:, -2]
        return missing

    def drop(self, seq_ids: Sequence[int]) -> None:
        super().drop(seq_ids)
        for seq_id in seq_ids:
            self._num_kept.pop(seq_id, None)


class _ModelWithCache(LanguageModel):
    cache_type: type[KVCache] = KVCache

    def new_cache(self, pool: MemoryPool) -> KVCache:
        return self.cache_type(pool, self.traits.bytes_per_token, self.traits.context_len)


def _with_cache(cache_type: type[KVCache]) -> Callable[[LanguageModel], LanguageModel]:
    def broken(model: LanguageModel) -> LanguageModel:
        found = _ModelWithCache(model.hf, model.traits, model.body)
        found.cache_type = cache_type
        return found

    return broken


# --- all of them --------------------------------------------------------------------------------------------------

_ALL = (GREEDY, SEEDED, SAMPLED)

CONTROLS: tuple[Control, ...] = (
    Control("accept all", "every draft token stands", _ALL, "drafts", _verifier(accepts_everything)),
    Control(
        "accept the likely",
        "a draft token stands where the target gives it a tenth or more",
        _ALL,
        "drafts",
        _verifier(accepts_what_is_likely_enough),
    ),
    Control("one too many", "one draft token more stands", _ALL, "drafts", _verifier(accepts_one_too_many)),
    Control(
        "early bonus", "the bonus token comes from the row before its own", _ALL, "drafts",
        _verifier(takes_the_bonus_one_row_early),
    ),
    Control("lost token", "the last draft token that stands is lost", _ALL, "drafts", _verifier(drops_a_token)),
    Control(
        "stale cache", "a rejected token stays in the cache", _ALL, "drafts", target=_with_cache(StaleCache)
    ),
    Control(
        "stale far on", "behind 68 tokens the last of a draft that stood whole is stale in the cache", (GREEDY, SEEDED),
        "far drafts", target=_with_cache(FarStaleCache),
    ),
    Control(
        "counts ahead", "penalties count draft tokens that are not there yet", (GREEDY, SEEDED), "penalties",
        _verifier(counts_ahead),
    ),
    Control("lenient", "draft tokens stand with min(1, 2 p/q)", (DRAWN,), "sampled", _by(**LENIENT)),
    Control(
        "no residual", "a recovered token is drawn from p", (SAMPLED, DRAWN), "sampled", _verifier(forgets_the_residual)
    ),
    Control(
        "late residual", "the same, but only behind three draft tokens or more", (DRAWN,), "deep",
        _verifier(forgets_the_residual_late),
    ),
    Control(
        "p and q exchanged", "a recovered token is drawn from max(q - p, 0)", (DRAWN,), "sampled",
        _verifier(exchanges_p_and_q),
    ),
    Control(
        "another q", "drafts are weighed by a law they were not drawn from", (DRAWN,), "sampled",
        _verifier(weighs_by_another_law),
    ),
    Control(
        "warmer q", "drafts are weighed by their law at a temperature 2 % higher", (DRAWN,), "sampled",
        _verifier(weighs_at_another_temperature),
    ),
    Control(
        "noise again", "every second step draws with the noise of the one before", (SAMPLED,), "rows in step",
        ReusesNoise(),
    ),
    Control(
        "unlikely drafts dropped", "a drawn draft token goes unverified because its q is low", (DRAWN,), "sampled",
        _verifier(drops_unlikely_drafts),
    ),
    Control(
        "first failure", "block verification that does not try the later places", (DRAWN,), "block",
        _by(block=stops_at_first_failure),
    ),
    Control(
        "token residual", "block verification with the residual of single tokens", (DRAWN,), "block",
        _by(block=token_residual),
    ),
    Control(
        "uncapped scale", "block verification whose ratios are not capped at 1", (DRAWN,), "block",
        _by(block=uncapped_scale),
    ),
    Control(
        "drawn", "a token is drawn where the likeliest is asked for", (GREEDY,), "",
        _verifier(_with_params(temperature=1.0)),
    ),
    Control(
        "other noise", "the noise of another seed", (SEEDED,), "", _verifier(_with_params(seed=lambda s: s + 1))
    ),
    Control(
        "likeliest", "the likeliest token in place of a drawn one", (SAMPLED,), "",
        _verifier(_with_params(temperature=0.0)),
    ),
    Control(
        "cooler", "the temperature a fifth lower than asked for", (SAMPLED,), "",
        _verifier(_with_params(temperature=lambda t: _COOLER * t)),
    ),
)  # fmt: skip


_MOSTLY = 0.9
"""Share of draft tokens that must be drawn for steps to be taken as steps over drawn drafts."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened while the real verifier was tried. num_sampled: draft tokens drawn from a law. rule: by which they are
    verified. length: draft tokens of a step, at most. max_len: tokens of the longest text. penalty: the sum of what a
    token's logit loses by its count and by its presence."""

    num_drafted: int
    num_sampled: int
    rule: str
    length: int
    max_len: int = 0
    penalty: float = 0.0

    def lacks(self, needs: str) -> str | None:
        """Why a control that needs this could show nothing; None if it can."""
        if needs == "rows in step":
            has_certain = self.num_sampled < _MOSTLY * self.num_drafted
            return "steps over certain drafts do not use their noise in the same places" if has_certain else None
        if needs and not self.num_drafted:
            return "nothing was drafted"
        if needs in ("sampled", "block", "deep") and not self.num_sampled:
            return "no draft token was drawn from a law"
        if needs == "block" and self.rule != "block":
            return f"drafts are verified by {self.rule}"
        if needs == "block" and self.length < 2:
            return "one draft token at a time is no block"
        if needs == "deep" and self.length <= _DEEP:
            return f"at most {self.length} draft tokens stand before one that falls"
        if needs == "far drafts" and self.max_len < _FAR_ENOUGH:
            return f"the texts end before token {_FAR_ENOUGH}"
        if needs == "penalties" and abs(self.penalty) < _MILD:
            return "there is no frequency or presence penalty to speak of"
        return None


def applying(kind: str, seen: Seen) -> list[Control]:
    """Those that can show in what is looked at."""
    return [control for control in CONTROLS if kind in control.tests and seen.lacks(control.needs) is None]


def left_out(kind: str, seen: Seen) -> list[str]:
    """Those that cannot, and why: a line for each reason."""
    names: dict[str, list[str]] = {}
    for control in CONTROLS:
        why = seen.lacks(control.needs)
        if kind in control.tests and why is not None:
            names.setdefault(why, []).append(control.name)
    return [f"controls of {kind} tokens ({', '.join(those)}): {why}" for why, those in names.items()]


# --- shared -------------------------------------------------------------------------------------------------------


def _starts(proposal: Proposal) -> Tensor:
    """[B], the first row of logits of each sequence."""
    sizes = proposal.lens + 1
    return sizes.cumsum(0) - sizes


def _own_tokens(
    stops: Tensor, logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Tensor:
    """The target's own token behind each history and its first stops[b] draft tokens. [B]"""
    prefixes = [
        [*history, *ids[:stop]]
        for history, ids, stop in zip(histories, proposal.ids.tolist(), stops.tolist(), strict=True)
    ]
    rows = logits[(_starts(proposal) + stops).to(logits.device)]
    return verify(rows, Proposal.certain([()] * len(samplers)), samplers, prefixes)[0].next_ids


def _standing(
    stops: Tensor, logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], histories: Histories
) -> Verdict:
    """So many draft tokens stand, and the target's own follows them."""
    return Verdict(stops, _own_tokens(stops, logits, proposal, samplers, histories))


def _raw_laws(logits: Tensor, proposal: Proposal) -> Tensor:
    """softmax of the rows behind each draft token. [B, K, V], rubbish beyond lens"""
    places = torch.arange(proposal.ids.shape[1])[None].minimum((proposal.lens[:, None] - 1).clamp(min=0))
    rows = (_starts(proposal)[:, None] + places).to(logits.device)
    return torch.softmax(logits[rows].float(), dim=-1).cpu()
