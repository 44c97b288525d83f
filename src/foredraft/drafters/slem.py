"""Drafts of a model with another vocabulary, translated as text: string-level exact match (SLEM, arXiv:2502.05202)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Protocol

import torch

from foredraft.engine.proposal import Drafter, DraftRequest, Proposal
from foredraft.engine.stats import PrefixStats
from foredraft.sampling import Sampler, SamplingParams
from foredraft.vocabulary import TranslatedHistory, VocabularyPair


class ModelDrafter(Drafter, Protocol):
    """A drafter with its own cache, which it can retain for texts with the same prefix."""

    prefix_stats: PrefixStats

    @property
    def bytes_held(self) -> int: ...

    def retain(self, seq_id: int, history: Sequence[int]) -> None: ...

    def drop_retained(self) -> None: ...


class SlemDrafter:
    """Asks a drafter in the draft model's vocabulary, and encodes its draft with the target's tokenizer.

    The draft tokens are certain: they are a function of the history, and the target draws its own tokens independently of them. So a
    translation error costs acceptance, never exactness. The draft model always writes greedily, even if the target samples. inner:
    proposes certain ids of the draft model.
    """

    def __init__(self, inner: ModelDrafter, pair: VocabularyPair) -> None:
        self._inner = inner
        self._pair = pair
        self._histories: dict[int, TranslatedHistory] = {}
        self._samplers = {shares: _greedy(prefix_caching=shares) for shares in (False, True)}

    @property
    def bytes_held(self) -> int:
        """Bytes of the engine's cache memory."""
        return self._inner.bytes_held

    @property
    def prefix_stats(self) -> PrefixStats:
        return self._inner.prefix_stats

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = self._inner.propose([self._translated(request) for request in requests]).draft_ids
        return Proposal.certain(
            [
                self._histories[request.seq_id].to_target(ids)[: request.max_len]
                for request, ids in zip(requests, drafts, strict=True)
            ]
        )

    def forget(self, seq_ids: list[int]) -> None:
        self._inner.forget(seq_ids)
        for seq_id in seq_ids:
            self._histories.pop(seq_id, None)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """See DraftModelDrafter.retain."""
        known = self._histories.pop(seq_id, None)
        if known is None:
            self._inner.forget([seq_id])
        else:
            self._inner.retain(seq_id, known.follow(history))

    def drop_retained(self) -> None:
        self._inner.drop_retained()

    def _translated(self, request: DraftRequest) -> DraftRequest:
        """The request in the draft model's ids. It asks for as much text as max_len of the target's tokens have on average in this
        history, and one id more, since the last one may end inside a token of the target."""
        history = self._histories.setdefault(request.seq_id, TranslatedHistory(self._pair))
        ids = history.follow(request.tokens)
        num_drafted = ceil(request.max_len * history.draft_ids_per_token) + 1 if request.max_len and ids else 0
        return DraftRequest(request.seq_id, ids, num_drafted, self._samplers[request.sampler.params.prefix_caching])


def _greedy(*, prefix_caching: bool) -> Sampler:
    params = SamplingParams(temperature=0.0, prefix_caching=prefix_caching).resolve({})
    return Sampler(params, (), torch.Generator())
