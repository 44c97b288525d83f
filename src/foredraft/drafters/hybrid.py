"""A lookup where it promises more tokens than a model does, and the model elsewhere: the hybrid of SuffixDecoding (arXiv:2411.04975)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foredraft.drafters._combined import CombinedDrafter, CountedMeans
from foredraft.engine.proposal import Drafter, DraftRequest, PendingProposal, Proposal, begin
from foredraft.errors import ForedraftError
from foredraft.sampling import Pending

_PRIOR_RATE = 0.6
"""The assumed acceptance rate of each draft token before any was counted."""


class HybridDrafter(CombinedDrafter["_History"]):
    """Asks a lookup first, which costs next to nothing. If it found a draft of which more tokens can be expected to be right than of
    the model's, that is the draft; else the model drafts.

    The numbers of correct tokens are counted by the length of the draft, in all texts and in the text itself: from committed tokens
    alone, so nothing depends on noise that a text may still use. A lookup's draft is also compared with the text if it was not used.

    lookup, model: (name, drafter).

    Raises ForedraftError for two parts of the same name.
    """

    def __init__(self, lookup: tuple[str, Drafter], model: tuple[str, Drafter]) -> None:
        if lookup[0] == model[0]:
            raise ForedraftError(f"a hybrid needs two different drafters, not {lookup[0]} twice")
        super().__init__(dict([lookup, model]))
        self._lookup, self._model = lookup[1], model[1]
        self._means = _Means(CountedMeans(_prior), CountedMeans(_prior))

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> the lookup's certain tokens or the model's draft for each request. All requests are learned from before any is drafted for, so
        order does not matter."""
        return self.begin(requests).resolve()

    def begin(self, requests: list[DraftRequest]) -> Pending[Proposal]:
        """See Drafter."""
        histories = [self._learn(request) for request in requests]
        found = self._lookup.propose(
            [self._request_for(self._lookup, request, request.max_len) for request in requests]
        ).draft_ids
        for history, request, ids in zip(histories, requests, found, strict=True):
            history.expect(len(request.tokens), ids, is_lookup=True, length=len(ids))
        asked = [
            b
            for b, (history, request, ids) in enumerate(zip(histories, requests, found, strict=True))
            if request.max_len and not history.prefers_lookup(len(ids), request.max_len)
        ]
        if not asked:
            return Pending.of(Proposal.certain(found))
        pending = begin(
            self._model,
            [self._request_for(self._model, requests[b], requests[b].max_len) for b in asked],
        )
        others = [b for b in range(len(requests)) if b not in set(asked)]

        def finish(drafted: Proposal) -> Proposal:
            for b, ids in zip(asked, drafted.draft_ids, strict=True):
                histories[b].expect(len(requests[b].tokens), ids, is_lookup=False, length=requests[b].max_len)
            if not others:
                return drafted
            parts = [(others, Proposal.certain([found[b] for b in others])), (asked, drafted)]
            return Proposal.merged(parts, len(requests))

        if not others and isinstance(pending, PendingProposal):
            return PendingProposal(lambda: finish(pending.resolve()), pending.draft)
        return pending.then(finish)

    def _learn(self, request: DraftRequest) -> _History:
        """Learn from the tokens that the text gained since its last draft."""
        history = self._histories.get(request.seq_id)
        if history is None or len(request.tokens) < history.length:  # new, or the id is used for another history
            own = _Means(*(CountedMeans(mean.of) for mean in self._means))
            history = self._histories[request.seq_id] = _History(own)
        history.compare(request.tokens, (self._means, history.means))
        return history


class _Means(NamedTuple):
    """The mean number of correct tokens by the length of a draft."""

    lookup: CountedMeans[int]
    model: CountedMeans[int]


def _prior(length: int) -> float:
    """The expected number of correct tokens of a draft if each is right with the prior rate."""
    return _PRIOR_RATE * (1 - _PRIOR_RATE**length) / (1 - _PRIOR_RATE)


class _Expected(NamedTuple):
    """Tokens that were expected from a place in the text on. length: the key that they count under."""

    start: int
    ids: Sequence[int]
    is_lookup: bool
    length: int

    def num_right(self, tokens: Sequence[int]) -> int | None:
        """How many of them, from the first on, the text has; None if it is too short to tell."""
        for place, token in enumerate(self.ids, start=self.start):
            if place >= len(tokens):
                return None
            if tokens[place] != token:
                return place - self.start
        return len(self.ids)


@dataclass(slots=True)
class _History:
    """The state of one sequence. means: of this text, whose priors are those of all texts. length: of its history when it was last
    asked for. expected: drafts that have yet to be compared with it."""

    means: _Means
    length: int = 0
    expected: list[_Expected] = field(default_factory=list)

    def prefers_lookup(self, num_found: int, model_len: int) -> bool:
        return self.means.lookup.of(num_found) >= self.means.model.of(model_len) if num_found else False

    def expect(self, start: int, ids: Sequence[int], *, is_lookup: bool, length: int) -> None:
        if ids:
            self.expected.append(_Expected(start, list(ids), is_lookup, length))

    def compare(self, tokens: Sequence[int], counted: Sequence[_Means]) -> None:
        """Count the drafts that can be told to be right or wrong by now."""
        self.length = len(tokens)
        open_ones = []
        for each in self.expected:
            num_right = each.num_right(tokens)
            if num_right is None:
                open_ones.append(each)
                continue
            for means in counted:
                (means.lookup if each.is_lookup else means.model).count(each.length, num_right)
        self.expected = open_ones
