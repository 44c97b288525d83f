"""Check the verifier alone, on distributions of the user's own models: many drafts for the same few rows.

A step of the engine costs passes of two models, and some mistakes are rare: those of block verification show only after
a draft token that q favours. Here, distributions that target and drafter actually had at some position of some text are
put in a row, as if they did not depend on the tokens between them. Exactness holds for them as for any others: whatever is
drafted, and wherever the draft stops, the tokens are drawn from the target's distributions, one after the other. A step
that stops early is completed by plain draws. Some of the drafter's distributions are sharpened, as if from a more confident
drafter, and some flattened.

These bets notice faults of about a percent. The same rules are also tested by enumeration (docs/internals/exactness.md), where
they are exact to 1e-12 in float64, and to 3.4e-7 as compiled float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.betting import SURPRISE, Bet, Bets, BettingCheck, TokenSource
from foredraft.certificate.controls import Control
from foredraft.certificate.report import DRAWN, SAMPLED
from foredraft.certificate.setting import Setting
from foredraft.certificate.surprise import centred_surprise
from foredraft.certificate.texts import Text, one_thread, read_whole, rows_of, step_starts
from foredraft.engine.proposal import Proposal
from foredraft.model import LanguageModel
from foredraft.sampling import Row, Sampler, SamplingParams, adjusted, inverse_cdf, token_probs_of
from foredraft.sampling.token_probs import tempered
from foredraft.verify import Verifier, verify

_MOST_LOGITS, _NUM_DRAFTS = 1 << 23, 4096
"""The most of one call: elements of its logits, and drafts of several tokens."""
_MOST_SCORE = 4.0
_CANDIDATES, _NUM_PAIRS, _NUM_SINGLES = 256, 16, 8
_NUM_IDS = 128
_SHARPER, _FLATTER = 2.0, 0.5
_MOST_PLACES = 8
"""Positions in a draft that have their own bet; later positions share the last one."""

_BETS = {
    "surprise": SURPRISE,
    "single tokens": Bet("recovered tokens are drawn as if no draft token preceded them"),
    "scale": Bet("recovered tokens are drawn as if ratios were not capped at 1"),
    "draft's temperature": Bet("drafts are verified with their distribution at another temperature"),
}

NOTHING_DRAWN = "verification of drawn drafts: none was drawn from a distribution; ids are only compared"


def _stands_at(place: int) -> str:
    """The bet's name. place: the token's position in its step, from 0."""
    return f"draft stands at {min(place, _MOST_PLACES - 1) + 1}"


def _bets_on(length: int) -> Bets:
    """length: the most draft tokens of a step."""
    description = (
        "tokens that a draft favours over what is left of the target's distribution occur too often or too rarely, "
        "at position {} of a step"
    )
    places = range(min(length, _MOST_PLACES))
    return Bets(_BETS | {_stands_at(place): Bet(description.format(place + 1)) for place in places})


def verification_check(setting: Setting, texts: Sequence[Text]) -> BettingCheck | None:
    """Check that every token of a step has the target's distribution, whatever the verifier decides. texts: the source of the
    distributions. -> None if none of their drafts was drawn"""
    params = setting.params_of(SAMPLED)
    pairs = pairs_of(setting.llm.target, texts)
    if not pairs:
        return None
    chains, singles = select_pairs(pairs, params)

    def new_draws(control: Control | None, num_wanted: int) -> Draws:
        verifier = control.verifier if control else verify
        return Draws(chains, singles, params, setting.gamma, verifier, seed=setting.seed, num_wanted=num_wanted)

    return BettingCheck("verification", DRAWN, setting.deadline, setting.num_draws, new_draws)


# --- which distributions ------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Target and drafter at one position. logits: [V], the target's, adjusted. q: [V], the drafter's distribution."""

    logits: Tensor
    q: Tensor


