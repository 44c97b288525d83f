"""Broken verifiers: the real one with one mistake each, in its output, in its input, or in its rule.

The catalogue in certificate/controls.py says what each of them does wrong. `foredraft check` and the tests must detect them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal, Verdict
from foredraft.engine.token_tree import ROOT, path_to, tokens_to
from foredraft.sampling import Row, Sampler, adjusted, inverse_cdf, token_probs_of
from foredraft.verify import RULES, Case, OutcomeLaw, Rule, Verifier, block_law, verify
from foredraft.verify.law import drafted

_LIKELY_ENOUGH = 0.1
_LENIENCE = 2.0
_LOW = 0.5


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of `verify`."""

    logits: Tensor
    proposal: Proposal
    samplers: Sequence[Sampler]
    histories: Sequence[Sequence[int]]

    def verify(self) -> Verdict:
        return verify(self.logits, self.proposal, self.samplers, self.histories)

    @property
    def lens(self) -> Tensor:
        return self.proposal.lens

    @property
    def starts(self) -> Tensor:
        """[B], the index of each sequence's first row of logits."""
        sizes = self.lens + 1
        return sizes.cumsum(0) - sizes

    def child(self, b: int, node: int) -> int | None:
        """The first child of a node of a draft, or of ROOT; None if it has none."""
        parents = self.proposal.draft_parents[b]
        if parents is None:
            return node + 1 if node + 1 < int(self.lens[b]) else None
        return next((place for place, parent in enumerate(parents) if parent == node), None)

    def descend(self, b: int, goes_on: Callable[[int, int], bool]) -> int:
        """The node reached from ROOT by going to the first child while goes_on(node, its first child) is true."""
        node = ROOT
        while (child := self.child(b, node)) is not None and goes_on(node, child):
            node = child
        return node

    def target_ids(self, nodes: Sequence[int]) -> Tensor:
        """The target's own token after each history and the draft tokens down to nodes[b], which may be ROOT. [B]"""
        drafts = zip(self.histories, self.proposal.draft_ids, self.proposal.draft_parents, nodes, strict=True)
        prefixes = [[*history, *tokens_to(ids, parents, node)] for history, ids, parents, node in drafts]
        rows = self.logits[(self.starts + 1 + torch.tensor(nodes)).to(self.logits.device)]
        nothing = Proposal.certain([()] * len(self.samplers))
        return torch.tensor(verify(rows, nothing, self.samplers, prefixes).next_ids)

    def accepting(self, nodes: Sequence[int]) -> Verdict:
        """The verdict that accepts the draft tokens down to nodes[b], followed by the target's own token."""
        paths = [path_to(parents, node) for parents, node in zip(self.proposal.draft_parents, nodes, strict=True)]
        verdict = Verdict.of_chains([0] * len(nodes), self.target_ids(nodes).tolist())
        return replace(verdict, paths=paths)


def mutation(function: Callable[[Inputs], Verdict]) -> Verifier:
    def broken(
        logits: Tensor,
        proposal: Proposal,
        samplers: Sequence[Sampler],
        histories: Sequence[Sequence[int]],
        *,
        near_tie: float = 0.0,
    ) -> Verdict:
        return function(Inputs(logits, proposal, samplers, histories))

    return broken


def _stops(verdict: Verdict) -> Tensor:
    """[B], the number of accepted draft tokens of each sequence."""
    return torch.tensor(verdict.num_accepted)


def _last_nodes(verdict: Verdict) -> list[int]:
    """The last accepted draft token of each sequence, or ROOT."""
    return [path[-1] if path else ROOT for path in verdict.paths]


def _with_next(verdict: Verdict, where: Tensor, next_ids: Tensor) -> Verdict:
    """The verdict with other next tokens for some of the sequences. where, next_ids: [B]"""
    return replace(verdict, next_ids=torch.where(where, next_ids, torch.tensor(verdict.next_ids)).tolist())


# --- mistakes in the output ---------------------------------------------------------------------------------------


@mutation
def accepts_everything(inputs: Inputs) -> Verdict:
    return inputs.accepting([inputs.descend(b, lambda *_: True) for b in range(len(inputs.samplers))])


