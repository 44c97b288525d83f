"""The state of one text in a grammar."""

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


class WalkedGrammar(Protocol):
    """A grammar as a walk uses it.

    matcher: at the start of the grammar. Its copies share cached results, and the limits on them.
    end_ids: the ids that end a text; once the grammar is complete, only these are allowed.
    """

    kind: str
    limits: GrammarLimits
    matcher: LLMatcher
    end_ids: frozenset[int]
    vocab_size: int
    work: float

    def renew(self, spent: LLMatcher) -> bool:
        """Replace the matcher, whose copies have reached their limits. False: that takes too long."""
        ...


class GrammarWalk:
    """A sampling.Constraint: the state of one text in a grammar.

    It advances over draft tokens and rolls back when they are rejected. After a token that the grammar does not allow, or
    after the end, only the end ids are allowed.
    """

    def __init__(self, grammar: WalkedGrammar, prompt_len: int, meter: Meter) -> None:
        self._grammar = grammar
        self._prompt_len = prompt_len
        self._meter = meter
        self._end_ids = grammar.end_ids
        self._end = np.zeros(max(self._end_ids) // 8 + 1, dtype=np.uint8)
        for token in self._end_ids:
            self._end[token // 8] |= 1 << token % 8
        self._has_tried_again = False
        self._num_paid = -1  # positions (output tokens before them) up to which the masks have been charged
        self._costs: dict[int, float] = {}  # seconds for the masks at later positions
        self._failed: tuple[list[int], str] | None = None  # the output after which limits were reached, and the reason
        self._begin()

    def _begin(self) -> None:
        self._source = self._grammar.matcher
        self._matcher = self._source.deep_copy()
        self._walked: list[int] = []  # output tokens that the matcher has consumed
        self._masks: dict[int, Bits] = {}  # by position

    @property
    def allows_drafts(self) -> bool:
        return self._meter.allows_drafts

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        wanted = [*history[self._prompt_len :], *drafted]
        self._refuse_failed(wanted)
        self._roll_back(common_prefix(self._walked, wanted))
        self._charge(len(wanted) - len(drafted) - 1)
        if not drafted and self._meter.is_spent:
            raise ForedraftError(self._spent)
        try:
            return self._metered(wanted)
        except _Spent as error:
            failure = str(error)
        if self._restart() and not drafted and not self._has_tried_again:
            # only once, since it takes a tenth of a second to reach the limits
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
        # use the masks: where the grammar forces a text, they allow only one of its tokenizations
        for position, token in enumerate(drafted):
            if not has_id(self.allowed(history, drafted[:position]), token):
                return position
            if token in self._end_ids:
                return position + 1
        return len(drafted)

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < at_most and not (ids and ids[-1] in self._end_ids):
            token = only_id(self.allowed(history, [*drafted, *ids]))
            if token is None:
                break
            ids.append(token)
        return ids

    def _metered(self, wanted: list[int]) -> Bits:
        """The mask after these output tokens, with its time measured. The time is charged when plain decoding reaches this
        position; at once, as time for drafts, if plain decoding has passed it."""
        position, clock = len(wanted), self._grammar.limits.clock
        began = clock()
        try:
            return self._mask(wanted)
        finally:
            seconds = clock() - began
            self._grammar.work += seconds
            if position > self._num_paid and position not in self._costs:
                self._costs[position] = seconds
            else:
                self._meter.charge_drafts(seconds)

    def _mask(self, wanted: list[int]) -> Bits:
        if not self._advance_to(wanted):
            return self._end
        bits = self._masks.get(len(wanted))
        if bits is None:
            bits = self._computed_mask()
            self._keep(len(wanted), bits)
        return bits

    def _charge(self, position: int) -> None:
        """Plain decoding has passed this position: charge the time for the masks up to it."""
        if position > self._num_paid:
            paid = [at for at in self._costs if at <= position]
            self._meter.charge(sum(self._costs.pop(at) for at in paid), position - self._num_paid)
            self._num_paid = position

    def _advance_to(self, wanted: list[int]) -> bool:
        """Move to the state after these output tokens. False: the grammar does not allow them, or has ended."""
        new = wanted[len(self._walked) :]
        words = self._before_end(new)
        num_read = self._matcher.try_consume_tokens(words) if words else 0
        self._check()
        self._walked += words[:num_read]
        if num_read < len(words):
            # if another text has reached the shared limits, every token is refused, and only a mask shows the reason
            self._computed_mask()
        return num_read == len(new)

    def _computed_mask(self) -> Bits:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return bits

    def _roll_back(self, position: int) -> None:
        excess = len(self._walked) - position
        if excess:
            self._matcher.rollback(excess)
            del self._walked[position:]
            self._masks = {at: bits for at, bits in self._masks.items() if at <= position}
        for at in [at for at in self._costs if at > position]:
            self._meter.charge_drafts(self._costs.pop(at))

    def _keep(self, position: int, bits: Bits) -> None:
        """A step needs the masks of its draft twice, to draft and to verify. Older masks are computed again if needed."""
        self._masks[position] = bits
        if len(self._masks) > _MASKS_KEPT:
            self._masks = {at: self._masks[at] for at in sorted(self._masks)[_MASKS_KEPT // 2 :]}

    def _before_end(self, ids: Sequence[int]) -> list[int]:
        """The ids before the first one that ends a text or is not in the tokenizer."""
        size = self._grammar.vocab_size
        stop = next((i for i, token in enumerate(ids) if token in self._end_ids or token >= size), len(ids))
        return list(ids[:stop])

    def _restart(self) -> bool:
        """Start again with a new matcher. -> whether another text may have caused the limits to be reached"""
        self._begin()
        self._matcher.compute_bitmask()
        if not self._matcher.is_error():
            return False
        is_renewed = self._grammar.renew(self._source)
        self._begin()
        return is_renewed

    def _refuse_failed(self, wanted: list[int]) -> None:
        """Raises ForedraftError after an output at which limits were reached: plain decoding would have failed there. A
        second attempt would only delay the rest of the batch."""
        if self._failed is not None:
            failed_at, failure = self._failed
            if wanted[: len(failed_at)] == failed_at:
                raise ForedraftError(self._field + failure)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _Spent(reason(self._matcher.get_error(), self._grammar.kind))

    @property
    def _field(self) -> str:
        return f"structured_outputs.{self._grammar.kind}: "

    @property
    def _spent(self) -> str:
        limits = self._grammar.limits
        return (
            f"{self._field}its masks take more than {limits.base_seconds:g} s plus {limits.seconds_per_token * 1000:g} ms "
            f"per token of processor time: make it less ambiguous or smaller"
        )


class _Spent(Exception):
    """A matcher has reached its limits and cannot be used any more."""
