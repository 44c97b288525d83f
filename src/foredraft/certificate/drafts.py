"""Who is asked for drafts in a test: drafters in turn, each of them watched, and made worse for every second sequence.

A drafter that is nearly always right shows next to nothing of what verification does after a rejection, and one that
seldom drafts shows nothing at all. Worse drafts are still honest ones, so what is promised holds for them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Drafter, DraftRequest, Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.policy import DraftBudget, FixedPolicy
from foredraft.sampling import Sampler, TokenProbs

_HOTTER = 2.0
_TURN = 8


class InTurn:
    """Drafters in turn, for as many tokens as the request wants: in one text one after the other, and at the same time
    different ones in different texts. A policy that drafts what pays may draft nothing, and a test of that shows nothing.

    Whose turn it is follows from the number and the length of a text alone, so it cannot bias it.
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self._drafters = [FixedPolicy(name) for name in drafters]

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return sum((drafter.fallbacks for drafter in self._drafters), Counter())

    def begin(self, running: Sequence[TokenSequence]) -> None:
        for drafter in self._drafters:
            drafter.begin(running)

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        # texts come in twos, of which the second one's drafts are worsened
        turn = sequence.seq_id // 2 + len(sequence.tokens) // _TURN
        return self._drafters[turn % len(self._drafters)].draft_budget(sequence)

    def observe(self, step: Step) -> None:
        """Nothing is learnt."""

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        new = [name for drafter in self._drafters for name in drafter.cool_down(drafters, reason, num_steps)]
        return list(dict.fromkeys(new))

    def cooldowns(self) -> dict[str, str]:
        return {name: why for drafter in self._drafters for name, why in drafter.cooldowns().items()}


class FirstDraft(NamedTuple):
    """What a step began with. law: one row, of its first draft token, or the token itself where it was certain. sampler: what
    the drafter drew with. num_drafted: its draft tokens. All of it was settled before anything was drawn."""

    probs: int | TokenProbs
    sampler: Sampler
    num_drafted: int


@dataclass(slots=True)
class WatchedDrafter:
    """Passes on to `inner`. fills: propose something, to every second sequence, where inner does not. script: full texts
    by sequence, which are proposed to every second one in place of what inner says: so drafts stand as a whole, in part
    and not at all, whatever inner is worth. wrong_every: certain tokens proposed to every second sequence are wrong at
    positions that this divides.

    firsts: by sequence and position in its tokens, the drafts of each step that began there; kept for requests whose
    draws are independent of the drafts, until `take`. num_sampled: draft tokens that were drawn from a law.
    """

    inner: Drafter
    fills: bool
    wrong_every: int = 3
    script: Mapping[int, Sequence[int]] = field(default_factory=dict)
    num_drafted: int = 0
    num_sampled: int = 0
    firsts: dict[int, dict[int, FirstDraft]] = field(default_factory=dict)
    _hotter: dict[int, Sampler] = field(default_factory=dict)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        requests = [self._worsened(request) for request in requests]
        proposal = self.inner.propose(requests)
        if any(_is_worsened(request) for request in requests):
            proposal = _with_wrong_tokens(self._filled(proposal, requests), requests, self.wrong_every)
        self._note(proposal, requests)
        return proposal

    @property
    def bytes_held(self) -> int:
        return getattr(self.inner, "bytes_held", 0)

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self._hotter.pop(seq_id, None)
        self.inner.forget(seq_ids)

    def take(self, seq_id: int) -> dict[int, FirstDraft]:
        """What was noted of a sequence; it is not kept longer."""
        return self.firsts.pop(seq_id, {})

    def _worsened(self, request: DraftRequest) -> DraftRequest:
        """Who draws from a law draws from a hotter one."""
        if not _is_worsened(request) or _is_certain(request):
            return request
        sampler = self._hotter.get(request.seq_id)
        if sampler is None:
            sampler = self._hotter[request.seq_id] = hotter(request.sampler, request.tokens)
        return replace(request, sampler=sampler)

    def _filled(self, proposal: Proposal, requests: list[DraftRequest]) -> Proposal:
        if not self.fills:
            return proposal
        lens = proposal.lens.tolist()
        extra = Proposal.certain([self._extra(request, n) for request, n in zip(requests, lens, strict=True)])
        return _replaced(proposal, extra) if extra.ids.numel() else proposal

    def _extra(self, request: DraftRequest, length: int) -> Sequence[int]:
        """What to propose in place of so many tokens of inner's; nothing leaves those. Without a script the last few tokens
        once more, where inner had nothing to say."""
        if not _is_worsened(request) or not request.max_len:
            return ()
        if request.seq_id in self.script:
            return self.script[request.seq_id][len(request.tokens) :][: request.max_len]
        return () if length else request.tokens[-request.max_len :]

    def _note(self, proposal: Proposal, requests: list[DraftRequest]) -> None:
        drafted = proposal.drafted
        self.num_drafted += int(drafted.sum())
        self.num_sampled += int((drafted & (proposal.prob_rows != CERTAIN)).sum())
        for b, (request, length) in enumerate(zip(requests, proposal.lens.tolist(), strict=True)):
            if length and not _is_certain(request):
                first = FirstDraft(_first_law(proposal, b), request.sampler, length)
                self.firsts.setdefault(request.seq_id, {})[len(request.tokens)] = first


