"""What a benchmark records, before anything is computed from it."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.engine.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. Times in seconds.

    seconds: from the request's arrival to its last token. time_to_first_token: to its first. gaps: from one delivery to
    the next; the tokens of one step arrive together.
    """

    prompt_len: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    seconds: float
    time_to_first_token: float
    gaps: tuple[float, ...]
    stats: SpeculationStats

    @property
    def time_per_output_token(self) -> float | None:
        """The mean time from one token to the next after the first; None for a single token."""
        if len(self.token_ids) < 2:
            return None
        return (self.seconds - self.time_to_first_token) / (len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's turns under one configuration."""

    question_id: str
    category: str
    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def seconds(self) -> float:
        """Of all its turns; in a batch the same seconds count for each answer."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def stats(self) -> SpeculationStats:
        return sum((turn.stats for turn in self.turns), SpeculationStats())


@dataclass(frozen=True, slots=True)
class GroupRun:
    """One run of a group of questions under one configuration, to be paired with the same group under another.

    configuration: its name. group, repeat: indices from 0. category: "mixed" if the questions are of several.
    seconds: of its own steps, from the first arrival to the last token, summed over successive batches and turns.
    """

    configuration: str
    group: int
    repeat: int
    category: str
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def stats(self) -> SpeculationStats:
        return sum((answer.stats for answer in self.answers), SpeculationStats())
