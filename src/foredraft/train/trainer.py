"""The training loop. Each step is a pure function of the state before it and of its number."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from foredraft.errors import ForedraftError
from foredraft.train.blocks import IGNORED, Blocks
from foredraft.train.objectives import Objective, device_of, measure, micro_batches, total
from foredraft.train.optimiser import Optimiser
from foredraft.train.peak_memory import MemoryForecast, forecast, pass_memory, pass_shape
from foredraft.train.records import StepRecord, ValidationRecord, read_log
from foredraft.train.run_folder import LOG, TRAINER, RunFolder, load_trainer, writing
from foredraft.train.tasks import TaskRotation
from foredraft.train.texts import HELD_OUT
from foredraft.train.watch import Watch
from foredraft.utils.heap import malloc_trim
from foredraft.utils.machine import process_memory

NUM_VALIDATIONS = 4
_CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run is: `steps`, or `seconds` of training time over all its resumptions. Exactly one of them is given."""

    steps: int | None = None
    seconds: float | None = None

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is over, 0 to 1."""
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
    checkpoint_every: float = _CHECKPOINT_SECONDS


@dataclass(slots=True)
class Trainer:
    """student: the module to train. logit_width: its logits per token. save_student: writes it into a folder. tasks: what steps
    read and minimise. validation_objective: measures held-out text, whatever objective a step has. validation: blocks by kind
    of text."""

    student: nn.Module
    logit_width: int
    save_student: Callable[[Path], None]
    optimiser: Optimiser
    tasks: TaskRotation
    validation_objective: Objective
    validation: Mapping[str, Blocks]
    schedule: Schedule
    folder: RunFolder
    step: int = 0
    seconds: float = 0.0
    history: list[ValidationRecord] = field(default_factory=list)

    def resume(self) -> None:
        """Restore the last checkpoint, if there is one. The student already has its weights."""
        checkpoints = self.folder.checkpoints
        if checkpoints:
            state = load_trainer(checkpoints[-1])
            self.optimiser.load_state_dict(state["optimiser"])
            torch.set_rng_state(state["rng"])
            self.step, self.seconds = state["step"], state["seconds"]
            self.history = [ValidationRecord(**record) for record in state["history"]]
        self._truncate_log()

    def forecast_memory(self) -> MemoryForecast | None:
        """None off the CPU, and on systems that do not report memory. Call it before `resume`, with everything loaded."""
        if device_of(self.student).type != "cpu":
            return None
        task = self.tasks.tasks[0]
        shape = pass_shape(self.schedule.batch_size, task.blocks.ids.shape[1], self.logit_width)
        of_pass = pass_memory(self.student, task.objective, shape)
        memory = process_memory()  # only now, because computing the shapes imports modules
        return None if memory is None else forecast(memory, self.optimiser, of_pass)

    @property
    def progress(self) -> float:
        return self.schedule.length.progress(self.step, self.seconds)

    def run(self, watch: Watch, should_stop: Callable[[], bool]) -> bool:
        """Train to the end, or until should_stop(). Either way a checkpoint is saved. -> whether the run is complete

        Raises ForedraftError if the loss is not finite; the last checkpoint is kept as it is.
        """
        saved_at = started = time.monotonic()
        seconds_before = self.seconds
        self.student.train()
        if not self.history:
            self._validate(watch)
        watch.stage("training")
        while self.progress < 1 and not should_stop():
            progress = self.progress
            record = self._train_step(progress)
            self.seconds = seconds_before + time.monotonic() - started
            self._log(record)
            watch.step(record)
            if int(NUM_VALIDATIONS * progress) != int(NUM_VALIDATIONS * self.progress):
                self._validate(watch)
                watch.stage("training")
            if time.monotonic() - saved_at >= self.schedule.checkpoint_every:
                self.save()
                saved_at = time.monotonic()
        self.save()
        return self.progress >= 1

    def _train_step(self, progress: float) -> StepRecord:
        task = self.tasks.batch(self.schedule.seed, self.step, self.schedule.batch_size)
        device = device_of(self.student)
        ids, next_ids = task.blocks.ids.long().to(device), task.blocks.next_ids.long().to(device)
        num_tokens = int((next_ids != IGNORED).sum())
        parts = []
        for rows in micro_batches(task.blocks.ids, self.logit_width):
            part = task.objective(self.student, ids[rows], next_ids[rows], progress)
            (part.loss / num_tokens).backward()  # type: ignore[no-untyped-call]
            parts.append(part)
            malloc_trim()  # passes differ in length, so the heap would grow to several times what one of them needs
        sums = total(parts)
        loss = float(sums.loss) / num_tokens
        norm = self.optimiser.clip_gradients()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise ForedraftError(self._not_finite(loss, norm))
        self.optimiser.step(progress)
        self.step += 1
        return StepRecord(
            self.step - 1,
            loss,
            sums.acceptance / num_tokens,
            sums.agreement / num_tokens,
            num_tokens,
            norm,
            progress,
            self.seconds,
        )

    def _not_finite(self, loss: float, norm: float) -> str:
        checkpoints = self.folder.checkpoints
        kept = f"the checkpoint of {checkpoints[-1].name} is kept" if checkpoints else "there is no checkpoint yet"
        return (
            f"the loss is {loss} and the norm of its gradient {norm} at step {self.step}: give lower learning rates or "
            f"a longer warm-up; {kept}"
        )

    def _validate(self, watch: Watch) -> None:
        self.student.eval()
        losses, acceptances = {}, {}
        for kind, blocks in self.validation.items():
            name = HELD_OUT if kind == HELD_OUT else f"{HELD_OUT} ({kind})"
            watch.stage(f"measuring {name} at step {self.step}")
            sums = measure(self.validation_objective, self.student, blocks, self.progress, watch.share)
            losses[kind] = float(sums.loss) / sums.num_rows
            acceptances[kind] = sums.acceptance / sums.num_rows
        self.student.train()
        self.history.append(ValidationRecord(self.step, losses, acceptances))

    def save(self) -> None:
        """Save a checkpoint of this step."""
        state = {
            "optimiser": self.optimiser.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "history": [asdict(record) for record in self.history],
        }

        def write(folder: Path) -> None:
            self.save_student(folder)
            torch.save(state, folder / TRAINER)

        self.folder.save(self.step, write)

    def _log(self, record: StepRecord) -> None:
        file = self.folder.out / LOG
        with writing(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(record)) + "\n")

    def _truncate_log(self) -> None:
        """Drop the steps after the checkpoint: they will be taken and logged again."""
        records = [record for record in read_log(self.folder.out / LOG) if record["step"] < self.step]
        self.folder.write_text(LOG, "".join(json.dumps(record) + "\n" for record in records))
