"""A drafter that is watched, and made worse for every second sequence.

A drafter that is nearly always right shows next to nothing of what verification does after a rejection, and one that
seldom drafts shows nothing at all. Worse drafts are still honest ones, so what is promised holds for them too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from foredraft.proposal import CERTAIN, Drafter, DraftRequest, Proposal

_WRONG_EVERY = 3

Law: TypeAlias = int | Tensor
"""What a step's first draft token was drawn from: a law [V], or the token itself where it was certain."""


@dataclass(slots=True)
class WatchedDrafter:
    """Passes on to `inner`. firsts: by sequence and position in its tokens, the law of the first draft token of each
    step that began there; kept for requests whose draws are independent of the drafts, until `take`.
    """

    inner: Drafter
    fills: bool
    generator: torch.Generator
    num_drafted: int = 0
    num_sampled: int = 0
    firsts: dict[int, dict[int, Law]] = field(default_factory=dict)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        proposal = self.inner.propose(requests)
        if any(_is_worsened(request) for request in requests):
            proposal = self._worsened(proposal, requests)
        drafted = proposal.drafted
        self.num_drafted += int(drafted.sum())
        self.num_sampled += int((drafted & (proposal.prob_rows != CERTAIN)).sum())
        for b, request in enumerate(requests):
            if proposal.lens[b] and not (request.sampler.is_greedy or request.sampler.shares_noise):
                self.firsts.setdefault(request.seq_id, {})[len(request.tokens)] = _first_law(proposal, b)
        return proposal

    def forget(self, seq_ids: list[int]) -> None:
        self.inner.forget(seq_ids)

    def take(self, seq_id: int) -> dict[int, Law]:
        """What was noted of a sequence; it is not kept longer."""
        return self.firsts.pop(seq_id, {})

    def _worsened(self, proposal: Proposal, requests: list[DraftRequest]) -> Proposal:
        """Certain tokens wrong at every third position, sampled ones drawn anew from a flatter law, and something
        proposed where nothing was."""
        if self.fills:
            proposal = _filled(proposal, requests)
        ids, prob_rows = proposal.ids.clone(), proposal.prob_rows.clone()
        laws = [] if proposal.probs is None else [proposal.probs]
        num_laws = 0 if proposal.probs is None else len(proposal.probs)
        for b, request in enumerate(requests):
            if not _is_worsened(request):
                continue
            for i in range(int(proposal.lens[b])):
                row = int(prob_rows[b, i])
                if row == CERTAIN:
                    if (len(request.tokens) + i) % _WRONG_EVERY == 0:
                        ids[b, i] = _another(int(ids[b, i]), request)
                    continue
                assert proposal.probs is not None
                flat = proposal.probs[row].to(torch.float64).sqrt().cpu()
                ids[b, i] = int(torch.multinomial(flat, 1, generator=self.generator))
                laws.append((flat / flat.sum()).to(proposal.probs)[None])
                prob_rows[b, i] = num_laws
                num_laws += 1
        return replace(proposal, ids=ids, prob_rows=prob_rows, probs=torch.cat(laws) if laws else None)


def _is_worsened(request: DraftRequest) -> bool:
    return request.seq_id % 2 == 1


def _another(token: int, request: DraftRequest) -> int:
    """A token of the text, where it has another one: it is likelier to be almost right."""
    return next((t for t in reversed(request.tokens[:-1]) if t != token), token - 1 if token else 1)


def _filled(proposal: Proposal, requests: list[DraftRequest]) -> Proposal:
    """The last few tokens once more, where the drafter had nothing to say."""
    rows = []
    for b, request in enumerate(requests):
        empty = _is_worsened(request) and not proposal.lens[b]
        rows.append(list(request.tokens[-request.max_len :]) if empty and request.max_len else [])
    extra = Proposal.certain(rows)
    if not extra.ids.numel():
        return proposal
    width = max(proposal.ids.shape[1], extra.ids.shape[1])
    is_new = (extra.lens > 0)[:, None]
    return Proposal(
        torch.where(is_new, _wide(extra.ids, width, 0), _wide(proposal.ids, width, 0)),
        torch.where(is_new[:, 0], extra.lens, proposal.lens),
        torch.where(is_new, CERTAIN, _wide(proposal.prob_rows, width, CERTAIN)),
        proposal.probs,
    )


def _wide(rows: Tensor, width: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=fill)


def _first_law(proposal: Proposal, b: int) -> Law:
    row = int(proposal.prob_rows[b, 0])
    if row == CERTAIN:
        return int(proposal.ids[b, 0])
    assert proposal.probs is not None
    return proposal.probs[row].clone()
