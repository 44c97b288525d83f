"""Toys: a target and a drafter over a handful of ids, whose distributions depend on the whole prefix. All their outcomes can be
enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal
from foredraft.sampling import Sampler, SamplingParams
from foredraft.sampling.token_probs import REACHED

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Toy:
    """logits: of the target after each prefix of 0..depth ids. p: its distribution there under `params`.
    q: the distribution that each draft token is drawn from, after each prefix of 0..depth - 1 ids; a point mass at a depth in
    `certain`. named: what the proposal states as q (the same, unless the drafter lies). settings: of the sampler.
    """

    vocab_size: int
    depth: int
    logits: Mapping[Prefix, Tensor]
    p: Mapping[Prefix, Tensor]
    q: Mapping[Prefix, Tensor]
    certain: frozenset[int] = frozenset()
    named: Mapping[Prefix, Tensor] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def drafts(self) -> list[Prefix]:
        """All possible drafts of full depth."""
        return [x for x in product(range(self.vocab_size), repeat=self.depth) if self.odds(x) > 0]

    @cached_property
    def _numbers(self) -> tuple[dict[Prefix, list[float]], dict[Prefix, list[float]]]:
        return {x: row.tolist() for x, row in self.p.items()}, {x: row.tolist() for x, row in self.q.items()}

    def odds(self, draft: Prefix) -> float:
        q = self._numbers[1]
        return math.prod(q[draft[:i]][token] for i, token in enumerate(draft))

    def texts(self) -> list[Prefix]:
        return list(product(range(self.vocab_size), repeat=self.depth + 1))

    def text_odds(self, text: Prefix, start: int = 0) -> float:
        """The target's probability of text[start:] after text[:start]."""
        p = self._numbers[0]
        return math.prod(p[text[:i]][text[i]] for i in range(start, len(text)))

    def target_rows(self, drafts: Sequence[Prefix]) -> Tensor:
        return torch.stack([self.logits[x[:i]] for x in drafts for i in range(len(x) + 1)])

    def proposal(self, drafts: Sequence[Prefix], padding: tuple[int, int] = (0, CERTAIN)) -> Proposal:
        """padding: (id, prob_row) beyond each row's length."""
        named = self.q if self.named is None else self.named
        width = max(map(len, drafts), default=0)
        ids = torch.full((len(drafts), width), padding[0], dtype=torch.int64)
        prob_rows = torch.full((len(drafts), width), padding[1], dtype=torch.int64)
        probs: list[Tensor] = []
        for b, draft in enumerate(drafts):
            for i, token in enumerate(draft):
                ids[b, i] = token
                prob_rows[b, i] = CERTAIN
                if i not in self.certain:
                    prob_rows[b, i] = len(probs)
                    probs.append(named[draft[:i]])
        lens = torch.tensor([len(draft) for draft in drafts], dtype=torch.int64)
        return Proposal(ids, lens, prob_rows, torch.stack(probs) if probs else None)

    def is_ratio(self, draft: Prefix) -> bool:
        return any(i not in self.certain for i in range(len(draft)))


def prefixes(vocab_size: int, lengths: range) -> list[Prefix]:
    return [x for n in lengths for x in product(range(vocab_size), repeat=n)]


def toy(
    p: Callable[[Prefix], Tensor],
    q: Callable[[Prefix], Tensor],
    *,
    vocab_size: int = 3,
    depth: int = 2,
    certain: Sequence[int] = (),
    **params: Any,
) -> Toy:
    """A toy whose target samples from p(prefix), modified by `params`, and whose drafter draws from q(prefix)."""
    raw = {x: p(x) for x in prefixes(vocab_size, range(depth + 1))}
    logits = {x: law.log() for x, law in raw.items()}
    laws = {x: dense_law(row, **params) for x, row in logits.items()} if params else raw
    q_laws = {x: q(x) for x in prefixes(vocab_size, range(depth))}
    for x in q_laws:
        if len(x) in certain:
            q_laws[x] = one_hot(int(q_laws[x].argmax()), vocab_size)
    return Toy(vocab_size, depth, logits, laws, q_laws, frozenset(certain), params=params)


