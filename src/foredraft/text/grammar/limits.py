"""Limits on the cost of a grammar: of its compilation, of one mask, and of all masks of a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_PARSER = {
    "max_items_in_row": 2000,
    "step_max_items": 10_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_MAX_ITEMS_OF_RULES = 500
"""A row of an ambiguous grammar costs up to the cube of its items: 15 ms per byte for 500 of them, 350 ms for 2000. Rules that
a user writes may be ambiguous. Rules translated from a schema are not, and need four items per optional property."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """compile_seconds: processor time of one compilation. compile_bytes: memory for one grammar. stack_bytes: of the thread that
    compiles; half of the smallest default. forced_bytes: the longest beginning that all texts may share, since every mask in it
    has to process it.

    base_seconds, seconds_per_token: processor time that the masks of a request may take: a fixed part, and a part for each
    generated token. clock: measures it.

    cache_bytes: memory for the cached grammars. growth_per_second, max_growth: bytes by which a grammar is assumed to grow for
    each second of mask computation, since llguidance caches results, and the maximum growth. worn_seconds: after this much mask
    computation a grammar is compiled again for new requests.
    """

    compile_seconds: int = 2
    compile_bytes: int = 128 * 2**20
    stack_bytes: int = 2 * 2**20
    forced_bytes: int = 16_384
    base_seconds: float = 0.5
    seconds_per_token: float = 0.005
    cache_bytes: int = 256 * 2**20
    growth_per_second: int = 100 * 2**20
    max_growth: int = 32 * 2**20
    worn_seconds: float = 2.0
    parser: Mapping[str, int] = field(default_factory=lambda: _PARSER)
    clock: Callable[[], float] = time.thread_time

    def parser_for(self, kind: str) -> dict[str, int]:
        """llguidance's limits for a field of StructuredOutputs. They count work, not time, so that a text does not depend on
        a clock."""
        limits = dict(self.parser)
        if kind == "grammar":
            limits["max_items_in_row"] = min(limits["max_items_in_row"], _MAX_ITEMS_OF_RULES)
        return limits


class Meter:
    """The processor time that the masks of one request have taken. Its texts share one meter.

    Time that plain decoding would need too, and time for rejected drafts, are counted separately, with an equal allowance for
    each. A request that exceeds the first fails; one that exceeds the second goes on without drafts.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._seconds = 0.0
        self._draft_seconds = 0.0
        self._num_tokens = 0

    def charge(self, seconds: float, num_tokens: int) -> None:
        self._seconds += seconds
        self._num_tokens += num_tokens

    def charge_drafts(self, seconds: float) -> None:
        self._draft_seconds += seconds

    @property
    def is_spent(self) -> bool:
        return self._seconds > self._allowance

    @property
    def allows_drafts(self) -> bool:
        return self._draft_seconds <= self._allowance

    @property
    def _allowance(self) -> float:
        return self._limits.base_seconds + self._limits.seconds_per_token * self._num_tokens
