"""Speed and exactness on one GPU, in one call of at most eight minutes. Runs wherever there is a CUDA device.

    python -m benchmarks.gpu.one_gpu --out DIR --data DIR [--widen FILE] [--minutes 8] [--toys]

Needs llguidance and tomli-w besides PyTorch and transformers. --data: a folder with prompts/mbpp.jsonl. --widen: the tool that makes a
small checkpoint cost as much as a large one.

bandwidth: of a copy. decoding: a random target of Llama-3.1-8B's shape, the time of a step by batch size and by rows per sequence,
against the floor (bytes of weights over bandwidth), with the library's products and with batch-invariant ones; and `transformers`
generate for comparison. speculation: the embedded pair, its target widened to about 7 B, greedy on code prompts, against its own
plain decoding and assisted generation. invariance: how many greedy texts are the same with and without drafts. profile: the
kernels of one step. products, attention: pieces of a step in every variant of the kernels (see pieces.py).

A part that fails or has no time left is named in the table; the others are unaffected. --toys runs everything on toy models, to check
that the script runs, also without a GPU (TRITON_INTERPRET=1). Writes gpu.json after every part, and prints a short table at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks.common.prompts import code_prompts
from benchmarks.gpu import pieces
from benchmarks.gpu.device import DEVICE, DTYPE, HAS_GPU, median_ms, wait
from foredraft import LLM, SamplingParams
from foredraft.engine.step import Step
from foredraft.gpu import Graphs, at_once
from foredraft.model import EMBEDDED, LanguageModel, Read
from foredraft.model.device_stack import DeviceStackBody
from foredraft.model.probe import probe
from foredraft.utils.machine import this_machine

GAMMA = 4


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured: the full size by default, or TOYS."""

    hidden: int = 4096
    layers: int = 32
    intermediate: int = 14336
    vocab: int = 128_256
    copied: int = 4 << 30
    num_prompts: int = 100
    max_tokens: int = 256
    prompt: int = 256
    context: int = 1024
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    widths: tuple[int, ...] = (1, 2, 3, 5, 8, 16, 32, 64)
    wide: tuple[int, ...] = (4096, 32, 11008, 64)
    draft: tuple[int, ...] = (1024, 4, 2816, 16)
    product_rows: tuple[int, ...] = (1, 5, 16)
    contexts: tuple[int, ...] = (256, 1024, 8192)
    parts: tuple[int, ...] = (1, 4, 16)

    @property
    def num_heads(self) -> int:
        """Heads are 128 wide; four share one key/value head."""
        return self.hidden // 128

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.num_heads // 4)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """[n, k] of the matrices that a layer reads, and of the lm_head."""
        kv_width = 2 * self.num_kv_heads * 128
        return {
            "qkv": (self.hidden + kv_width, self.hidden),
            "out": (self.hidden, self.hidden),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


TOYS = Size(
    128,
    1,
    256,
    96,
    1 << 20,
    4,
    16,
    16,
    64,
    (1, 2),
    (1, 2, 5),
    wide=(256, 8, 704, 4),
    draft=(256, 1, 704, 4),
    product_rows=(2,),
    contexts=(70,),
    parts=(1, 2),
)


class Report:
    """The results so far, saved after every part."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.file, self.result = out / "gpu.json", dict[str, Any]()
        self._ends = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def part(self, name: str, measure: Callable[[], Any], needed: float) -> None:
        """Run a part if `needed` seconds are left, and keep its result, or the reason why there is none."""
        if self.seconds_left < needed:
            self.result[name] = {"left_out": f"{self.seconds_left:.0f} s were left and it needs {needed:.0f}"}
        else:
            started = time.monotonic()
            try:
                self.result[name] = measure()
            except Exception as error:
                traceback.print_exc()
                self.result[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            self.result.setdefault("seconds", {})[name] = time.monotonic() - started
        clear()
        self.file.write_text(json.dumps(self.result, indent=1))


def clear() -> None:
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


def bandwidth(size: Size) -> dict[str, float]:
    source = torch.randint(0, 255, (size.copied,), dtype=torch.uint8, device=DEVICE)
    goal = torch.empty_like(source)
    return {"bytes_per_second": 2 * size.copied / (median_ms(lambda: goal.copy_(source)) / 1000)}


def random_llama(size: Size) -> Any:
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.intermediate,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        vocab_size=size.vocab,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()


def bytes_read(model: Any) -> int:
    """Read by a step of few rows: every matrix except the embedding."""
    looked_up = model.get_input_embeddings().weight.numel()
    return 2 * (sum(parameter.numel() for parameter in model.parameters()) - looked_up)


def decoding(size: Size, bytes_per_second: float | None) -> dict[str, Any]:
    hf = random_llama(size)
    num_bytes = bytes_read(hf)
    result: dict[str, Any] = {
        "bytes": num_bytes,
        "floor_ms": 1000 * num_bytes / bytes_per_second if bytes_per_second else None,
        "transformers_ms_per_token": generate_ms(hf, size),
    }
    del hf
    for is_invariant in (False, True):
        clear()
        model = ours(size, is_batch_invariant=is_invariant)
        result["batch_invariant" if is_invariant else "library_products"] = {
            "by_batch": {batch: step_ms(model, batch, 1, size) for batch in size.batches},
            "by_width": {width: step_ms(model, 1, width, size) for width in size.widths},
        }
        del model
    return result


def ours(size: Size, *, is_batch_invariant: bool) -> LanguageModel:
    """The random target as foredraft runs it."""
    runner = Graphs(DEVICE) if HAS_GPU else at_once

    def body(hf: Any) -> DeviceStackBody:
        return DeviceStackBody(hf, size.context, runner, is_batch_invariant=is_batch_invariant)

    return probe(random_llama(size), "llama", size.context, body)


def generate_ms(hf: Any, size: Size) -> float:
    """Milliseconds per token of `transformers` generate, eager, greedy, batch 1, after the prompt."""
    ids = torch.randint(0, size.vocab, (1, size.prompt), device=DEVICE)
    num_tokens = 32
    settings = {"do_sample": False, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens, "pad_token_id": 0}
    with torch.inference_mode():
        hf.generate(ids, **settings)
        wait()
        started = time.perf_counter()
        hf.generate(ids, **settings)
        wait()
    return 1000 * (time.perf_counter() - started) / num_tokens


def step_ms(model: LanguageModel, batch: int, width: int, size: Size) -> float:
    """A pass of `width` rows for each of `batch` sequences after a prompt, from ids and tables to the logits on the device."""
    vocab_size = model.traits.vocab_size
    cache = model.scratch_cache([size.context] * batch)
    draw = torch.Generator().manual_seed(0)
    for i in range(batch):
        model.read([Read(i, torch.randint(0, vocab_size, (size.prompt,), generator=draw).tolist(), 0)], cache)
    tokens = torch.randint(0, vocab_size, (width,), generator=draw).tolist()

    def step() -> None:
        model.read([Read(i, tokens, width) for i in range(batch)], cache)
        for i in range(batch):
            del cache.region(i).tokens[size.prompt :]

    return median_ms(step)


class Widening:
    """Widens the embedded pair to the cost of a 7 B target and a 60 M draft model, while the device does other things."""

    def __init__(self, widen: Path, folder: Path, size: Size) -> None:
        self._folder = folder
        self._running = [
            subprocess.Popen(
                [sys.executable, widen, EMBEDDED / name, folder / name, *_options(*shape)],
                env={**os.environ, "OMP_NUM_THREADS": "2"},  # the measurements meanwhile need the processor too
            )
            for name, shape in (("target", size.wide), ("draft", size.draft))
        ]

    def done(self) -> tuple[Path, Path]:
        """Wait for the widened pair. -> target, draft model"""
        if any(one.wait() for one in self._running):
            raise RuntimeError("the pair could not be widened; see above")
        return self._folder / "target", self._folder / "draft"


def _options(hidden: int, layers: int, intermediate: int, heads: int) -> list[str]:
    shape = {"hidden": hidden, "layers": layers, "intermediate": intermediate, "heads": heads}
    return [part for key, value in shape.items() for part in (f"--{key}", str(value))]


def speculation(target: Path, draft: Path, prompts: Sequence[str], size: Size) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=min(size.max_tokens, 128), ignore_eos=True)
    speculating = LLM(target, draft, device=DEVICE, speculative_tokens=GAMMA, max_num_seqs=32)
    plain = speculating.with_drafter("none")
    auto = speculating.with_drafter(speculative_tokens="auto")
    result: dict[str, Any] = {"gamma": GAMMA}
    few = list(prompts[: max(4, size.num_prompts // 10)])
    for name, llms, group in (
        ("batch_1", {"own": speculating, "plain": plain}, 1),
        ("batch_32", {"own": auto, "plain": plain}, 32),
    ):
        result[name] = in_turn(llms, few if group == 1 else list(prompts[:64]), params, group)
    del speculating, plain, auto, llms
    clear()
    result["assisted"] = assisted(target, draft, few[:4], params.max_tokens or 128)
    return result


def in_turn(llms: dict[str, LLM], prompts: list[str], params: SamplingParams, group: int) -> dict[str, Any]:
    """Tokens per second, τ and times per step. Each group of prompts runs with every LLM in turn."""
    sums = {name: [0, 0.0, 0] for name in llms}
    clocks = {name: Clock() for name in llms}
    for name, llm in llms.items():
        llm.generate(prompts[:group], params)
        llm.engine.observers.append(clocks[name])
    for first in range(0, len(prompts), group):
        for name, llm in llms.items():
            wait()
            started = time.perf_counter()
            outputs = llm.generate(prompts[first : first + group], params)
            seconds = time.perf_counter() - started
            stats = [output.metrics.stats for output in outputs]
            sums[name][0] += sum(one.num_emitted_tokens for one in stats)
            sums[name][1] += seconds
            sums[name][2] += sum(one.num_steps for one in stats)
    speeds = {name: tokens / seconds for name, (tokens, seconds, _) in sums.items()}
    tau = sums["own"][0] / sums["own"][2]
    steps = {name: clock.ms_per_step() for name, clock in clocks.items()}
    return {"tokens_per_second": speeds, "tau": tau, "speedup": speeds["own"] / speeds["plain"], "step_ms": steps}


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
    settings = {"do_sample": False, "min_new_tokens": max_tokens, "max_new_tokens": max_tokens, "pad_token_id": 0}
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


def invariance(target: Path, draft: Path, prompts: Sequence[str], size: Size) -> dict[str, Any]:
    """The number of greedy texts that are the same with drafts, sixteen at a time, as without, five at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=size.max_tokens, ignore_eos=True)
    result = {}
    for is_invariant in (True, False):
        llm = LLM(target, draft, device=DEVICE, speculative_tokens=GAMMA, max_num_seqs=16, batch_invariant=is_invariant)
        texts = [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]
        alone = llm.with_drafter("none")
        few = [list(prompts[first : first + 5]) for first in range(0, len(prompts), 5)]
        plain = [output.outputs[0].token_ids for some in few for output in alone.generate(some, params)]
        same = sum(a == b for a, b in zip(texts, plain, strict=True))
        name = "batch_invariant" if is_invariant else "library_products"
        result[name] = {"identical": same, "of": len(texts), "row_exact": llm.target.traits.row_exact}
        del llm, alone
        clear()
    return result


