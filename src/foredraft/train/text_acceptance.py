"""Computes a draft's acceptance on given texts. Both models read them (teacher forcing), and nothing is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from foredraft.engine.methods import DRAFT_METHODS
from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.model import LanguageModel, Read
from foredraft.sampling.token_probs import token_probs_under
from foredraft.train.head_acceptance import HeadOnTexts

GREEDY = 0.0
_CHUNK = 64
"""Rows whose probabilities are in memory at the same time: with a large vocabulary those of a whole text would take gigabytes."""


@dataclass(frozen=True, slots=True)
class TextAcceptance:
    """Σ min(p, q), summed over the positions of texts that the target did not write, and the number of positions."""

    total: float
    num_positions: int

    @property
    def mean(self) -> float:
        return self.total / self.num_positions

    def __add__(self, other: TextAcceptance) -> TextAcceptance:
        return TextAcceptance(self.total + other.total, self.num_positions + other.num_positions)


class Draft(Protocol):
    """A draft model or head on texts. depends_on_place: whether what it would draft depends on how many draft tokens come before.
    drafts_first: whether it can draft before the target has read the prompt."""

    depends_on_place: bool
    drafts_first: bool

    def logits(self, ids: Sequence[int], depth: int, source: Source = NO_SOURCE) -> Iterator[Tensor]:
        """ids: [N]. source: what the text answers. -> for each position in a draft [N, V]: row t is for the token at position t; row 0
        has no meaning."""
        ...


class DraftModel:
    """A draft model on texts: what it drafts depends only on the tokens before."""

    depends_on_place, drafts_first = False, True

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def logits(self, ids: Sequence[int], depth: int, source: Source = NO_SOURCE) -> Iterator[Tensor]:
        """See Draft."""
        yield torch.nn.functional.pad(_logits(self._model, ids, len(ids) - 1, source), (0, 0, 1, 0))


class DecoderOverEncoder:
    """A decoder over the target's own encoder on texts. It drafts once the target has read the source."""

    depends_on_place, drafts_first = False, False

    def __init__(self, model: LanguageModel, target: LanguageModel) -> None:
        self._model, self._target = model, target

    def logits(self, ids: Sequence[int], depth: int, source: Source = NO_SOURCE) -> Iterator[Tensor]:
        """See Draft."""
        read = list(ids[:-1])
        cache = self._model.scratch_cache([len(read)], sources=[source])
        keys = cache.source(0)
        assert keys is not None
        keys.encoded = self._encoded(source)
        yield torch.nn.functional.pad(self._model.read([Read(0, read, len(read))], cache), (0, 0, 1, 0))

    def _encoded(self, source: Source) -> Tensor | None:
        """The output of the target's encoder. [len(source), width]"""
        start = list(self._target.traits.start_ids)
        cache = self._target.scratch_cache([len(start)], sources=[source], keeps_encoded=True)
        self._target.read([Read(0, start, 0)], cache)
        keys = cache.source(0)
        assert keys is not None
        return keys.encoded


class ParallelDraftModel:
    """A draft model that writes a whole draft in one pass over mask tokens, on texts: what it would draft at any position of a draft
    depends only on the tokens before the draft."""

    depends_on_place, drafts_first = True, True

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def logits(self, ids: Sequence[int], depth: int, source: Source = NO_SOURCE) -> Iterator[Tensor]:
        """See Draft. It reads the masks after every token of the text, in one pass for each token."""
        assert self._model.mask_token is not None
        cache, masks = self._model.scratch_cache([len(ids) + depth]), [self._model.mask_token] * (depth - 1)
        first = self._model.read([Read(0, ids[:-1], len(ids) - 1)], cache)
        yield torch.nn.functional.pad(first, (0, 0, 1, 0))
        drafts = []
        for num_tokens in range(len(ids) - 1, 0, -1) if masks else ():
            cache.keep_prefix_of(0, ids, at_most=num_tokens)
            drafts.append(self._model.read([Read(0, masks, len(masks))], cache).clone())
        for place in range(1, depth):
            rows = torch.stack([each[place - 1] for each in reversed(drafts)])
            yield torch.nn.functional.pad(rows, (0, 0, place + 1, 0), value=-torch.inf)[: len(ids)]


