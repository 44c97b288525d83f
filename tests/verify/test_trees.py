"""Law 1 with trees: the emitted tokens have the target's distribution, whatever the tree contains; and broken walks are detected.

Enumerated through `verify`: the target's own token after each node takes every value, with its probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor

from foredraft.certificate.controls import CONTROLS, Control
from foredraft.engine.proposal import Proposal
from foredraft.engine.token_tree import ROOT, path_to
from foredraft.sampling import Sampler, SamplingParams
from foredraft.verify import Verifier, verify, walk

VOCAB_SIZE = 3
Law = dict[tuple[int, ...], float]
"""The distribution of the next tokens of a text."""

_UNDECIDED = -1


def trees(num_nodes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the ids and parents of every tree with this many nodes and distinct siblings."""
    for parents in product(*(range(ROOT, node) for node in range(num_nodes))):
        for ids in product(range(VOCAB_SIZE), repeat=num_nodes):
            if len(set(zip(parents, ids, strict=True))) == num_nodes:
                yield ids, parents


def probs_after(prefix: Sequence[int]) -> list[float]:
    """A distribution that depends on the whole prefix, and sometimes has a token of probability 0."""
    return _probs_after(tuple(prefix))


@cache
def _probs_after(prefix: tuple[int, ...]) -> list[float]:
    generator = torch.Generator().manual_seed(1 + sum((token + 1) * 7**place for place, token in enumerate(prefix)))
    probs = torch.rand(VOCAB_SIZE, generator=generator, dtype=torch.float64)
    if len(prefix) % 3 == 2:
        probs[sum(prefix) % VOCAB_SIZE] = 0
    return [float(p) for p in probs / probs.sum()]


Step = Callable[[Sequence[int], Sequence[int], Sequence[int]], tuple[Sequence[int], int]]


def outcome_law(ids: Sequence[int], parents: Sequence[int], step: Step, length: int) -> Law:
    """The distribution of the first `length` tokens: those that a step emits, then tokens drawn from the target. Every combination of
    the target's own tokens after the nodes is enumerated."""
    prefixes = [[ids[i] for i in path_to(parents, node)] for node in range(ROOT, len(ids))]
    law: Counter[tuple[int, ...]] = Counter()
    for own in product(range(VOCAB_SIZE), repeat=len(prefixes)):
        weight = 1.0
        for prefix, token in zip(prefixes, own, strict=True):
            weight *= probs_after(prefix)[token]
        if weight:
            path, next_id = step(own, ids, parents)
            _draw_on([*(ids[i] for i in path), next_id], weight, length, law)
    return dict(law)


def _draw_on(text: list[int], weight: float, length: int, law: Counter[tuple[int, ...]]) -> None:
    if len(text) >= length:
        law[tuple(text[:length])] += weight
        return
    for token, p in enumerate(probs_after(text)):
        if p:
            _draw_on([*text, token], weight * p, length, law)


def target_law(length: int) -> Law:
    law: Counter[tuple[int, ...]] = Counter()
    _draw_on([], 1.0, length, law)
    return dict(law)


def distance(one: Law, other: Law) -> float:
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other})


def verified(
    own: Sequence[int], ids: Sequence[int], parents: Sequence[int], verifier: Verifier = verify
) -> tuple[Sequence[int], int]:
    """A step through production code, with greedy rows whose argmax is the own token."""
    logits = torch.nn.functional.one_hot(torch.tensor(own), VOCAB_SIZE).float()
    sampler = Sampler(SamplingParams(temperature=0.0).resolve({}), [0], torch.Generator())
    verdict = verifier(logits, Proposal.certain([list(ids)], [list(parents)]), [sampler], [[0]])
    return verdict.paths[0], verdict.next_ids[0]


def test_a_walk_has_the_targets_distribution() -> None:
    """All trees of up to three nodes and some of four, in every order of their nodes, with every combination of own tokens."""
    for num_nodes in range(5):
        expected = target_law(num_nodes + 1)
        for i, (ids, parents) in enumerate(trees(num_nodes)):
            if num_nodes < 4 or i % 3 == 0:
                assert distance(outcome_law(ids, parents, walk, num_nodes + 1), expected) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [5, 6])
def test_a_walk_along_larger_trees_has_the_targets_distribution(num_nodes: int) -> None:
    expected = target_law(4)
    for i, (ids, parents) in enumerate(trees(num_nodes)):
        if i % (97 if num_nodes == 5 else 2999) == 0:
            assert distance(outcome_law(ids, parents, walk, 4), expected) <= 1e-12


