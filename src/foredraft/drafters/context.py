"""What drafters are built from."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.engine.cache import MemoryPool
from foredraft.heads import AnyHead
from foredraft.model import LanguageModel


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may be built from. draft_model is None unless the user gave one.

    pool: every byte a drafter holds for its sequences' keys and values is taken from here and given back.
    max_rows: how many tokens a drafter may read in one pass of its own model. head: None unless the user gave one in the place of
    a draft model. context_len: the longest sequence of the target.
    """

    vocab_size: int
    pool: MemoryPool
    draft_model: LanguageModel | None = None
    max_rows: int = 512
    head: AnyHead | None = None
    context_len: int = 1 << 62
