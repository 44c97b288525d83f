"""Was every token drawn from the target's law? Bets on that, over texts that were sampled without a seed.

Three bets look at every token and know only its law given the text before it. Two more know where a step began, and what
was drafted there first: a law, or a certain token, but never a token drawn from a law, because that one and the target's
are drawn together. The token with which a step begins has the target's law given all that came before the step; of
the next ones that cannot be said, because whether they belong to the same step is decided together with them.
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
from foredraft.sampling import Laws, adjusted, laws_of

_MOST_SURPRISE = 16.0
_MOST_RATIO = 4.0

_EVERY_TOKEN = {
    "surprise": Bet("tokens are too likely or too unlikely on average"),
    "likeliest": Bet("the likeliest token comes too often or too seldom"),
    "rank": Bet("tokens come from too far up or down the list of candidates"),
}
_FIRST_OF_STEP = {
    "draft stands": Bet("what the drafter favours comes too often or too seldom"),
    "draft's law": Bet("tokens follow the drafter's law more, or less, than they should", high=_MOST_RATIO),
}


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
        return Bets(_EVERY_TOKEN | _FIRST_OF_STEP if self.with_drafts else _EVERY_TOKEN)

    def settle(self, bets: Bets, texts: Sequence[Text]) -> None:
        """Bet on all output tokens, with the laws of an independent pass."""
        found: dict[str, list[_Outcome]] = {name: [] for name in bets.bets}
        for batch, logits in read_whole(self.model, texts):
            rows = rows_of(batch)
            logits = adjusted(logits, rows)
            laws = laws_of(logits, rows)
            tokens = torch.tensor([token for text in batch for token in text.output_ids], device=logits.device)
            case = _Tokens.of(laws, tokens)
            impossible = ~case.is_possible
            if self.border > 0 and bool(impossible.any()):
                impossible &= ~_at_the_border(logits, laws, tokens, self.border)
            bets.num_impossible += int(impossible.sum())
            for name, outcome in self._outcomes(case, laws, batch).items():
                found[name].append(outcome)
        for name, outcomes in found.items():
            if outcomes:
                bets.settle(name, *(torch.cat(parts) for parts in zip(*outcomes, strict=True)))

    def _outcomes(self, case: _Tokens, laws: Laws, batch: Sequence[Text]) -> dict[str, _Outcome]:
        found = _every_token(case)
        if not self.with_drafts:
            return found
        drafted = _first_laws(batch, laws)
        if drafted is not None:
            found |= _first_of_step(case.at_rows(drafted[0]), drafted[1])
        return found


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
    def of(cls, laws: Laws, tokens: Tensor) -> _Tokens:
        p = laws.probs.to(torch.float64)
        return cls(p / p.sum(1, keepdim=True), _columns_of(laws, tokens))

    def at_rows(self, rows: Tensor) -> _Tokens:
        return _Tokens(self.p[rows], self.column[rows])

    @property
    def is_possible(self) -> Tensor:
        return self.own > 0

    def bet(self, h: Tensor, alternative: Tensor | None = None) -> _Outcome:
        """h: [N, W], a value for each token; the bet is on its mean. alternative: [N, W], the laws of the shift."""
        mean = (self.p * h).sum(1)
        variance = (self.p * h.square()).sum(1) - mean.square()
        shift = torch.zeros_like(mean) if alternative is None else (alternative * h).sum(1) - mean
        return self.outcome(h.gather(1, self.at)[:, 0] - mean, variance, shift)

    def outcome(self, *columns: Tensor) -> _Outcome:
        """Without the tokens that are impossible: those are counted, not bet on."""
        return _Outcome(*(column[self.is_possible] for column in columns))


def _every_token(case: _Tokens) -> dict[str, _Outcome]:
    """The shift is that of taking the likeliest token."""
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
    }


def _first_of_step(case: _Tokens, q: Tensor) -> dict[str, _Outcome]:
    """q: [N, W]. The shift is that of letting the draft token stand, whatever the target says."""
    ratio = _ratio(q, case.p)
    return {
        "draft stands": case.bet(ratio.clamp(max=1.0), q),
        "draft's law": case.bet(ratio.clamp(max=_MOST_RATIO), q),
    }


def _ratio(q: Tensor, p: Tensor) -> Tensor:
    return torch.where(p > 0, q / p.clamp(min=1e-300), 0)


def _columns_of(laws: Laws, tokens: Tensor) -> Tensor:
    if laws.ids is None:
        return tokens
    matches = (laws.ids == tokens[:, None]) & (laws.probs > 0)
    return torch.where(matches.any(1), matches.to(torch.uint8).argmax(1), -1)


def _at_the_border(logits: Tensor, laws: Laws, tokens: Tensor, border: float) -> Tensor:
    """Whether a token's logit is within twice the error of the least one that is kept. [N] bool"""
    if laws.ids is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    kept = torch.where(laws.probs > 0, logits.gather(1, laws.ids), torch.inf).amin(1)
    return logits.gather(1, tokens[:, None])[:, 0] >= kept - 2 * border


def _first_laws(texts: Sequence[Text], laws: Laws) -> tuple[Tensor, Tensor] | None:
    """(which tokens a drafted step began with [N], what was drafted there, on the columns of laws [N, W])"""
    at, q, start = [], [], 0
    for text in texts:
        for position, first in text.firsts.items():
            row = start + position - text.prompt_len
            if position < len(text.tokens):
                at.append(row)
                q.append(_on_columns(first.law, laws, row))
        start += len(text.output_ids)
    return (torch.tensor(at, device=laws.probs.device), torch.stack(q)) if at else None


def _on_columns(law: int | Laws, laws: Laws, row: int) -> Tensor:
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