_DRAFTS: Mapping[str, Callable[[LanguageModel], Draft]] = MappingProxyType({"pard": ParallelDraftModel})
"""How to read draft models on texts, by method, for methods that do not draft token by token."""


def drafter_of(llm: LLM) -> str:
    """The method that drafts with the draft model or the head."""
    return next((name for name in llm.method.split("+") if name in DRAFT_METHODS), "draft_model")


def draft_of(llm: LLM) -> Draft:
    """What the LLM drafts with. Raises ForedraftError without a draft model or head, and for a draft with another vocabulary."""
    if llm.head is not None:
        return HeadOnTexts(llm)
    if llm.draft is None:
        raise ForedraftError("there is no draft model to evaluate: give one")
    if llm.vocabularies is not None:
        raise ForedraftError(
            "a draft with another vocabulary cannot be evaluated token by token: measure it with foredraft bench or tune"
        )
    if llm.draft.traits.shares_encoder:
        return DecoderOverEncoder(llm.draft, llm.target)
    return _DRAFTS.get(drafter_of(llm), DraftModel)(llm.draft)


def acceptance_on(
    target: LanguageModel,
    draft: Draft,
    ids: Sequence[int],
    temperature: float,
    *,
    first: int = 1,
    depth: int = 1,
    source: Source = NO_SOURCE,
) -> tuple[Tensor, Tensor]:
    """ids: [N], of a text. first: the first position to measure. depth: tokens of a draft. source: what the text answers, if the target
    is an encoder-decoder.

    -> for each position in a draft and each text position from `first` on, [depth, N - first] float64, or [1, N - first] if the
    position in the draft does not matter: the acceptance probability of the text's token, min(1, q / p); and that of a token yet to
    be drawn, Σ min(p, q). Draft positions that the draft never reaches have 0.
    """
    target_logits = _logits(target, ids, len(ids) - first, source)
    tokens = torch.tensor(ids[first:], device=target_logits.device)
    places = [
        _acceptance(target_logits, each[first:], tokens, temperature) for each in draft.logits(ids, depth, source)
    ]
    if draft.depends_on_place:
        nothing = torch.zeros(len(tokens), dtype=torch.float64)
        places += [(nothing, nothing)] * (depth - len(places))
    of_tokens, of_draws = zip(*places, strict=True)
    return torch.stack(of_tokens), torch.stack(of_draws)


def _acceptance(
    target_logits: Tensor, draft_logits: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """At one position in a draft: see acceptance_on. [N, V], [N, V'], [N] -> [N], [N]"""
    vocab_size = min(target_logits.shape[1], draft_logits.shape[1])
    target_logits, draft_logits = target_logits[:, :vocab_size], draft_logits[:, :vocab_size]
    of_tokens, of_draws = [], []
    chunks = (torch.split(x, _CHUNK) for x in (target_logits, draft_logits, tokens))
    for target_rows, draft_rows, some_tokens in zip(*chunks, strict=True):
        p, q = (_probs(rows, temperature) for rows in (target_rows, draft_rows))
        index = some_tokens[:, None]
        of_tokens.append((q.gather(1, index) / p.gather(1, index)).nan_to_num(0.0, posinf=0.0).clamp(max=1.0)[:, 0])
        of_draws.append(torch.minimum(p, q).sum(-1))
    return torch.cat(of_tokens).cpu(), torch.cat(of_draws).cpu()


def _logits(model: LanguageModel, ids: Sequence[int], count: int, source: Source) -> Tensor:
    """The logits [count, V] that predict the last `count` tokens. A decoder-only model ignores the source."""
    read = list(ids[:-1])
    cache = model.scratch_cache([len(read)], sources=[source] if model.has_encoder else ())
    return model.read([Read(0, read, count)], cache)


def _probs(logits: Tensor, temperature: float) -> Tensor:
    """[R, V] float64; one-hot if greedy"""
    if temperature == GREEDY:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return token_probs_under(logits, [temperature] * len(logits), None).dense(logits.shape[-1]).double()
