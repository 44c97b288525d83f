"""Was every token drawn from the target's law? Bets on that, over texts that were sampled without a seed.

Three bets look at every token and know only its law given the text before it. Two more know what was drafted first in the
step that began at a token: a law, or a certain token, but never the token drawn from a law, because that one and the
target's are drawn together. The token at which a step begins has the target's law given all that came before the
step, so these bets are on that token alone.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def new_bets(*, with_drafts: bool) -> Bets:
    return Bets(_EVERY_TOKEN | _FIRST_OF_STEP if with_drafts else _EVERY_TOKEN)


def bet_on(bets: Bets, model: LanguageModel, texts: Sequence[Text], *, border: float = 0.0) -> None:
    """Settle all bets on all output tokens, with the laws of an independent pass.

    border: how far a logit may be off (reading.row_noise). A token outside the kept ids is then looked at no further
    if it would have been kept with such an error; where border is 0 it is impossible.
    """
    columns: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in bets.bets}
    for batch, logits in read_whole(model, texts):
        rows = rows_of(batch)
        logits = adjusted(logits, rows)
        laws = laws_of(logits, rows)
        tokens = torch.tensor([token for text in batch for token in text.output_ids], device=logits.device)
        p = laws.probs.to(torch.float64)
        case = _Tokens(p / p.sum(1, keepdim=True), _columns_of(laws, tokens))
        impossible = ~case.is_possible
        if border > 0 and bool(impossible.any()):
            impossible &= ~_at_the_border(logits, laws, tokens, border)
        bets.num_impossible += int(impossible.sum())
        for name, one in _every_token(case).items():
            columns[name].append(_kept(one, case.is_possible))
        drafted = _first_laws(batch, laws)
        if drafted is not None and "draft stands" in columns:
            at, q = drafted
            part = _Tokens(case.p[at], case.column[at])
            for name, one in _first_of_step(part, q).items():
                columns[name].append(_kept(one, part.is_possible))
    for name, found in columns.items():
        if found:
            bets.settle(name, *(torch.cat(parts) for parts in zip(*found, strict=True)))


class _Tokens:
    """p: [N, W] laws of N tokens. column: [N], where each token stands in its law; -1 where it has no place there."""

    def __init__(self, p: Tensor, column: Tensor) -> None:
        self.p, self.column = p, column
        self.at = column.clamp(min=0)[:, None]
        self.own = torch.where(column >= 0, p.gather(1, self.at)[:, 0], 0)

    @property
    def is_possible(self) -> Tensor:
        return self.own > 0

    def centred(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h: [N, W], a value for each token -> (that of the token, less its mean [N]; the mean [N]; the variance [N])"""
        mean = (self.p * h).sum(1)
        return h.gather(1, self.at)[:, 0] - mean, mean, (self.p * h.square()).sum(1) - mean.square()


def _every_token(case: _Tokens) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Bet -> (g, its variance, its shift), [N] each. The shift is that of taking the likeliest token."""
    p = case.p
    surprise, _, surprise_var = case.centred((-p.clamp(min=1e-300).log()).clamp(max=_MOST_SURPRISE) / _MOST_SURPRISE)
    top, where = p.max(1)
    likeliest = (where == case.column).to(p.dtype) - top
    own = case.own[:, None]
    # the middle of the token's step in the distribution function, so that its mean is exactly a half
    rank = 1 - 2 * (torch.where(p > own, p, 0).sum(1) + torch.where(p == own, p, 0).sum(1) / 2)
    zero = torch.zeros_like(top)
    return {
        "surprise": (surprise, surprise_var, zero),
        "likeliest": (likeliest, top * (1 - top), 1 - top),
        "rank": (rank, (1 - p.pow(3).sum(1)) / 3, zero),
    }


def _first_of_step(case: _Tokens, q: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """q: [N, W]. The shift is that of letting the draft token stand, whatever the target says."""
    ratio = q / case.p.clamp(min=1e-300)
    found = {}
    for name, most in (("draft stands", 1.0), ("draft's law", _MOST_RATIO)):
        h = torch.where(case.p > 0, ratio.clamp(max=most), 0)
        g, mean, variance = case.centred(h)
        found[name] = (g, variance, (q * h).sum(1) - mean)
    return found


def _kept(one: tuple[Tensor, Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g, variance, shift = one
    return g[mask], variance[mask], shift[mask]


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
        for position, law in text.firsts.items():
            row = start + position - text.prompt_len
            if position < len(text.tokens):
                at.append(row)
                q.append(_on_columns(law, laws, row))
        start += len(text.output_ids)
    return (torch.tensor(at, device=laws.probs.device), torch.stack(q)) if at else None


def _on_columns(law: int | Tensor, laws: Laws, row: int) -> Tensor:
    ids = laws.ids
    if isinstance(law, int):
        if ids is None:
            return torch.nn.functional.one_hot(torch.tensor(law, device=laws.probs.device), laws.probs.shape[1]).to(
                torch.float64
            )
        return ((ids[row] == law) & (laws.probs[row] > 0)).to(torch.float64)
    dense = law.to(laws.probs.device, torch.float64)
    return dense if ids is None else torch.where(laws.probs[row] > 0, dense[ids[row]], 0)
