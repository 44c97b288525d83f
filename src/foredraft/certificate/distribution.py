"""Was every token drawn from the target's law? Bets on that, over texts that were sampled without a seed.

Four bets look at every token and know only its law given the text before it, and that text. Three more know where a step
began, and what was drafted there first: a law, or a certain token, but never a token drawn from a law, because that
one and the target's are drawn together. The token with which a step begins has the target's law given all that came before
the step, how earlier steps ended included; of the next ones that cannot be said, because whether they belong to the same
step is decided together with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.betting import FALSE_ALARM, Bet, Bets
from foredraft.certificate.draws import Chosen, chosen, pairs_of
from foredraft.certificate.reading import one_thread, read_whole, rows_of
from foredraft.certificate.report import SAMPLED, CheckResult
from foredraft.certificate.setting import OVERTIME, Setting, shortened
from foredraft.certificate.trial import Found, Rejection, Subject, Text
from foredraft.certificate.wording import bets_figures, bets_line, bets_odds
from foredraft.engine.sequence import Origin
from foredraft.errors import RequestError
from foredraft.model import LanguageModel
from foredraft.sampling import TokenProbs, adjusted, token_probs_of

_MOST_SURPRISE = 16.0
_MOST_RATIO = 4.0

_EVERY_TOKEN = {
    "surprise": Bet("tokens are too likely or too unlikely on average"),
    "likeliest": Bet("the likeliest token comes too often or too seldom"),
    "rank": Bet("tokens come from too far up or down the list of candidates"),
    "noise, tokens": Bet("a token tells something of the noise that the next one is drawn with"),
}
_FIRST_OF_STEP = {
    "draft stands": Bet("what the drafter favours comes too often or too seldom"),
    "draft's law": Bet("tokens follow the drafter's law more, or less, than they should", high=_MOST_RATIO),
    "noise, steps": Bet("the last token of a step tells something of the noise of the next step"),
}
_BONUS = {"noise, bonus": Bet("the bonus token of a step tells something of the noise of the next step's")}

_FIRST_SHARE, _FIRST_LENGTH = 24, 24
"""The first round has one in so many of all tokens, in texts of at most so many: a gross mistake shows in few. Each round
has twice as many as the one before, in texts twice as long."""
_TEXTS_PER_TOKEN = 1 / 16
"""Texts that the test looks at, at most, for each token that it may look at: very short ones cost more than their tokens."""
_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Judge:
    """What the bets are settled with. model: the target. border: how far a logit may be off (reading.row_noise); a token
    outside the kept ids is then looked at no further if it would have been kept with such an error, and where border is
    0 it is impossible.
    """

    model: LanguageModel
    with_drafts: bool
    border: float = 0.0

    def new_bets(self) -> Bets:
        return Bets(_EVERY_TOKEN | _FIRST_OF_STEP | _BONUS if self.with_drafts else _EVERY_TOKEN)

    def settle(self, bets: Bets, texts: Sequence[Text]) -> None:
        """Bet on all output tokens, with the laws of an independent pass."""
        found: dict[str, list[_Outcome]] = {name: [] for name in bets.bets}
        for batch, logits in read_whole(self.model, texts):
            with one_thread():
                num_impossible, outcomes = self._looked_at(batch, logits)
            bets.num_impossible += num_impossible
            for name, outcome in outcomes.items():
                found[name].append(outcome)
        for name, parts in found.items():
            if parts:
                bets.settle(name, *(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def _looked_at(self, batch: Sequence[Text], logits: Tensor) -> tuple[int, dict[str, _Outcome]]:
        """-> (tokens that are impossible, what each bet gave on the others)"""
        rows = rows_of(batch)
        logits = adjusted(logits, rows)
        laws = token_probs_of(logits, rows)
        tokens = torch.tensor([token for text in batch for token in text.output_ids], device=logits.device)
        case = _Tokens.of(laws, tokens)
        impossible = ~case.is_possible
        if self.border > 0 and bool(impossible.any()):
            impossible &= ~_at_the_border(logits, laws, tokens, self.border)
        return int(impossible.sum()), self._outcomes(case, laws, batch)

    def _outcomes(self, case: _Tokens, laws: TokenProbs, batch: Sequence[Text]) -> dict[str, _Outcome]:
        found = _every_token(case, _places_before(case, batch))
        if not self.with_drafts:
            return found
        rows, last = (torch.tensor(part, dtype=torch.int64, device=case.p.device) for part in _bonus_pairs(batch))
        found |= _bonus(case.at_rows(rows), case.place[last])
        drafted = _first_laws(batch, laws)
        if drafted is not None:
            found |= _first_of_step(case, drafted)
        return found


@dataclass(frozen=True, slots=True)
class _Sample:
    """texts: of the last round. is_cut: the time was over before all of it was there."""

    bets: Bets
    texts: Sequence[Text]
    num_texts: int
    num_tokens: int
    num_drafted: int
    num_sampled: int
    is_cut: bool = False


class DistributionTest:
    """Every token of a text was drawn from the target's law. chosen: laws that target and drafters had on the way."""

    name, kind = "distribution", SAMPLED

    def __init__(self, setting: Setting, real: Subject) -> None:
        self.chosen: Chosen | None = None
        self._setting = setting
        self._real = real
        self._num_tokens = 0

    def run(self) -> Found:
        """Raises RequestError for a text that fails."""
        found = self._sample(self._real, self._setting.num_tokens, budgets=1.0)
        self._num_tokens = found.num_tokens
        if found.num_sampled:
            pairs = pairs_of(self._setting.llm.target, found.texts, _CANDIDATES)
            self.chosen = chosen(pairs, self._setting.params_of(SAMPLED)) if pairs else None
        bets = found.bets
        share = bets.smallest_share("draft stands") if "draft stands" in bets.bets else None
        likeliest = bets.smallest_share("likeliest")
        result = CheckResult(
            self.name, self.kind, found.num_texts, found.num_tokens, found.num_drafted, not bets.is_rejected,
            bets_line(bets), bets_odds(share, likeliest),
            {**bets_figures(bets), "smallest_unverified_share": share, "smallest_likeliest_share": likeliest},
            FALSE_ALARM,
        )  # fmt: skip
        cut = [f"sampled tokens behind {found.num_tokens:,}, of {self._setting.num_tokens:,}: the time was over"]
        return Found([result], found.num_drafted, found.num_sampled, cut if found.is_cut else [])

    def reject(self, subject: Subject) -> Rejection:
        try:
            found = self._sample(subject, self._num_tokens)
        except RequestError:
            return Rejection(self.name, 0, None)
        power = found.bets.power_at(self._num_tokens / max(found.num_tokens, 1))
        return Rejection(self.name if found.bets.is_rejected else None, found.num_tokens, power, found.is_cut)

    def _sample(self, subject: Subject, num_tokens: int, *, budgets: float = OVERTIME) -> _Sample:
        """Round after round of texts, until there are num_tokens, or the bets are won, or so many budgets are spent."""
        setting, all_prompts = self._setting, self._setting.prompts
        trial = setting.trial(subject)
        judge = Judge(setting.llm.target, with_drafts=setting.drafts_at_all, border=setting.noise)
        bets, params = judge.new_bets(), setting.params_of(SAMPLED)
        texts: list[Text] = []
        num_seen = num_texts = turn = num_rounds = 0
        is_cut = False
        while num_seen < num_tokens and num_texts < _TEXTS_PER_TOKEN * num_tokens and not (bets.is_rejected or is_cut):
            length, num_prompts, n = self._round(num_rounds, num_tokens - num_seen)
            num_rounds += 1
            # in turn, where a round has fewer prompts than there are
            some = [all_prompts[(turn + i) % len(all_prompts)] for i in range(num_prompts)]
            turn += num_prompts
            texts = trial.write(some, shortened(replace(params, n=n), length))
            judge.settle(bets, texts)
            num_texts += len(texts)
            num_seen += sum(len(text.output_ids) for text in texts)
            is_cut = setting.deadline.is_over(budgets=budgets)
        is_cut &= num_seen < num_tokens and not bets.is_rejected
        return _Sample(bets, texts, num_texts, num_seen, trial.num_drafted, trial.num_sampled, is_cut)

    def _round(self, index: int, num_left: int) -> tuple[int, int, int]:
        """(tokens of a text, prompts, texts of each) of a round. num_left: tokens that are still to come."""
        setting, factor = self._setting, 2 ** min(index, 2)
        length = min(setting.length, _FIRST_LENGTH * factor)
        wanted = min(num_left, setting.num_tokens * factor / _FIRST_SHARE) / length
        prompts = max(1, min(len(setting.prompts), round(wanted / 2)))
        return length, prompts, 2 * max(1, round(wanted / 2 / prompts))


