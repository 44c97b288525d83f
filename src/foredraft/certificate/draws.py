"""The verifier alone, on the laws of the user's own models: many drafts for the same few rows.

A step of the engine costs passes of two models, and some mistakes are rare: those of block verification show only behind
a draft token that q favours. Here laws that target and drafter really had, each at some position of some text, are put
in a row, as if they did not depend on the tokens between. The promise holds for such laws as for any others: whatever
is drafted, and wherever the draft stops, the tokens are drawn from the target's laws, one after the other. A step that
stops early is finished by plain draws. Some of the drafter's laws are made sharper, as a surer drafter's would be, and
some flatter: the promise holds for any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.betting import FALSE_ALARM, Bet, Bets
from foredraft.certificate.reading import one_thread, read_whole, rows_of
from foredraft.certificate.report import DRAWN, SAMPLED, CheckResult
from foredraft.certificate.setting import OVERTIME, Setting
from foredraft.certificate.trial import Found, Rejection, Subject, Text
from foredraft.certificate.wording import bets_figures, bets_line, bets_odds
from foredraft.engine.proposal import Proposal
from foredraft.model import LanguageModel
from foredraft.sampling import Row, Sampler, SamplingParams, adjusted, inverse_cdf, token_probs_of
from foredraft.sampling.token_probs import tempered
from foredraft.verify import Verifier

_MOST_SURPRISE = 16.0
_LOGITS = 1 << 23
"""Numbers that one call's logits may have."""

_MOST_SCORE = 4.0
_NUM_PAIRS, _NUM_SINGLES = 32, 8
_NUM_IDS = 128
_SHARPER, _FLATTER = 2.0, 0.5
_MOST_PLACES = 8
"""Beyond these, places of a draft share a bet."""

_BETS = {
    "surprise": Bet("tokens are too likely or too unlikely on average"),
    "single tokens": Bet("recovered tokens are drawn as if no draft token stood before them"),
    "scale": Bet("recovered tokens are drawn as if ratios above 1 counted"),
    "draft's temperature": Bet("drafts are weighed by their law at another temperature"),
}


def _stands_at(place: int) -> str:
    """The bet's name. place: of a token in its step, from 0."""
    return f"draft stands at {min(place, _MOST_PLACES - 1) + 1}"


