"""foredraft: lossless speculative decoding for any Hugging Face model.

A drafter proposes tokens and the target verifies every one of them, so the output does not depend on the drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.aio import AsyncLLM
    from foredraft.certificate import Certificate, check
    from foredraft.engine.proposal import Drafter, DraftRequest, Proposal
    from foredraft.engine.sequence import Origin
    from foredraft.errors import ForedraftError, ModelError, RequestError, VocabularyError
    from foredraft.hf import custom_generate, generate
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams, StructuredOutputs
    from foredraft.text.outputs import CompletionOutput, Delta, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Certificate",
    "CompletionOutput",
    "Delta",
    "DraftRequest",
    "Drafter",
    "ForedraftError",
    "ModelError",
    "Origin",
    "Proposal",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "VocabularyError",
    "check",
    "custom_generate",
    "generate",
]


def __dir__() -> list[str]:
    return sorted(__all__)


__getattr__ = attributes(
    __name__,
    {
        "aio": ("AsyncLLM",),
        "certificate": ("Certificate", "check"),
        "errors": ("ForedraftError", "ModelError", "RequestError", "VocabularyError"),
        "hf": ("custom_generate", "generate"),
        "llm": ("LLM",),
        "text.outputs": ("CompletionOutput", "Delta", "RequestOutput"),
        "engine.proposal": ("DraftRequest", "Drafter", "Proposal"),
        "sampling": ("SamplingParams", "StructuredOutputs"),
        "engine.sequence": ("Origin",),
    },
)
