"""Was every token drawn from the target's law? Bets on that, over texts that were sampled without a seed.

Four bets look at every token and know only its law given the text before it, and that text. Three more know where a step
began, and what was drafted there first: a law, or a certain token, but never a token drawn from a law, because that one
and the target's are drawn together. The token with which a step begins has the target's law given all that came before
the step, including how earlier steps ended; this does not hold for the next ones, because whether they belong to the same
step is decided together with them. One more bet is on bonus tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.betting import SURPRISE, Bet, Bets, surprise
from foredraft.certificate.checks import BettingCheck, Sample
from foredraft.certificate.drafts import FirstLaw
from foredraft.certificate.report import SAMPLED
from foredraft.certificate.texts import Subject, Text, one_thread, read_whole, rows_of, shortened
from foredraft.engine.sequence import Origin
from foredraft.model import LanguageModel
from foredraft.sampling import TokenProbs, adjusted, token_probs_of

_MOST_RATIO = 4.0

_EVERY_TOKEN = {
    "surprise": SURPRISE,
    "likeliest": Bet("the likeliest token comes too often or too seldom"),
    "rank": Bet("tokens come from too far up or down the list of candidates"),
    "noise, tokens": Bet("a token depends on the noise that the next one is drawn with"),
}
_FIRST_OF_STEP = {
    "draft stands": Bet("what the drafter favours comes too often or too seldom"),
    "draft's law": Bet("tokens follow the drafter's law more, or less, than they should", high=_MOST_RATIO),
    "noise, steps": Bet("the last token of a step depends on the noise of the next step"),
}
_BONUS = {"noise, bonus": Bet("the bonus token of a step depends on the noise of the next step's")}

_FIRST_SHARE, _FIRST_LENGTH = 24, 24
"""The first round has one in so many of all tokens, in texts of at most so many: a gross mistake shows in few. Each round
has twice as many as the one before, in texts twice as long."""
_TEXTS_PER_TOKEN = 1 / 16
"""Texts looked at, at most, for each token that may be looked at: very short ones cost more than their tokens."""


class DistributionCheck(BettingCheck):
    """Every token of a text was drawn from the target's law. texts: of the last round."""

    name, kind = "distribution", SAMPLED

    @property
    def _num_wanted(self) -> int:
        return self._setting.num_tokens

    def _shares(self, bets: Bets) -> dict[str, float | None]:
        return {
            "smallest_unverified_share": bets.smallest_share("draft stands"),
            "smallest_likeliest_share": bets.smallest_share("likeliest"),
        }

    def _odds(self, bets: Bets) -> str:
        faults = (
            "draft tokens that stand unverified in {:.1%} of steps",
            "the likeliest token in place of a drawn one in {:.1%}",
        )
        shares = zip(faults, self._shares(bets).values(), strict=True)
        lines = [fault.format(share) for fault, share in shares if share is not None]
        return super()._odds(bets) + ("; found with odds 0.99: " + ", or ".join(lines) if lines else "")

    def _sample(self, subject: Subject, num_tokens: int, *, budgets: float) -> Sample:
        """Round after round of texts."""
        setting, prompts = self._setting, self._setting.prompts
        trial = setting.trial(subject)
        text_bets = TextBets(setting.llm.target, with_drafts=setting.has_drafter, border=setting.noise)
        bets, params = text_bets.new(), setting.params_of(SAMPLED)
        texts: list[Text] = []
        num_seen = num_texts = turn = num_rounds = 0
        is_over = False
        while num_seen < num_tokens and num_texts < _TEXTS_PER_TOKEN * num_tokens and not (bets.is_rejected or is_over):
            length, num_prompts, n = self._round(num_rounds, num_tokens - num_seen)
            num_rounds += 1
            # in turn, where a round has fewer prompts than there are
            chosen = [prompts[(turn + i) % len(prompts)] for i in range(num_prompts)]
            turn += num_prompts
            texts = trial.write(chosen, shortened(replace(params, n=n), length))
            text_bets.place(bets, texts)
            num_texts += len(texts)
            num_seen += sum(len(text.output_ids) for text in texts)
            is_over = setting.deadline.is_over(budgets=budgets)
        is_cut = is_over and num_seen < num_tokens and not bets.is_rejected
        return Sample(bets, num_texts, num_seen, trial.num_drafted, trial.num_sampled, is_cut, texts)

    def _round(self, index: int, num_left: int) -> tuple[int, int, int]:
        """(tokens of a text, prompts, texts of each) of a round. num_left: tokens that are still to come."""
        setting, factor = self._setting, 2 ** min(index, 2)
        length = min(setting.length, _FIRST_LENGTH * factor)
        wanted = min(num_left, setting.num_tokens * factor / _FIRST_SHARE) / length
        prompts = max(1, min(len(setting.prompts), round(wanted / 2)))
        return length, prompts, 2 * max(1, round(wanted / 2 / prompts))