def profile(size: Size) -> dict[str, Any]:
    """The kernels of a plain step and of a verification of five rows: their number of calls and microseconds, by name."""
    model = ours(size, is_batch_invariant=False)
    result = {}
    for width in (1, 5):
        cache = model.scratch_cache([size.context])
        model.read([Read(0, [1] * size.prompt, 0)], cache)
        model.read([Read(0, [2] * width, width)], cache)
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
            model.read([Read(0, [2] * width, width)], cache)
            wait()
        on_device = [one for one in seen.key_averages() if one.device_type != torch.autograd.DeviceType.CPU]
        rows = sorted(on_device, key=lambda one: -one.self_device_time_total)
        result[f"{width} rows"] = {
            "total_us": sum(one.self_device_time_total for one in rows),
            "kernels": {one.key[:80]: [one.count, one.self_device_time_total] for one in rows[:12]},
        }
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """A summary, line by line."""
    for name, part in result.items():
        if isinstance(part, dict) and ("failed" in part or "left_out" in part):
            yield f"{name}: {part}"
    speed = result.get("bandwidth", {}).get("bytes_per_second")
    if speed:
        yield f"copy: {speed / 1e12:.2f} TB/s"
    decoded = result.get("decoding", {})
    if decoded.get("floor_ms"):
        yield f"floor of a step {decoded['floor_ms']:.3f} ms; transformers {decoded['transformers_ms_per_token']:.2f} ms"
        for name in ("library_products", "batch_invariant"):
            for by in ("by_batch", "by_width"):
                steps = {key: f"{value:.3f}" for key, value in decoded[name][by].items()}
                yield f"{name} {by}: {steps}"
            yield f"{name}: {decoded['floor_ms'] / decoded[name]['by_batch'][1]:.2f} of the floor's speed at batch 1"
    for name in ("batch_1", "batch_32"):
        if one := result.get("speculation", {}).get(name):
            yield f"speculation {name}: {one['speedup']:.2f} times plain, tau {one['tau']:.2f}"
            for who, parts in one["step_ms"].items():
                yield f"  a step of {who}, ms: { {part: round(ms, 2) for part, ms in parts.items()} }"
    if one := result.get("speculation", {}).get("assisted"):
        own = result["speculation"]["batch_1"]["tokens_per_second"]["own"]
        yield f"over transformers' assisted generation: {own / one['tokens_per_second']:.2f}"
    yield from pieces.table(result, speed)
    yield f"invariance: {result.get('invariance')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--widen", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--toys", action="store_true")
    args = parser.parse_args()
    size = TOYS if args.toys else Size()
    report = Report(args.out, args.minutes)
    report.result["machine"] = {**asdict(this_machine()), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        pair = None if args.widen is None else Widening(args.widen, Path(folder), size)
        report.part("bandwidth", lambda: bandwidth(size), 10)
        speed = report.result["bandwidth"].get("bytes_per_second")
        report.part("decoding", lambda: decoding(size, speed), 100)
        report.part("profile", lambda: profile(size), 40)
        report.part("products", lambda: pieces.products(size.matrices, size.product_rows), 45)
        heads = (size.num_heads, size.num_kv_heads)
        report.part("attention", lambda: pieces.attention(*heads, size.contexts, (1, 5), size.parts), 20)
        if pair is not None:

            def prompts() -> list[str]:
                return code_prompts(size.num_prompts, args.data)

            report.part("speculation", lambda: speculation(*pair.done(), prompts(), size), 80)
            report.part("invariance", lambda: invariance(*pair.done(), prompts(), size), 150)
    print("\n".join(table(report.result)))


if __name__ == "__main__":
    main()