class _Outcome(NamedTuple):
    """Of one bet on N tokens: what it gave, its variance and its shift (Bets.settle), [N] each."""

    g: Tensor
    variance: Tensor
    shift: Tensor


class _Tokens:
    """p: [N, W] laws of N tokens. column: [N], where each token stands in its law; -1 where it has no place there."""

    def __init__(self, p: Tensor, column: Tensor) -> None:
        self.p, self.column = p, column
        self.at = column.clamp(min=0)[:, None]
        self.own = torch.where(column >= 0, p.gather(1, self.at)[:, 0], 0)

    @classmethod
    def of(cls, laws: TokenProbs, tokens: Tensor) -> _Tokens:
        p = laws.probs.to(torch.float64)
        return cls(p / p.sum(1, keepdim=True), _columns_of(laws, tokens))

    def at_rows(self, rows: Tensor) -> _Tokens:
        return _Tokens(self.p[rows], self.column[rows])

    @property
    def is_possible(self) -> Tensor:
        return self.own > 0

    @property
    def place(self) -> Tensor:
        """Where each token stands in the distribution function of its law, the columns in the order in which a draw goes
        through them: from 1 down to -1, 0 on average; the middle of its step. [N]"""
        below = self.p.cumsum(1).gather(1, self.at)[:, 0] - self.own / 2
        return torch.where(self.is_possible, 1 - 2 * below, 0)

    def bet(self, h: Tensor, alternative: Tensor | None = None) -> _Outcome:
        """h: [N, W], a value for each token; the bet is on its mean. alternative: [N, W], the laws of the shift."""
        mean = (self.p * h).sum(1)
        variance = (self.p * h.square()).sum(1) - mean.square()
        shift = torch.zeros_like(mean) if alternative is None else (alternative * h).sum(1) - mean
        return self.outcome(h.gather(1, self.at)[:, 0] - mean, variance, shift)

    def outcome(self, *columns: Tensor) -> _Outcome:
        """Without the tokens that are impossible: those are counted, not bet on."""
        return _Outcome(*(column[self.is_possible] for column in columns))


