"""What an engine needs beside its target: drafters by name, and the memory that they share with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from foredraft.cache import MemoryPool
from foredraft.contract import check_drafter
from foredraft.drafters import REGISTRY, SELF_DRAFTS, DrafterContext, build
from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel, available_memory
from foredraft.proposal import Drafter
from foredraft.scheduler import Limits

Method: TypeAlias = str | Drafter
Methods: TypeAlias = Method | Sequence[Method]

NO_DRAFT = "none"
_CACHE_SHARE = 0.5
_UNKNOWN_MEMORY = 4 * 2**30


def choose_methods(methods: Methods | None, *, has_draft_model: bool) -> list[Method]:
    """The drafters' names, or the drafters themselves. methods: one, several, or names with "+" between them. Raises ForedraftError for a name that is none, for an object that is no drafter, and for a draft model
    that is missing or that nobody asks for."""
    if methods is None:
        return ["draft_model" if has_draft_model else "suffix"]
    chosen, names = _listed(methods), names_of(methods)
    if not chosen or len(set(names)) < len(names):
        raise ForedraftError(f"method must name at least one drafter, and none of them twice, not {names}")
    if NO_DRAFT in names and len(names) > 1:
        raise ForedraftError('method "none" stands alone: every choice among drafters has it in it')
    for method in chosen:
        if not isinstance(method, str):
            check_drafter(method)
        elif method not in REGISTRY:
            raise ForedraftError(f"unknown method {method!r}: known are {', '.join(sorted(REGISTRY))}")
    if "draft_model" in names and not has_draft_model:
        raise ForedraftError('method "draft_model" needs a draft model: give draft_model=')
    if has_draft_model and all(name in SELF_DRAFTS for name in names):
        raise ForedraftError(f'method "{names[0]}" makes its draft from the target: leave draft_model out')
    return chosen


def _listed(methods: Methods) -> list[Method]:
    if isinstance(methods, str):
        return [*methods.split("+")]
    return [*methods] if isinstance(methods, Sequence) else [methods]


def names_of(methods: Methods) -> list[str]:
    return [name_of(method) for method in _listed(methods)]


def name_of(method: Method) -> str:
    return method if isinstance(method, str) else type(method).__name__


def draft_of(method: Method) -> str:
    """Which draft model a method drafts with, if it uses one: its own copy of the target, or the one that was given."""
    name = name_of(method)
    return name if name in SELF_DRAFTS else "draft_model"


def equip(
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
