"""A hybrid drafts with a lookup where more of its tokens can be expected to be right than of the model's, and only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from foredraft.drafters import HybridDrafter, NgramDrafter, SuffixDrafter
from foredraft.engine.contract import check_probs, check_proposal
from foredraft.engine.proposal import (
    CERTAIN,
    Drafter,
    DraftRequest,
    Features,
    PendingProposal,
    Proposal,
    begin,
)
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError
from foredraft.sampling import TokenProbs

MakeRequest = Callable[..., DraftRequest]
VOCAB_SIZE = 16


@dataclass
class Drafts:
    """Drafts what `make` gives for the tokens of a request, and draws where it draws."""

    make: Callable[[Sequence[int]], Sequence[int]]
    taps: tuple[int, ...] = ()
    shares_cache: bool = False
    asked: list[DraftRequest] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.asked += requests
        rows = [list(self.make(request.tokens))[: request.max_len] for request in requests]
        if not any(request.sampler.draws for request in requests):
            return Proposal.certain(rows)
        drawn_from = [
            [0 if request.sampler.draws else CERTAIN] * len(row) for request, row in zip(requests, rows, strict=True)
        ]
        return Proposal.of(rows, drawn_from, TokenProbs(torch.full((1, VOCAB_SIZE), 1 / VOCAB_SIZE)))

    def forget(self, seq_ids: list[int]) -> None:
        self.forgotten += seq_ids


def always(*ids: int) -> Drafts:
    return Drafts(lambda tokens: ids)


def hybrid(lookup: Drafter, model: Drafter) -> HybridDrafter:
    return HybridDrafter(("suffix", lookup), ("eagle", model))


def write(
    drafter: HybridDrafter, make_request: MakeRequest, text: Sequence[int], seq_id: int = 0, **params: Any
) -> list[list[int]]:
    """The drafts before each token of a text, one token at a time, after the first token."""
    return [
        drafter.propose([make_request(seq_id, list(text[: place + 1]), 4, **params)]).draft_ids[0]
        for place in range(len(text))
    ]


def test_where_the_lookup_finds_nothing_the_model_drafts(make_request: MakeRequest) -> None:
    drafter = hybrid(always(), always(5, 6, 7))
    assert drafter.propose([make_request(0, [1, 2], 2)]).draft_ids == [[5, 6]]
    assert drafter.propose([make_request(0, [1, 2, 3], 0)]).draft_ids == [[]]


def test_before_anything_is_counted_the_longer_draft_is_used(make_request: MakeRequest) -> None:
    lookup, model = Drafts(lambda tokens: [8] * tokens[-1]), always(5, 6, 7)
    proposal = hybrid(lookup, model).propose(
        [make_request(seq_id, [1, length], 3) for seq_id, length in enumerate((0, 2, 3))]
    )
    assert proposal.draft_ids == [[5, 6, 7], [5, 6, 7], [8, 8, 8]]
    assert [request.seq_id for request in model.asked] == [0, 1]


@pytest.mark.parametrize("right", ["lookup", "model"])
def test_the_part_that_was_right_drafts(make_request: MakeRequest, right: str) -> None:
    """The lookup's drafts are compared with the text even while the model drafts. What one text showed holds for the next."""
    lookup, model = (
        (always(7, 7, 7, 7), always(6, 6, 6, 6)) if right == "lookup" else (always(6, 6, 6, 6), always(7, 7, 7, 7))
    )
    drafter = hybrid(lookup, model)
    assert write(drafter, make_request, [1] + [7] * 40)[-1] == [7, 7, 7, 7]
    assert write(drafter, make_request, [2] + [7] * 3, seq_id=1)[-1] == [7, 7, 7, 7]


def test_a_text_counts_more_than_other_texts(make_request: MakeRequest) -> None:
    drafter = hybrid(always(7, 7, 7, 7), always(6, 6, 6, 6))
    write(drafter, make_request, [1] + [7] * 300)
    assert write(drafter, make_request, [1] + [6] * 60, seq_id=1)[-1] == [6, 6, 6, 6]
    assert write(drafter, make_request, [1] + [7] * 4, seq_id=2)[-1] == [7, 7, 7, 7]


