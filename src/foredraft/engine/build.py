"""What an engine needs beside its target: drafters by name, and the memory that they share with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from foredraft.drafters import DrafterContext, build
from foredraft.engine.cache import MemoryPool
from foredraft.engine.methods import Method, draft_of, name_of
from foredraft.engine.proposal import Drafter
from foredraft.engine.scheduler import Limits
from foredraft.model import LanguageModel, available_memory

_CACHE_SHARE = 0.5
_UNKNOWN_MEMORY = 4 * 2**30


def build_drafters(
    target: LanguageModel,
    drafts: Mapping[str, LanguageModel],
    methods: Sequence[Method],
    limits: Limits,
    cache_memory: int | None = None,
    pool: MemoryPool | None = None,
) -> tuple[dict[str, Drafter], MemoryPool]:
    """Drafters by name, and the memory that they share with the target: `pool`, if there is one.

    drafts: draft models, by draft_of. cache_memory: bytes; None takes what max_num_seqs full contexts need, at most half
    of the free memory.
    """
    if pool is None:
        used = {draft_of(method) for method in methods}
        per_token = sum(model.traits.bytes_per_token for model in (target, *(drafts[k] for k in used & set(drafts))))
        wanted = per_token * target.traits.context_len * limits.max_num_seqs
        pool = MemoryPool(cache_memory or _default_cache(wanted, target.device))
    drafters = {}
    for method in methods:
        context = DrafterContext(target.traits.vocab_size, pool, drafts.get(draft_of(method)), limits.max_batch_tokens)
        drafters[name_of(method)] = build(method, context) if isinstance(method, str) else method
    return drafters, pool


def _default_cache(wanted: int, device: torch.device) -> int:
    """Bytes for keys and values: what is wanted, but at most half of the memory that is free."""
    free = available_memory(device)
    return max(1, min(wanted, int(_CACHE_SHARE * free) if free else _UNKNOWN_MEMORY))
