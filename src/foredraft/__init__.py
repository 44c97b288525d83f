"""foredraft: lossless speculative decoding for any Hugging Face model.

A drafter guesses, the target vouches, nothing else is trusted.
"""

from foredraft.aio import AsyncLLM
from foredraft.errors import ForedraftError, ModelError, RequestError, VocabularyError
from foredraft.hf import custom_generate, generate
from foredraft.llm import LLM
from foredraft.outputs import CompletionOutput, Delta, RequestOutput
from foredraft.proposal import Drafter, DraftRequest, Proposal
from foredraft.sampling import SamplingParams
from foredraft.sequence import Origin

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
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
    "VocabularyError",
    "custom_generate",
    "generate",
]
