"""What a benchmark compares: a drafter, its number of draft tokens, and the batch size."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.engine.proposal import Drafter
    from foredraft.llm import LLM

_PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Configuration:
    """method, speculative_tokens: as LLM takes them; None: those of the LLM. batch_size: prompts at a time."""

    method: str | Drafter | None = None
    speculative_tokens: int | str | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ForedraftError(f"batch_size must be at least 1, not {self.batch_size}")

    @classmethod
    def plain(cls, batch_size: int = 1) -> Configuration:
        """Decoding without drafts."""
        return cls("none", 0, batch_size)

    @classmethod
    def parse(cls, text: str, batch_size: int = 1) -> Configuration:
        """ "plain", or METHOD[:SPECULATIVE_TOKENS], each optionally followed by @BATCH_SIZE."""
        head, at, batch = text.partition("@")
        method, colon, tokens = head.partition(":")
        if not method or (at and not batch.isdecimal()) or (colon and not tokens):
            raise ForedraftError(f"configuration {text!r}: give plain, METHOD, METHOD:TOKENS or METHOD:TOKENS@BATCH")
        batch_size = int(batch) if at else batch_size
        if method in (_PLAIN, "none"):
            if colon:
                raise ForedraftError(f"configuration {text!r}: plain decoding drafts nothing: leave out {tokens!r}")
            return cls.plain(batch_size)
        return cls(method, int(tokens) if tokens.isdecimal() else tokens or None, batch_size)

    @property
    def is_plain(self) -> bool:
        return self.method == "none"

    @property
    def name(self) -> str:
        """As `parse` reads it, unless the drafter is an object."""
        batch = "" if self.batch_size == 1 else f"@{self.batch_size}"
        if self.is_plain:
            return _PLAIN + batch
        method = self.method if isinstance(self.method, str | None) else type(self.method).__name__
        tokens = "" if self.speculative_tokens is None else f":{self.speculative_tokens}"
        return f"{method or 'default'}{tokens}{batch}"


class Stopwatch:
    """Runs only inside `with`, so it pauses while other contenders run."""

    def __init__(self) -> None:
        self._before = 0.0
        self._started: float | None = None

    def seconds(self) -> float:
        """The time it has run so far."""
        return self._before + (0.0 if self._started is None else time.perf_counter() - self._started)

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._before, self._started = self.seconds(), None


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration without None fields, the LLM that runs it, and the time it has run."""

    configuration: Configuration
    llm: LLM
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def name(self) -> str:
        return self.configuration.name


def default_configurations(batch_size: int = 1) -> list[Configuration]:
    """Plain decoding, and the LLM as it is."""
    return [Configuration.plain(batch_size), Configuration(batch_size=batch_size)]


def contenders_for(llm: LLM, configurations: Sequence[Configuration]) -> list[Contender]:
    """Each configuration with its own engine over the models of `llm`, which are loaded once.

    Raises ForedraftError if there is none, if two are the same, or if one cannot run.
    """
    if not configurations:
        raise ForedraftError("no configuration was given: give at least one")
    contenders = [_contender(llm, configuration) for configuration in configurations]
    name, count = Counter(contender.name for contender in contenders).most_common(1)[0]
    if count > 1:
        raise ForedraftError(f"configuration {name} is given {count} times: give each only once")
    return contenders


def _contender(llm: LLM, configuration: Configuration) -> Contender:
    tokens = 0 if configuration.is_plain else configuration.speculative_tokens
    try:
        variant = llm.with_drafter(configuration.method, tokens)
    except ForedraftError as error:
        raise type(error)(f"configuration {configuration.name}: {error}") from error
    method = variant.method if isinstance(configuration.method, str | None) else configuration.method
    return Contender(replace(configuration, method=method, speculative_tokens=variant.speculative_tokens), variant)
