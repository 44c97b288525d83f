"""How much a grammar may cost: to compile, for one mask, and over a request."""

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
"""A row of an ambiguous grammar costs up to the cube of its items: 15 ms a byte for 500 of them, 350 ms for 2000. Rules that
somebody wrote can be ambiguous. Those that a schema comes to are not, and need four items for each optional property."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """compile_seconds: of processor time. compile_bytes: of memory for one grammar. stack_bytes: half of what a thread has where
    it has least. forced_bytes: with which every text begins; each mask there costs time for all of them.

    base_seconds, seconds_per_token: of processor time, what a request's masks may take: so much, and so much more for each
    token it has written. clock: measures it.

    cache_bytes: of memory for the grammars that are kept. growth_per_second: of bytes, what a grammar is taken to grow by while
    masks are computed, up to max_growth: what is worked out about it is kept with it. worn_seconds: after so much of that work
    a grammar is compiled anew for those who come then.
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
        """llguidance's own limits, by what field of StructuredOutputs is given. All but the time of a request are counted in
        work, so that a text depends on no clock."""
        limits = dict(self.parser)
        if kind == "grammar":
            limits["max_items_in_row"] = min(limits["max_items_in_row"], _MAX_ITEMS_OF_RULES)
        return limits


class Meter:
    """What the masks of one request have taken of its processor time. Its texts share one.

    What plain decoding would have done counts by itself, and is what a request fails for. What was done for drafts, and was
    in vain, counts apart: where that is too much, the request goes on without drafts.
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
