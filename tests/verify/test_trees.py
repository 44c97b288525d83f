"""Law 1 with trees: what a walk emits has the target's law, whatever the tree holds; and where it is broken, that shows.

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
"""Of the next tokens of a text."""


def trees(num_nodes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All ids and parents of trees with so many nodes, siblings being different."""
    for parents in product(*(range(ROOT, node) for node in range(num_nodes))):
        for ids in product(range(VOCAB_SIZE), repeat=num_nodes):
            if len(set(zip(parents, ids, strict=True))) == num_nodes:
                yield ids, parents


def probs_after(prefix: Sequence[int]) -> list[float]:
    """A distribution that depends on the whole prefix, with a token that never comes now and then."""
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
    """Of the first `length` tokens, where what a step does not emit is drawn after it. Own tokens are enumerated where they are
    looked at only: a node that is not reached has no say."""
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
    """Through production code: greedy rows, whose own token is the likeliest."""
    logits = torch.nn.functional.one_hot(torch.tensor(own), VOCAB_SIZE).float()
    sampler = Sampler(SamplingParams(temperature=0.0).resolve({}), [0], torch.Generator())
    verdict = verifier(logits, Proposal.certain([list(ids)], [list(parents)]), [sampler], [[0]])
    return verdict.paths[0], verdict.next_ids[0]


def test_a_walk_has_the_targets_law() -> None:
    """All trees of up to three nodes, and some of four."""
    for num_nodes in range(5):
        expected = target_law(num_nodes + 1)
        for i, (ids, parents) in enumerate(trees(num_nodes)):
            if num_nodes < 4 or i % 3 == 0:
                assert distance(outcome_law(ids, parents, walk, num_nodes + 1), expected) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [5, 6])
def test_larger_trees_do_too(num_nodes: int) -> None:
    expected = target_law(4)
    for i, (ids, parents) in enumerate(trees(num_nodes)):
        if i % (97 if num_nodes == 5 else 2999) == 0:
            assert distance(outcome_law(ids, parents, walk, 4), expected) <= 1e-12


def test_verify_walks_as_walk_does() -> None:
    for ids, parents in trees(3):
        for own in product(range(VOCAB_SIZE), repeat=4):
            path, next_id = verified(own, ids, parents)
            assert (list(path), next_id) == (list(walk(own, ids, parents)[0]), walk(own, ids, parents)[1])


@pytest.mark.parametrize(
    "control",
    [control for control in CONTROLS if control.needs == "drafts" and control.target is None],
    ids=lambda control: control.name,
)
def test_each_broken_verifier_breaks_the_law_of_trees_too(control: Control) -> None:
    ids, parents = (0, 1, 1, 0), (ROOT, ROOT, 0, 0)
    step = partial(verified, verifier=control.verifier)
    assert distance(outcome_law(ids, parents, verified, 3), target_law(3)) <= 1e-12
    assert distance(outcome_law(ids, parents, step, 3), target_law(3)) > 0.01


def _second_sibling_of_another(own: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> tuple[list[int], int]:
    """A node that has the right token, but another parent, is taken too."""
    path: list[int] = []
    token = own[0]
    for node in range(len(ids)):
        if ids[node] == token and (not path or node > path[-1]):
            path.append(node)
            token = own[node + 1]
    return path, token


def _own_of_the_root(own: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> tuple[Sequence[int], int]:
    """The row of the wrong parent gives the last token."""
    path, _ = walk(own, ids, parents)
    return path, own[path[-1] if path else 0]


def _drawn_twice(own: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> tuple[Sequence[int], int]:
    """Where no child stands, a token that is no child's."""
    path, next_id = walk(own, ids, parents)
    last = path[-1] if path else ROOT
    children = [token for token, parent in zip(ids, parents, strict=True) if parent == last]
    others = [token for token in range(VOCAB_SIZE) if token not in children]
    return path, others[0] if children and others else next_id


@pytest.mark.parametrize("broken", [_second_sibling_of_another, _own_of_the_root, _drawn_twice])
def test_a_broken_walk_has_another_law(broken: Step) -> None:
    expected = target_law(4)
    distances = [distance(outcome_law(ids, parents, broken, 4), expected) for ids, parents in trees(3)]
    assert max(distances) > 0.01


def test_rows_of_a_tree_share_their_noise_with_its_drafter_also_without_a_seed() -> None:
    """The target's own token behind a tree is the likeliest under the sampler's coupled noise, at the depth of its row."""
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
