"""Merged trees contain common nodes once, then the likeliest other ones, and their choice of nodes does not depend on deeper noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foredraft.drafters.merged as merged_module
from foredraft.drafters import MergedDrafter, NgramDrafter, NoDrafter, SuffixDrafter
from foredraft.drafters.combined import Offer
from foredraft.drafters.merged import AcceptedShares, merge
from foredraft.engine.contract import check_proposal
from foredraft.engine.proposal import Drafter, DraftRequest, Features, Proposal
from foredraft.engine.token_tree import ROOT, TreeShape, depths_of, tokens_to
from foredraft.errors import DrafterError, ForedraftError
from foredraft.sampling import TokenProbs
from foredraft.verify import walk
from tests.verify.test_trees import as_proposed, distance, law_of_walks, shapes_of, target_law

MakeRequest = Callable[..., DraftRequest]
Paths = frozenset[tuple[int, ...]]
EXACT, BROKEN = 1e-12, 1e-3
VOCAB_SIZE = 3


@dataclass
class Fixed:
    """Drafts the same tokens for every request. asked: the requests it got."""

    ids: Sequence[int]
    parents: Sequence[int] | None = None
    taps: tuple[int, ...] = ()
    shares_cache: bool = False
    grows_trees: bool = True
    asked: list[DraftRequest] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.asked += requests
        return Proposal.certain([self.ids] * len(requests), [self.parents] * len(requests))

    def forget(self, seq_ids: list[int]) -> None:
        self.forgotten += seq_ids


def merged(*parts: Drafter) -> MergedDrafter:
    return MergedDrafter({f"part {i}": part for i, part in enumerate(parts)})


def draft(drafter: MergedDrafter, request: DraftRequest) -> tuple[list[int], list[int] | None]:
    proposal = drafter.propose([request])
    (parents,) = proposal.draft_parents
    return proposal.draft_ids[0], None if parents is None else list(parents)


def paths_of(ids: Sequence[int], parents: Sequence[int] | None) -> list[tuple[int, ...]]:
    return [tuple(tokens_to(ids, parents, node)) for node in range(len(ids))]


def wide(*sizes: int) -> TreeShape:
    """A shape with these numbers of nodes at each depth."""
    parents, first = [ROOT] * sizes[0], 0
    for before, size in pairwise(sizes):
        parents += [first + i % before for i in range(size)]
        first += before
    return TreeShape(tuple(parents))


# --- which nodes a merged tree has --------------------------------------------------------------------------------


def test_nodes_that_parts_have_in_common_are_drafted_once(make_request: MakeRequest) -> None:
    drafter = merged(Fixed([5, 6, 7]), Fixed([5, 6, 8, 9], [ROOT, 0, 1, 1]))
    request = replace(make_request(0, [1, 2], 8), shape=wide(2, 2, 2))
    found = paths_of(*draft(drafter, request))
    assert sorted(found) == [(5,), (5, 6), (5, 6, 7), (5, 6, 8), (5, 6, 9)]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([5], [5, 6, 7], {5, 6}),
        ([5], [6, 7, 8], {5, 6}),
        ([], [6, 7, 8], {6, 7}),
        ([5, 6], [6, 5], {5, 6}),
    ],
    ids=["a free row is the next sibling's", "the first of each", "one finds nothing", "both"],
)
def test_free_rows_are_the_next_best_siblings(
    make_request: MakeRequest, one: list[int], other: list[int], expected: set[int]
) -> None:
    drafter = merged(Fixed(one, [ROOT] * len(one)), Fixed(other, [ROOT] * len(other)))
    ids, parents = draft(drafter, replace(make_request(0, [1, 2], 8), shape=wide(2)))
    assert (set(ids), parents) == (expected, [ROOT, ROOT])


def test_rows_that_a_depth_does_not_use_are_left_to_the_next(make_request: MakeRequest) -> None:
    drafter = merged(Fixed([5, 6, 7, 8], [ROOT, 0, 0, 0]), Fixed([5, 6], [ROOT, 0]))
    found = paths_of(*draft(drafter, replace(make_request(0, [1, 2], 8), shape=wide(2, 2))))
    assert found == [(5,), (5, 6), (5, 7), (5, 8)]


def test_tokens_of_the_part_that_was_right_come_first(make_request: MakeRequest) -> None:
    """What was right in this text counts more than what was right in others."""
    often, seldom = Fixed([5]), Fixed([6])
    drafter = merged(often, seldom)
    tokens = [1]
    for _ in range(20):
        draft(drafter, replace(make_request(0, list(tokens), 4), shape=wide(1)))
        tokens.append(6)
    for seq_id in (0, 1):
        ids, _ = draft(drafter, replace(make_request(seq_id, list(tokens), 4), shape=wide(2)))
        assert ids == [6, 5]
    for _ in range(40):
        tokens.append(5)
        draft(drafter, replace(make_request(2, list(tokens), 4), shape=wide(1)))
    ids, _ = draft(drafter, replace(make_request(2, list(tokens), 4), shape=wide(2)))
    assert ids == [5, 6]


def test_without_a_shape_it_drafts_a_chain_of_the_likeliest_tokens(make_request: MakeRequest) -> None:
    """Without a seed the chain is verified as a tree, since it is not drawn."""
    drafter = merged(Fixed([]), Fixed([6, 7]))
    assert draft(drafter, make_request(0, [1, 2], 8)) == ([6, 7], None)
    assert draft(drafter, make_request(1, [1, 2], 8, temperature=1.0, seed=2)) == ([6, 7], None)
    assert draft(drafter, make_request(2, [1, 2], 8, temperature=1.0)) == ([6, 7], [ROOT, 0])
    assert draft(drafter, make_request(3, [1, 2], 1)) == ([6], None)


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> Paths:
    """Draws a tree, as the set of the paths to its nodes."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, most))):
        before = draw(st.sampled_from([(), *paths]))
        paths.append((*before, draw(st.integers(0, 2))))
    return frozenset(paths)