def one_hot(token: int, vocab_size: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), vocab_size).to(torch.float64)


def random_laws(
    seed: int, sharpness: float, vocab_size: int = 3, without: int | None = None
) -> Callable[[Prefix], Tensor]:
    """A random distribution for each prefix. sharpness: the scale of its logits (about 1 for randomly initialised models, for which
    p ≈ q hides the residual path). without: an id with probability 0."""

    def law(prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        logits = sharpness * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
        if without is not None:
            logits[without] = -torch.inf
        return torch.softmax(logits, dim=0)

    return law


@cache
def toys(depth: int) -> dict[str, Toy]:
    """The cases that a rule must pass, over 3 ids."""
    p, q, other = random_laws(1, 2), random_laws(2, 2), random_laws(3, 6)
    return {
        "random": toy(p, q, depth=depth),
        "near": toy(random_laws(4, 0.3), random_laws(5, 0.3), depth=depth),
        "sharp": toy(other, random_laws(6, 6), depth=depth),
        "needle": toy(random_laws(7, 25), random_laws(8, 25), depth=depth),
        "equal": toy(p, p, depth=depth),
        "disjoint": toy(random_laws(1, 2, without=2), lambda _: one_hot(2), depth=depth),
        "disjoint, two ids drafted": toy(lambda _: one_hot(2), random_laws(1, 2, without=2), depth=depth),
        "one-hot q": toy(p, lambda x: one_hot(sum(x) % 3), depth=depth),
        "q misses an id": toy(p, random_laws(2, 2, without=1), depth=depth),
        "p misses an id": toy(random_laws(1, 2, without=0), q, depth=depth),
        "one-hot p": toy(lambda x: one_hot((1 + sum(x)) % 3), q, depth=depth),
        "one-hot p and q": toy(
            lambda x: one_hot((1 + sum(x)) % 3), lambda x: one_hot((1 + 2 * sum(x)) % 3), depth=depth
        ),
        "certain, then sampled": toy(p, q, depth=depth, certain=range(0, depth, 2)),
        "sampled, then certain": toy(p, q, depth=depth, certain=range(1, depth, 2)),
    }


def dense_law(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The reference distribution for one row: temperature, min-p, top-k and top-p in this order, renormalised after each, over the
    whole vocabulary in float64. Of equal logits at the limit, top-k keeps all and top-p the lower ids. [V] -> [V]"""
    law = torch.softmax(logits.to(torch.float64) / temperature, dim=0)
    if min_p > 0:
        law = torch.where(law >= min_p * law.max(), law, 0)
        law = law / law.sum()
    if 0 < top_k < len(law):
        law = torch.where(logits >= logits.sort(descending=True).values[top_k - 1], law, 0)
        law = law / law.sum()
    if top_p < 1:
        order = logits.argsort(descending=True, stable=True)
        before = law[order].cumsum(0) - law[order]
        law = law.clone()
        law[order[before >= REACHED * top_p]] = 0
        law = law / law.sum()
    return law


def sampler_for(params: Mapping[str, Any], *, prompt: Sequence[int] = (0,), seed: int = 0, **settings: Any) -> Sampler:
    """A sampler like the engine's. seed: of the generator; this is not the request's seed."""
    resolved = SamplingParams(**{"temperature": 1.0, "max_tokens": 64, **params}).resolve({})
    return Sampler(resolved, prompt, torch.Generator().manual_seed(seed), **settings)


def text_error(case: Toy, emitted: Mapping[Prefix, float]) -> float:
    """The largest error of a text's probability. emitted: the probability of emitting each prefix of 1..depth + 1 ids; the target alone
    continues it."""
    errors = []
    for text in case.texts():
        got = sum(emitted.get(text[:n], 0.0) * case.text_odds(text, n) for n in range(1, len(text) + 1))
        errors.append(abs(got - case.text_odds(text)))
    return max(errors)