def _every_token(case: _Tokens, before: Tensor) -> dict[str, _Outcome]:
    """before: [N] in [-1, 1], where the token before stands (_Tokens.place), 0 where there is none. The shift is that of
    taking the likeliest token."""
    p = case.p
    top, where = p.max(1)
    own = case.own[:, None]
    # the middle of the token's step in the distribution function, so that its mean is exactly a half
    rank = 1 - 2 * (torch.where(p > own, p, 0).sum(1) + torch.where(p == own, p, 0).sum(1) / 2)
    zero = torch.zeros_like(top)
    return {
        "surprise": case.bet((-p.clamp(min=1e-300).log()).clamp(max=_MOST_SURPRISE) / _MOST_SURPRISE),
        "likeliest": case.outcome((where == case.column).to(p.dtype) - top, top * (1 - top), 1 - top),
        "rank": case.outcome(rank, (1 - p.pow(3).sum(1)) / 3, zero),
        "noise, tokens": case.outcome(case.place * before, before.square() * (1 - p.pow(3).sum(1)) / 3, zero),
    }


def _first_of_step(whole: _Tokens, firsts: _Firsts) -> dict[str, _Outcome]:
    """whole: all tokens. The shift is that of letting the draft token stand, whatever the target says."""
    case, q = whole.at_rows(firsts.rows), firsts.q
    ratio = _ratio(q, case.p)
    share, place = _recovered(case, torch.where(firsts.is_certain[:, None], 0, q))
    # where the step before ended with its first token, that one was recovered too
    before = torch.where(firsts.before >= 0, place[firsts.before], whole.place[(firsts.rows - 1).clamp(min=0)])
    before = torch.where(firsts.is_first, 0, before)
    zero = torch.zeros_like(place)
    return {
        "draft stands": case.bet(ratio.clamp(max=1.0), q),
        "draft's law": case.bet(ratio.clamp(max=_MOST_RATIO), q),
        "noise, steps": case.outcome(share * place * before, zero, zero),
    }


def _bonus(case: _Tokens, before: Tensor) -> dict[str, _Outcome]:
    """case: bonus tokens. That a token is a bonus token is settled before it is drawn, so its law is p. before: [N], where the
    bonus token stands that ended the step before."""
    variance = before.square() * (1 - case.p.pow(3).sum(1)) / 3
    return {"noise, bonus": case.outcome(case.place * before, variance, torch.zeros_like(before))}


