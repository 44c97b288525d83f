"""A text with its history, its budget and its stop rules. Histories grow only here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.engine.stats import SpeculationStats
from foredraft.errors import message_of
from foredraft.sampling import Sampler

StopRule = Callable[[Sequence[int], int], int | None]
"""(new ids, output tokens before them) -> how many of the new ids to keep if the text ends among them, else None."""


class Origin(IntEnum):
    """Where an emitted token came from."""

    PLAIN = 0  # the target's own, without a draft
    ACCEPTED = 1  # an accepted draft token
    RECOVERED = 2  # the target's own, in place of a rejected draft token
    BONUS = 3  # the target's own, after a fully accepted draft


class TokenLogprobs(NamedTuple):
    """The raw distribution at one token: the token's log-probability and rank (from 1), and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One text that is being generated.

    tokens: the history, prompt first; it only grows. The last one is the pending token.
    source: what the decoder attends to besides its history; NO_SOURCE for a model without an encoder.
    max_len: the maximum length of the history. end_ids: each of them ends the text. stop_rule: ends it depending on its content.
    speculative_tokens: the most draft tokens per step; None: the policy decides.
    error: what went wrong, in one line. failure: the exception behind it, if there was one.
    wait_for: a sequence that is reading a common prefix, whose keys and values this one will share as soon as wait_len tokens of it
    are read (None: all of that sequence's prompt). num_cached: how many tokens, including those of its source, were cached when it
    first started.
    client: the owner; clients are served fairly. priority: orders the sequences of one client; the lower, the earlier.
    """

    seq_id: int
    tokens: list[int]
    sampler: Sampler
    max_len: int
    speculative_tokens: int | None
    source: Source = NO_SOURCE
    end_ids: frozenset[int] = frozenset()
    stop_rule: StopRule | None = None
    wait_for: TokenSequence | None = None
    wait_len: int | None = None
    num_cached: int = 0
    client: str = ""
    priority: int = 0
    prompt_len: int = 0
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    failure: Exception | None = None
    num_preemptions: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    begun_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of its source, if that has any, else of the start of its history."""
        return self.source.ids or self.tokens[: self.prompt_len]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def room(self) -> int:
        """How many more tokens it may get."""
        return self.max_len - len(self.tokens)

    @property
    def shares_prefix(self) -> bool:
        """Whether it may start from cached keys and values. Not if it needs prompt_logprobs, which come from reading the prompt."""
        params = self.sampler.params
        return params.prefix_caching and params.prompt_logprobs is None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def begin(self) -> None:
        """Record when it is first scheduled; later calls (after a preemption) do nothing."""
        self.begun_at = self.begun_at or time.perf_counter()

    def commit(self, new_ids: Sequence[int], num_evaluated: int, *, has_own: bool = True) -> int:
        """Append verified tokens, cut where the text ends. -> how many tokens were kept

        new_ids: the accepted draft tokens, then the target's own (has_own: whether there is one; not if its row failed).
        num_evaluated: see Outcome.
        """
        num_accepted = len(new_ids) - has_own
        kept = self._cut(list(new_ids[: self.room]))
        own = _origin_of_own(num_evaluated, num_accepted)
        self.origins += [*[Origin.ACCEPTED] * num_accepted, own][: len(kept)]
        self.tokens.extend(kept)
        if kept:
            now = time.perf_counter()
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        if self.finish_reason is None and self.room <= 0:
            self.finish_reason = "length"
        return len(kept)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens that another engine wrote, which applies its own stop rules and keeps its own statistics."""
        self.tokens.extend(ids)

    def finish(self, reason: str, error: str | None = None) -> None:
        self.finish_reason = self.finish_reason or reason
        self.error = self.error or error

    def fail(self, error: Exception) -> None:
        """End with an exception."""
        self.finish_reason = "error"
        self.failure = self.failure or error
        self.error = self.error or message_of(error)

    def _cut(self, ids: list[int]) -> list[int]:
        params = self.sampler.params
        end = next((i for i, token in enumerate(ids) if token in self.end_ids), None)
        is_stop_token = end is not None and ids[end] in params.stop_token_ids
        # the token that ends the text is among its ids, but in its string only if the request asks for it
        is_shown = is_stop_token and params.include_stop_str_in_output
        text_ids = ids if end is None else ids[: end + is_shown]
        if self.stop_rule is not None:
            keep = self.stop_rule(text_ids, self.num_output)
            if keep is not None:
                self.finish_reason = "stop"
                return ids[:keep]
        if end is None:
            return ids
        self.finish_reason = "stop"
        self.stop_reason = ids[end] if is_stop_token else None
        return ids[: end + 1]


def _origin_of_own(num_drafted: int, num_accepted: int) -> Origin:
    if num_drafted == 0:
        return Origin.PLAIN
    return Origin.BONUS if num_accepted == num_drafted else Origin.RECOVERED
