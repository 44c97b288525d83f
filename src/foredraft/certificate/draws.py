"""The verifier alone, on the laws of the user's own models: many drafts for the same few rows.

A step of the engine costs passes of two models, and some mistakes are rare: those of block verification show only behind
a draft token that q favours. Here laws that target and drafter really had, each at some position of some text, are put
in a row, as if they did not depend on the tokens between. The promise holds for such laws as for any others: whatever
is drafted, and wherever the draft stops, the tokens are drawn from the target's laws, one after the other. A step that
stops early is finished by plain draws. Half of the drafter's laws are made sharper, as a surer drafter's would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.betting import Bet, Bets
from foredraft.certificate.reading import read_whole, rows_of
from foredraft.certificate.trial import Text
from foredraft.model import LanguageModel
from foredraft.proposal import Proposal
from foredraft.sampling import Row, Sampler, SamplingParams, adjusted, inverse_cdf, laws_of
from foredraft.sampling.laws import tempered
from foredraft.verify import Verifier

_MOST_SURPRISE = 16.0
_LOGITS = 1 << 23
"""Numbers that one call's logits may have."""

_BETS = {
    "surprise": Bet("tokens are too likely or too unlikely on average"),
    "draft stands": Bet("what a draft leaves of the target's law comes too often or too seldom"),
    "single tokens": Bet("recovered tokens are drawn as if no draft token stood before them"),
    "scale": Bet("recovered tokens are drawn as if ratios above 1 counted"),
}


class Pair(NamedTuple):
    """What target and drafter said at one place. logits: [V], adjusted. q: [V]"""

    logits: Tensor
    q: Tensor