def _bets_on(length: int) -> dict[str, Bet]:
    """length: draft tokens of a step, at most."""
    says = "what a draft leaves of the target's law comes too often or too seldom, at place {} of a step"
    stands = {_stands_at(place): Bet(says.format(min(place, _MOST_PLACES - 1) + 1)) for place in range(length)}
    return _BETS | stands


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
                if not isinstance(first.probs, int) and position < len(text.tokens):
                    row = logits[start + position - text.prompt_len].clone()
                    found.append(Pair(row, first.probs.dense(len(row))[0]))
            start += len(text.output_ids)
        if len(found) >= most:
            break
    return found[:: max(1, len(found) // most)][:most]


class Chosen(NamedTuple):
    """Pairs to draw from. chains: for drafts of several tokens. singles: for drafts of one."""

    chains: list[Pair]
    singles: list[Pair]


def chosen(pairs: Sequence[Pair], params: SamplingParams) -> Chosen:
    """The most telling ones, as they are and with another drafter, on the ids that matter."""
    half = _NUM_PAIRS // 2
    chains = [
        *_best(pairs, params, _differs, half),
        *_best(_with_power(pairs, _SHARPER), params, _differs, half),
    ]
    singles = _best([*pairs, *_with_power(pairs, _FLATTER)], params, _information, _NUM_SINGLES)
    return Chosen(narrowed(chains, params, _NUM_IDS), narrowed(singles, params, _NUM_IDS))


def _best(
    pairs: Sequence[Pair], params: SamplingParams, score: Callable[[Tensor, Tensor], float], most: int
) -> list[Pair]:
    """score: of the target's law and the drafter's, [V] each."""
    sampler = Sampler(_only_laws(params), [0], torch.Generator())

    def of(pair: Pair) -> float:
        p = token_probs_of(pair.logits[None], [Row(sampler, [0])]).dense(len(pair.logits))[0]
        return score(p.to(torch.float64), pair.q.to(torch.float64))

    return sorted(pairs, key=of, reverse=True)[:most]


def _differs(p: Tensor, q: Tensor) -> float:
    """Large where drafts are rejected, and where the target likes what the drafter likes better: tokens that stand there
    shrink what is left of the target's law behind them."""
    return float(p[q > p].sum() * (1 - torch.minimum(p, q).sum()))


def _information(p: Tensor, q: Tensor) -> float:
    """How fast the bet on the draft's temperature wins."""
    return float((p * _warped(p, q).square()).sum())


def _only_laws(params: SamplingParams) -> SamplingParams:
    """Without what changes logits: that is done."""
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        verification=params.verification,
    ).resolve({})


def _with_power(pairs: Sequence[Pair], power: float) -> list[Pair]:
    """The same with a drafter that is surer (power above 1) or less sure. Where a token stands that it favours more than
    the target does, less of the target's law is left behind it, and only there does block verification differ from that
    of single tokens."""
    token_probs = [pair.q.pow(power) for pair in pairs]
    return [Pair(pair.logits, law / law.sum()) for pair, law in zip(pairs, token_probs, strict=True)]


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


class VerificationTest:
    """Every token of a step has the target's law, whatever the verifier decides. chosen: None where no draft token was drawn."""

    name, kind = "verification", DRAWN

    def __init__(self, setting: Setting, real: Subject, chosen: Chosen | None) -> None:
        self._setting = setting
        self._real = real
        self._chosen = chosen
        self._num_tokens = 0

    def run(self) -> Found:
        if self._chosen is None:
            return Found([], 0, 0, ["verification of drawn drafts: none was drawn from a law, ids are only compared"])
        wanted = self._setting.num_draws
        bets, draws = self._draw(self._chosen, self._real, wanted, budgets=1.0)
        self._num_tokens = draws.num_tokens
        result = CheckResult(
            self.name, self.kind, draws.num_steps, draws.num_tokens, draws.num_drafted, not bets.is_rejected,
            bets_line(bets), bets_odds(None, None), bets_figures(bets), FALSE_ALARM,
        )  # fmt: skip
        is_cut = draws.num_tokens < wanted and not bets.is_rejected
        cut = [f"drawn tokens behind {draws.num_tokens:,}, of {wanted:,}: the time was over"] if is_cut else []
        return Found([result], draws.num_drafted, draws.num_drafted, cut)

    def reject(self, subject: Subject) -> Rejection:
        assert self._chosen is not None
        bets, draws = self._draw(self._chosen, subject, self._num_tokens)
        seen, wanted = draws.num_tokens, self._num_tokens
        is_cut = seen < wanted and not bets.is_rejected
        return Rejection(self.name if bets.is_rejected else None, seen, bets.power_at(wanted / seen), is_cut)

    def _draw(
        self, chosen: Chosen, subject: Subject, num_tokens: int, *, budgets: float = OVERTIME
    ) -> tuple[Bets, Draws]:
        setting = self._setting
        draws = Draws(chosen, setting.params_of(SAMPLED), setting.gamma, subject.verifier, setting.seed)
        bets = draws.new_bets()
        with one_thread():
            while draws.num_tokens < num_tokens and not bets.is_rejected:
                draws.settle(bets)
                if setting.deadline.is_over(budgets=budgets):
                    break
        return bets, draws


class Draws:
    """Drafts for rows of pairs, verified by someone: in turn chains of up to `length` tokens, and single ones. params: how
    the target's laws come from its logits, and the rule. seed: of all noise here. most_drafts: of one call."""

    def __init__(
        self,
        pairs: Chosen,
        params: SamplingParams,
        length: int,
        verifier: Verifier,
        seed: int,
        most_drafts: int = 4096,
    ) -> None:
        self._pairs = pairs
        self._num_calls = 0
        self._length = length
        self._most_drafts = most_drafts
        self._verifier = verifier
        self._generator = torch.Generator().manual_seed(seed)
        self._sampler = Sampler(_only_laws(params), [0], self._generator)
        self._is_block = self._sampler.params.verifier == "block"
        self.num_steps = self.num_tokens = self.num_drafted = 0

    def new_bets(self) -> Bets:
        return Bets(_bets_on(self._length))

    def settle(self, bets: Bets) -> None:
        """One row of pairs, as many drafts as one call takes, and the bets on what came out."""
        is_single = self._num_calls % 2 == 1
        self._num_calls += 1
        pairs, length = (self._pairs.singles, 1) if is_single else (self._pairs.chains, self._length)
        picked = torch.randint(len(pairs), (length + 1,), generator=self._generator).tolist()
        logits = torch.stack([pairs[i].logits for i in picked])
        q = torch.stack([pairs[i].q for i in picked[:-1]])
        num_drafts = max(8, min(self._most_drafts * self._length // length, _LOGITS // logits.numel()))
        rows = [Row(self._sampler, [0])] * len(logits)
        token_probs = token_probs_of(logits, rows)
        p = token_probs.dense(logits.shape[1]).to(torch.float64).cpu()
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
            _settle_by_id(bets, "surprise", _surprise(p[place]), own[possible])
            if place == len(q):
                return
            here = possible & (place < lens)
            ladder = _Ladder.of(p[place], q[place])
            r = ladder.ratio[own]
            bets.settle(_stands_at(place), _stands(ladder, r[here], scale[here]))
            if place == 0:
                _settle_by_id(bets, "draft's temperature", _warped(p[0], q[0]), own[here])
            # the smaller the ratios that were above 1, the likelier a draft token stood there
            for name, other, weight in (
                ("single tokens", torch.ones_like(scale), torch.ones_like(scale)),
                ("scale", uncapped, scale / uncapped.clamp(min=1e-300)),
            ):
                part = here & (other > scale)
                g = weight[part] * _against(ladder, r[part], scale[part], other[part])
                bets.settle(name, g)
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


def _settle_by_id(bets: Bets, name: str, g: Tensor, ids: Tensor) -> None:
    """Where the token alone says what a bet gives. g: [V], ids: [N]"""
    times = torch.bincount(ids, minlength=len(g)).to(torch.float64)
    seen = times > 0
    bets.settle(name, g[seen], times=times[seen])


def _surprise(p: Tensor) -> Tensor:
    """[V] -> [V]"""
    h = (-p.clamp(min=1e-300).log()).clamp(max=_MOST_SURPRISE) / _MOST_SURPRISE
    return h - (p * h).sum()


def _stands(ladder: _Ladder, r: Tensor, scale: Tensor) -> Tensor:
    """On min(1, q / (scale p)). r: [N], q/p of the tokens"""
    mass, weighted = ladder.below(scale)
    mean = weighted / scale + ladder.mass[-1] - mass
    return (r / scale).clamp(max=1) - mean


def _warped(p: Tensor, q: Tensor) -> Tensor:
    """The score of the law that comes out where the first draft token is drawn from q and weighed by q^(1 + e), at e = 0:
    the best bet against a small e. Tokens with q > p stand with p / q^(1 + e); what falls is drawn from max(p - q^(1 + e), 0).
    [V], [V] -> [V]
    """
    surplus = q.clamp(min=1e-300).log()
    surplus = surplus - (q * surplus).sum()  # of log q^(1 + e), normalised, by e
    more = (p - q).clamp(min=0)
    is_cut = q > p
    fallen = torch.where(is_cut, p * surplus, 0).sum() + torch.where(is_cut, 0, q * surplus).sum()
    change = torch.where(is_cut, -p * surplus, more / more.sum().clamp(min=1e-300) * fallen - q * surplus)
    score = torch.where(p > 0, change / p.clamp(min=1e-300), 0).clamp(-_MOST_SCORE, _MOST_SCORE)
    return (score - (p * score).sum()) / (2 * _MOST_SCORE)


def _against(ladder: _Ladder, r: Tensor, scale: Tensor, other: Tensor) -> Tensor:
    """The law of a token recovered with a larger scale against that with the right one, both over p, times the mass that
    can be recovered: max(other - q/p, 0) Z(scale) / Z(other) - max(scale - q/p, 0). Its mean is 0, and as Z is convex with
    Z(0) = 0, it lies within scale of that. r: [N], q/p of the tokens; scale <= other -> [N]"""
    right, wrong = ladder.residual(scale), ladder.residual(other)
    share = torch.where(wrong > 1e-12, right / wrong.clamp(min=1e-12), 0)
    g = (other - r).clamp(min=0) * share - (scale - r).clamp(min=0)
    return torch.where(wrong > 1e-12, g, 0)