def hotter(sampler: Sampler, tokens: Sequence[int]) -> Sampler:
    """The same request at a higher temperature. tokens: its history, or more of it."""
    temperature = _HOTTER * (sampler.params.temperature or 1.0)
    return sampler.fresh(tokens[: sampler.prompt_len], replace(sampler.params, temperature=temperature))


def _is_worsened(request: DraftRequest) -> bool:
    return request.seq_id % 2 == 1


def _is_certain(request: DraftRequest) -> bool:
    """Whether the request's own tokens are settled by its history, so that nothing is there to bet on."""
    return request.sampler.is_greedy or request.sampler.is_coupled


def _with_wrong_tokens(proposal: Proposal, requests: list[DraftRequest], wrong_every: int) -> Proposal:
    ids = proposal.ids.clone()
    certain = (proposal.drafted & (proposal.prob_rows == CERTAIN)).tolist()
    for b, request in enumerate(requests):
        if _is_worsened(request):
            for i, is_certain in enumerate(certain[b]):
                if is_certain and (len(request.tokens) + i) % wrong_every == 0:
                    ids[b, i] = _another(int(ids[b, i]), request)
    return replace(proposal, ids=ids)


def _another(token: int, request: DraftRequest) -> int:
    """A token of the text, where it has another one: it is likelier to be almost right."""
    return next((t for t in reversed(request.tokens[:-1]) if t != token), token - 1 if token else 1)


def _replaced(proposal: Proposal, extra: Proposal) -> Proposal:
    """The rows of extra where it has any."""
    width = max(proposal.ids.shape[1], extra.ids.shape[1])
    is_new = (extra.lens > 0)[:, None]
    return Proposal(
        torch.where(is_new, _wide(extra.ids, width, 0), _wide(proposal.ids, width, 0)),
        torch.where(is_new[:, 0], extra.lens, proposal.lens),
        torch.where(is_new, CERTAIN, _wide(proposal.prob_rows, width, CERTAIN)),
        proposal.probs,
        proposal.kept_ids,
    )


def _wide(rows: Tensor, width: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=fill)


def _first_law(proposal: Proposal, b: int) -> int | TokenProbs:
    row = int(proposal.prob_rows[b, 0])
    return int(proposal.ids[b, 0]) if row == CERTAIN else law_of(proposal, row)


def law_of(proposal: Proposal, row: int) -> TokenProbs:
    """One of the laws that drafts were drawn from, copied: a proposal may share its memory with the next one."""
    assert proposal.probs is not None
    kept_ids = proposal.kept_ids
    return TokenProbs(
        proposal.probs[row : row + 1].clone(), None if kept_ids is None else kept_ids[row : row + 1].clone()
    )