def pairs_of(model: LanguageModel, texts: Sequence[Text], most: int) -> list[Pair]:
    """Of the places where a step with a drawn draft began, most of them at most."""
    found: list[Pair] = []
    for batch, logits in read_whole(model, [text for text in texts if text.firsts]):
        logits, start = adjusted(logits, rows_of(batch)), 0
        for text in batch:
            for position, first in sorted(text.firsts.items()):
                if not isinstance(first.law, int) and position < len(text.tokens):
                    row = logits[start + position - text.prompt_len].clone()
                    found.append(Pair(row, first.law.dense(len(row))[0]))
            start += len(text.output_ids)
        if len(found) >= most:
            break
    return found[:: max(1, len(found) // most)][:most]


def telling(pairs: Sequence[Pair], params: SamplingParams, most: int) -> list[Pair]:
    """Those whose laws differ, and in which the target likes what the drafter likes better: where drafts are rejected,
    and where tokens stand that shrink what is left of the target's law behind them."""
    sampler = Sampler(_only_laws(params), [0], torch.Generator())

    def score(pair: Pair) -> float:
        p = laws_of(pair.logits[None], [Row(sampler, [0])]).dense(len(pair.logits))[0].to(pair.q)
        return float(p[pair.q > p].sum() * (1 - torch.minimum(p, pair.q).sum()))

    return sorted(pairs, key=score, reverse=True)[:most]


def _only_laws(params: SamplingParams) -> SamplingParams:
    """Without what changes logits: that is done."""
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        verification=params.verification,
    ).resolve({})


def sharpened(pairs: Sequence[Pair]) -> list[Pair]:
    """The same with a surer drafter. Where a token stands that it favours more than the target does, less of the target's
    law is left behind it, and only there does block verification differ from that of single tokens."""
    squares = [pair.q.square() for pair in pairs]
    return [Pair(pair.logits, square / square.sum()) for pair, square in zip(pairs, squares, strict=True)]


def narrowed(pairs: Sequence[Pair], params: SamplingParams, width: int) -> list[Pair]:
    """The same laws on the ids that matter to any of them, renormalised: a draw costs in proportion to the ids."""
    if not pairs or len(pairs[0].q) <= width:
        return list(pairs)
    logits = torch.stack([pair.logits for pair in pairs])
    q = torch.stack([pair.q for pair in pairs])
    p = tempered(
        logits, torch.full((len(pairs),), params.temperature or 1.0, dtype=torch.float64, device=logits.device)
    )
    ids = torch.maximum(p, q.to(p)).amax(0).topk(width).indices
    kept = q[:, ids.to(q.device)]
    kept = kept / kept.sum(1, keepdim=True)
    return [Pair(*pair) for pair in zip(logits[:, ids], kept, strict=True)]


class Draws:
    """Drafts for rows of pairs, verified by someone. params: how the target's laws come from its logits, and the rule.
    length: draft tokens of a step at most. seed: of all noise here.
    most_drafts: of one call."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        params: SamplingParams,
        length: int,
        verifier: Verifier,
        seed: int,
        most_drafts: int = 4096,
    ) -> None:
        self._pairs = pairs
        self._length = length
        self._most_drafts = most_drafts
        self._verifier = verifier
        self._generator = torch.Generator().manual_seed(seed)
        self._sampler = Sampler(_only_laws(params), [0], self._generator)
        self._is_block = self._sampler.params.verifier == "block"
        self.num_steps = self.num_tokens = self.num_drafted = 0

    @staticmethod
    def new_bets() -> Bets:
        return Bets(_BETS)

    def settle(self, bets: Bets) -> None:
        """One row of pairs, as many drafts as one call takes, and the bets on what came out."""
        picked = torch.randint(len(self._pairs), (self._length + 1,), generator=self._generator).tolist()
        logits = torch.stack([self._pairs[i].logits for i in picked])
        q = torch.stack([self._pairs[i].q for i in picked[:-1]])
        num_drafts = max(8, min(self._most_drafts, _LOGITS // logits.numel()))
        rows = [Row(self._sampler, [0])] * len(logits)
        laws = laws_of(logits, rows)
        p = laws.dense(logits.shape[1]).to(torch.float64).cpu()
        p = p / p.sum(1, keepdim=True)
        drafts, lens = self._drafts(q, num_drafts)
        tokens = self._verified(logits, p, q, drafts, lens)
        self._bet(bets, p, q.to("cpu", torch.float64), tokens, lens)
        self.num_steps += len(drafts)
        self.num_tokens += tokens.numel()
        self.num_drafted += int(lens.sum())

    def _drafts(self, q: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """-> ids [count, K], lens [count]: all of them in half of the drafts, fewer in the others"""
        draws = [torch.multinomial(law.double().cpu(), count, replacement=True, generator=self._generator) for law in q]
        lens = torch.randint(1, len(q) + 1, (count,), generator=self._generator)
        lens[::2] = len(q)
        return torch.stack(draws, dim=1), lens

    def _verified(self, logits: Tensor, p: Tensor, q: Tensor, drafts: Tensor, lens: Tensor) -> Tensor:
        """[count, K + 1], what the step emits, finished by plain draws"""
        count, width = drafts.shape
        places = torch.cat([torch.arange(int(n) + 1) for n in lens])
        proposal = Proposal(drafts, lens, torch.arange(width).expand(count, -1), q)
        verdict, _ = self._verifier(logits[places.to(logits.device)], proposal, [self._sampler] * count, [[0]] * count)
        out = torch.stack([inverse_cdf(law[None].expand(count, -1), self._uniforms(count)) for law in p], dim=1)
        place = torch.arange(width + 1)[None]
        stop = verdict.num_accepted[:, None]
        wide = torch.nn.functional.pad(drafts, (0, 1))
        return torch.where(place < stop, wide, torch.where(place == stop, verdict.next_ids[:, None], out))

    def _uniforms(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def _bet(self, bets: Bets, p: Tensor, q: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """In the order of the tokens of a step: what is bet on a token follows from those before it."""
        scale = torch.ones(len(tokens), dtype=torch.float64)
        uncapped = scale.clone()
        for place in range(p.shape[0]):
            own = tokens[:, place]
            p_own = p[place, own]
            bets.num_impossible += int((p_own <= 0).sum())
            possible = p_own > 0
            _surprise(bets, p[place], own[possible])
            if place == len(q):
                return
            here = possible & (place < lens)
            ladder = _Ladder.of(p[place], q[place])
            r = ladder.ratio[own]
            _stands(bets, ladder, r[here], scale[here])
            # the smaller the ratios that were above 1, the likelier a draft token stood there
            for name, other, weight in (
                ("single tokens", torch.ones_like(scale), torch.ones_like(scale)),
                ("scale", uncapped, scale / uncapped.clamp(min=1e-300)),
            ):
                part = here & (other > scale)
                g = weight[part] * _against(ladder, r[part], scale[part], other[part])
                bets.settle(name, g, torch.zeros_like(g))
            ratio = torch.where(r > 0, 1 / r.clamp(min=1e-300), torch.inf)
            if self._is_block:
                scale, uncapped = (scale * ratio).clamp(max=1), (uncapped * ratio).clamp(max=1e6)


@dataclass(frozen=True, slots=True)
class _Ladder:
    """The ratios q/p of all tokens in order, so that a mean over p of what is linear in them between two thresholds is two
    look-ups. ratio: [V]. steps: [W], the ratios in order. mass, weighted: [W + 1], sums of p, and of p q/p, below."""

    ratio: Tensor
    steps: Tensor
    mass: Tensor
    weighted: Tensor

    @staticmethod
    def of(p: Tensor, q: Tensor) -> _Ladder:
        ratio = torch.where(p > 0, q / p.clamp(min=1e-300), 0)
        kept = p > 0
        steps, order = ratio[kept].sort()
        mass = p[kept][order]
        zero = mass.new_zeros(1)
        return _Ladder(ratio, steps, torch.cat([zero, mass.cumsum(0)]), torch.cat([zero, (mass * steps).cumsum(0)]))

    def below(self, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of p, and of p q/p, over tokens with q/p < threshold. [N] -> [N], [N]"""
        at = torch.searchsorted(self.steps, threshold)
        return self.mass[at], self.weighted[at]

    def residual(self, scale: Tensor) -> Tensor:
        """The mass of max(scale p - q, 0). [N] -> [N]"""
        mass, weighted = self.below(scale)
        return scale * mass - weighted


def _surprise(bets: Bets, p: Tensor, own: Tensor) -> None:
    h = (-p.clamp(min=1e-300).log()).clamp(max=_MOST_SURPRISE) / _MOST_SURPRISE
    mean = float((p * h).sum())
    bets.settle("surprise", h[own] - mean, torch.full((len(own),), float((p * h * h).sum()) - mean * mean))


def _stands(bets: Bets, ladder: _Ladder, r: Tensor, scale: Tensor) -> None:
    """On min(1, q / (scale p)). r: [N], q/p of the tokens"""
    mass, weighted = ladder.below(scale)
    mean = weighted / scale + ladder.mass[-1] - mass
    bets.settle("draft stands", (r / scale).clamp(max=1) - mean, torch.zeros_like(mean))


def _against(ladder: _Ladder, r: Tensor, scale: Tensor, other: Tensor) -> Tensor:
    """The law of a token recovered with a larger scale against that with the right one, both over p, times the mass that
    can be recovered: max(other - q/p, 0) Z(scale) / Z(other) - max(scale - q/p, 0). Its mean is 0, and as Z is convex with
    Z(0) = 0, it lies within scale of that. r: [N], q/p of the tokens; scale <= other -> [N]"""
    right, wrong = ladder.residual(scale), ladder.residual(other)
    share = torch.where(wrong > 1e-12, right / wrong.clamp(min=1e-12), 0)
    g = (other - r).clamp(min=0) * share - (scale - r).clamp(min=0)
    return torch.where(wrong > 1e-12, g, 0)
