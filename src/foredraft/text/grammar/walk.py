"""One text's way through a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher

from foredraft.errors import ForedraftError
from foredraft.sampling import Bits, has_id, only_id
from foredraft.text.grammar.limits import GrammarLimits, Meter
from foredraft.text.grammar.source import reason
from foredraft.utils.prefix import common_prefix

_MASKS_KEPT = 64


class Origin(Protocol):
    """What a walk knows of its grammar.

    matcher: at the grammar's beginning. Its copies share what was worked out about the grammar, and the limits on that.
    end_ids: the ids that end a text; where a grammar is complete, they are what it allows.
    """

    kind: str
    limits: GrammarLimits
    matcher: LLMatcher
    end_ids: frozenset[int]
    vocab_size: int
    work: float

    def renew(self, spent: LLMatcher) -> bool:
        """This one's copies have met their limits: replace it, unless another text has done so. False: it costs too much."""
        ...


class GrammarWalk:
    """A sampling.Constraint: one text's place in a grammar.

    It goes along with the draft and comes back with it. What lies behind a token that the grammar refuses, or behind the
    end, no text has: there the end alone is allowed.
    """

    def __init__(self, grammar: Origin, prompt_len: int, meter: Meter) -> None:
        self._grammar = grammar
        self._prompt_len = prompt_len
        self._meter = meter
        self._end_ids = grammar.end_ids
        self._end = np.zeros(max(self._end_ids) // 8 + 1, dtype=np.uint8)
        for token in self._end_ids:
            self._end[token // 8] |= 1 << token % 8
        self._has_tried_again = False
        self._num_settled = -1  # the places, counted by the output tokens before them, that plain decoding has paid for
        self._costs: dict[int, float] = {}  # of the places behind those, in seconds
        self._failed: tuple[list[int], str] | None = None  # an output behind which limits were met, and which
        self._begin()

    def _begin(self) -> None:
        self._origin = self._grammar.matcher
        self._matcher = self._origin.deep_copy()
        self._walked: list[int] = []  # the output tokens that the matcher has read
        self._masks: dict[int, Bits] = {}  # by how many output tokens come before

    @property
    def allows_drafts(self) -> bool:
        return self._meter.allows_drafts

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        wanted = [*history[self._prompt_len :], *drafted]
        self._refuse_failed(wanted)
        self._go_back(common_prefix(self._walked, wanted))
        self._settle(len(wanted) - len(drafted) - 1)
        if not drafted and self._meter.is_spent:
            raise ForedraftError(self._spent)
        try:
            return self._metered(wanted)
        except _Spent as error:
            failure = str(error)
        if self._begin_again() and not drafted and not self._has_tried_again:
            # once only: what leads to the limits takes a tenth of a second
            self._has_tried_again = True
            try:
                return self._metered(wanted)
            except _Spent as error:
                failure = str(error)
                self._begin()
        if not drafted:
            self._failed = (wanted, failure)
        raise ForedraftError(self._field + failure)

    def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
        # by the masks: where the grammar forces some text, they allow one way of writing it and no other
        for place, token in enumerate(drafted):
            if not has_id(self.allowed(history, drafted[:place]), token):
                return place
            if token in self._end_ids:
                return place + 1
        return len(drafted)

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        found: list[int] = []
        while len(found) < at_most and not (found and found[-1] in self._end_ids):
            token = only_id(self.allowed(history, [*drafted, *found]))
            if token is None:
                break
            found.append(token)
        return found

    def _metered(self, wanted: list[int]) -> Bits:
        """The mask behind these output tokens. What it takes is paid for when plain decoding comes there; at once, and for
        drafts, where it has been there."""
        place, clock = len(wanted), self._grammar.limits.clock
        began = clock()
        try:
            return self._mask(wanted)
        finally:
            seconds = clock() - began
            self._grammar.work += seconds
            if place > self._num_settled and place not in self._costs:
                self._costs[place] = seconds
            else:
                self._meter.charge_drafts(seconds)

    def _mask(self, wanted: list[int]) -> Bits:
        if not self._go_to(wanted):
            return self._end
        bits = self._masks.get(len(wanted))
        if bits is None:
            bits = self._computed_mask()
            self._keep(len(wanted), bits)
        return bits

    def _settle(self, place: int) -> None:
        """Plain decoding has come behind this place: pay for what lies up to it."""
        if place > self._num_settled:
            paid = [at for at in self._costs if at <= place]
            self._meter.charge(sum(self._costs.pop(at) for at in paid), place - self._num_settled)
            self._num_settled = place

    def _go_to(self, wanted: list[int]) -> bool:
        """Stand behind these output tokens; say whether that is a place in the grammar, and not its end."""
        new = wanted[len(self._walked) :]
        words = self._before_end(new)
        num_read = self._matcher.try_consume_tokens(words) if words else 0
        self._check()
        self._walked += words[:num_read]
        if num_read < len(words):
            # where another text has met the limits they share, every token is refused, and only a mask tells why
            self._computed_mask()
        return num_read == len(new)

    def _computed_mask(self) -> Bits:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return bits

    def _go_back(self, place: int) -> None:
        excess = len(self._walked) - place
        if excess:
            self._matcher.rollback(excess)
            del self._walked[place:]
            self._masks = {at: bits for at, bits in self._masks.items() if at <= place}
        for at in [at for at in self._costs if at > place]:
            self._meter.charge_drafts(self._costs.pop(at))

    def _keep(self, place: int, bits: Bits) -> None:
        """A step asks for those of its draft, once to draft and once to verify; what comes before is computed again if
        somebody asks for it."""
        self._masks[place] = bits
        if len(self._masks) > _MASKS_KEPT:
            self._masks = {at: self._masks[at] for at in sorted(self._masks)[_MASKS_KEPT // 2 :]}

    def _before_end(self, ids: Sequence[int]) -> list[int]:
        """Up to the first that ends a text, or that the tokenizer does not have."""
        size = self._grammar.vocab_size
        stop = next((i for i, token in enumerate(ids) if token in self._end_ids or token >= size), len(ids))
        return list(ids[:stop])

    def _begin_again(self) -> bool:
        """With a matcher that works; say whether the limits that this one met were perhaps met by another text."""
        self._begin()
        self._matcher.compute_bitmask()
        if not self._matcher.is_error():
            return False
        is_renewed = self._grammar.renew(self._origin)
        self._begin()
        return is_renewed

    def _refuse_failed(self, wanted: list[int]) -> None:
        """Behind a place where limits were met no text goes on: plain decoding would have ended there. Others wait for
        every attempt, so that there are no more."""
        if self._failed is not None:
            failed_at, failure = self._failed
            if wanted[: len(failed_at)] == failed_at:
                raise ForedraftError(self._field + failure)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _Spent(reason(self._matcher.get_error()))

    @property
    def _field(self) -> str:
        return f"structured_outputs.{self._grammar.kind}: "

    @property
    def _spent(self) -> str:
        limits = self._grammar.limits
        return (
            f"{self._field}its masks take more than {limits.base_seconds:g} s and {limits.seconds_per_token * 1000:g} ms a token "
            f"of processor time: make it less ambiguous, or smaller"
        )


class _Spent(Exception):
    """A matcher met its limits, and is of no more use."""