def offer_of(paths: Paths) -> Offer:
    return Offer.of(*as_proposed(sorted(paths, key=lambda path: (len(path), path))))


def counted_shares(data: st.DataObject) -> AcceptedShares:
    shares = AcceptedShares(lambda place: 0.5 / (place[1] + 1))
    for place in product(range(3), range(3)):
        for _ in range(data.draw(st.integers(0, 3))):
            shares.count(place, data.draw(st.booleans()))
    return shares


def by_brute_force(
    parts: Sequence[Paths], shares: Sequence[AcceptedShares], sizes: Sequence[int]
) -> Mapping[tuple[int, ...], float]:
    """The paths that should be drafted, with the probability of each."""
    chosen: dict[tuple[int, ...], float] = {(): 1.0}
    for depth, size in enumerate(sizes):
        spare = sum(sizes[:depth]) - (len(chosen) - 1)
        chances = {}
        for path in {path for part in parts for path in part if len(path) == depth + 1 and path[:-1] in chosen}:
            wrong = 1.0
            for part, counts in zip(parts, shares, strict=True):
                siblings = sorted(other for other in part if other[:-1] == path[:-1] and len(other) == len(path))
                if path in part:
                    wrong *= 1 - counts.of((depth, siblings.index(path)))
            chances[path] = chosen[path[:-1]] * (1 - wrong)
        chosen |= dict(sorted(chances.items(), key=lambda pair: -pair[1])[: size + spare])
    return {path: chance for path, chance in chosen.items() if path}


