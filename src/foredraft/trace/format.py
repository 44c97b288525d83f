"""The lines of a trace file, version 1; docs/guides/trace.md describes them.

The recorder writes these objects and the reader gives them back, so that there is one description of the format.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from foredraft.engine.stats import SpeculationStats

VERSION = 1

OriginName = Literal["plain", "accepted", "recovered", "bonus"]
Verdict = Literal["accepted", "rejected", "unused"]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class _Line(BaseModel):
    # a later foredraft may add fields within a version: they are passed over
    model_config = ConfigDict(frozen=True, extra="ignore")


class ModelInfo(_Line):
    """name: as the checkpoint calls itself. dtype: of its weights. quantization: what was asked for, if anything."""

    name: str
    dtype: str
    quantization: str | None = None


class Header(_Line):
    """The first line. created: ISO 8601, with the time zone. method: the drafter, or drafters."""

    type: Literal["trace"] = "trace"
    version: int = VERSION
    foredraft: str
    created: str
    method: str = ""
    device: str = ""
    target: ModelInfo | None = None
    draft: ModelInfo | None = None


class TextLine(_Line):
    """A text begins. text: its number in this file. child: which of the n texts of its request. prompt: decoded, or None
    without a tokenizer. params: the sampling parameters as they were resolved."""

    type: Literal["text"] = "text"
    text: Count
    child: Count = 0
    prompt_ids: list[int]
    prompt: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)


class StepLine(_Line):
    """One step of the engine: times in seconds, start from the beginning of the recording, rest = what the other two
    leave of the whole step. num_rows: of the target's pass. num_texts: that took part. drafters: seconds of each."""

    type: Literal["step"] = "step"
    step: Count
    start: Seconds
    draft: Seconds
    verify: Seconds
    rest: Seconds
    read: Seconds
    num_rows: Count
    num_texts: Count
    drafters: dict[str, Seconds] = Field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


class Token(_Line):
    """p: the target's probability of it at its place, after all warps; p_raw: before any. None: there was no number.
    text: what it adds to the text; empty while a character is incomplete, and without a tokenizer."""

    id: Count
    text: str = ""
    p: Probability | None
    p_raw: Probability | None


class DraftToken(Token):
    """q: the probability with which it was drafted; 1 where it was certain."""

    q: Probability | None
    verdict: Verdict


class OwnToken(Token):
    """The target's own token."""

    origin: Literal["plain", "recovered", "bonus"]


class RoundLine(_Line):
    """What one step did to one text. at: how many output tokens the text had before. own: None where the text ended
    before it."""

    type: Literal["round"] = "round"
    text: Count
    step: Count
    at: Count
    drafter: str = ""
    draft: list[DraftToken]
    own: OwnToken | None

    @property
    def kept(self) -> list[Token]:
        """The tokens that it gave to the text."""
        accepted: list[Token] = [token for token in self.draft if token.verdict == "accepted"]
        return accepted if self.own is None else [*accepted, self.own]

    def count(self, stats: SpeculationStats) -> None:
        verdicts = [token.verdict for token in self.draft]
        stats.record(
            num_drafted=len(verdicts), num_accepted=verdicts.count("accepted"), num_kept=len(self.kept)
        )  # fmt: skip


class Counts(_Line):
    """The fields of SpeculationStats, by the same definitions."""

    num_steps: Count = 0
    num_spec_steps: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    num_evaluated_tokens: Count = 0
    num_emitted_tokens: Count = 0
    num_near_ties: Count = 0
    acceptance_histogram: list[Count] = Field(default_factory=list)
    drafted_per_position: list[Count] = Field(default_factory=list)
    evaluated_per_position: list[Count] = Field(default_factory=list)
    accepted_per_position: list[Count] = Field(default_factory=list)

    @staticmethod
    def of(stats: SpeculationStats) -> Counts:
        return Counts(**asdict(stats))


class EndLine(_Line):
    """A text ended, or the recording did. finish_reason: as in an output; None if it was still being written.
    counts: the engine's own, which the rounds must give again."""

    type: Literal["end"] = "end"
    text: Count
    finish_reason: str | None
    error: str | None = None
    token_ids: list[int]
    num_preemptions: Count = 0
    counts: Counts


class Footer(_Line):
    """The last line: the recording was closed, and nothing is missing."""

    type: Literal["close"] = "close"
    num_texts: Count
    num_steps: Count
    counts: Counts


Line = Header | TextLine | StepLine | RoundLine | EndLine | Footer
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


@dataclass(frozen=True, slots=True)
class TextTrace:
    """One text: how it began, its rounds in order, how it ended (None where the file breaks off before)."""

    begin: TextLine
    rounds: tuple[RoundLine, ...]
    end: EndLine | None

    @property
    def stats(self) -> SpeculationStats:
        """Counted again from the rounds."""
        stats = SpeculationStats()
        for one in self.rounds:
            one.count(stats)
        return stats

    @property
    def token_ids(self) -> list[int]:
        return [token.id for one in self.rounds for token in one.kept]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file. is_complete: whether the recording was closed."""

    header: Header
    texts: tuple[TextTrace, ...]
    steps: tuple[StepLine, ...]
    is_complete: bool

    @property
    def stats(self) -> SpeculationStats:
        return sum((text.stats for text in self.texts), SpeculationStats())