def test_a_draft_is_counted_once_when_the_text_shows_how_much_of_it_was_right(make_request: MakeRequest) -> None:
    drafter = hybrid(always(7, 8, 9), always())
    means = drafter._means.lookup
    prior = means.of(3)
    drafter.propose([make_request(0, [1], 3)])
    drafter.propose([make_request(0, [1, 7, 8], 0)])
    assert means.of(3) == prior, "the third token is open"
    drafter.propose([make_request(0, [1, 7, 8, 4], 0)])
    assert means.of(3) == pytest.approx((6 * prior + 2) / 7)
    drafter.propose([make_request(0, [1, 7, 8, 4, 5], 0)])
    assert means.of(3) == pytest.approx((6 * prior + 2) / 7)


def test_the_model_drafts_as_many_tokens_as_are_likely_to_be_right(make_request: MakeRequest) -> None:
    """Its tokens count by place: here the first is always right, and the second never."""
    model = always(7, 8, 9, 9, 9, 9)
    drafter = hybrid(always(), model)
    assert drafter.propose([make_request(0, [1], 6)]).draft_ids == [[7, 8, 9, 9]], ".6 to the fourth is above .1"
    write(drafter, make_request, [1] + [7] * 30)
    assert write(drafter, make_request, [1] + [7] * 30)[-1] == [7]
    drafter = hybrid(always(), Drafts(lambda tokens: [tokens[-1]] * 4))
    assert write(drafter, make_request, [1] + [7] * 30)[-1] == [7, 7, 7, 7]
    assert write(drafter, make_request, [*range(15)] * 4, seq_id=1)[-1] == [14], (
        "at least one, so that it is seen to improve"
    )


@dataclass
class DraftsTrees(Drafts):
    """Drafts trees of the requested shape. A first child is 7, the next one 8."""

    grows_trees: bool = True

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        [request] = requests
        self.asked += requests
        if request.shape is None:
            return Proposal.certain([[7] * request.max_len])
        shape = request.shape.cut(request.max_len)
        ranks = [shape.parents[:node].count(parent) for node, parent in enumerate(shape.parents)]
        return Proposal.certain([[7 + rank for rank in ranks]], [shape.parents])


TREE = TreeShape((-1, -1, 0, 1))


def test_it_grows_trees_if_its_model_does(make_request: MakeRequest) -> None:
    assert not hybrid(always(), always()).grows_trees
    model = DraftsTrees(lambda tokens: [])
    drafter = hybrid(Drafts(lambda tokens: [5] * tokens[-1]), model)
    assert drafter.grows_trees
    grown = drafter.propose([replace(make_request(0, [1, 0], 3), shape=TREE)])
    assert (grown.draft_ids, grown.draft_parents) == ([[7, 8, 7]], [(-1, -1, 0)])
    looked_up = drafter.propose([replace(make_request(1, [1, 3], 3), shape=TREE)])
    assert (looked_up.draft_ids, looked_up.draft_parents) == ([[5, 5, 5]], [None])
    assert len(model.asked) == 1


def test_the_right_tokens_of_a_tree_are_counted_on_all_branches(make_request: MakeRequest) -> None:
    drafter = hybrid(always(), DraftsTrees(lambda tokens: []))
    means = drafter._means.tree
    prior = means.of((2, 4))
    request = make_request(0, [1], 4)
    drafter.propose([replace(request, shape=TREE)])
    drafter.propose([make_request(0, [1, 8], 0)])
    assert means.of((2, 4)) == prior, "the next token is open"
    drafter.propose([make_request(0, [1, 8, 7], 0)])
    assert means.of((2, 4)) == pytest.approx((6 * prior + 2) / 7)
    drafter.propose([replace(make_request(0, [1, 8, 7], 4), shape=TREE)])
    drafter.propose([make_request(0, [1, 8, 7, 9], 0)])
    assert means.of((2, 4)) == pytest.approx((6 * prior + 2) / 8), "the second tree was wrong"


