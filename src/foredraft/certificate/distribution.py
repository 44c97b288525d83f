"""Check that every token was drawn from the target's distribution, by bets on texts sampled without a seed.

Four bets look at every token and use only the text before it and the token's distribution given that text. Three more also use
where a step began and what was drafted there first: a distribution, or a certain token, but never a token drawn from a
distribution, because that token and the target's are drawn together. The first token of a step has the target's
distribution given all that came before the step, including how earlier steps ended; this does not hold for the next ones,
because whether they belong to the same step is decided together with them. One more bet is on bonus tokens.

The last bet is on the drafter itself: whether its draft tokens come from the distributions that it reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.certificate.betting import SURPRISE, Bet, Bets, BettingCheck, TokenSource
from foredraft.certificate.controls import Control
from foredraft.certificate.report import SAMPLED
from foredraft.certificate.setting import Setting
from foredraft.certificate.surprise import surprise
from foredraft.certificate.texts import (
    FirstLaw,
    Text,
    num_tokens,
    one_thread,
    read_whole,
    rows_of,
    shortened,
    step_starts,
)
from foredraft.engine.sequence import Origin
from foredraft.model import LanguageModel
from foredraft.sampling import TokenProbs, adjusted, token_probs_of

_MOST_RATIO = 4.0

EVERY_TOKEN = {
    "surprise": SURPRISE,
    "likeliest": Bet("the likeliest token occurs too often or too rarely"),
    "rank": Bet("tokens come from too far up or down the list of candidates"),
    "noise, tokens": Bet("a token depends on the noise with which the next one is drawn"),
}
OF_STEPS = {
    "draft stands": Bet("tokens that the drafter favours occur too often or too rarely"),
    "draft's law": Bet(
        "tokens follow the drafter's distribution more or less closely than they should", high=_MOST_RATIO
    ),
    "noise, steps": Bet("the last token of a step depends on the noise of the next step"),
    "noise, bonus": Bet("the bonus token of a step depends on the noise of the next step's bonus token"),
}
OF_DRAFTS = {
    "draft's surprise": Bet(
        "draft tokens are too likely or too unlikely under the distribution that the drafter reports"
    )
}

_FIRST_SHARE, _FIRST_LENGTH = 24, 24
"""The first round has 1/24 of all tokens, in texts of at most 24 tokens, because a gross mistake shows in few. The next two
rounds each have twice as many as the one before, in texts twice as long; later rounds do not grow."""
_TOKENS_PER_TEXT = 16
"""Very short texts cost more than their tokens, so each counts as at least this many."""


def distribution_check(setting: Setting) -> BettingCheck:
    """The check that every token of a text was drawn from the target's distribution."""
    return BettingCheck("distribution", SAMPLED, setting.deadline, setting.num_tokens, partial(TextSource, setting))


class TextSource(TokenSource):
    """Writes texts in rounds and bets on their tokens."""

    def __init__(self, setting: Setting, control: Control | None, num_wanted: int) -> None:
        super().__init__(Bets(EVERY_TOKEN | OF_STEPS | OF_DRAFTS if setting.drafters else EVERY_TOKEN), num_wanted)
        self._setting = setting
        self._trial = setting.trial(control)
        self._num_rounds = self._num_prompts = 0

    @property
    def is_complete(self) -> bool:
        return super().is_complete or _TOKENS_PER_TEXT * self.num_texts >= self.num_wanted

    def place(self) -> None:
        setting, (length, count, copies) = self._setting, self._next_round()
        # a round that uses only some of the prompts continues where the last one stopped
        prompts = [setting.prompts[(self._num_prompts + i) % len(setting.prompts)] for i in range(count)]
        self._num_rounds += 1
        self._num_prompts += count
        params = shortened(replace(setting.params_of(SAMPLED), n=copies), length)
        self.texts = self._trial.write(prompts, params)
        if surprises := self._trial.take_draft_surprises():
            self.bets.update("draft's surprise", torch.cat(surprises))
        bet_on_texts(self.bets, setting.llm.target, self.texts, setting.noise)
        self.num_texts += len(self.texts)
        self.num_tokens += num_tokens(self.texts)
        record = self._trial.record
        self.num_drafted, self.num_sampled, self.num_by_heads = (
            record.num_drafted,
            record.num_sampled,
            record.num_by_heads,
        )

    def _next_round(self) -> tuple[int, int, int]:
        """-> (tokens of a text, number of prompts, texts per prompt)"""
        setting, factor = self._setting, 2 ** min(self._num_rounds, 2)
        length = min(setting.length, _FIRST_LENGTH * factor)
        wanted = min(self.num_wanted - self.num_tokens, setting.num_tokens * factor / _FIRST_SHARE) / length
        prompts = max(1, min(len(setting.prompts), round(wanted / 2)))
        return length, prompts, 2 * max(1, round(wanted / 2 / prompts))

    @property
    def shares(self) -> dict[str, float | None]:
        return {
            "smallest_unverified_share": self.bets.smallest_share("draft stands"),
            "smallest_likeliest_share": self.bets.smallest_share("likeliest"),
        }

    @property
    def odds(self) -> str:
        faults = (
            "draft tokens accepted unverified in {:.1%} of steps",
            "the likeliest token taken in place of a draw for {:.1%} of tokens",
        )
        shares = zip(faults, self.shares.values(), strict=True)
        lines = [fault.format(share) for fault, share in shares if share is not None]
        return super().odds + ("; found with probability 0.99: " + ", or ".join(lines) if lines else "")


