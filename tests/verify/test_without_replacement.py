"""Law 1 for sampled trees: rejection without replacement has the target's distribution, over every draw of a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from foredraft.engine.token_tree import ROOT, TreeShape, path_to
from foredraft.verify.without_replacement import siblings_law, tree_law

TARGET, DRAFT = 0, 1
Law = dict[tuple[int, ...], float]
TreeLaw = Callable[[Sequence[int], TreeShape, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Toy:
    """Distributions that depend on the whole prefix; the target's sometimes has a token of probability 0."""

    vocab_size: int

    def probs_after(self, prefix: Sequence[int], model: int) -> tuple[float, ...]:
        return _probs_after(tuple(prefix), model, self.vocab_size)

    def rows(self, prefixes: Sequence[Sequence[int]], model: int) -> Tensor:
        return torch.tensor([self.probs_after(prefix, model) for prefix in prefixes], dtype=torch.float64)

    def drawn_trees(self, shape: TreeShape) -> Iterator[tuple[list[int], float]]:
        """Every tree of the shape, with its probability: siblings are drawn without replacement."""
        waiting: list[tuple[dict[int, int], float]] = [({}, 1.0)]
        for node, children in shape.children.items():
            further = []
            for ids, weight in waiting:
                q = self.probs_after([ids[before] for before in path_to(shape.parents, node)], DRAFT)
                for tokens in permutations(range(self.vocab_size), len(children)):
                    chance, left = weight, 1.0
                    for token in tokens:
                        chance *= q[token] / left
                        left -= q[token]
                    further.append((ids | dict(zip(children, tokens, strict=True)), chance))
            waiting = further
        yield from (([ids[node] for node in range(len(shape))], weight) for ids, weight in waiting)

    def law_of(self, shape: TreeShape, rule: TreeLaw, length: int) -> Law:
        """The distribution of the first `length` tokens, the tree's and then the target's own."""
        law: Counter[tuple[int, ...]] = Counter()
        for ids, weight in self.drawn_trees(shape):
            prefixes = [[ids[node] for node in path_to(shape.parents, last)] for last in range(ROOT, len(ids))]
            stop, next_probs = rule(ids, shape, self.rows(prefixes, TARGET), self.rows(prefixes, DRAFT))
            for prefix, end, nexts in zip(prefixes, stop.tolist(), next_probs.tolist(), strict=True):
                for token, probability in enumerate(nexts):
                    law[(*prefix, token)] += weight * end * probability
        drawn_on: Counter[tuple[int, ...]] = Counter()
        for text, weight in law.items():
            self._draw_on(text, weight, length, drawn_on)
        return drawn_on

    def target_law(self, length: int) -> Law:
        law: Counter[tuple[int, ...]] = Counter()
        self._draw_on((), 1.0, length, law)
        return law

    def _draw_on(self, text: tuple[int, ...], weight: float, length: int, law: Counter[tuple[int, ...]]) -> None:
        if not weight:
            return
        if len(text) >= length:
            law[text[:length]] += weight
            return
        for token, probability in enumerate(self.probs_after(text, TARGET)):
            self._draw_on((*text, token), weight * probability, length, law)

    def error(self, shape: TreeShape, rule: TreeLaw = tree_law) -> float:
        length = min(shape.depth + 1, 5)
        law, expected = self.law_of(shape, rule, length), self.target_law(length)
        return max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in {*law, *expected})

    def shapes(self, num_nodes: int) -> Iterator[TreeShape]:
        """Every shape of this many nodes, in order of parents, in which no node has more children than there are tokens."""
        for parents in product(*(range(ROOT, node) for node in range(num_nodes))):
            fits = max(Counter(parents).values(), default=0) <= self.vocab_size
            if fits and list(parents) == sorted(parents):
                yield TreeShape(parents)


@cache
def _probs_after(prefix: tuple[int, ...], model: int, vocab_size: int) -> tuple[float, ...]:
    generator = torch.Generator().manual_seed(
        sum((token + 1) * 7**place for place, token in enumerate([model, *prefix]))
    )
    probs = torch.rand(vocab_size, generator=generator, dtype=torch.float64)
    if model == TARGET and len(prefix) % 3 == 1:
        probs[sum(prefix) % vocab_size] = 0
    return tuple((probs / probs.sum()).tolist())


@pytest.mark.parametrize(
    ("num_nodes", "vocab_size"),
    [
        (0, 3),
        (1, 3),
        (2, 3),
        (3, 3),
        (4, 2),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in ((4, 3), (5, 2), (6, 2))),
    ],
)
def test_every_tree_has_the_targets_distribution(num_nodes: int, vocab_size: int) -> None:
    toy = Toy(vocab_size)
    for shape in toy.shapes(num_nodes):
        assert toy.error(shape) <= 1e-12, shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "parents", [(-1,) * 3 + (0,) * 3 + (1,) * 3 + (2,) * 3, (-1,) * 3 + (1,) * 3 + (4,) * 3 + (7,) * 3]
)
def test_two_trees_of_twelve_nodes_have_the_targets_distribution(parents: tuple[int, ...]) -> None:
    assert Toy(3).error(TreeShape(parents)) <= 1e-12


def _residual_of_the_root(ids: Sequence[int], shape: TreeShape, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    stop, next_probs = tree_law(ids, shape, p, q)
    return stop, next_probs[:1].expand_as(next_probs)


def _without_residual(ids: Sequence[int], shape: TreeShape, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return tree_law(ids, shape, p, q)[0], p


@pytest.mark.parametrize("broken", [_residual_of_the_root, _without_residual])
def test_a_broken_rule_has_a_wrong_distribution(broken: TreeLaw) -> None:
    assert max(Toy(3).error(shape, broken) for shape in Toy(3).shapes(3)) > 0.01


def test_children_that_were_not_drawn_give_a_wrong_distribution() -> None:
    """The classic bug: the top k children, verified as if they were drawn."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    stands, residual = siblings_law(p, q, torch.tensor([2, 1]))
    law = (1 - stands.sum()) * residual
    law[[2, 1]] += stands
    assert (law - p).abs().max() > 0.08


def test_two_siblings_by_hand() -> None:
    """The third token is accepted with 0.2/0.7. After its rejection p is (0.8, 0.2, 0) and q is (1/3, 2/3, 0), so the second one is
    accepted with 0.2 · 3/2. After both p is all on the first token."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    stands, residual = siblings_law(p, q, torch.tensor([2, 1]))
    assert stands.tolist() == pytest.approx([2 / 7, 5 / 7 * 0.3])
    assert residual.tolist() == pytest.approx([1, 0, 0])


def test_a_batch_of_positions_gives_the_results_of_each() -> None:
    p, q = (Toy(3).rows([[place] for place in range(5)], model) for model in (TARGET, DRAFT))
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    together = siblings_law(p, q, ids)
    each = [siblings_law(*of_one) for of_one in zip(p, q, ids, strict=True)]
    torch.testing.assert_close(together[0], torch.stack([stands for stands, _ in each]))
    torch.testing.assert_close(together[1], torch.stack([residual for _, residual in each]))