@dataclass(frozen=True, slots=True)
class TextBets:
    """Places bets on texts. model: the target. border: how far a logit may be off (texts.row_noise). A token outside the
    kept ids is impossible, unless such an error could have kept it; then no bet is placed on it."""

    model: LanguageModel
    with_drafts: bool
    border: float = 0.0

    def new(self) -> Bets:
        return Bets(_EVERY_TOKEN | _FIRST_OF_STEP | _BONUS if self.with_drafts else _EVERY_TOKEN)

    def place(self, bets: Bets, texts: Sequence[Text]) -> None:
        """Bet on all output tokens, with the laws of an independent pass."""
        results: dict[str, list[BetResult]] = {name: [] for name in bets.bets}
        for batch, logits in read_whole(self.model, texts):
            with one_thread():
                num_impossible, of_batch = self._results(batch, logits)
            bets.num_impossible += num_impossible
            for name, result in of_batch.items():
                results[name].append(result)
        for name, parts in results.items():
            if parts:
                bets.update(name, *(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def _results(self, batch: Sequence[Text], logits: Tensor) -> tuple[int, dict[str, BetResult]]:
        """-> (tokens that are impossible, the results of each bet on the others)"""
        rows = rows_of(batch)
        logits = adjusted(logits, rows).logits
        laws = token_probs_of(logits, rows)
        ids = torch.tensor([token for text in batch for token in text.output_ids], device=logits.device)
        tokens = Tokens.of(laws, ids)
        impossible = ~tokens.is_possible
        if self.border > 0 and bool(impossible.any()):
            impossible &= ~_is_at_the_border(logits, laws, ids, self.border)
        results = every_token(tokens, _cdf_before(tokens, batch))
        if self.with_drafts:
            results |= self._of_steps(tokens, laws, batch)
        return int(impossible.sum()), results

    def _of_steps(self, tokens: Tokens, laws: TokenProbs, batch: Sequence[Text]) -> dict[str, BetResult]:
        rows, last = (torch.tensor(part, dtype=torch.int64, device=tokens.p.device) for part in bonus_pairs(batch))
        results = bonus(tokens.at_rows(rows), tokens.cdf[last])
        starts = _starts_of(batch, laws)
        return results if starts is None else results | first_of_step(tokens, starts)


class BetResult(NamedTuple):
    """Of one bet on N tokens: its g, variance and shift (Bets.update), [N] each."""

    g: Tensor
    variance: Tensor
    shift: Tensor


class Tokens:
    """N tokens and their laws. p: [N, W]. column: [N], of each token in its law; -1 where it has none there."""

    def __init__(self, p: Tensor, column: Tensor) -> None:
        self.p, self.column = p, column
        self.at = column.clamp(min=0)[:, None]
        self.p_token = torch.where(column >= 0, p.gather(1, self.at)[:, 0], 0)

    @classmethod
    def of(cls, laws: TokenProbs, ids: Tensor) -> Tokens:
        p = laws.probs.to(torch.float64)
        return cls(p / p.sum(1, keepdim=True), _columns_of(laws, ids))

    def at_rows(self, rows: Tensor) -> Tokens:
        return Tokens(self.p[rows], self.column[rows])

    @property
    def is_possible(self) -> Tensor:
        return self.p_token > 0

    @property
    def cdf(self) -> Tensor:
        """See cdf_of. [N]"""
        return self.cdf_of(self.p, self.p_token)

    def cdf_of(self, weights: Tensor, weight: Tensor) -> Tensor:
        """The place of each token in the distribution function of a law, the columns in the order in which a draw goes
        through them: from 1 down to -1, with mean 0; the middle of its step, and 0 for weight 0. weights: [N, W], of the
        law. weight: [N], of the token. -> [N]"""
        below = weights.cumsum(1).gather(1, self.at)[:, 0] - weight / 2
        return torch.where(weight > 0, 1 - 2 * below / weights.sum(1).clamp(min=1e-300), 0)

    def bet(self, h: Tensor, alternative: Tensor | None = None) -> BetResult:
        """h: [N, W], a value for each token; the bet is on its mean. alternative: [N, W], the laws of the shift."""
        mean = (self.p * h).sum(1)
        variance = (self.p * h.square()).sum(1) - mean.square()
        shift = torch.zeros_like(mean) if alternative is None else (alternative * h).sum(1) - mean
        return self.result(h.gather(1, self.at)[:, 0] - mean, variance, shift)

    def result(self, *columns: Tensor) -> BetResult:
        """Without the impossible tokens: those are counted, not bet on."""
        return BetResult(*(column[self.is_possible] for column in columns))


def every_token(tokens: Tokens, before: Tensor) -> dict[str, BetResult]:
    """before: [N] in [-1, 1], Tokens.cdf of the token before, 0 where there is none. The shift is that of taking the
    likeliest token."""
    p, p_token = tokens.p, tokens.p_token[:, None]
    top, where = p.max(1)
    # the middle of the token's step in the distribution function, so that its mean is exactly a half
    rank = 1 - 2 * (torch.where(p > p_token, p, 0).sum(1) + torch.where(p == p_token, p, 0).sum(1) / 2)
    spread, zero = (1 - p.pow(3).sum(1)) / 3, torch.zeros_like(top)
    return {
        "surprise": tokens.bet(surprise(p)),
        "likeliest": tokens.result((where == tokens.column).to(p.dtype) - top, top * (1 - top), 1 - top),
        "rank": tokens.result(rank, spread, zero),
        "noise, tokens": tokens.result(tokens.cdf * before, before.square() * spread, zero),
    }


def first_of_step(tokens: Tokens, starts: StepStarts) -> dict[str, BetResult]:
    """tokens: all of them. The shift is that of letting the draft token stand, whatever the target's law."""
    first, q = tokens.at_rows(starts.rows), starts.q
    ratio = torch.where(first.p > 0, q / first.p.clamp(min=1e-300), 0)
    # if the token was recovered from max(p - q, 0): the odds of that given the token; their product with cdf has mean 0
    residual = (first.p - torch.where(starts.is_certain[:, None], 0, q)).clamp(min=0)
    weight = torch.where(first.is_possible, residual.gather(1, first.at)[:, 0], 0)
    share = torch.where(weight > 0, weight / first.p_token.clamp(min=1e-300), 0)
    cdf = first.cdf_of(residual, weight)
    # where the step before ended with its first token, that one was recovered too
    before = torch.where(starts.before >= 0, cdf[starts.before], tokens.cdf[(starts.rows - 1).clamp(min=0)])
    before = torch.where(starts.is_first, 0, before)
    zero = torch.zeros_like(cdf)
    return {
        "draft stands": first.bet(ratio.clamp(max=1.0), q),
        "draft's law": first.bet(ratio.clamp(max=_MOST_RATIO), q),
        "noise, steps": first.result(share * cdf * before, zero, zero),
    }


def bonus(tokens: Tokens, before: Tensor) -> dict[str, BetResult]:
    """tokens: bonus tokens. Whether a token is one is decided before it is drawn, so its law is p. before: [N], Tokens.cdf of
    the bonus token that ended the step before."""
    variance = before.square() * (1 - tokens.p.pow(3).sum(1)) / 3
    return {"noise, bonus": tokens.result(tokens.cdf * before, variance, torch.zeros_like(before))}


def bonus_pairs(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Rows of output tokens, counted over all texts: bonus tokens of steps, and the bonus tokens of the steps before."""
    rows, before, start = list[int](), list[int](), 0
    for text in texts:
        last: int | None = None  # the token that ended the step before, if it was a bonus token
        for position, origin in enumerate(text.origins[: len(text.output_ids)]):
            if origin is Origin.ACCEPTED:
                continue
            if origin is Origin.BONUS and last is not None:
                rows.append(start + position)
                before.append(start + last)
            last = position if origin is Origin.BONUS else None
        start += len(text.output_ids)
    return rows, before


class StepStarts(NamedTuple):
    """The tokens that N drafted steps began with. rows: [N], of these tokens. q: [N, W], the first law of each step, on the
    columns of the laws; is_certain: [N], whether it was a token. before: [N], which of these steps is the one before, where
    that wrote a single token; -1 elsewhere. is_first: [N], whether the token is the first of a text."""

    rows: Tensor
    q: Tensor
    is_certain: Tensor
    before: Tensor
    is_first: Tensor


def _starts_of(texts: Sequence[Text], laws: TokenProbs) -> StepStarts | None:
    rows, before, start = list[int](), list[int](), 0
    q, is_certain, is_first = list[Tensor](), list[bool](), list[bool]()
    for text in texts:
        places: dict[int, int] = {}
        for position, law in sorted(text.first_laws.items()):
            row = start + position - text.prompt_len
            if position < len(text.tokens):
                places[position] = len(rows)
                rows.append(row)
                q.append(_on_columns(law, laws, row))
                is_certain.append(isinstance(law, int))
                before.append(places.get(position - 1, -1))
                is_first.append(position == text.prompt_len)
        start += len(text.output_ids)
    if not rows:
        return None
    where, certain, last, begins = (
        torch.tensor(part, device=laws.probs.device) for part in (rows, is_certain, before, is_first)
    )
    return StepStarts(where, torch.stack(q), certain, last, begins)


def _on_columns(law: FirstLaw, laws: TokenProbs, row: int) -> Tensor:
    """A first law on the columns of one of the laws. [W] float64"""
    width, device = laws.probs.shape[1], laws.probs.device
    ids = torch.arange(width, device=device) if laws.ids is None else laws.ids[row]
    if isinstance(law, int):
        q = ids == law
    else:
        q = law.to(device).at(torch.zeros(1, dtype=torch.int64, device=device), ids[None])[0]
    return q.to(torch.float64) if laws.ids is None else torch.where(laws.probs[row] > 0, q.to(torch.float64), 0)


def _columns_of(laws: TokenProbs, ids: Tensor) -> Tensor:
    if laws.ids is None:
        return ids
    matches = (laws.ids == ids[:, None]) & (laws.probs > 0)
    return torch.where(matches.any(1), matches.to(torch.uint8).argmax(1), -1)


def _is_at_the_border(logits: Tensor, laws: TokenProbs, ids: Tensor, border: float) -> Tensor:
    """Whether a token's logit is within twice the error of the lowest one that is kept. [N] bool"""
    if laws.ids is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    kept = torch.where(laws.probs > 0, logits.gather(1, laws.ids), torch.inf).amin(1)
    return logits.gather(1, ids[:, None])[:, 0] >= kept - 2 * border


def _cdf_before(tokens: Tokens, texts: Sequence[Text]) -> Tensor:
    """Tokens.cdf of the token before each in its text; 0 for the first. [N]"""
    before = tokens.cdf.roll(1)
    starts = list(accumulate((len(text.output_ids) for text in texts[:-1]), initial=0))
    before[starts] = 0
    return before