@mutation
def accepts_the_likely(inputs: Inputs) -> Verdict:
    """As in "typical acceptance" (arXiv:2401.10774), which is fast but not lossless."""
    p = torch.softmax(inputs.logits.float(), dim=-1).cpu()

    def last_likely(b: int) -> int:
        start, ids = int(inputs.starts[b]), inputs.proposal.draft_ids[b]
        return inputs.descend(b, lambda node, child: bool(p[start + node + 1, ids[child]] >= _LIKELY_ENOUGH))

    return inputs.accepting([last_likely(b) for b in range(len(inputs.samplers))])


@mutation
def accepts_one_too_many(inputs: Inputs) -> Verdict:
    last = _last_nodes(inputs.verify())
    children = [inputs.child(b, node) for b, node in enumerate(last)]
    return inputs.accepting([node if child is None else child for node, child in zip(last, children, strict=True)])


@mutation
def takes_the_bonus_one_row_early(inputs: Inputs) -> Verdict:
    right = inputs.verify()
    is_bonus = [bool(path) and inputs.child(b, path[-1]) is None for b, path in enumerate(right.paths)]
    early = inputs.target_ids([path[-2] if len(path) > 1 else ROOT for path in right.paths])
    return _with_next(right, torch.tensor(is_bonus), early)


@mutation
def loses_a_token(inputs: Inputs) -> Verdict:
    right = inputs.verify()
    return replace(right, paths=[path[:-1] for path in right.paths])


def without_residual(after: int = 0) -> Verifier:
    """After a rejection it draws from p instead of the residual, if at least `after` draft tokens are accepted."""

    @mutation
    def broken(inputs: Inputs) -> Verdict:
        right = inputs.verify()
        stops = _stops(right)
        is_chain = torch.tensor([parents is None for parents in inputs.proposal.draft_parents])
        is_recovered = is_chain & (stops >= after) & (stops < inputs.lens)
        return _with_next(right, is_recovered, inputs.target_ids(_last_nodes(right)))

    return broken


@mutation
def exchanges_p_and_q(inputs: Inputs) -> Verdict:
    right, laws = inputs.verify(), inputs.proposal.token_probs
    if laws is None:
        return right
    stops, vocab_size = _stops(right), inputs.logits.shape[1]
    drafts = zip(inputs.samplers, inputs.histories, inputs.proposal.ids.tolist(), right.num_accepted, strict=True)
    rows = [Row(sampler, history, ids[:stop]) for sampler, history, ids, stop in drafts]
    logits = inputs.logits[(inputs.starts + stops).to(inputs.logits.device)]
    p = token_probs_of(adjusted(logits, rows).logits, rows).dense(vocab_size)
    row = torch.nn.functional.pad(inputs.proposal.prob_rows, (0, 1), value=CERTAIN).gather(1, stops[:, None])[:, 0]
    q = laws.dense(vocab_size)[row.clamp(min=0).to(laws.probs.device)].to(p)
    residual = (q - p).clamp(min=0)
    is_recovered = (stops < inputs.lens) & (row != CERTAIN) & residual.any(1).cpu()
    uniforms = torch.rand(len(rows), generator=inputs.samplers[0].generator, dtype=torch.float64).to(p.device)
    recovered = inverse_cdf(torch.where(is_recovered.to(p.device)[:, None], residual, p), uniforms)
    return _with_next(right, is_recovered, recovered.cpu())


def reuses_noise() -> Verifier:
    """Draws each second step with the noise of the step before. Its state: the generator, and the state of the noise before the step."""
    generator: torch.Generator | None = None
    used: tuple[Tensor, list[float]] | None = None

    @mutation
    def broken(inputs: Inputs) -> Verdict:
        nonlocal generator, used
        sampler = inputs.samplers[0]
        state = sampler.generator.get_state(), sampler.unused_uniforms
        if sampler.generator is not generator or used is None:
            generator, used = sampler.generator, state
            return inputs.verify()
        sampler.generator.set_state(used[0])
        sampler.unused_uniforms = used[1]
        used = None
        try:
            return inputs.verify()
        finally:
            sampler.generator.set_state(state[0])
            sampler.unused_uniforms = state[1]

    return broken


# --- mistakes in the input ----------------------------------------------------------------------------------------


def weighs_by_a_power(power: float) -> Verifier:
    """Weighs drafts by q^power, as if q were taken at another temperature, or before the drafter's temperature was applied."""

    @mutation
    def broken(inputs: Inputs) -> Verdict:
        probs = inputs.proposal.probs
        if probs is None:
            return inputs.verify()
        laws = probs.double().pow(power)
        laws = (laws / laws.sum(-1, keepdim=True)).to(probs.dtype)
        return replace(inputs, proposal=inputs.proposal.replaced(probs=laws)).verify()

    return broken