def bet_on_texts(bets: Bets, model: LanguageModel, texts: Sequence[Text], noise: float) -> None:
    """Bet on all output tokens, with the distributions of an independent pass.

    noise: how far a logit may be off (texts.row_noise). A token outside the kept ids is impossible, unless an error of that
    size could have kept it; then no bet is placed on it.
    """
    for batch, logits in read_whole(model, texts):
        with one_thread():
            _bet_on_batch(bets, batch, logits, noise)


def _bet_on_batch(bets: Bets, batch: Sequence[Text], logits: Tensor, noise: float) -> None:
    rows = rows_of(batch)
    logits = adjusted(logits, rows).logits
    laws = token_probs_of(logits, rows)
    ids = torch.tensor([token for text in batch for token in text.output_ids], device=logits.device)
    tokens = Tokens.of(laws, ids)
    impossible = ~tokens.is_possible
    if noise > 0 and bool(impossible.any()):
        impossible &= ~_is_at_the_border(logits, laws, ids, noise)
    bets.num_impossible += int(impossible.sum())
    begins = torch.zeros_like(impossible)
    begins[list(accumulate((len(text.output_ids) for text in batch[:-1]), initial=0))] = True
    bonus_rows, last_rows = (torch.tensor(part, dtype=torch.int64, device=ids.device) for part in bonus_pairs(batch))
    places = tokens.cdf()
    results = every_token(tokens, _before(places, begins)) | bonus(tokens.at_rows(bonus_rows), places[last_rows])
    if starts := step_starts(batch):
        where = torch.tensor([row for row, _ in starts], device=ids.device)
        is_certain = torch.tensor([isinstance(law, int) for _, law in starts], device=ids.device)
        q = torch.stack([_on_columns(law, laws, row) for row, law in starts])
        results |= first_of_step(tokens, begins, where, q, is_certain)
    for name in results.keys() & bets.accounts.keys():
        bets.update(name, *results[name])


class BetResult(NamedTuple):
    """One bet on N tokens: its g, and variance and shift where they are needed (Account.update), [N] each."""

    g: Tensor
    variance: Tensor | None = None
    shift: Tensor | None = None


class Tokens:
    """N tokens and their distributions. p: [N, W] float64. column: [N], each token's column in its own row of p; -1 for none."""

    def __init__(self, p: Tensor, column: Tensor) -> None:
        self.p, self.column = p, column
        self.at = column.clamp(min=0)[:, None]
        self.p_token = self.at_column(p)

    def at_column(self, values: Tensor) -> Tensor:
        """values: [N, W] -> [N], 0 for tokens without a column"""
        return torch.where(self.column >= 0, values.gather(1, self.at)[:, 0], 0)

    @classmethod
    def of(cls, laws: TokenProbs, ids: Tensor) -> Tokens:
        """laws: the distributions of N tokens. ids: [N]"""
        p = laws.probs.to(torch.float64)
        p = p / p.sum(1, keepdim=True)
        if laws.ids is None:
            return cls(p, ids)
        matches = (laws.ids == ids[:, None]) & (laws.probs > 0)
        return cls(p, torch.where(matches.any(1), matches.to(torch.uint8).argmax(1), -1))

    def at_rows(self, rows: Tensor) -> Tokens:
        return Tokens(self.p[rows], self.column[rows])

    @property
    def is_possible(self) -> Tensor:
        return self.p_token > 0

    def cdf(self, weights: Tensor | None = None) -> Tensor:
        """Each token's value of the distribution function, with the columns in the order in which a draw goes through them:
        scaled from 1 down to -1, so its mean is 0; taken in the middle of the token's step, and 0 for weight 0.
        weights: [N, W]; None: the token's own distribution. -> [N]"""
        weights = self.p if weights is None else weights
        weight = self.at_column(weights)
        below = weights.cumsum(1).gather(1, self.at)[:, 0] - weight / 2
        return torch.where(weight > 0, 1 - 2 * below / weights.sum(1).clamp(min=1e-300), 0)

    def bet(self, h: Tensor, alternative: Tensor | None = None) -> BetResult:
        """h: [N, W], a value for each token; the bet is on its mean. alternative: [N, W], the distributions to compute the shift with."""
        mean = (self.p * h).sum(1)
        g = self.at_column(h) - mean
        if alternative is None:
            return self.result(g)
        return self.result(g, (self.p * h.square()).sum(1) - mean.square(), (alternative * h).sum(1) - mean)

    def result(self, *columns: Tensor) -> BetResult:
        """The result without impossible tokens, which are counted, not bet on."""
        return BetResult(*(column[self.is_possible] for column in columns))