def pairs_of(model: LanguageModel, texts: Sequence[Text]) -> list[Pair]:
    """Pairs at positions where a step with a drawn draft began, at most _CANDIDATES of them."""
    pairs: list[Pair] = []
    drawn = [text for text in texts if any(not isinstance(law, int) for law in text.first_laws.values())]
    for batch, logits in read_whole(model, drawn):
        logits, starts = adjusted(logits, rows_of(batch)).logits, step_starts(batch)
        pairs += [
            Pair(logits[row].clone(), law.dense(logits.shape[1])[0]) for row, law in starts if not isinstance(law, int)
        ]
        if len(pairs) >= _CANDIDATES:
            break
    return pairs[:: max(1, len(pairs) // _CANDIDATES)][:_CANDIDATES]


def select_pairs(pairs: Sequence[Pair], params: SamplingParams) -> tuple[list[Pair], list[Pair]]:
    """The most informative pairs, with the drafter's distributions both as they are and changed, on the ids that matter.

    -> (for drafts of several tokens, for drafts of one)
    """
    half = _NUM_PAIRS // 2
    chains = [*_best(pairs, params, _differs, half), *_best(_with_power(pairs, _SHARPER), params, _differs, half)]
    singles = _best([*pairs, *_with_power(pairs, _FLATTER)], params, _information, _NUM_SINGLES)
    return _narrowed(chains, params), _narrowed(singles, params)


def _with_power(pairs: Sequence[Pair], power: float) -> list[Pair]:
    """The same pairs with a more confident (power above 1) or less confident drafter. After an accepted token that the drafter
    favours more than the target does, less of the target's distribution is left; only there does block verification differ
    from token verification."""
    laws = [pair.q.pow(power) for pair in pairs]
    return [Pair(pair.logits, law / law.sum()) for pair, law in zip(pairs, laws, strict=True)]


def _best(
    pairs: Sequence[Pair], params: SamplingParams, score: Callable[[Tensor, Tensor], float], most: int
) -> list[Pair]:
    """The pairs with the highest scores. score: given the target's distribution and the drafter's, [V] each."""
    row = Row(_without_processors(params, torch.Generator()), [0])

    def score_of(pair: Pair) -> float:
        p = token_probs_of(pair.logits[None], [row]).dense(len(pair.logits))[0]
        return score(p.to(torch.float64), pair.q.to(torch.float64))

    return sorted(pairs, key=score_of, reverse=True)[:most]


def _differs(p: Tensor, q: Tensor) -> float:
    """Large where drafts are rejected and the target gives much probability to tokens with q > p: once accepted, such tokens
    shrink what is left of the target's distribution after them."""
    return float(p[q > p].sum() * (1 - torch.minimum(p, q).sum()))


def _information(p: Tensor, q: Tensor) -> float:
    """How fast the bet on the draft's temperature wins."""
    return float((p * temperature_score(p, q).square()).sum())


def _narrowed(pairs: Sequence[Pair], params: SamplingParams) -> list[Pair]:
    """The pairs on the ids that matter to any of them, renormalised: the cost of a draw grows with the number of ids."""
    if len(pairs[0].q) <= _NUM_IDS:
        return list(pairs)
    logits, q = (torch.stack(column) for column in zip(*pairs, strict=True))
    temperatures = torch.full((len(q),), params.temperature or 1.0, dtype=torch.float64, device=logits.device)
    p = tempered(logits, temperatures)
    ids = torch.maximum(p, q.to(p)).amax(0).topk(_NUM_IDS).indices
    kept = q[:, ids.to(q.device)]
    return list(map(Pair, logits[:, ids], kept / kept.sum(1, keepdim=True)))


def _without_processors(params: SamplingParams, generator: torch.Generator) -> Sampler:
    """A sampler that does not change logits, because they are adjusted already."""
    names = ("temperature", "top_p", "top_k", "min_p", "verification")
    kept = SamplingParams(**{name: getattr(params, name) for name in names}).resolve({})
    return Sampler(kept, [0], generator)


# --- draws and bets -----------------------------------------------------------------------------------------------


class Draws(TokenSource):
    """Drafts for rows of pairs, verified: chains of up to `length` tokens and single tokens, in turn. params: how to get the
    target's distributions from its logits, and the verification rule. seed: of all noise here."""

    def __init__(
        self,
        chains: Sequence[Pair],
        singles: Sequence[Pair],
        params: SamplingParams,
        length: int,
        verifier: Verifier,
        *,
        seed: int,
        num_wanted: int,
    ) -> None:
        super().__init__(_bets_on(length), num_wanted)
        self._turns = cycle([(chains, length, _NUM_DRAFTS), (singles, 1, _NUM_DRAFTS * length)])
        self._verifier = verifier
        self._generator = torch.Generator().manual_seed(seed)
        self._sampler = _without_processors(params, self._generator)

    def place(self) -> None:
        """Verify as many drafts for one row of pairs as a call takes, and bet on the resulting tokens."""
        pairs, length, most = next(self._turns)
        picked = [pairs[i] for i in torch.randint(len(pairs), (length + 1,), generator=self._generator).tolist()]
        logits, q = (torch.stack(column) for column in zip(*picked, strict=True))
        q = q[:-1]
        with one_thread():
            laws = token_probs_of(logits, [Row(self._sampler, [0])] * len(logits))
            p = laws.dense(logits.shape[1]).to(torch.float64).cpu()
            p = p / p.sum(1, keepdim=True)
            drafts, lens = self._drafts(q, max(8, min(most, _MOST_LOGITS // logits.numel())))
            tokens = self._verified(logits, p, q, drafts, lens)
            self._bet(p, q.to("cpu", torch.float64), tokens, lens)
        self.num_texts += len(drafts)
        self.num_tokens += tokens.numel()
        self.num_drafted += int(lens.sum())
        self.num_sampled = self.num_drafted

    @property
    def odds(self) -> str:
        return (
            f"{super().odds}; by enumeration, the rules are exact to 1e-12 in float64 and to 3.4e-7 in compiled float32"
        )

    def _drafts(self, q: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """-> ids [count, K], lens [count]: K for half of the drafts, random from 1 to K for the others"""
        draws = [torch.multinomial(law.double().cpu(), count, replacement=True, generator=self._generator) for law in q]
        lens = torch.randint(1, len(q) + 1, (count,), generator=self._generator)
        lens[::2] = len(q)
        return torch.stack(draws, dim=1), lens

    def _verified(self, logits: Tensor, p: Tensor, q: Tensor, drafts: Tensor, lens: Tensor) -> Tensor:
        """The tokens of each step, completed by plain draws. [count, K + 1]"""
        count, width = drafts.shape
        rows = torch.cat([torch.arange(int(n) + 1) for n in lens])
        proposal = Proposal(drafts, lens, torch.arange(width).expand(count, -1), q)
        verdict = self._verifier(logits[rows.to(logits.device)], proposal, [self._sampler] * count, [[0]] * count)
        plain = torch.stack([inverse_cdf(law[None].expand(count, -1), self._uniforms(count)) for law in p], dim=1)
        place, stop = torch.arange(width + 1)[None], torch.tensor(verdict.num_accepted)[:, None]
        next_ids = torch.tensor(verdict.next_ids)[:, None]
        wide = torch.nn.functional.pad(drafts, (0, 1))
        return torch.where(place < stop, wide, torch.where(place == stop, next_ids, plain))

    def _uniforms(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def _bet(self, p: Tensor, q: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Bet in the order of a step's tokens, because the bet on a token depends on those before it."""
        bets, scale = self.bets, torch.ones(len(tokens), dtype=torch.float64)
        uncapped = scale.clone()
        for place, ids in enumerate(tokens.T):
            possible = p[place, ids] > 0
            bets.num_impossible += int((~possible).sum())
            bets.update("surprise", centred_surprise(p[place])[ids[possible]])
            if place == len(q):
                return
            is_drafted = possible & (place < lens)
            ratios = SortedRatios(p[place], q[place])
            r = ratios.ratio[ids]
            bets.update(_stands_at(place), stands(ratios, r[is_drafted], scale[is_drafted]))
            if place == 0:
                bets.update("draft's temperature", temperature_score(p[0], q[0])[ids[is_drafted]])
            # the smaller the ratios that were above 1, the more probable it is that a draft token was accepted there
            for name, other, weight in (
                ("single tokens", torch.ones_like(scale), torch.ones_like(scale)),
                ("scale", uncapped, scale / uncapped.clamp(min=1e-300)),
            ):
                part = is_drafted & (other > scale)
                bets.update(name, weight[part] * other_residual(ratios, r[part], scale[part], other[part]))
            ratio = torch.where(r > 0, 1 / r.clamp(min=1e-300), torch.inf)
            if self._sampler.params.verifier == "block":
                scale, uncapped = (scale * ratio).clamp(max=1), (uncapped * ratio).clamp(max=1e6)


class SortedRatios:
    """The ratios q/p of all tokens, sorted, so that the mean over p of a function piecewise linear in them takes two look-ups.
    ratio: [V]. steps: [W], the sorted ratios. mass, weighted: [W + 1], sums of p, and of p q/p, below each."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        kept = p > 0
        self.ratio = torch.where(kept, q / p.clamp(min=1e-300), 0)
        self.steps, order = self.ratio[kept].sort()
        mass = p[kept][order]
        zero = mass.new_zeros(1)
        self.mass = torch.cat([zero, mass.cumsum(0)])
        self.weighted = torch.cat([zero, (mass * self.steps).cumsum(0)])

    def below(self, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of p, and of p q/p, over tokens with q/p < threshold. [N] -> [N], [N]"""
        at = torch.searchsorted(self.steps, threshold)
        return self.mass[at], self.weighted[at]

    def residual(self, scale: Tensor) -> Tensor:
        """The mass of max(scale p - q, 0). [N] -> [N]"""
        mass, weighted = self.below(scale)
        return scale * mass - weighted


def stands(ratios: SortedRatios, r: Tensor, scale: Tensor) -> Tensor:
    """The bet on min(1, q / (scale p)). r: [N], q/p of the tokens"""
    mass, weighted = ratios.below(scale)
    mean = weighted / scale + ratios.mass[-1] - mass
    return (r / scale).clamp(max=1) - mean


def temperature_score(p: Tensor, q: Tensor) -> Tensor:
    """The score, at e = 0, of the distribution that results if the first draft token is drawn from q but weighed by q^(1 + e):
    the best bet against a small e. Tokens with q > p are accepted with probability p / q^(1 + e); after a rejection the token
    is drawn from max(p - q^(1 + e), 0). [V], [V] -> [V]
    """
    surplus = q.clamp(min=1e-300).log()
    surplus = surplus - (q * surplus).sum()  # the derivative by e of log q^(1 + e), normalised
    more = (p - q).clamp(min=0)
    is_cut = q > p
    fallen = torch.where(is_cut, p * surplus, 0).sum() + torch.where(is_cut, 0, q * surplus).sum()
    change = torch.where(is_cut, -p * surplus, more / more.sum().clamp(min=1e-300) * fallen - q * surplus)
    score = torch.where(p > 0, change / p.clamp(min=1e-300), 0).clamp(-_MOST_SCORE, _MOST_SCORE)
    return (score - (p * score).sum()) / (2 * _MOST_SCORE)


def other_residual(ratios: SortedRatios, r: Tensor, scale: Tensor, other: Tensor) -> Tensor:
    """The distribution of a token recovered with a larger scale minus that with the right one, both over p, times the mass
    that can be recovered: max(other - q/p, 0) Z(scale) / Z(other) - max(scale - q/p, 0). Its mean is 0, and because Z is
    convex with Z(0) = 0, its absolute value is at most scale. r: [N], q/p of the tokens; scale <= other -> [N]"""
    right, wrong = ratios.residual(scale), ratios.residual(other)
    share = torch.where(wrong > 1e-12, right / wrong.clamp(min=1e-12), 0)
    g = (other - r).clamp(min=0) * share - (scale - r).clamp(min=0)
    return torch.where(wrong > 1e-12, g, 0)