def _bonus_pairs(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Output tokens, counted over all texts: the bonus tokens of steps, and those that ended the steps before."""
    rows, before, start = list[int](), list[int](), 0
    for text in texts:
        last: int | None = None  # the token that ended the step before, if it was a bonus token
        for place, origin in enumerate(text.origins[: len(text.output_ids)]):
            if origin is Origin.ACCEPTED:
                continue
            if origin is Origin.BONUS and last is not None:
                rows.append(start + place)
                before.append(start + last)
            last = place if origin is Origin.BONUS else None
        start += len(text.output_ids)
    return rows, before


def _recovered(case: _Tokens, q: Tensor) -> tuple[Tensor, Tensor]:
    """If tokens were recovered from max(p - q, 0): the odds that each was, given it came, and where it stands in the
    distribution function of that (_Tokens.place). Their product is 0 on average. q: [N, W] -> [N], [N]"""
    weights = (case.p - q).clamp(min=0)
    own = torch.where(case.is_possible, weights.gather(1, case.at)[:, 0], 0)
    below = weights.cumsum(1).gather(1, case.at)[:, 0] - own / 2
    place = torch.where(own > 0, 1 - 2 * below / weights.sum(1).clamp(min=1e-300), 0)
    return torch.where(own > 0, own / case.own.clamp(min=1e-300), 0), place


def _ratio(q: Tensor, p: Tensor) -> Tensor:
    return torch.where(p > 0, q / p.clamp(min=1e-300), 0)


def _columns_of(laws: TokenProbs, tokens: Tensor) -> Tensor:
    if laws.ids is None:
        return tokens
    matches = (laws.ids == tokens[:, None]) & (laws.probs > 0)
    return torch.where(matches.any(1), matches.to(torch.uint8).argmax(1), -1)


def _at_the_border(logits: Tensor, laws: TokenProbs, tokens: Tensor, border: float) -> Tensor:
    """Whether a token's logit is within twice the error of the least one that is kept. [N] bool"""
    if laws.ids is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    kept = torch.where(laws.probs > 0, logits.gather(1, laws.ids), torch.inf).amin(1)
    return logits.gather(1, tokens[:, None])[:, 0] >= kept - 2 * border


def _places_before(case: _Tokens, texts: Sequence[Text]) -> Tensor:
    """Of the token before each in its text; 0 for the first. [N]"""
    places = case.place
    before = torch.cat([torch.zeros_like(places[:1]), places[:-1]])
    starts = list(accumulate((len(text.output_ids) for text in texts[:-1]), initial=0))
    before[starts] = 0
    return before


class _Firsts(NamedTuple):
    """The tokens that N drafted steps began with. rows: [N], which tokens these are. q: [N, W], what was drafted there, on the
    columns of the laws; is_certain: [N], whether it was no law. before: [N], which of these steps is the one before, where
    that wrote a single token; -1 elsewhere. is_first: [N], whether it is the first token of a text."""

    rows: Tensor
    q: Tensor
    is_certain: Tensor
    before: Tensor
    is_first: Tensor


def _first_laws(texts: Sequence[Text], laws: TokenProbs) -> _Firsts | None:
    rows, before, start = list[int](), list[int](), 0
    q, is_certain, is_first = list[Tensor](), list[bool](), list[bool]()
    for text in texts:
        places: dict[int, int] = {}
        for position, first in sorted(text.firsts.items()):
            row = start + position - text.prompt_len
            if position < len(text.tokens):
                places[position] = len(rows)
                rows.append(row)
                q.append(_on_columns(first.probs, laws, row))
                is_certain.append(isinstance(first.probs, int))
                before.append(places.get(position - 1, -1))
                is_first.append(position == text.prompt_len)
        start += len(text.output_ids)
    if not rows:
        return None
    columns = (torch.tensor(part, device=laws.probs.device) for part in (rows, is_certain, before, is_first))
    where, certain, last, begins = columns
    return _Firsts(where, torch.stack(q), certain, last, begins)


def _on_columns(law: int | TokenProbs, laws: TokenProbs, row: int) -> Tensor:
    ids = laws.ids
    if isinstance(law, int):
        if ids is None:
            return torch.nn.functional.one_hot(torch.tensor(law, device=laws.probs.device), laws.probs.shape[1]).to(
                torch.float64
            )
        return ((ids[row] == law) & (laws.probs[row] > 0)).to(torch.float64)
    law, width = law.to(laws.probs.device), laws.probs.shape[1]
    if ids is None:
        return law.dense(width)[0].to(torch.float64)
    q = law.at(torch.zeros(1, dtype=torch.int64, device=ids.device), ids[row][None])[0]
    return torch.where(laws.probs[row] > 0, q.to(torch.float64), 0)
