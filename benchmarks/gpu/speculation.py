"""Speculation on the embedded pair, whose target is widened to the cost of a large one, against its own plain decoding and `transformers`'
assisted generation."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu.decoding import clear, greedy_settings
from benchmarks.gpu.device import DEVICE, DTYPE, wait
from benchmarks.gpu.size import Size, WideShape
from foredraft import LLM, SamplingParams
from foredraft.engine.step import Step
from foredraft.model import EMBEDDED

GAMMA = 4
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]
_FIELDS = ("hidden", "layers", "intermediate", "heads")


class Widening:
    """Widens the embedded pair and head on the processor, while the device does other things."""

    def __init__(self, widen: Path, folder: Path, size: Size) -> None:
        target, draft, head = (folder / name for name in ("target", "draft", "head"))
        command = [sys.executable, str(widen)]
        self._running = [
            _start([*command, EMBEDDED / "target", target, *_options(size.wide)]),
            _start([*command, EMBEDDED / "draft", draft, *_options(size.wide_draft)]),
        ]
        self._head: list[str | Path] = [
            sys.executable,
            "-m",
            "benchmarks.common.wide_heads",
            EMBEDDED / "head",
            EMBEDDED / "target",
            target,
            head,
        ]
        self.target, self.draft, self.head = target, draft, head

    def wait(self) -> None:
        """Raises RuntimeError if the pair or the head could not be widened."""
        running, self._running = self._running, []
        if running:
            done = [one.wait() for one in running]
            if any(done) or _start(self._head).wait():
                raise RuntimeError("the pair could not be widened; see above")


def _start(command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    # the measurements meanwhile need the processor too
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""})


def _options(shape: WideShape) -> list[str]:
    return [part for name, number in zip(_FIELDS, shape, strict=True) for part in (f"--{name}", str(number))]


def speculation(models: Widening, prompts: Sequence[str], size: Size) -> dict[str, Any]:
    """Greedy, on code prompts. Each drafter in turn with plain decoding."""
    models.wait()
    params, few = greedy(size), few_of(prompts, size)
    by_draft = LLM(models.target, models.draft, device=DEVICE, dtype=DTYPE, speculative_tokens=GAMMA, max_num_seqs=8)
    systems = {"plain": by_draft.with_drafter("none"), "draft model": by_draft}
    result: dict[str, Any] = {"gamma": GAMMA, "batch_1": in_turn(systems, few, params, 1)}
    result["batch_8"] = in_turn(systems, list(prompts[:32]), params, 8)
    del by_draft, systems
    clear()
    result["assisted"] = assisted(models.target, models.draft, few[:2], (params.max_tokens or 128) // 2)
    return result


def greedy(size: Size) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=min(size.max_tokens, 128), ignore_eos=True)


def few_of(prompts: Sequence[str], size: Size) -> list[str]:
    """The prompts for batch 1."""
    return list(prompts[: max(4, size.num_prompts // 5)])


def heads(models: Widening, prompts: Sequence[str], size: Size) -> dict[str, Any]:
    """The same for the embedded head: chains and a tree."""
    models.wait()
    params, few = greedy(size), few_of(prompts, size)
    by_head = LLM(models.target, models.head, device=DEVICE, dtype=DTYPE, speculative_tokens=GAMMA, max_num_seqs=1)
    systems = {"plain": by_head.with_drafter("none"), "head": by_head}
    systems["tree"] = by_head.with_drafter(speculative_token_tree=TREE)
    return {"batch_1": in_turn(systems, few, params, 1)}


def in_turn(llms: dict[str, LLM], prompts: list[str], params: SamplingParams, group: int) -> dict[str, Any]:
    """Tokens per second, τ and times of a step. Each group of prompts runs with every LLM in turn."""
    tokens, seconds, steps = (dict.fromkeys(llms, 0.0) for _ in range(3))
    clocks = {name: Clock() for name in llms}
    for name, llm in llms.items():
        llm.generate(prompts[:group], params)
        llm.engine.observers.append(clocks[name])
    for first in range(0, len(prompts), group):
        for name, llm in llms.items():
            wait()
            started = time.perf_counter()
            outputs = llm.generate(prompts[first : first + group], params)
            seconds[name] += time.perf_counter() - started
            stats = [output.metrics.stats for output in outputs]
            tokens[name] += sum(one.num_emitted_tokens for one in stats)
            steps[name] += sum(one.num_steps for one in stats)
    speeds = {name: tokens[name] / seconds[name] for name in llms}
    return {
        name: {
            "tokens_per_second": speeds[name],
            "tau": tokens[name] / steps[name],
            "speedup": speeds[name] / speeds["plain"],
            "step_ms": clocks[name].ms_per_step(),
        }
        for name in llms
    }


class Clock:
    """An observer of where the time of a step goes. The target's pass is launched in `read` and waited for in `verify`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {"draft": 0.0, "read": 0.0, "verify": 0.0, "whole": 0.0}
        self._num_steps = 0

    def observe(self, step: Step) -> None:
        times = {"draft": step.draft_time, "read": step.read_time, "verify": step.verify_time, "whole": step.total_time}
        for name, seconds in times.items():
            self._sums[name] += seconds
        self._num_steps += 1

    def ms_per_step(self) -> dict[str, float]:
        return {name: 1000 * seconds / max(1, self._num_steps) for name, seconds in self._sums.items()}


def assisted(target: Path, draft: Path, prompts: Sequence[str], max_tokens: int) -> dict[str, float]:
    """`transformers` assisted generation with the same pair."""
    models = [AutoModelForCausalLM.from_pretrained(at, dtype=DTYPE).to(DEVICE).eval() for at in (target, draft)]
    tokenizer = AutoTokenizer.from_pretrained(target)
    settings = greedy_settings(max_tokens)
    tokens, seconds = 0, 0.0
    with torch.inference_mode():
        for place, prompt in enumerate([prompts[0], *prompts]):
            ids = tokenizer(prompt, return_tensors="pt").input_ids.to(DEVICE)
            wait()
            started = time.perf_counter()
            out = models[0].generate(ids, assistant_model=models[1], **settings)
            wait()
            if place:
                tokens, seconds = tokens + out.shape[1] - ids.shape[1], seconds + time.perf_counter() - started
    return {"tokens_per_second": tokens / seconds}


def table(result: dict[str, Any]) -> list[str]:
    """A summary, line by line."""
    lines = []
    for part in ("speculation", "heads"):
        for batch in ("batch_1", "batch_8"):
            for name, one in result.get(part, {}).get(batch, {}).items():
                parts = {key: round(ms, 3) for key, ms in one["step_ms"].items()}
                share = one["speedup"] / one["tau"]
                lines.append(
                    f"{part} {batch} {name}: {one['tokens_per_second']:.0f} tokens/s, {one['speedup']:.2f} times plain, "
                    f"tau {one['tau']:.2f}, speedup over tau {share:.2f}; a step, ms: {parts}"
                )
    if assisted_speed := result.get("speculation", {}).get("assisted", {}).get("tokens_per_second"):
        own = result["speculation"]["batch_1"]["draft model"]["tokens_per_second"]
        lines.append(
            f"over transformers' assisted generation ({assisted_speed:.0f} tokens/s): {own / assisted_speed:.2f}"
        )
    return lines
