"""The training loop: one step after the other, each a pure function of what came before and of its number."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.train.blocks import NOTHING, Blocks
from foredraft.train.checkpoint import LOG, TRAINER, RunFolder, load_trainer, save_model, writing
from foredraft.train.objectives import Objective, added, measure_on, passes
from foredraft.train.optimiser import Optimiser
from foredraft.train.turns import Turns

NUM_VALIDATIONS = 4
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is: `steps`, or `seconds` of training time over all its resumptions. One of them."""

    steps: int | None = None
    seconds: float | None = None

    def progress(self, step: int, seconds: float) -> float:
        """0 to 1."""
        if self.steps is not None:
            return min(step / self.steps, 1.0)
        assert self.seconds is not None
        return min(seconds / self.seconds, 1.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """batch_size: blocks of a step. checkpoint_every: seconds. seed: of the order of the blocks."""

    length: Length
    batch_size: int
    seed: int
    checkpoint_every: float = _PATIENCE


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the log. loss, acceptance, agreement: means over tokens. seconds: of training so far."""

    step: int
    loss: float
    acceptance: float
    agreement: float
    num_tokens: int
    norm: float
    progress: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """loss, acceptance: on held-out text, by its kind."""

    step: int
    loss: dict[str, float]
    acceptance: dict[str, float]


Watcher = Callable[[StepRecord], None]


@dataclass(slots=True)
class Trainer:
    """turns: what steps read and minimise. measured_by: what held-out text is measured by, the served law, whatever objective
    a step has. validation: blocks by kind of text."""

    student: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimiser: Optimiser
    turns: Turns
    measured_by: Objective
    validation: Mapping[str, Blocks]
    schedule: Schedule
    folder: RunFolder
    step: int = 0
    seconds: float = 0.0
    history: list[ValidationRecord] = field(default_factory=list)

    def resume(self) -> bool:
        """From the last checkpoint, if there is one; the student holds its weights already."""
        found = self.folder.checkpoints
        if found:
            state = load_trainer(found[-1])
            self.optimiser.load_state_dict(state["optimiser"])
            torch.set_rng_state(state["rng"])
            self.step, self.seconds = state["step"], state["seconds"]
            self.history = [ValidationRecord(**one) for one in state["history"]]
        self._cut_log()
        return bool(found)

    @property
    def progress(self) -> float:
        return self.schedule.length.progress(self.step, self.seconds)

    def run(self, watch: Watcher, stop: Callable[[], bool]) -> bool:
        """To the end, or until asked to stop; a checkpoint is left in either case. -> whether it is the end.

        Raises ForedraftError where the loss is no number; the last checkpoint is kept as it is.
        """
        saved_at = began = time.monotonic()
        before = self.seconds
        self.student.train()
        if not self.history:
            self._validate()
        while self.progress < 1 and not stop():
            progress = self.progress
            record = self._one_step(progress)
            self.seconds = before + time.monotonic() - began
            self._log(record)
            watch(record)
            if int(NUM_VALIDATIONS * progress) != int(NUM_VALIDATIONS * self.progress):
                self._validate()
            if time.monotonic() - saved_at >= self.schedule.checkpoint_every:
                self.save()
                saved_at = time.monotonic()
        self.save()
        return self.progress >= 1

    def _one_step(self, progress: float) -> StepRecord:
        turn = self.turns.at(self.schedule.seed, self.step, self.schedule.batch_size)
        device = self.student.device
        ids, following = (part.long().to(device) for part in (turn.blocks.ids, turn.blocks.following))
        num_tokens = int((following != NOTHING).sum())
        parts = []
        for some in passes(len(ids), ids.shape[1], int(self.student.config.get_text_config().vocab_size)):
            found = turn.objective(self.student, ids[some], following[some], progress)
            (found.loss / num_tokens).backward()  # type: ignore[no-untyped-call]
            parts.append(found)
        total = added(parts)
        loss = float(total.loss) / num_tokens
        norm = self.optimiser.shorten()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise ForedraftError(self._no_number(loss, norm))
        self.optimiser.step(progress)
        self.step += 1
        return StepRecord(
            self.step - 1,
            loss,
            total.acceptance / num_tokens,
            total.agreement / num_tokens,
            num_tokens,
            norm,
            progress,
            self.seconds,
        )

    def _no_number(self, loss: float, norm: float) -> str:
        kept = self.folder.checkpoints
        rest = f"the checkpoint of {kept[-1].name} is kept" if kept else "there is no checkpoint yet"
        return (
            f"the loss is {loss} and its gradient's norm {norm} at step {self.step}: give lower learning rates, or more "
            f"warm-up; {rest}"
        )

    def _validate(self) -> None:
        self.student.eval()
        losses, acceptances = {}, {}
        for kind, blocks in self.validation.items():
            found = measure_on(
                self.measured_by, self.student, list(zip(blocks.ids, blocks.following, strict=True)), self.progress
            )
            losses[kind] = float(found.loss) / found.num_rows
            acceptances[kind] = found.acceptance / found.num_rows
        self.student.train()
        self.history.append(ValidationRecord(self.step, losses, acceptances))

    def save(self) -> None:
        state = {
            "optimiser": self.optimiser.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "history": [asdict(one) for one in self.history],
        }

        def write(folder: Path) -> None:
            save_model(self.student, self.tokenizer, folder)
            torch.save(state, folder / TRAINER)

        self.folder.save(self.step, write)

    def _log(self, record: StepRecord) -> None:
        file = self.folder.out / LOG
        with writing(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(record)) + "\n")

    def _cut_log(self) -> None:
        """What was logged after the checkpoint will be logged again."""
        kept = [line for line in log_lines(self.folder.out / LOG) if line["step"] < self.step]
        self.folder.write_text(LOG, "".join(json.dumps(line) + "\n" for line in kept))


def log_lines(file: Path) -> list[dict[str, Any]]:
    """A log's lines; one that a kill cut off is left out."""
    found: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C, or a polite kill, has asked to stop. The second Ctrl-C ends at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
