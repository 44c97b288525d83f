"""The sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeAlias

from foredraft.errors import ForedraftError, shown
from foredraft.sampling.structured import FIELD, StructuredOutputs
from foredraft.utils.unicode import check_unicode

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor: TypeAlias = "Callable[[list[int], Tensor], Tensor]"
"""(prefix, logits [V]) -> logits [V]: a pure function of one row and its own growing prefix (prompt and output ids)."""

VERIFICATIONS = ("block", "rejection", "coupled")
AUTO = "auto"
GREEDY_BELOW = 1e-5

_CHECKPOINT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prefix_caching")
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
"""Field -> its type, and whether None is allowed."""
MOST_INT = 2**63 - 1
"""The largest number that a count, an id or a length may be: what an int64 holds."""
MOST_SEED, LEAST_SEED = 2**64 - 1, -(2**63)
MOST_N = 2**14
MOST_TEMPERATURE = 1e4
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 1e-3, 1e3
MOST_BIAS = 1e4
LEAST_TOP_P = 1e-30
"""A smaller value also keeps only the most likely id, but could become 0 in float32."""
MOST_TOP_K = 2**31 - 1
"""No vocabulary is larger: a larger top_k keeps every id."""

_BOUNDS: dict[str, tuple[float, float, str]] = {
    "n": (1, MOST_N, f"from 1 to {MOST_N}"),
    "temperature": (0, MOST_TEMPERATURE, f"from 0 (greedy) to {MOST_TEMPERATURE:g}"),
    "top_p": (math.ulp(0), 1, "in (0, 1]"),
    "top_k": (0, MOST_INT, "-1 or 0 (keep all) or from 1 to 2^63 - 1"),
    "min_p": (0, 1, "in [0, 1]"),
    "repetition_penalty": (
        LEAST_REPETITION_PENALTY,
        MOST_REPETITION_PENALTY,
        f"from {LEAST_REPETITION_PENALTY:g} to {MOST_REPETITION_PENALTY:g}",
    ),
    "presence_penalty": (-2, 2, "in [-2, 2]"),
    "frequency_penalty": (-2, 2, "in [-2, 2]"),
    "max_tokens": (0, MOST_INT, "from 0 to 2^63 - 1"),
    "min_tokens": (0, MOST_INT, "from 0 to 2^63 - 1"),
    "seed": (LEAST_SEED, MOST_SEED, "from -2^63 to 2^64 - 1"),
    "logprobs": (0, MOST_INT, "from 0 to 2^63 - 1"),
    "prompt_logprobs": (0, MOST_INT, "from 0 to 2^63 - 1"),
}
"""Field -> the smallest and the largest value, and both in words. None is handled by the type check."""
_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Names and defaults are those of vLLM.

    Penalties are applied first, then logits_processors, logit_bias, bad_words, min_tokens and allowed_token_ids, structured_outputs,
    temperature, min_p, top_k and top_p. vLLM applies penalties after the other changes to logits; otherwise its order is the same.

    temperature, top_p, top_k, min_p, repetition_penalty: None takes the checkpoint's generation_config, else the
        neutral value. Temperature 0 is greedy. top_k 0 (or -1, or more than the vocabulary holds) and top_p 1 keep
        everything.
    max_tokens: None runs to the end of the context. 0 generates nothing but reads the prompt, for its prompt_logprobs or for the
        prefix cache.
    stop: strings that end the text; checked once min_tokens were generated. stop_token_ids: the same for ids.
    include_stop_str_in_output: the text ends with the stop string, or the text of the stop token, that ended it.
    bad_words: strings whose last token is masked where it would complete one that began in the output.
    allowed_token_ids: the only ids that may be generated; None: any. An end-of-sequence id ends the text only if it is among them.
    seed: makes the text depend on model, prompt, parameters and seed alone (verification "coupled"). None or -1: no seed.
    n: how many texts to generate for the prompt.
    logprobs, prompt_logprobs: how many of the target's most likely tokens to report for each token besides that token itself, from
        the raw distribution; 0 reports only the token itself.
    logits_processors: pure callables (prefix ids, logits [V]) -> logits [V].
    structured_outputs: the form that the text must have. The text ends when the form is complete, so it cannot be combined with
        ignore_eos or min_tokens. If max_tokens or a stop string ends the text earlier, the form is incomplete.
    speculative_tokens: the most draft tokens per step; None takes the engine's, 0 is plain decoding, "auto" drafts as long as that
        is faster.
    verification: "block" (arXiv:2403.10444), "rejection" (arXiv:2211.17192), "coupled", or the name of a rule that was given
        to the LLM (verification_rules); None chooses "coupled" if there is a seed, otherwise "block". All agree at
        temperature 0.
    prefix_caching: whether the request may use cached keys and values of others, and leave its own to them.

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
    allowed_token_ids: Sequence[int] | None = None
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
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_types()
        self._check_ranges()
        if self.top_k is not None and self.top_k > MOST_TOP_K:
            object.__setattr__(self, "top_k", 0)
        if self.top_p is not None and self.top_p < LEAST_TOP_P:
            object.__setattr__(self, "top_p", LEAST_TOP_P)
        self._check_combinations()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    @property
    def verifier(self) -> str:
        """The name of the verification rule for this request."""
        return self.verification or ("coupled" if self.seed is not None else "block")

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The same parameters with None replaced by the value in `defaults` (a checkpoint's generation_config), else by a neutral one."""
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
                raise ForedraftError(f"{name} must be {what}, not {shown(value)}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ForedraftError(f"{name} must be true or false, not {shown(getattr(self, name))}")
        if not _is_draft_len(self.speculative_tokens):
            raise ForedraftError(
                f'speculative_tokens must be an integer from 0 (plain decoding) to 2^63 - 1, or "{AUTO}", '
                f"not {shown(self.speculative_tokens)}"
            )
        if self.verification is not None and (not isinstance(self.verification, str) or not self.verification):
            raise ForedraftError(f"verification must be the name of a rule, not {shown(self.verification)}")
        _check_items("stop", self.stop, lambda s: isinstance(s, str) and bool(s), "non-empty strings")
        for string in self.stop:
            check_unicode("stop", string)
        _check_items("bad_words", self.bad_words, lambda s: isinstance(s, str) and bool(s), "non-empty strings")
        _check_items("stop_token_ids", self.stop_token_ids, _is_id, "token ids")
        if self.allowed_token_ids is not None:
            _check_items("allowed_token_ids", self.allowed_token_ids, _is_id, "token ids")
            if not self.allowed_token_ids:
                raise ForedraftError("allowed_token_ids is empty: give at least one id, or None to allow all")
        _check_items("logits_processors", self.logits_processors, callable, "callables (prefix ids, logits) -> logits")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            kind = type(self.structured_outputs).__name__
            raise ForedraftError(f"{FIELD} must be a StructuredOutputs object, not {kind}")
        self._check_bias()

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping):
            raise ForedraftError(f"logit_bias must map token ids to numbers, not {shown(bias)}")
        for token, value in bias.items():
            if not _is_id(token) or not _is_bias(value):
                raise ForedraftError(
                    f"logit_bias must map token ids to numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}, or to -inf, "
                    f"not {shown(token)} to {shown(value)}"
                )

    def _check_ranges(self) -> None:
        for name, (least, most, right) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ForedraftError(f"{name} must be {right}, not {shown(value)}")

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
                raise ForedraftError(
                    f"ignore_eos would continue the text after {FIELD} is complete: leave one of them out"
                )
            if self.min_tokens:
                raise ForedraftError(
                    f"min_tokens {self.min_tokens} cannot be guaranteed, since {FIELD} ends the text: set the minimum there (minLength, "
                    "minItems, {20,}), or leave one of them out"
                )


def _is_draft_len(value: object) -> bool:
    return value is None or value == AUTO or _is_id(value)


def _is_id(value: object) -> bool:
    """Whether it may be a token id, or a count. The engine compares it with the vocabulary's size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_INT


def _is_bias(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == -math.inf or -MOST_BIAS <= value <= MOST_BIAS


def _check_items(name: str, items: object, is_good: Callable[[Any], bool], what: str) -> None:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes) or not all(is_good(item) for item in items):
        raise ForedraftError(f"{name} must be a sequence of {what}, not {shown(items)}")