def shapes_of(num_nodes: int, prefix: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every tree of this many nodes with distinct siblings, as the paths of its nodes, parents first."""
    for sizes in product(range(num_nodes + 1), repeat=VOCAB_SIZE):
        if sum(sizes) != num_nodes:
            continue
        branches = [
            [((*prefix, token), *rest) for rest in shapes_of(size - 1, (*prefix, token))] if size else [()]
            for token, size in enumerate(sizes)
        ]
        yield from (tuple(path for branch in chosen for path in branch) for chosen in product(*branches))


def as_proposed(paths: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Convert the paths of nodes. -> ids and parents"""
    return [path[-1] for path in paths], [paths.index(path[:-1]) if len(path) > 1 else ROOT for path in paths]


def law_of_walks(ids: Sequence[int], parents: Sequence[int], length: int) -> Law:
    """As outcome_law, through `walk` and `verify`. The target's own token after a node is enumerated only when a walk reaches that node;
    in `verify` the other own tokens are arbitrary."""
    law: Counter[tuple[int, ...]] = Counter()
    waiting: list[tuple[list[int], float]] = [([_UNDECIDED] * (len(ids) + 1), 1.0)]
    while waiting:
        own, weight = waiting.pop()
        path, next_id = walk(own, ids, parents)
        prefix = [ids[i] for i in path]
        if next_id == _UNDECIDED:
            row = path[-1] + 1 if path else 0
            for token, p in enumerate(probs_after(prefix)):
                if p:
                    waiting.append(([*own[:row], token, *own[row + 1 :]], weight * p))
            continue
        decided = [(sum(own) + i) % VOCAB_SIZE if token == _UNDECIDED else token for i, token in enumerate(own)]
        assert verified(decided, ids, parents) == (path, next_id)
        _draw_on([*prefix, next_id], weight, length, law)
    return dict(law)


@pytest.mark.parametrize(
    "num_nodes", [0, 1, 2, 3, 4, pytest.param(5, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_every_tree_has_the_targets_distribution(num_nodes: int) -> None:
    expected, count = target_law(num_nodes + 1), 0
    for paths in shapes_of(num_nodes):
        assert distance(law_of_walks(*as_proposed(paths), num_nodes + 1), expected) <= 1e-12
        count += 1
    assert count == [1, 3, 12, 55, 273, 1428, 7752][num_nodes]  # the numbers of ternary trees


@pytest.mark.parametrize("order", ["by depth", "by branch"])
@pytest.mark.parametrize("name", ["three to the second", "a chain with siblings"])
def test_two_trees_of_twelve_nodes_have_the_targets_distribution(name: str, order: str) -> None:
    """In both orders of nodes that drafters use."""
    paths = {
        "three to the second": [path for depth in (1, 2) for path in product(range(VOCAB_SIZE), repeat=depth)],
        "a chain with siblings": [(*(1,) * depth, token) for depth in range(4) for token in range(VOCAB_SIZE)],
    }[name]
    assert len(paths) == 12
    ordered = sorted(paths, key=len) if order == "by depth" else sorted(paths)
    assert distance(law_of_walks(*as_proposed(ordered), 5), target_law(5)) <= 1e-12


def test_verify_accepts_the_path_of_walk() -> None:
    for ids, parents in trees(3):
        for own in product(range(VOCAB_SIZE), repeat=4):
            path, next_id = verified(own, ids, parents)
            assert (list(path), next_id) == (list(walk(own, ids, parents)[0]), walk(own, ids, parents)[1])


@pytest.mark.parametrize(
    "control",
    [control for control in CONTROLS if control.needs == "drafts" and control.target is None],
    ids=lambda control: control.name,
)
def test_each_broken_verifier_breaks_law_1_with_trees_too(control: Control) -> None:
    ids, parents = (0, 1, 1, 0), (ROOT, ROOT, 0, 0)
    step = partial(verified, verifier=control.verifier)
    assert distance(outcome_law(ids, parents, verified, 3), target_law(3)) <= 1e-12
    assert distance(outcome_law(ids, parents, step, 3), target_law(3)) > 0.01


def _second_sibling_of_another(own: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> tuple[list[int], int]:
    """A seeded bug: also accepts a node that has the right token, but another parent."""
    path: list[int] = []
    token = own[0]
    for node in range(len(ids)):
        if ids[node] == token and (not path or node > path[-1]):
            path.append(node)
            token = own[node + 1]
    return path, token


def _own_of_the_root(own: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> tuple[Sequence[int], int]:
    """A seeded bug: takes the last token from the wrong parent's row."""
    path, _ = walk(own, ids, parents)
    return path, own[path[-1] if path else 0]


def _drawn_twice(own: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> tuple[Sequence[int], int]:
    """A seeded bug: where no child is accepted, gives a token that no child has."""
    path, next_id = walk(own, ids, parents)
    last = path[-1] if path else ROOT
    children = [token for token, parent in zip(ids, parents, strict=True) if parent == last]
    others = [token for token in range(VOCAB_SIZE) if token not in children]
    return path, others[0] if children and others else next_id


@pytest.mark.parametrize("broken", [_second_sibling_of_another, _own_of_the_root, _drawn_twice])
def test_a_broken_walk_has_a_wrong_distribution(broken: Step) -> None:
    expected = target_law(4)
    distances = [distance(outcome_law(ids, parents, broken, 4), expected) for ids, parents in trees(3)]
    assert max(distances) > 0.01


def test_trees_share_noise_with_their_drafter_without_a_seed_too() -> None:
    """The target's own tokens in a tree are drawn with the sampler's coupled noise, at the depth of their row."""
    generator = torch.Generator().manual_seed(5)
    params = SamplingParams(temperature=0.9).resolve({})
    sampler = Sampler(params, [0], generator)
    seeded = SamplingParams(temperature=0.9, seed=sampler.coupled_spec.seed).resolve({})
    twin = Sampler(seeded, [0], torch.Generator())
    ids, parents = [4, 7, 9, 4], [ROOT, ROOT, 0, 1]
    logits: Tensor = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    for history in ([0], [0, 3], [0, 3, 8]):
        found = verify(logits, Proposal.certain([ids], [parents]), [sampler], [history])
        same = verify(logits, Proposal.certain([ids], [parents]), [twin], [history])
        assert (found.paths, found.next_ids) == (same.paths, same.next_ids)
    assert Sampler(params, [0], generator).coupled_spec.seed != sampler.coupled_spec.seed
