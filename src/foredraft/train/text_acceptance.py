"""A draft's acceptance on given texts. Both models read them (teacher forcing), and nothing is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.model import LanguageModel, Read
from foredraft.sampling.token_probs import token_probs_under

GREEDY = 0.0
_CHUNK = 64
"""Rows whose probabilities are in memory together: with a large vocabulary those of a whole text would take gigabytes."""


@dataclass(frozen=True, slots=True)
class TextAcceptance:
    """Σ min(p, q) over the positions of texts that the target did not write and need not agree with: sum and number."""

    total: float
    num_positions: int

    @property
    def mean(self) -> float:
        return self.total / self.num_positions

    def __add__(self, other: TextAcceptance) -> TextAcceptance:
        return TextAcceptance(self.total + other.total, self.num_positions + other.num_positions)


def acceptance_on(llm: LLM, ids: Sequence[int], temperature: float, *, first: int = 1) -> tuple[Tensor, Tensor]:
    """From the engine's own logits. ids: [N]. first: the first position to measure.

    -> for each position from `first` on, [N - first] float64: the acceptance probability of the token that stands there,
    min(1, q / p); and that of a token yet to be drawn, Σ min(p, q)
    """
    draft = _draft_of(llm)
    vocab_size = min(llm.target.traits.vocab_size, draft.traits.vocab_size)
    target_logits, draft_logits = (_logits(m, ids, len(ids) - first)[:, :vocab_size] for m in (llm.target, draft))
    tokens = torch.tensor(ids[first:], device=target_logits.device)
    of_tokens, of_draws = [], []
    chunks = (torch.split(x, _CHUNK) for x in (target_logits, draft_logits, tokens))
    for target_rows, draft_rows, some_tokens in zip(*chunks, strict=True):
        p, q = (_probs(rows, temperature) for rows in (target_rows, draft_rows))
        index = some_tokens[:, None]
        of_tokens.append((q.gather(1, index) / p.gather(1, index)).nan_to_num(0.0, posinf=0.0).clamp(max=1.0)[:, 0])
        of_draws.append(torch.minimum(p, q).sum(-1))
    return torch.cat(of_tokens).cpu(), torch.cat(of_draws).cpu()


def _draft_of(llm: LLM) -> LanguageModel:
    if llm.draft is None:
        raise ForedraftError("there is no draft model to evaluate: give one")
    return llm.draft


def _logits(model: LanguageModel, ids: Sequence[int], count: int) -> Tensor:
    """[count, V], those that predict the last `count` tokens"""
    read = list(ids[:-1])
    return model.read([Read(0, read, count)], model.scratch_cache([len(read)]))


def _probs(logits: Tensor, temperature: float) -> Tensor:
    """[R, V] float64; one-hot if greedy"""
    if temperature == GREEDY:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return token_probs_under(logits, [temperature] * len(logits), None).dense(logits.shape[-1]).double()