@given(
    parts=st.lists(trees(), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_a_merged_tree_has_the_likeliest_nodes_of_each_depth(
    parts: list[Paths], sizes: list[int], data: st.DataObject
) -> None:
    shares = [counted_shares(data) for _ in parts]
    found = paths_of(*merge([offer_of(part) for part in parts], shares, sizes))
    expected = by_brute_force(parts, shares, sizes)
    assert len(found) == len(set(found)) <= sum(sizes)
    assert set(found) <= set(chain(*parts))
    differing = set(found) ^ set(expected)
    if differing:  # ties only; nodes below a differing one differ too
        depth = min(map(len, differing))
        assert sum(len(path) == depth for path in found) == sum(len(path) == depth for path in expected)
        worst = min(chance for path, chance in expected.items() if len(path) == depth)
        chances = by_brute_force(parts, shares, [99] * len(sizes))
        assert all(chances[path] == pytest.approx(worst) for path in differing if len(path) == depth)


@given(
    parts=st.lists(trees(), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    depth=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_the_nodes_of_a_depth_do_not_depend_on_deeper_offers(
    parts: list[Paths], sizes: list[int], depth: int, data: st.DataObject
) -> None:
    shares = [counted_shares(data) for _ in parts]
    cut = [frozenset(path for path in part if len(path) <= depth) for part in parts]
    whole, upper = (paths_of(*merge([offer_of(part) for part in each], shares, sizes)) for each in (parts, cut))
    assert [path for path in whole if len(path) <= depth] == upper


# --- why it is exact ----------------------------------------------------------------------------------------------

SMALL = [paths for num_nodes in range(4) for paths in shapes_of(num_nodes)]


@cache
def _law_error(ids: tuple[int, ...], parents: tuple[int, ...]) -> float:
    return distance(law_of_walks(ids, parents, len(ids) + 1), target_law(len(ids) + 1))


@pytest.mark.parametrize(
    "shape", [wide(1, 1, 1, 1), wide(2, 1, 1), wide(2, 2), wide(3, 1)], ids=lambda shape: str(shape.parents)
)
def test_every_merged_tree_has_the_targets_distribution(make_request: MakeRequest, shape: TreeShape) -> None:
    """For all pairs of trees of up to three nodes."""
    request, seen = replace(make_request(0, [1, 2], 4), shape=shape), set()
    for one, other in product(SMALL, SMALL):
        proposal = merged(Fixed(*as_proposed(one)), Fixed(*as_proposed(other))).propose([request])
        check_proposal(merged, proposal, [request], VOCAB_SIZE)
        (ids,), (parents,) = proposal.draft_ids, proposal.draft_parents
        assert parents is not None
        seen.add((tuple(ids), tuple(parents)))
    assert len(seen) > 20
    assert max(_law_error(*each) for each in seen) <= EXACT


NUM_NOISES = 4
"""How many equally likely values the noise of a position has here. So each token's probability is a multiple of 1/4."""


def token_under(prefix: tuple[int, ...], noise: int, model: int) -> int:
    """The token that a model chooses next, given the noise of the position. model 0 is the target."""
    table = (0, 0, 1, 2), (0, 1, 1, 2), (0, 2, 2, 1), (1, 1, 0, 2)
    return table[(sum(prefix) + 2 * len(prefix) + model) % len(table)][noise]


@dataclass
class SharedNoise:
    """Drafts two tokens of a model at each depth, given its noise, and continues after the first. noises: by depth."""

    noises: Sequence[int]
    model: int
    grows_trees = True

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        ids, parents, prefix, node = [], [], (), ROOT
        for noise in self.noises:
            first = token_under(prefix, noise, self.model)
            ids += [first, (first + 1) % VOCAB_SIZE]
            parents += [node, node]
            prefix, node = (*prefix, first), len(ids) - 2
        return Proposal.certain([ids] * len(requests), [parents] * len(requests))

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""


def law_of_a_tree_then_fresh_noise(request: DraftRequest, chain_ids: Sequence[int], model: int) -> float:
    """The error in the distribution of a text whose first step is a merged tree, and whose next steps have fresh noise, as sampled
    chains do.

    Every noise of every position is enumerated. The tree is drafted with the noise that the target draws with.
    """
    depth = 3
    law: Counter[tuple[int, ...]] = Counter()
    target: Counter[tuple[int, ...]] = Counter()
    for noises in product(range(NUM_NOISES), repeat=depth + 1):
        weight = NUM_NOISES ** -(depth + 1)
        text: tuple[int, ...] = ()
        for noise in noises:
            text = (*text, token_under(text, noise, 0))
        target[text[:depth]] += weight
        drafter = merged(Fixed(chain_ids), SharedNoise(noises[:depth], model))
        ids, parents = draft(drafter, request)
        own = [token_under(path, noises[len(path)], 0) for path in [(), *paths_of(ids, parents)]]
        path, next_id = walk(own, ids, parents)
        emitted = (*(ids[i] for i in path), next_id)
        _go_on(emitted, weight, depth, law)
    return distance(dict(law), dict(target))


def _go_on(text: tuple[int, ...], weight: float, length: int, law: Counter[tuple[int, ...]]) -> None:
    if len(text) >= length:
        law[text[:length]] += weight
        return
    for noise in range(NUM_NOISES):
        _go_on((*text, token_under(text, noise, 0)), weight / NUM_NOISES, length, law)


def _errors(make_request: MakeRequest, shape: TreeShape) -> list[float]:
    request = replace(make_request(0, [1, 2], len(shape), temperature=1.0), shape=shape)
    return [
        law_of_a_tree_then_fresh_noise(request, ids, model)
        for ids in product(range(VOCAB_SIZE), repeat=3)
        for model in (1, 2)
    ]


@pytest.mark.parametrize("shape", [wide(1, 1, 1), wide(1, 2, 1), wide(2, 2, 2)], ids=lambda shape: str(shape.parents))
def test_a_tree_step_may_be_followed_by_steps_with_fresh_noise(make_request: MakeRequest, shape: TreeShape) -> None:
    """As in a request without a seed, whose trees share the target's noise and whose chains do not."""
    assert max(_errors(make_request, shape)) <= EXACT


def test_giving_unused_rows_to_earlier_depths_is_detected(
    make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded bug: rows that all depths leave unused go to the first one."""

    def looking_ahead(
        offers: Sequence[Offer], shares: Sequence[AcceptedShares], sizes: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        ids, _ = merge(offers, shares, sizes)
        return merge(offers, shares, [sizes[0] + sum(sizes) - len(ids), *sizes[1:]])

    monkeypatch.setattr(merged_module, "merge", looking_ahead)
    assert max(_errors(make_request, wide(1, 4, 1))) > BROKEN


def test_duplicate_siblings_break_the_contract(make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug: equal tokens of several parts become separate nodes."""

    def each_its_own(
        node: merged_module._Node, place: int, depth: int, offers: Sequence[Offer], shares: Sequence[AcceptedShares]
    ) -> list[merged_module._Node]:
        return [
            merged_module._Node(
                offers[part].ids[child], place, {part: child}, node.chance * shares[part].of((depth, rank))
            )
            for part, own in node.nodes.items()
            for rank, child in enumerate(offers[part].children.get(own, ()))
        ]

    monkeypatch.setattr(merged_module, "_children", each_its_own)
    request = replace(make_request(0, [1, 2], 4), shape=wide(2, 2))
    proposal = merged(Fixed([5, 6]), Fixed([5, 7])).propose([request])
    with pytest.raises(DrafterError, match="siblings must differ"):
        check_proposal(merged, proposal, [request], 16)


# --- its parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts", [[NgramDrafter()], [SuffixDrafter(), NoDrafter()]], ids=["one", "one that grows none"]
)
def test_at_least_two_parts_must_grow_trees(parts: list[Drafter]) -> None:
    with pytest.raises(ForedraftError, match="a merged tree needs two or more drafters that grow trees"):
        merged(*parts)


def test_parts_must_not_draw_tokens(make_request: MakeRequest) -> None:
    class Drawing(Fixed):
        def propose(self, requests: list[DraftRequest]) -> Proposal:
            laws = TokenProbs(torch.full((1, 16), 1 / 16))
            return Proposal.of([[3]] * len(requests), [[0]] * len(requests), laws)

    with pytest.raises(DrafterError, match="part 1 sampled tokens for a merged tree"):
        merged(Fixed([5]), Drawing([])).propose([make_request(0, [1, 2], 4, temperature=1.0)])


def test_each_part_gets_its_own_features_and_cache(make_request: MakeRequest) -> None:
    parts = Fixed([]), Fixed([], taps=(5,)), Fixed([], taps=(2, 5), shares_cache=True)
    drafter = merged(*parts)
    assert (drafter.taps, drafter.shares_cache) == ((2, 5), True)
    rows = torch.arange(12.0).view(2, 6)
    region = object()
    for columns in (None, torch.tensor([1, 2, 4, 5])):
        features = Features(rows if columns is not None else rows[:, :4], columns)
        drafter.propose([replace(make_request(0, [1, 2, 3], 4), features=features, region=region)])  # type: ignore[arg-type]
        none, second, both = (part.asked[-1] for part in parts)
        assert none.features is None
        assert (none.region, second.region, both.region) == (None, None, region)
        assert second.features is not None
        assert both.features is not None
        assert torch.equal(both.features.since(0), features.since(0))
        assert torch.equal(second.features.since(1), features.since(1)[:, 2:])


def test_parts_get_unseeded_requests_as_chain_shapes_so_that_they_do_not_draw(make_request: MakeRequest) -> None:
    part = Fixed([])
    requests = [
        make_request(0, [1], 3),
        make_request(1, [1], 3, temperature=1.0, seed=4),
        make_request(2, [1], 3, temperature=1.0),
    ]
    merged(part, Fixed([])).propose(requests)
    assert [request.shape for request in part.asked] == [None, None, TreeShape.chain(3)]


def test_an_offer_is_compared_with_the_text_as_far_as_it_was_right() -> None:
    offer, shares = Offer.of([5, 6, 7], [ROOT, ROOT, 1]), AcceptedShares(lambda place: 0.5)
    merged_module._compare(offer, [6, 8, 9], [shares])
    assert shares.of((0, 0)) < 0.5 < shares.of((0, 1))
    assert shares.of((1, 0)) < 0.5
    assert shares.of((2, 0)) == 0.5
    assert depths_of([ROOT, ROOT, 1]) == [1, 1, 2]