def _before(values: Tensor, begins: Tensor) -> Tensor:
    """The value of the previous token; 0 for the first of a text. values: [N]. begins: [N] bool"""
    return torch.where(begins, 0, values.roll(1))


def every_token(tokens: Tokens, before: Tensor) -> dict[str, BetResult]:
    """before: [N] in [-1, 1], the cdf of the previous token, 0 where there is none. The alternative of the shift is to always
    take the likeliest token."""
    p, p_token = tokens.p, tokens.p_token[:, None]
    top, where = p.max(1)
    # the middle of the token's step in the distribution function, so that its mean is exactly a half
    rank = 1 - 2 * (torch.where(p > p_token, p, 0).sum(1) + torch.where(p == p_token, p, 0).sum(1) / 2)
    return {
        "surprise": tokens.bet(surprise(p)),
        "likeliest": tokens.result((where == tokens.column).to(p.dtype) - top, top * (1 - top), 1 - top),
        "rank": tokens.result(rank),
        "noise, tokens": tokens.result(tokens.cdf() * before),
    }


def bonus(tokens: Tokens, before: Tensor) -> dict[str, BetResult]:
    """tokens: bonus tokens. Whether a token is a bonus token is decided before it is drawn, so its distribution is p.
    before: [N], the cdf of the bonus token that ended the previous step."""
    return {"noise, bonus": tokens.result(tokens.cdf() * before)}


def bonus_pairs(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Rows among the output tokens of all texts: bonus tokens of steps, and the bonus tokens of the steps before those."""
    rows, before, start = list[int](), list[int](), 0
    for text in texts:
        last: int | None = None  # the token that ended the previous step, if it was a bonus token
        for row, origin in enumerate(text.origins[: len(text.output_ids)], start):
            if origin is Origin.ACCEPTED:
                continue
            if origin is Origin.BONUS and last is not None:
                rows.append(row)
                before.append(last)
            last = row if origin is Origin.BONUS else None
        start += len(text.output_ids)
    return rows, before


def first_of_step(tokens: Tokens, begins: Tensor, rows: Tensor, q: Tensor, is_certain: Tensor) -> dict[str, BetResult]:
    """Bets on the first tokens of M drafted steps. The alternative of the shift is to accept the draft token whatever the
    target's distribution.

    tokens: all N tokens. begins: [N] bool, whether a text begins with the token. rows: [M], the tokens bet on. q: [M, W], the
    first distribution of each step (FirstLaw), on the columns of the target's; is_certain: [M], whether it was a token.
    """
    first = tokens.at_rows(rows)
    ratio = torch.where(first.p > 0, q / first.p.clamp(min=1e-300), 0)
    # the probability, given the token, that it was recovered from max(p - q, 0); its product with cdf has mean 0
    residual = (first.p - torch.where(is_certain[:, None], 0, q)).clamp(min=0)
    weight = torch.where(first.is_possible, first.at_column(residual), 0)
    share = torch.where(weight > 0, weight / first.p_token.clamp(min=1e-300), 0)
    place, ends = first.cdf(residual), tokens.cdf()
    # if the previous step ended with its first token, that token was recovered too
    ends[rows] = place
    return {
        "draft stands": first.bet(ratio.clamp(max=1.0), q),
        "draft's law": first.bet(ratio.clamp(max=_MOST_RATIO)),
        "noise, steps": first.result(share * place * _before(ends, begins)[rows]),
    }


def _on_columns(law: FirstLaw, laws: TokenProbs, row: int) -> Tensor:
    """A step's first distribution (FirstLaw) on the columns of the target's distribution of that row. [W] float64"""
    width, device = laws.probs.shape[1], laws.probs.device
    ids = torch.arange(width, device=device) if laws.ids is None else laws.ids[row]
    if isinstance(law, int):
        q = ids == law
    else:
        q = law.to(device).at(torch.zeros(1, dtype=torch.int64, device=device), ids[None])[0]
    return q.to(torch.float64) if laws.ids is None else torch.where(laws.probs[row] > 0, q.to(torch.float64), 0)


def _is_at_the_border(logits: Tensor, laws: TokenProbs, ids: Tensor, noise: float) -> Tensor:
    """Whether a token's logit is within twice the noise of the lowest logit that is kept. [N] bool"""
    if laws.ids is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    kept = torch.where(laws.probs > 0, logits.gather(1, laws.ids), torch.inf).amin(1)
    return logits.gather(1, ids[:, None])[:, 0] >= kept - 2 * noise
