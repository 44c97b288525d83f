"""What will be asked of a model, so that it can make itself ready."""

from __future__ import annotations

from typing import NamedTuple


class Demand(NamedTuple):
    """num_spans: sequences at a time, at most. width: rows of each, or, where the model drafts, the tokens that it goes on to
    write, of the first vocab_size ids."""

    num_spans: int
    width: int
    vocab_size: int
    drafts: bool
