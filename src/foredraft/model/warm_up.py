"""The sizes of the passes that a model will run."""

from __future__ import annotations

from typing import NamedTuple


class WarmUpSizes(NamedTuple):
    """The passes that a model prepares before the first request. max_num_seqs: sequences in a pass. max_tokens: rows of each sequence,
    or, if drafts, tokens that the model generates after each. vocab_size: it chooses among the first vocab_size ids. taps: the hidden
    states that passes return."""

    max_num_seqs: int
    max_tokens: int
    vocab_size: int
    drafts: bool
    taps: tuple[int, ...] = ()
