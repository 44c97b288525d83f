"""One tree from several drafters: tokens they share are drafted once, and the rows go to the likeliest tokens of all drafters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foredraft.drafters.combined import CombinedDrafter, CountedMeans, Offer
from foredraft.engine.proposal import CERTAIN, Drafter, DraftRequest, Proposal, grows_trees, trees_of
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.errors import DrafterError, ForedraftError

_PRIORS = (0.6, 0.15, 0.08, 0.05)
"""Assumed shares of correct tokens by rank among siblings, before any were counted; the last one holds for all further ranks."""

AcceptedShares = CountedMeans[tuple[int, int]]
"""The share of one drafter's tokens that were correct, among those with a correct parent, by (depth, rank among siblings). Depth 0 is
directly after the pending token."""


class MergedDrafter(CombinedDrafter["_History"]):
    """Asks its parts for trees and merges them. Where two parts offer the same token after the same tokens, it becomes one node, and
    the row that this saves goes to the next best token.

    The requested shape says how many nodes each depth has; nodes that a depth does not use are left to deeper ones. Nodes are chosen
    depth by depth, by the probability of their paths. That is the product of the shares of correct tokens, which are counted for each
    part by depth and by rank among siblings, in all texts and in the text itself. A token that several parts offer is likelier.
    Without a shape the draft is a chain, made in the same way.

    This is exact: the choice at one depth does not depend on what the parts offer at deeper ones, whose noise the text may still use
    (docs/internals/trees.md), and counts come from committed tokens. A part must not draw its tokens, since those of a tree are
    certain.

    parts: by name, two or more drafters that grow trees.

    Raises ForedraftError for other parts, and DrafterError in `propose` if one of them draws.
    """

    grows_trees = True

    def __init__(self, parts: Mapping[str, Drafter]) -> None:
        unable = [name for name, part in parts.items() if not grows_trees(part)]
        if len(parts) < 2 or unable:
            raise ForedraftError(f"a merged tree needs two or more drafters that grow trees, not {unable or [*parts]}")
        super().__init__(parts)
        self._shares = [AcceptedShares(_prior) for _ in parts]

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> one row of certain tokens per request. All requests are learned from before any is drafted for, so order does not matter."""
        histories = [self._learn(request) for request in requests]
        for history in histories:
            history.offers = []
        for name, part in self._parts.items():
            for history, offer in zip(histories, self._ask(name, part, requests), strict=True):
                history.offers.append(offer)
        rows = [_draft(*pair) for pair in zip(requests, histories, strict=True)]
        return Proposal.certain([ids for ids, _ in rows], trees_of([parents for _, parents in rows]))

    def _learn(self, request: DraftRequest) -> _History:
        """Learn from the tokens that the text gained since its last draft."""
        history = self._history_of(request, lambda: _History([AcceptedShares(all_.of) for all_ in self._shares]))
        written = request.tokens[history.length :]
        for offer, shares, own in zip(history.offers, self._shares, history.shares, strict=False):
            _compare(offer, written, (shares, own))
        history.length = len(request.tokens)
        return history

    def _ask(self, name: str, part: Drafter, requests: Sequence[DraftRequest]) -> list[Offer]:
        proposal = part.propose([self._tree_request_for(part, request) for request in requests])
        if any(row != CERTAIN for rows in proposal.draft_prob_rows for row in rows):
            raise DrafterError(f"{name} sampled tokens for a merged tree: a tree's tokens must be certain, {CERTAIN}")
        return [Offer.of(*row) for row in zip(proposal.draft_ids, proposal.draft_parents, strict=True)]

    def _tree_request_for(self, part: Drafter, request: DraftRequest) -> DraftRequest:
        """For an unseeded request a chain is requested as a tree with one child per node, which is not drawn."""
        shape = request.shape
        if shape is None and request.sampler.draws:
            shape = TreeShape.chain(request.max_len)
        return self._request_for(part, request, request.max_len, shape)


def _prior(place: tuple[int, int]) -> float:
    return _PRIORS[min(place[1], len(_PRIORS) - 1)]


def _compare(offer: Offer, written: Sequence[int], shares: Iterable[AcceptedShares]) -> None:
    """Count which tokens of an offer were correct. written: the tokens that the text has after the pending token"""
    for depth, (children, right) in enumerate(offer.walk(written)):
        for rank, child in enumerate(children):
            for each in shares:
                each.count((depth, rank), child == right)


@dataclass(slots=True)
class _History:
    """The state of one sequence. shares, offers: one per part. length: of its history when the parts were last asked."""

    shares: list[AcceptedShares]
    offers: list[Offer] = field(default_factory=list)
    length: int = 0


@dataclass(slots=True)
class _Node:
    """parent: the parent's place in the merged tree. nodes: by part, the place of this node in the part's offer. chance: the
    probability that the text reaches it."""

    token: int
    parent: int
    nodes: dict[int, int] = field(default_factory=dict)
    chance: float = 0.0


def _draft(request: DraftRequest, history: _History) -> tuple[list[int], list[int] | None]:
    """-> tokens and parents, as in Proposal"""
    if request.shape is None:
        ids, parents = merge(history.offers, history.shares, [1] * request.max_len)
        return ids, parents if request.sampler.draws else None
    sizes = Counter(request.shape.cut(request.max_len).depths)
    return merge(history.offers, history.shares, [sizes[depth] for depth in sorted(sizes)])


def merge(
    offers: Sequence[Offer], shares: Sequence[AcceptedShares], sizes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """-> tokens and parents of one tree, as in Proposal

    offers, shares: one per part. sizes: the number of nodes at each depth; those that a depth does not use are left to the next one.
    """
    ids: list[int] = []
    parents: list[int] = []
    level = [(ROOT, _Node(0, ROOT, dict.fromkeys(range(len(offers)), ROOT), 1.0))]
    room = 0
    for depth, size in enumerate(sizes):
        found = [child for place, node in level for child in _children(node, place, depth, offers, shares)]
        best = sorted(found, key=lambda node: -node.chance)[: room + size]
        room += size - len(best)
        level = list(enumerate(best, start=len(ids)))
        ids += [node.token for node in best]
        parents += [node.parent for node in best]
    return ids, parents


def _children(
    node: _Node, place: int, depth: int, offers: Sequence[Offer], shares: Sequence[AcceptedShares]
) -> Iterable[_Node]:
    """The children that any part offers, each token once. The errors of the parts are assumed to be independent."""
    found: dict[int, _Node] = {}
    for part, own in node.nodes.items():
        for rank, child in enumerate(offers[part].children.get(own, ())):
            token = offers[part].ids[child]
            merged = found.setdefault(token, _Node(token, place))
            merged.nodes[part] = child
            merged.chance += (node.chance - merged.chance) * shares[part].of((depth, rank))
    return found.values()
