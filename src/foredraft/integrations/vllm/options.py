"""The options in `--additional-config '{"foredraft": {...}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from foredraft.engine.methods import names_of
from foredraft.errors import ForedraftError, shown
from foredraft.sampling import AUTO

METHODS = ("suffix", "ngram", "draft_model")
"""The methods that need nothing from the target but its tokens."""


@dataclass(frozen=True, slots=True)
class ProposerOptions:
    """method: one of METHODS, or several, as a list or joined with "+". speculative_tokens: "auto", which drafts as many as pay, up to
    vLLM's num_speculative_tokens, or a fixed number, which only the first method drafts. draft_model, draft_quantization: as for LLM;
    the model runs on the CPU. draft_memory: bytes for its KV cache; None: enough for all sequences, at most a quarter of the free
    memory. corpus_tokens: how many tokens of finished texts "suffix" keeps to draft other texts from; 0 keeps texts apart.

    Raises ForedraftError, one line, for values that cannot work.
    """

    method: tuple[str, ...] = ("suffix",)
    speculative_tokens: int | str = AUTO
    draft_model: str | None = None
    draft_quantization: str | None = None
    draft_memory: int | None = None
    corpus_tokens: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.method if name not in METHODS]
        if unknown or not self.method or len(set(self.method)) < len(self.method):
            raise ForedraftError(
                f"method must be one or more of {', '.join(METHODS)}, each once, not {shown([*self.method])}"
            )
        tokens = self.speculative_tokens
        if tokens != AUTO and not (isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 1):
            raise ForedraftError(f'speculative_tokens must be "auto" or at least 1, not {shown(tokens)}')
        if ("draft_model" in self.method) != (self.draft_model is not None):
            raise ForedraftError('draft_model is for the method "draft_model": give both, or neither')

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ProposerOptions:
        """values: of the table "foredraft". Raises ForedraftError for an unknown option."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ForedraftError(f"unknown option {shown(name)} of foredraft: the options are {', '.join(known)}")
        given = dict(values)
        if "method" in given:
            given["method"] = tuple(names_of(given["method"]))
        return cls(**given)
