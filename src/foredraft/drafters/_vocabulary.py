"""The ids in which a draft model reads a text, and the mapping of its logits to the target's ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from foredraft.vocabulary import SharedIds, TranslatedHistory, VocabularyPair


class DraftVocabulary(Protocol):
    """is_the_targets: whether the draft model reads and writes the target's ids."""

    @property
    def is_the_targets(self) -> bool: ...

    def history(self, seq_id: int, tokens: Sequence[int]) -> Sequence[int]:
        """A sequence's history in the draft model's ids. A list that was returned may grow, but otherwise does not change."""
        ...

    def to_draft(self, drafted: Sequence[int]) -> list[int]:
        """Draft tokens in the draft model's ids, one for one."""
        ...

    def to_target(self, logits: Tensor) -> Tensor:
        """[R, V draft] -> [R, V target], give or take padding columns"""
        ...

    def forget(self, seq_ids: Sequence[int]) -> None: ...


class SameVocabulary:
    """The target's own vocabulary. The draft model's logits may have other padding columns."""

    is_the_targets = True

    def history(self, seq_id: int, tokens: Sequence[int]) -> Sequence[int]:
        return tokens

    def to_draft(self, drafted: Sequence[int]) -> list[int]:
        return list(drafted)

    def to_target(self, logits: Tensor) -> Tensor:
        return logits

    def forget(self, seq_ids: Sequence[int]) -> None:
        pass


class SharedVocabulary:
    """Token-level intersection (TLI, arXiv:2502.05202): only tokens that both vocabularies have are drafted.

    draft_width: the width of the draft model's logits. vocab_size: of the target.
    """

    is_the_targets = False

    def __init__(self, pair: VocabularyPair, draft_width: int, vocab_size: int) -> None:
        self._pair = pair
        self._shared = SharedIds(pair, draft_width, vocab_size)
        self._histories: dict[int, TranslatedHistory] = {}

    def history(self, seq_id: int, tokens: Sequence[int]) -> Sequence[int]:
        history = self._histories.setdefault(seq_id, TranslatedHistory(self._pair))
        ids = history.follow(tokens)
        return [] if history.pending else ids

    def to_draft(self, drafted: Sequence[int]) -> list[int]:
        return [self._shared.to_draft(token) for token in drafted]

    def to_target(self, logits: Tensor) -> Tensor:
        return self._shared.to_target(logits)

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._histories.pop(seq_id, None)