@mutation
def counts_ahead(inputs: Inputs) -> Verdict:
    logits = inputs.logits.clone() if inputs.logits.dtype == torch.float64 else inputs.logits.float().clone()
    drafts = zip(inputs.starts.tolist(), inputs.proposal.ids.tolist(), inputs.lens.tolist(), strict=True)
    for sampler, (start, ids, length) in zip(inputs.samplers, drafts, strict=True):
        penalty = sampler.params.frequency_penalty + sampler.params.presence_penalty
        for row in range(length):
            for token in ids[row:length]:
                logits[start + row, token] -= penalty
    return replace(inputs, logits=logits).verify()


@mutation
def drops_unlikely_drafts(inputs: Inputs) -> Verdict:
    """Cuts a draft before its first token whose q is below half of the largest, although that token was already drawn."""
    proposal = inputs.proposal
    if proposal.token_probs is None:
        return inputs.verify()
    token_probs = proposal.token_probs.to(proposal.ids.device)
    rows, ids = proposal.prob_rows.clamp(min=0), torch.where(proposal.drafted, proposal.ids, 0)
    share = token_probs.at(rows, ids[..., None])[..., 0] / token_probs.probs.amax(1)[rows]
    likely = torch.where(proposal.prob_rows == CERTAIN, 1, share) >= _LOW
    lens = (likely & proposal.drafted).long().cumprod(1).sum(1)
    kept = torch.cat([torch.arange(int(s), int(s) + int(n) + 1) for s, n in zip(inputs.starts, lens, strict=True)])
    logits = inputs.logits[kept.to(inputs.logits.device)]
    return replace(inputs, logits=logits, proposal=proposal.replaced(lens=lens)).verify()


def with_params(**changes: Any) -> Verifier:
    """Verifies with changed parameters. changes: new values, or functions of the old value."""

    def changed(sampler: Sampler, history: Sequence[int]) -> Sampler:
        old = sampler.params
        values = {name: change(getattr(old, name)) if callable(change) else change for name, change in changes.items()}
        return sampler.fresh(history[: sampler.prompt_len], replace(old, **values))

    @mutation
    def broken(inputs: Inputs) -> Verdict:
        samplers = list(map(changed, inputs.samplers, inputs.histories))
        return replace(inputs, samplers=samplers).verify()

    return broken


# --- mistakes in the rule -----------------------------------------------------------------------------------------


def with_rules(rules: Mapping[str, Rule]) -> Verifier:
    return partial(verify, rules=MappingProxyType(dict(rules)))


def lenient(rule: Rule, case: Case) -> OutcomeLaw:
    return rule(replace(case, p_draft=case.p_draft * _LENIENCE))


LENIENT = {name: partial(lenient, rule) for name, rule in RULES.items()}


def stops_at_first_failure(case: Case) -> OutcomeLaw:
    right = block_law(case)
    holds = _holds_of(right.stop, case)
    ones = torch.ones_like(holds[:, :1])
    reached = torch.cat([ones, holds.cumprod(1)], dim=1)
    return OutcomeLaw(reached * torch.cat([1 - holds, ones], dim=1), right.scale)


def token_residual(case: Case) -> OutcomeLaw:
    return OutcomeLaw(block_law(case).stop, torch.ones_like(case.p[..., 0]))


def uncapped_scale(case: Case) -> OutcomeLaw:
    ratios = case.p_draft / torch.where(drafted(case), case.q_draft, 1)
    return OutcomeLaw(block_law(case).stop, torch.cat([torch.ones_like(ratios[:, :1]), ratios.cumprod(1)], dim=1))


def _holds_of(stop: Tensor, case: Case) -> Tensor:
    """Recover h_1 .. h_K from stop_i = h_i * prod_{j > i} (1 - h_j)."""
    held_by_none_later = stop.flip(1).cumsum(1).flip(1)[:, 1:]
    missed = torch.cat([1 - held_by_none_later, torch.ones_like(stop[:, :1])], dim=1)[:, 1:]
    holds = stop[:, 1:] / torch.where(missed > 0, missed, 1)
    return torch.where(drafted(case), holds, 0)
