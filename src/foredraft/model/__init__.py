"""Hugging Face models, read through our attention and our cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.model.checkpoint import EMBEDDED
    from foredraft.model.demand import Demand
    from foredraft.model.language_model import LanguageModel, Read, Traits
    from foredraft.model.loading import LoadOptions, available_memory, examine, load_model, load_tokenizer
    from foredraft.model.vocabulary import check_vocabulary

__all__ = [
    "EMBEDDED",
    "Demand",
    "LanguageModel",
    "LoadOptions",
    "Read",
    "Traits",
    "available_memory",
    "check_vocabulary",
    "examine",
    "load_model",
    "load_tokenizer",
]

__getattr__ = attributes(
    __name__,
    {
        "checkpoint": ("EMBEDDED",),
        "demand": ("Demand",),
        "language_model": ("LanguageModel", "Read", "Traits"),
        "loading": ("LoadOptions", "available_memory", "examine", "load_model", "load_tokenizer"),
        "vocabulary": ("check_vocabulary",),
    },
)
