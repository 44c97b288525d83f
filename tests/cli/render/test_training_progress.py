"""What a training run prints where standard error is not a terminal."""

from __future__ import annotations

from foredraft.cli.render.training_progress import TrainingLines
from foredraft.train import StepRecord


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record(step: int, progress: float) -> StepRecord:
    return StepRecord(step, 2.5, 0.25, 0.5, 10, 1.0, progress, 1.0)


def test_a_stage_has_a_line_when_it_begins_and_one_per_minute() -> None:
    lines: list[str] = []
    clock = Clock()
    shown = TrainingLines(lines.append, clock)
    shown.stage("writing 512 generations")
    for clock.now, share in ((30.0, 0.125), (61.0, 0.25), (62.0, 0.375), (121.0, 0.5)):
        shown.share(share)
    assert lines == ["writing 512 generations", "writing 512 generations: 25%", "writing 512 generations: 50%"]


def test_steps_have_a_line_per_minute() -> None:
    lines: list[str] = []
    clock = Clock()
    shown = TrainingLines(lines.append, clock)
    shown.stage("training")
    for clock.now, step in ((59.0, 3), (60.0, 4), (61.0, 5)):
        shown.step(record(step, step / 10))
    assert lines == ["training", "step 5 (40%): loss 2.500  acceptance 0.250"]


def test_nothing_is_printed_while_mistakes_are_still_found() -> None:
    lines: list[str] = []
    TrainingLines(lines.append, Clock()).prepare("reading")
    assert not lines
