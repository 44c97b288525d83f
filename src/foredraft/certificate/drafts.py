"""Drafts for the tests: the user's drafters in turn, each of them recorded, with worse drafts for every second sequence.

A drafter that is nearly always right shows next to nothing of what verification does after a rejection, and one that
seldom drafts shows nothing at all. Worse drafts are still honest ones, so what is promised holds for them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foredraft.engine.proposal import CERTAIN, Drafter, DraftRequest, Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.policy import DraftBudget, FixedPolicy
from foredraft.sampling import Sampler, TokenProbs

_HOTTER = 2.0
_TURN = 8
"""Tokens of a text before the next drafter's turn."""


class InTurn:
    """A policy that uses the drafters in turn, with as many draft tokens as the request wants. A policy that drafts what
    pays may draft nothing, and a test of that shows nothing.

    The drafter follows from the number and the length of a text alone, so it cannot bias the text.
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
        # texts come in pairs, and the second one's drafts are worsened
        turn = sequence.seq_id // 2 + len(sequence.tokens) // _TURN
        return self._drafters[turn % len(self._drafters)].draft_budget(sequence)

    def observe(self, step: Step) -> None:
        """Nothing is learnt."""

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        names = [name for drafter in self._drafters for name in drafter.cool_down(drafters, reason, num_steps)]
        return list(dict.fromkeys(names))

    def cooldowns(self) -> dict[str, str]:
        return {name: reason for drafter in self._drafters for name, reason in drafter.cooldowns().items()}


FirstLaw = int | TokenProbs
"""The law of the first draft token of a step, one row; or the token itself, where it was certain."""


@dataclass(slots=True)
class RecordedDrafter:
    """Records what `inner` drafts, and worsens it for every second sequence: drawn tokens come from a hotter law, certain
    ones are wrong at the positions that wrong_every divides.

    fills: where inner proposes nothing to such a sequence, propose its last tokens once more. script: full texts by
    sequence, proposed in place of inner's drafts, so that drafts are accepted as a whole, in part and not at all.
    first_laws: of the steps of each sequence, by their position in its tokens, until `take`; only for requests whose tokens
    are drawn independently of the drafts. num_sampled: draft tokens that were drawn from a law.
    """

    inner: Drafter
    fills: bool
    wrong_every: int = 3
    script: Mapping[int, Sequence[int]] = field(default_factory=dict)
    num_drafted: int = 0
    num_sampled: int = 0
    first_laws: dict[int, dict[int, FirstLaw]] = field(default_factory=dict)
    _hotter: dict[int, Sampler] = field(default_factory=dict)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        requests = [self._with_hotter_law(request) for request in requests]
        proposal = self.inner.propose(requests)
        if any(_is_worsened(request) for request in requests):
            proposal = self._worsened(proposal, requests)
        self._record(proposal, requests)
        return proposal

    @property
    def bytes_held(self) -> int:
        return getattr(self.inner, "bytes_held", 0)

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self._hotter.pop(seq_id, None)
        self.inner.forget(seq_ids)

    def take(self, seq_id: int) -> dict[int, FirstLaw]:
        """The first laws of a sequence, which are dropped here."""
        return self.first_laws.pop(seq_id, {})

    def _with_hotter_law(self, request: DraftRequest) -> DraftRequest:
        if not _is_worsened(request) or _is_certain(request):
            return request
        sampler = self._hotter.get(request.seq_id)
        if sampler is None:
            sampler = self._hotter[request.seq_id] = _hotter(request)
        return replace(request, sampler=sampler)

    def _worsened(self, proposal: Proposal, requests: list[DraftRequest]) -> Proposal:
        rows, sources = list[list[int]](), list[list[int]]()
        columns = (proposal.ids.tolist(), proposal.prob_rows.tolist(), proposal.lens.tolist())
        for request, ids, prob_rows, length in zip(requests, *columns, strict=True):
            row, source = ids[:length], prob_rows[:length]
            if _is_worsened(request):
                if self.fills and (others := list(self._replacement(request, length))):
                    row, source = others, [CERTAIN] * len(others)
                row = self._with_wrong_tokens(row, source, request)
            rows.append(row)
            sources.append(source)
        return Proposal.of(rows, sources, proposal.token_probs)

    def _replacement(self, request: DraftRequest, length: int) -> Sequence[int]:
        """Proposed in place of inner's `length` draft tokens; if empty, those are kept."""
        if not request.max_len:
            return ()
        if request.seq_id in self.script:
            return self.script[request.seq_id][len(request.tokens) :][: request.max_len]
        return () if length else request.tokens[-request.max_len :]

    def _with_wrong_tokens(self, row: list[int], source: list[int], request: DraftRequest) -> list[int]:
        start = len(request.tokens)
        is_wrong = [s == CERTAIN and (start + i) % self.wrong_every == 0 for i, s in enumerate(source)]
        return [_another(token, request) if wrong else token for token, wrong in zip(row, is_wrong, strict=True)]

    def _record(self, proposal: Proposal, requests: list[DraftRequest]) -> None:
        drafted = proposal.drafted
        self.num_drafted += int(drafted.sum())
        self.num_sampled += int((drafted & (proposal.prob_rows != CERTAIN)).sum())
        for b, (request, length) in enumerate(zip(requests, proposal.lens.tolist(), strict=True)):
            if length and not _is_certain(request):
                self.first_laws.setdefault(request.seq_id, {})[len(request.tokens)] = _first_law(proposal, b)


def _hotter(request: DraftRequest) -> Sampler:
    """The request's sampler at a higher temperature."""
    sampler = request.sampler
    temperature = _HOTTER * (sampler.params.temperature or 1.0)
    return sampler.fresh(request.tokens[: sampler.prompt_len], replace(sampler.params, temperature=temperature))


def _first_law(proposal: Proposal, b: int) -> FirstLaw:
    """A copy: a proposal may share its memory with the next one."""
    row, laws = int(proposal.prob_rows[b, 0]), proposal.token_probs
    if row == CERTAIN or laws is None:
        return int(proposal.ids[b, 0])
    return TokenProbs(laws.probs[row : row + 1].clone(), None if laws.ids is None else laws.ids[row : row + 1].clone())


def _is_worsened(request: DraftRequest) -> bool:
    return request.seq_id % 2 == 1


def _is_certain(request: DraftRequest) -> bool:
    """Whether the history fixes the request's own tokens, which leaves nothing to bet on."""
    return request.sampler.is_greedy or request.sampler.is_coupled


def _another(token: int, request: DraftRequest) -> int:
    """A wrong token, taken from the text where that has another one, because it is more likely to be almost right."""
    return next((t for t in reversed(request.tokens[:-1]) if t != token), token - 1 if token else 1)
