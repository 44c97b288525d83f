"""What a request asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any

from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.sampling.structured import FIELD, StructuredOutputs

LogitsProcessor = Callable[[list[int], Tensor], Tensor]
"""(prefix, logits [V]) -> logits [V]: a pure function of one row and its own growing prefix (prompt and output ids)."""

VERIFICATIONS = ("block", "rejection", "coupled")
AUTO = "auto"
GREEDY_BELOW = 1e-5

_CHECKPOINT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NUMBERS: dict[str, tuple[type | UnionType, bool]] = {
    "n": (int, False),
    "top_k": (int, True),
    "min_tokens": (int, False),
    "max_tokens": (int, True),
    "seed": (int, True),
    "logprobs": (int, True),
    "prompt_logprobs": (int, True),
    "temperature": (int | float, True),
    "top_p": (int | float, True),
    "min_p": (int | float, True),
    "repetition_penalty": (int | float, True),
    "presence_penalty": (int | float, False),
    "frequency_penalty": (int | float, False),
}
"""Field -> its type, and whether None is a value."""
_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request; names, defaults and order of application as in vLLM.

    temperature, top_p, top_k, min_p, repetition_penalty: None takes the checkpoint's generation_config, else the
        neutral value. Temperature 0 is greedy. top_k 0 (or -1) and top_p 1 keep everything.
    max_tokens: None runs to the end of the context.
    stop: strings that end the text; checked once min_tokens were written. stop_token_ids: the same for ids.
    bad_words: strings whose last token is masked where it would complete them.
    seed: the text then depends on model, prompt, parameters and seed alone (verification "coupled").
    n: that many texts from one prompt.
    logprobs, prompt_logprobs: how many of the target's most likely tokens to report beside the one at hand, from
        the raw distribution; 0 reports that one alone.
    logits_processors: pure callables (prefix ids, logits [V]) -> logits [V].
    structured_outputs: the form that the text must have; it ends when that is complete, so neither ignore_eos nor
        min_tokens goes with it. Where max_tokens or a stop string ends it before, it has that form only so far.
    speculative_tokens: at most this many draft tokens per step; None takes the engine's, 0 is plain decoding, "auto" is
        as many as pay.
    verification: "block" (arXiv:2403.10444), "rejection" (arXiv:2211.17192) or "coupled"; None chooses "coupled" when
        there is a seed and "block" otherwise. The three agree at temperature 0.
    prefix_caching: whether the request may use keys and values that were read for others, and leave its own to them.

    Raises ForedraftError (a ValueError) for a value that cannot be honoured.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = field(default=(), repr=False)
    structured_outputs: StructuredOutputs | None = None
    speculative_tokens: int | str | None = None
    verification: str | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_types()
        self._check_ranges()
        self._check_combinations()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    @property
    def verifier(self) -> str:
        """The name of the verification rule this request runs under."""
        return self.verification or ("coupled" if self.seed is not None else "block")

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The same with every None that `defaults` (a checkpoint's generation_config) or neutrality can fill."""
        fill = {}
        for name in _CHECKPOINT_FIELDS:
            if getattr(self, name) is None:
                value = defaults.get(name)
                fill[name] = _NEUTRAL[name] if value is None else value
        return replace(self, **fill)

    def _check_types(self) -> None:
        for name, (kind, may_be_none) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            infinite = isinstance(value, float) and not math.isfinite(value)
            if isinstance(value, bool) or not isinstance(value, kind) or infinite:
                what = "an integer" if kind is int else "a finite number"
                raise ForedraftError(f"{name} must be {what}, not {value!r}")
        if not isinstance(self.prefix_caching, bool):
            raise ForedraftError(f"prefix_caching must be true or false, not {self.prefix_caching!r}")
        if not _is_draft_len(self.speculative_tokens):
            raise ForedraftError(
                f'speculative_tokens must be an integer of at least 0 (plain decoding) or "{AUTO}", '
                f"not {self.speculative_tokens!r}"
            )
        _check_items("stop", self.stop, lambda s: isinstance(s, str) and bool(s), "non-empty strings")
        _check_items("bad_words", self.bad_words, lambda s: isinstance(s, str) and bool(s), "non-empty strings")
        _check_items("stop_token_ids", self.stop_token_ids, _is_id, "token ids")
        _check_items("logits_processors", self.logits_processors, callable, "callables (prefix ids, logits) -> logits")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            kind = type(self.structured_outputs).__name__
            raise ForedraftError(f"{FIELD} must be StructuredOutputs, not {kind}")
        bias = self.logit_bias
        if bias is not None and not isinstance(bias, Mapping):
            raise ForedraftError(f"logit_bias must map token ids to numbers, not {bias!r}")
        for token, value in (bias or {}).items():
            if (
                not _is_id(token)
                or isinstance(value, bool)
                or not isinstance(value, int | float)
                or not value < math.inf
            ):
                raise ForedraftError(
                    f"logit_bias must map token ids to numbers below infinity, not {token!r} to {value!r}"
                )

    def _check_ranges(self) -> None:
        def require(name: str, good: bool, right: str) -> None:
            if getattr(self, name) is not None and not good:
                raise ForedraftError(f"{name} must be {right}, not {getattr(self, name)}")

        require("n", self.n >= 1, "at least 1")
        require("temperature", (self.temperature or 0) >= 0, "0 (greedy) or more")
        require("top_p", 0 < (1 if self.top_p is None else self.top_p) <= 1, "in (0, 1]")
        require("top_k", (self.top_k or 0) >= 0, "-1 or 0 (keep all) or at least 1")
        require("min_p", 0 <= (self.min_p or 0) <= 1, "in [0, 1]")
        require(
            "repetition_penalty", (1 if self.repetition_penalty is None else self.repetition_penalty) > 0, "above 0"
        )
        require("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        require("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        require("min_tokens", self.min_tokens >= 0, "0 or more")
        require("logprobs", (self.logprobs or 0) >= 0, "0 or more")
        require("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "0 or more")
        require("verification", self.verification in (None, *VERIFICATIONS), f"one of {', '.join(VERIFICATIONS)}")

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ForedraftError(f"min_tokens {self.min_tokens} must not exceed max_tokens {self.max_tokens}")
        if self.seed is not None and self.verification not in (None, "coupled"):
            raise ForedraftError(
                f"a seed needs verification 'coupled': under {self.verification!r} the text would depend on the draft"
            )
        if self.seed is None and self.verification == "coupled" and not self.is_greedy:
            raise ForedraftError("verification 'coupled' needs a seed")
        if self.structured_outputs is not None:
            if self.ignore_eos:
                raise ForedraftError(f"ignore_eos would write on past the end of {FIELD}: leave one of them out")
            if self.min_tokens:
                raise ForedraftError(
                    f"min_tokens {self.min_tokens} cannot hold where {FIELD} ends the text: say it in there (minLength, "
                    "minItems, {20,}), or leave one of them out"
                )


def _is_draft_len(value: object) -> bool:
    return value is None or value == AUTO or (_is_id(value) and isinstance(value, int) and value >= 0)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_items(name: str, items: object, is_good: Callable[[Any], bool], what: str) -> None:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes) or not all(is_good(item) for item in items):
        raise ForedraftError(f"{name} must hold {what}, not {items!r}")