def test_drawn_tokens_keep_their_distributions(make_request: MakeRequest) -> None:
    """A lookup's tokens are certain, also for a request that draws."""
    lookup = Drafts(lambda tokens: [8] * tokens[-1])
    drafter = hybrid(lookup, always(5, 6))
    requests = [
        make_request(0, [1, 3], 3, temperature=1.0),
        make_request(1, [1, 0], 3, temperature=1.0),
        make_request(2, [1, 0], 3),
    ]
    proposal = drafter.propose(requests)
    check_proposal(drafter, proposal, requests, VOCAB_SIZE)
    check_probs(drafter, proposal)
    assert proposal.draft_ids == [[8, 8, 8], [5, 6], [5, 6]]
    assert proposal.draft_prob_rows == [[CERTAIN] * 3, [0, 0], [CERTAIN] * 2]


def test_drafts_do_not_depend_on_the_order_of_requests(make_request: MakeRequest) -> None:
    texts = {0: [1, 2, 3, 1, 2, 3, 1, 2], 1: [4, 4, 4, 4, 4], 2: [5, 6, 7]}

    def drafts(order: Sequence[int]) -> dict[int, list[int]]:
        drafter = hybrid(SuffixDrafter(), always(9, 9))
        for length in (3, 5, 8):
            requests = [make_request(seq_id, texts[seq_id][:length], 4) for seq_id in order]
            found = drafter.propose(requests).draft_ids
        return dict(zip(order, found, strict=True))

    assert drafts([0, 1, 2]) == drafts([2, 0, 1])


def test_a_draft_that_a_device_is_still_choosing_is_passed_on(make_request: MakeRequest) -> None:
    """If the lookup has nothing better for any text, the target may read the model's placeholders."""
    draft = object()

    @dataclass
    class OnDevice(Drafts):
        def begin(self, requests: list[DraftRequest]) -> PendingProposal:
            return PendingProposal(lambda: self.propose(requests), draft)  # type: ignore[arg-type]

    lookup = Drafts(lambda tokens: [8] * tokens[-1])
    drafter = hybrid(lookup, OnDevice(lambda tokens: [5, 6]))
    pending = begin(drafter, [make_request(0, [1, 0], 3), make_request(1, [1, 0], 3)])
    assert isinstance(pending, PendingProposal)
    assert pending.draft is draft
    assert pending.resolve().draft_ids == [[5, 6], [5, 6]]
    mixed = begin(drafter, [make_request(0, [1, 0, 3], 3), make_request(1, [1, 0, 0], 3)])
    assert getattr(mixed, "draft", None) is None
    assert mixed.resolve().draft_ids == [[8, 8, 8], [5, 6]]


def test_each_part_gets_its_own_features_and_cache(make_request: MakeRequest) -> None:
    lookup, model = always(), Drafts(lambda tokens: [], taps=(2, 5), shares_cache=True)
    drafter = hybrid(lookup, model)
    assert (drafter.taps, drafter.shares_cache) == ((2, 5), True)
    features, region = Features(torch.arange(8.0).view(2, 4)), object()
    drafter.propose([replace(make_request(0, [1, 2, 3], 4), features=features, region=region)])  # type: ignore[arg-type]
    assert (lookup.asked[-1].features, lookup.asked[-1].region) == (None, None)
    assert model.asked[-1].features is not None
    assert torch.equal(model.asked[-1].features.since(0), features.since(0))
    assert model.asked[-1].region is region


def test_its_parts_must_differ() -> None:
    with pytest.raises(ForedraftError, match="two different drafters, not suffix twice"):
        HybridDrafter(("suffix", SuffixDrafter()), ("suffix", NgramDrafter()))
