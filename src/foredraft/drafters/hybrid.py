"""A lookup where it promises more tokens than a model does, and the model elsewhere: the hybrid of SuffixDecoding (arXiv:2411.04975)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from foredraft.drafters.combined import CombinedDrafter, CountedMeans, Offer
from foredraft.engine.proposal import Drafter, DraftRequest, PendingProposal, Proposal, begin, grows_trees
from foredraft.engine.token_tree import ROOT
from foredraft.errors import ForedraftError
from foredraft.sampling import Pending

_PRIOR_RATE = 0.6
"""The assumed share of right tokens among those whose predecessors are right, before any were counted."""
_LEAST_CHANCE = 0.1
"""The model drafts no token that is less likely to be right: unlike a lookup's, it costs a pass of the model beside its row. Together these
take about a tenth of the time that a token takes (benchmarks/controller/recorded_chats.py)."""


class HybridDrafter(CombinedDrafter["_History"]):
    """Asks a lookup first, which costs next to nothing. If it found a draft of which more tokens can be expected to be right than of
    the model's, that is the draft; else the model drafts: a chain of as many tokens as are likely enough to be right, or the requested
    tree. A lookup always drafts a chain, of as many tokens as the tree has nodes.

    A lookup's right tokens are counted by the length of its draft, a model's by their place in it, or by the size of a tree, in all
    texts and in the text itself: from committed tokens alone, so nothing depends on noise that a text may still use. A lookup's draft
    is also compared with the text if it was not used.

    lookup, model: (name, drafter).

    Raises ForedraftError for two parts of the same name.
    """

    def __init__(self, lookup: tuple[str, Drafter], model: tuple[str, Drafter]) -> None:
        if lookup[0] == model[0]:
            raise ForedraftError(f"a hybrid needs two different drafters, not {lookup[0]} twice")
        super().__init__(dict([lookup, model]))
        self._lookup, self._model = lookup[1], model[1]
        self.grows_trees = grows_trees(model[1])
        self._means = _Means(
            CountedMeans(_num_right_at_first),
            CountedMeans(lambda _: _PRIOR_RATE),
            CountedMeans(lambda size: _num_right_at_first(size[0])),
        )

    def with_parts(self, change: Callable[[Drafter], Drafter]) -> HybridDrafter:
        """See CombinedDrafter."""
        lookup, model = ((name, change(part)) for name, part in self._parts.items())
        return HybridDrafter(lookup, model)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> the lookup's certain tokens or the model's draft for each request. All requests are learned from before any is drafted for, so
        order does not matter."""
        return self.begin(requests).resolve()

    def begin(self, requests: list[DraftRequest]) -> Pending[Proposal]:
        """See Drafter."""
        histories = [self._learn(request) for request in requests]
        looked_up = [self._request_for(self._lookup, request, request.max_len) for request in requests]
        found = self._lookup.propose(looked_up).draft_ids
        asked: dict[int, DraftRequest] = {}
        for b, (history, request, ids) in enumerate(zip(histories, requests, found, strict=True)):
            history.expect(_Expected(len(request.tokens), Offer.of(ids, None), is_lookup=True))
            length, num_right = history.model_draft(request)
            if length and not (ids and history.means.lookup.of(len(ids)) >= num_right):
                asked[b] = self._request_for(self._model, request, length, request.shape)
        if not asked:
            return Pending.of(Proposal.certain(found))
        pending = begin(self._model, list(asked.values()))
        others = [b for b in range(len(requests)) if b not in asked]

        def finish(drafted: Proposal) -> Proposal:
            for b, ids, parents in zip(asked, drafted.draft_ids, drafted.draft_parents, strict=True):
                tree = _size_of(requests[b])
                histories[b].expect(_Expected(len(requests[b].tokens), Offer.of(ids, parents), tree=tree))
            if not others:
                return drafted
            parts = [(others, Proposal.certain([found[b] for b in others])), (list(asked), drafted)]
            return Proposal.merged(parts, len(requests))

        if not others and isinstance(pending, PendingProposal):
            return PendingProposal(lambda: finish(pending.resolve()), pending.draft)
        return pending.then(finish)

    def _learn(self, request: DraftRequest) -> _History:
        """Learn from the tokens that the text gained since its last draft."""
        history = self._history_of(request, lambda: _History(self._means.of_one_text()))
        history.compare(request.tokens, (self._means, history.means))
        return history


TreeSize: TypeAlias = tuple[int, int]
"""Levels and nodes of a requested tree."""


class _Means(NamedTuple):
    """lookup: the mean number of right tokens, by the length of a draft. model: the share of right tokens among those whose predecessors
    are right, by place in a chain. tree: the mean number of right tokens of the model's trees."""

    lookup: CountedMeans[int]
    model: CountedMeans[int]
    tree: CountedMeans[TreeSize]

    def of_one_text(self) -> _Means:
        """New means, whose priors are these."""
        return _Means(CountedMeans(self.lookup.of), CountedMeans(self.model.of), CountedMeans(self.tree.of))


def _num_right_at_first(length: int) -> float:
    return sum(_PRIOR_RATE**place for place in range(1, length + 1))


def _size_of(request: DraftRequest) -> TreeSize | None:
    """None: of a chain."""
    if request.shape is None:
        return None
    shape = request.shape.cut(request.max_len)
    return shape.depth, len(shape)


class _Expected(NamedTuple):
    """A draft from a place in the text on. tree: the size of a tree that the model was asked for."""

    start: int
    offer: Offer
    is_lookup: bool = False
    tree: TreeSize | None = None

    def num_right(self, tokens: Sequence[int]) -> int | None:
        """How many of its tokens in a row the text has; None if it is too short to show that."""
        written = tokens[self.start : self.start + len(self.offer.ids)]
        path = [right for _, right in self.offer.walk(written) if right is not None]
        node = path[-1] if path else ROOT
        is_open = len(path) == len(written) and node in self.offer.children
        return None if is_open else len(path)

    def record(self, num_right: int, means: _Means) -> None:
        if self.is_lookup:
            means.lookup.count(len(self.offer.ids), num_right)
        elif self.tree is not None:
            means.tree.count(self.tree, num_right)
        else:
            for place in range(min(num_right + 1, len(self.offer.ids))):
                means.model.count(place, place < num_right)


@dataclass(slots=True)
class _History:
    """The state of one sequence. means: of this text, whose priors are those of all texts. length: of its history when it was last
    asked for. expected: drafts that have yet to be compared with it."""

    means: _Means
    length: int = 0
    expected: list[_Expected] = field(default_factory=list)

    def model_draft(self, request: DraftRequest) -> tuple[int, float]:
        """How many tokens the model should draft, at least one where any may be, and how many can be expected to be right."""
        tree = _size_of(request)
        if tree is not None:
            return request.max_len, self.means.tree.of(tree)
        chance, expected = 1.0, 0.0
        for place in range(request.max_len):
            chance *= self.means.model.of(place)
            if place and chance < _LEAST_CHANCE:
                return place, expected
            expected += chance
        return request.max_len, expected

    def expect(self, draft: _Expected) -> None:
        if draft.offer.ids:
            self.expected.append(draft)

    def compare(self, tokens: Sequence[int], counted: Sequence[_Means]) -> None:
        """Count the drafts of which the text now shows how many tokens are right."""
        self.length = len(tokens)
        open_ones = []
        for each in self.expected:
            num_right = each.num_right(tokens)
            if num_right is None:
                open_ones.append(each)
                continue
            for means in counted:
                each.record(num_right, means)
        self.expected = open_ones
