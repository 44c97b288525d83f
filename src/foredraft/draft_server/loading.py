"""Builds a drafter that needs no target in its process, from a draft model or the name of a method."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.draft_server.method import check_method
from foredraft.drafters import DrafterContext, build
from foredraft.engine.draft_sources import half_of_free_memory
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.methods import LANGUAGE_MODEL_METHODS
from foredraft.engine.models import draft_method_of
from foredraft.engine.proposal import Drafter
from foredraft.errors import ForedraftError
from foredraft.model import LoadOptions, load_model, load_tokenizer
from foredraft.remote.vocabulary import VocabularyIdentity

MOST_ROWS = 512
"""The most rows that a draft model reads in one pass."""


@dataclass(frozen=True, slots=True)
class DraftServerSettings:
    """method: None: the method that the draft model is for, or "suffix" without a draft model. cache_memory: bytes for the draft model's
    KV cache; None: half of the free memory."""

    draft_model: str | None
    method: str | None
    options: LoadOptions
    cache_memory: int | None = None


def load_drafter(settings: DraftServerSettings) -> tuple[Drafter, VocabularyIdentity | None]:
    """The drafter, and the vocabulary of its ids (None: any). Raises ForedraftError if it cannot be loaded, or cannot draft here."""
    source, options = settings.draft_model, settings.options
    method = settings.method or ("suffix" if source is None else draft_method_of(source, None, options.revision))
    check_method(method, has_draft_model=source is not None)
    if source is None:
        return build(method, DrafterContext(0, MemoryPool(1))), None
    if method not in LANGUAGE_MODEL_METHODS:
        raise ForedraftError(f"method {method} needs no draft model: omit --draft-model")
    model = load_model(source, options)
    if model.has_encoder:
        raise ForedraftError(f"{model.traits.name} is an encoder-decoder: draft servers need decoder-only models")
    model.take_over()
    pool = MemoryPool(settings.cache_memory or half_of_free_memory(model))
    vocab_size = model.traits.vocab_size
    drafter = build(method, DrafterContext(vocab_size, pool, model, MOST_ROWS))
    return drafter, VocabularyIdentity.of(vocab_size, load_tokenizer(source, options))
