"""Runs of every kind that are killed at ten random moments give the result of an undisturbed run."""

from __future__ import annotations

import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from foredraft.train.records import read_log
from foredraft.train.run_folder import RunFolder, load_trainer
from tests.command_line import forked_commands, run_command

KINDS = {
    "draft model": ("distill", "--layers", "1"),
    "draft model in one pass": ("distill", "--layers", "1", "--parallel-tokens", "4"),
    "eagle3 with the target's lm_head": ("head", "--kind", "eagle3", "--share-lm-head", "--draft-vocab-size", "512"),
    "eagle1": ("head", "--kind", "eagle1", "--draft-model", "TARGET"),
    "dspark": ("head", "--kind", "dspark", "--block-size", "4", "--markov-rank", "8"),
    "medusa": ("head", "--kind", "medusa", "--heads", "2"),
    "exit": ("head", "--kind", "exit", "--exit-layer", "1", "--adapter-size", "32"),
}
NUM_KILLS = 10
NUM_STEPS = {"exit": 150}
"""The steps of a run, by kind. A step of an exit takes only milliseconds, so a short run would be over before it is killed."""
FEW_STEPS = 24
LONGEST_WAIT = 0.05
"""Up to this many seconds after a step: longer than several steps, each with a checkpoint."""


def command(kind: str, toy: Path, text: Path, out: Path) -> list[str]:
    name, *args = [str(toy) if word == "TARGET" else word for word in KINDS[kind]]
    return [
        *("train", name, "--target", str(toy), "--data", str(text)),
        *("--out", str(out), "--context", "16", "--batch-size", "2", "--num-threads", "1", *args),
        *("--steps", str(NUM_STEPS.get(kind, FEW_STEPS)), "--checkpoint-every", "0s", "--validation-share", "0.2"),
    ]


def start(kind: str, toy: Path, text: Path, out: Path) -> ForkServerProcess:
    args = command(kind, toy, text, out)
    process = forked_commands().Process(target=run_command, args=(args, out.with_suffix(".errors")))
    process.start()
    return process


def finish(kind: str, toy: Path, text: Path, out: Path) -> None:
    process = start(kind, toy, text, out)
    process.join(300)
    assert process.exitcode == 0, out.with_suffix(".errors").read_text()


def kill_at_a_random_moment(process: ForkServerProcess, out: Path, moments: random.Random) -> int | None:
    """Kill a run while it loads, or after its first, second or third step. -> exit code"""
    num_before = len(read_log(out / "log.jsonl"))
    num_steps, wait, deadline = moments.randrange(4), moments.uniform(0, LONGEST_WAIT), time.monotonic() + 120
    while num_steps and process.is_alive() and time.monotonic() < deadline:
        # the log is truncated to the checkpoint before it grows
        num_before = min(num_before, (now := len(read_log(out / "log.jsonl"))))
        if now >= num_before + num_steps:
            break
        time.sleep(0.001)
    time.sleep(wait)
    process.kill()
    process.join(120)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_with_the_result_of_an_undisturbed_one(
    kind: str, toy: Path, text: Path, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(kind, toy, text, whole)
    moments = random.Random(kind)
    codes, progress = [], []
    for _ in range(NUM_KILLS):
        codes.append(kill_at_a_random_moment(start(kind, toy, text, cut), cut, moments))
        checkpoints = RunFolder(cut).checkpoints if cut.exists() else []
        progress.append(load_trainer(checkpoints[-1])["step"] if checkpoints else 0)
        if codes[-1] != -signal.SIGKILL:
            break
    assert progress == sorted(progress)
    assert codes.count(-signal.SIGKILL) >= NUM_KILLS // 2, (codes, progress)
    assert len(set(progress)) > 2, progress
    finish(kind, toy, text, cut)
    logs = [
        [{key: value for key, value in step.items() if key != "seconds"} for step in read_log(out / "log.jsonl")]
        for out in (cut, whole)
    ]
    assert len(logs[1]) == NUM_STEPS.get(kind, FEW_STEPS)
    assert logs[0] == logs[1]
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
