"""The teacher-forced check: is every token the one that an independent pass over the text would have chosen?

For greedy texts and for those with a seed, where the target's token follows from its law alone: argmax(log p + noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.certificate.reading import read_whole, rows_of
from foredraft.certificate.trial import Text
from foredraft.model import LanguageModel
from foredraft.sampling import Row, adjusted, choose, laws_of
from foredraft.sampling.noise import exponentials


@dataclass(frozen=True, slots=True)
class Forced:
    """num_tokens: checked. num_missed: of these, not the choice of the pass. num_wrong: missed by more than a tie may be.
    worst_margin: the largest margin of the pass's choice over a token that was written instead; 0 where there is none."""

    num_tokens: int = 0
    num_missed: int = 0
    num_wrong: int = 0
    worst_margin: float = 0.0

    def __add__(self, other: Forced) -> Forced:
        return Forced(
            self.num_tokens + other.num_tokens,
            self.num_missed + other.num_missed,
            self.num_wrong + other.num_wrong,
            max(self.worst_margin, other.worst_margin),
        )


def force(model: LanguageModel, texts: Sequence[Text], noise: float) -> Forced:
    """Read the texts whole, and compare. noise: how far a logit may be off (reading.row_noise)."""
    total = Forced()
    for batch, logits in read_whole(model, texts):
        rows = rows_of(batch)
        written = torch.tensor([token for text in batch for token in text.output_ids])
        chosen = choose(logits, rows).ids
        missed = (chosen != written).nonzero()[:, 0].tolist()
        margins = [margin(logits[r], rows[r], int(chosen[r]), int(written[r])) for r in missed]
        wrong = sum(gap > tolerance(rows[r], noise) for r, gap in zip(missed, margins, strict=True))
        total += Forced(len(rows), len(missed), wrong, max(margins, default=0.0))
    return total


def margin(logits: Tensor, row: Row, best: int, other: int) -> float:
    """By how much `log p + noise` (the logit, at temperature 0) of one token beats another's. logits: [V]"""
    raw = adjusted(logits[None], [row])
    if row.sampler.is_greedy:
        return float(raw[0, best].double() - raw[0, other].double())
    law = laws_of(raw, [row])
    ids = torch.tensor([best, other], device=logits.device)
    p = law.at(torch.zeros(1, dtype=torch.int64, device=ids.device), ids[None])[0].to(torch.float64)
    scores = p.log() - exponentials([row.noise_key], ids)[0].log()
    return float(scores[0] - scores[1])


def tolerance(row: Row, noise: float) -> float:
    """How wide a tie may be: both tokens' logits may be off."""
    temperature = row.sampler.params.temperature
    return 2 * noise / (1.0 if row.sampler.is_greedy or not temperature else min(1.0, temperature))
