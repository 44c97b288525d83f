"""The lines of a trace file, version 1; docs/guides/trace.md describes them.

The recorder writes these objects and the reader returns them, so the format is defined once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from foredraft.engine.stats import SpeculationStats
from foredraft.engine.token_tree import depths_of

VERSION = 1
BEGINNING = b'{"type":"trace"'
"""How a trace file begins."""

Verdict = Literal["accepted", "rejected", "unused"]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class _Line(BaseModel):
    # a later foredraft may add fields within a version: they are ignored
    model_config = ConfigDict(frozen=True, extra="ignore")


class ModelInfo(_Line):
    """name: the checkpoint's own. dtype: of its weights. quantization: the requested one, if any."""

    name: str
    dtype: str
    quantization: str | None = None


class Header(_Line):
    """The first line. created: ISO 8601, with the time zone. method: the drafter, or drafters. adapts: whether one of them learned from
    the texts."""

    type: Literal["trace"] = "trace"
    version: int = VERSION
    foredraft: str
    created: str
    method: str = ""
    device: str = ""
    adapts: bool = False
    target: ModelInfo | None = None
    draft: ModelInfo | None = None


class TextLine(_Line):
    """The start of a text. text: its number in this file. child: its index among the n texts of its request. prompt: decoded; None
    without a tokenizer. params: the resolved sampling parameters."""

    type: Literal["text"] = "text"
    text: Count
    child: Count = 0
    prompt_ids: list[int]
    prompt: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)


class StepLine(_Line):
    """One step of the engine. Times are in seconds. start: since the beginning of the recording. rest: the step's time without draft
    and verify. num_rows: rows of the target's pass. num_texts: texts in the step. drafters: seconds of each drafter."""

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
    """p: the target's probability of the token, after all logits processing; p_raw: before it. None: not finite. text: the characters
    that the token adds; empty while a character is incomplete, and without a tokenizer."""

    id: Count
    text: str = ""
    p: Probability | None
    p_raw: Probability | None


class DraftToken(Token):
    """q: the probability with which the token was drafted; 1 if the draft was deterministic. parent: in a tree, the index in the draft
    of the token before it, -1 for none; None in a chain. At most one of several siblings is accepted; if none is, all are rejected."""

    q: Probability | None
    verdict: Verdict
    parent: Annotated[int, Field(ge=-1)] | None = None


class TargetToken(Token):
    """The target's own token of a round: recovered after a rejection, bonus after a fully accepted draft, or plain without one."""

    origin: Literal["plain", "recovered", "bonus"]


class RoundLine(_Line):
    """What one step did to one text. at: the number of output tokens before it. own: the target's token; None if the text ended
    before it."""

    type: Literal["round"] = "round"
    text: Count
    step: Count
    at: Count
    drafter: str = ""
    draft: list[DraftToken]
    own: TargetToken | None

    @property
    def kept(self) -> list[Token]:
        """The tokens that the round added to the text."""
        accepted: list[Token] = [token for token in self.draft if token.verdict == "accepted"]
        return accepted if self.own is None else [*accepted, self.own]

    def count(self, stats: SpeculationStats) -> None:
        """Add the round to the stats."""
        verdicts = [token.verdict for token in self.draft]
        counts = {"num_drafted": len(verdicts), "num_accepted": verdicts.count("accepted"), "num_kept": len(self.kept)}
        parents = [token.parent for token in self.draft if token.parent is not None]
        if parents:
            counts["depth"] = max(depths_of(parents))
            counts["num_evaluated"] = counts["num_accepted"] + ("rejected" in verdicts)
        stats.record(**counts)


class Counts(_Line):
    """The fields of SpeculationStats."""

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
    """The end of a text or of its recording. finish_reason: as in an output; None if the text was still running. counts: the engine's
    own, which must equal those of the rounds."""

    type: Literal["end"] = "end"
    text: Count
    finish_reason: str | None
    error: str | None = None
    token_ids: list[int]
    num_preemptions: Count = 0
    counts: Counts


class Footer(_Line):
    """The last line: the recording was closed and is complete."""

    type: Literal["close"] = "close"
    num_texts: Count
    num_steps: Count
    counts: Counts


Line = Header | TextLine | StepLine | RoundLine | EndLine | Footer
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


@dataclass(frozen=True, slots=True)
class TextTrace:
    """One text: its start, its rounds in order, and its end (None if the file breaks off before it)."""

    begin: TextLine
    rounds: tuple[RoundLine, ...]
    end: EndLine | None

    @property
    def stats(self) -> SpeculationStats:
        """Counted from the rounds."""
        stats = SpeculationStats()
        for line in self.rounds:
            line.count(stats)
        return stats

    @property
    def token_ids(self) -> list[int]:
        return [token.id for line in self.rounds for token in line.kept]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file. is_complete: whether the recording was closed."""

    header: Header
    texts: tuple[TextTrace, ...]
    steps: tuple[StepLine, ...]
    is_complete: bool

    @property
    def stats(self) -> SpeculationStats:
        return sum((text.stats for text in self.texts), SpeculationStats())
