"""How many draft tokens to ask for."""

from __future__ import annotations

from typing import Protocol

from foredraft.sequence import TokenSequence


class Policy(Protocol):
    """Decides before anything is drafted, and never from the values of draft tokens (that would bias the text)."""

    def draft_len(self, sequence: TokenSequence) -> int:
        """At most this many draft tokens for the sequence's next step; 0 is plain decoding."""
        ...


class FixedPolicy:
    """What the request asks for, less what could never be emitted: the last token of a text is the target's own."""

    def draft_len(self, sequence: TokenSequence) -> int:
        return max(0, min(sequence.speculative_tokens, sequence.room - 1))
