"""Hugging Face models, run with our attention and our KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.model.batch import RaggedBatch, Read, Reading, read_with_draft
    from foredraft.model.checkpoint import EMBEDDED
    from foredraft.model.generation import Generated
    from foredraft.model.language_model import LanguageModel, ModelInputs, Traits
    from foredraft.model.loading import examine, is_stored_in_few_bits, load_model, load_tokenizer
    from foredraft.model.memory import available_memory
    from foredraft.model.options import LoadOptions
    from foredraft.model.warm_up import WarmUpSizes

__all__ = [
    "EMBEDDED",
    "Generated",
    "LanguageModel",
    "LoadOptions",
    "ModelInputs",
    "RaggedBatch",
    "Read",
    "Reading",
    "Traits",
    "WarmUpSizes",
    "available_memory",
    "examine",
    "is_stored_in_few_bits",
    "load_model",
    "load_tokenizer",
    "read_with_draft",
]

__getattr__ = attributes(
    __name__,
    {
        "batch": ("RaggedBatch", "Read", "Reading", "read_with_draft"),
        "checkpoint": ("EMBEDDED",),
        "generation": ("Generated",),
        "language_model": ("LanguageModel", "ModelInputs", "Traits"),
        "loading": ("examine", "is_stored_in_few_bits", "load_model", "load_tokenizer"),
        "memory": ("available_memory",),
        "options": ("LoadOptions",),
        "warm_up": ("WarmUpSizes",),
    },
)
