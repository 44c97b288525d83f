"""Hugging Face models, read through our attention and our cache."""

from foredraft.checkpoint import EMBEDDED
from foredraft.model.demand import Demand
from foredraft.model.language_model import LanguageModel, Read, Traits
from foredraft.model.loading import (
    LoadOptions,
    available_memory,
    examine,
    load_model,
    load_tokenizer,
)
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
