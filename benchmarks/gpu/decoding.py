"""Plain decoding and verification of a random target of Llama-3.1-8B's shape: times of passes and of whole steps of the engine, against
the floor (bytes of weights over the bandwidth of a copy) and `transformers` generate."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.device import DEVICE, DTYPE, HAS_GPU, median_ms, wait
from benchmarks.gpu.size import Size
from foredraft.drafters import NoDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.gpu import Graphs, at_once
from foredraft.model import LanguageModel, Read
from foredraft.model.device_stack import DeviceStackBody
from foredraft.model.probe import probe
from foredraft.sampling import SamplingParams

_STEPS, _QUEUED = 40, 20
_SLEEP_CYCLES = 20_000_000
"""Of the device: longer than the host takes for a step."""


def bandwidth(size: Size) -> dict[str, float]:
    source = torch.randint(0, 255, (size.copied,), dtype=torch.uint8, device=DEVICE)
    goal = torch.empty_like(source)
    return {"bytes_per_second": 2 * size.copied / (median_ms(lambda: goal.copy_(source)) / 1000)}


def decoding(size: Size) -> dict[str, Any]:
    hf = random_llama(size)
    result: dict[str, Any] = {"bytes": bytes_read(hf), "transformers_ms_per_token": generate_ms(hf, size)}
    del hf
    clear()
    model = ours(size, is_batch_invariant=False)
    result["default"] = {
        "by_batch": {batch: pass_ms(model, chains(batch, 1, size), size) for batch in size.batches},
        "by_width": {width: pass_ms(model, chains(1, width, size), size) for width in size.widths},
        "tree": pass_ms(model, trees(*size.tree, size), size),
        "queued": queued_ms(model, size),
        "engine_by_batch": {batch: engine_ms(model, batch, size) for batch in (size.batches[0], size.batches[-1])},
    }
    result["profile"] = profile(model, size)
    return result


def batch_invariant_decoding(size: Size) -> dict[str, Any]:
    model = ours(size, is_batch_invariant=True)
    return {
        "by_batch": {batch: pass_ms(model, chains(batch, 1, size), size) for batch in size.batches},
        "by_width": {width: pass_ms(model, chains(1, width, size), size) for width in size.widths},
        "tree": pass_ms(model, trees(*size.tree, size), size),
    }


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


def clear() -> None:
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


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
    settings = greedy_settings(num_tokens)
    with torch.inference_mode():
        hf.generate(ids, **settings)
        wait()
        started = time.perf_counter()
        hf.generate(ids, **settings)
        wait()
    return 1000 * (time.perf_counter() - started) / num_tokens


def greedy_settings(num_tokens: int) -> dict[str, Any]:
    """Arguments of `transformers` generate for exactly this many tokens."""
    return {"do_sample": False, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens, "pad_token_id": 0}


def chains(batch: int, width: int, size: Size) -> list[Read]:
    """`width` tokens after each of `batch` sequences."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, size.vocab, (width,), generator=draw).tolist()
    return [Read(i, tokens, width) for i in range(batch)]


def trees(batch: int, num_nodes: int, size: Size) -> list[Read]:
    """A token and a binary tree after it, `num_nodes` in all, after each of `batch` sequences."""
    tokens = [node % size.vocab for node in range(1, num_nodes + 1)]
    parents = [(node - 1) // 2 if node else -1 for node in range(num_nodes)]
    return [Read(i, tokens, num_nodes, parents) for i in range(batch)]


def pass_ms(model: LanguageModel, reads: Sequence[Read], size: Size) -> float:
    """A pass after a prompt in each sequence, from ids and tables to the logits on the device, from an idle device to an idle device."""
    return median_ms(_repeated(model, reads, size))


def queued_ms(model: LanguageModel, size: Size) -> float:
    """A pass of one row on the device alone: it is queued while the device sleeps."""
    step = _repeated(model, chains(1, 1, size), size)
    if not HAS_GPU:
        return median_ms(step)
    times = []
    for _ in range(_QUEUED):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        began.record()
        step()
        ended.record()
        wait()
        times.append(began.elapsed_time(ended))
    return median(times)


def _repeated(model: LanguageModel, reads: Sequence[Read], size: Size) -> Callable[[], None]:
    vocab_size = model.traits.vocab_size
    cache = model.scratch_cache([size.context] * len(reads))
    draw = torch.Generator().manual_seed(0)
    for read in reads:
        prompt = torch.randint(0, vocab_size, (size.prompt,), generator=draw).tolist()
        model.read([Read(read.seq_id, prompt, 0)], cache)

    def step() -> None:
        model.read(reads, cache)
        for read in reads:
            del cache.region(read.seq_id).tokens[size.prompt :]

    return step


def engine_ms(model: LanguageModel, batch: int, size: Size) -> float:
    """A step of the engine that decodes `batch` sequences greedily: scheduling, the pass, the choice of tokens, results on the host."""
    num_steps = min(_STEPS, size.context - size.prompt - 8)
    engine = Engine(model, NoDrafter(), MemoryPool(8 << 30 if HAS_GPU else 1 << 28), speculative_tokens=0)
    params = SamplingParams(temperature=0.0, max_tokens=size.context - size.prompt, ignore_eos=True).resolve({})
    draw = torch.Generator().manual_seed(0)
    for _ in range(batch):
        engine.add(torch.randint(0, size.vocab, (size.prompt,), generator=draw).tolist(), params)
    return median_ms(engine.step, repeats=num_steps)


def profile(model: LanguageModel, size: Size) -> dict[str, Any]:
    """The kernels of passes of one and of eight rows: their number of calls and microseconds, by name."""
    result = {}
    for width in (1, 8):
        step = _repeated(model, chains(1, width, size), size)
        step()
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
            step()
            wait()
        on_device = [one for one in seen.key_averages() if one.device_type != DeviceType.CPU]
        rows = sorted(on_device, key=lambda one: -one.self_device_time_total)
        result[f"{width} rows"] = {
            "total_us": sum(one.self_device_time_total for one in rows),
            "kernels": {one.key[:100]: [one.count, one.self_device_time_total] for one in rows[:14]},
        }
    return result


def table(result: dict[str, Any], bytes_per_second: float | None) -> Iterator[str]:
    """A summary, line by line."""
    decoded = result.get("decoding", {})
    if "bytes" not in decoded:
        return
    theirs = decoded["transformers_ms_per_token"]
    floor = 1000 * decoded["bytes"] / bytes_per_second if bytes_per_second else 0.0
    yield f"floor of a step {floor:.3f} ms; transformers {theirs:.2f} ms per token"
    passes = decoded["default"]
    first, last = passes["engine_by_batch"].values()
    batch = list(passes["engine_by_batch"])[-1]
    yield f"engine: {first:.3f} ms at batch 1, {floor / first:.2f} of the floor's speed, {theirs / first:.1f} times transformers"
    yield f"engine: {last:.3f} ms at batch {batch}, {batch * first / last:.1f} times the speed of batch 1"
    yield f"host: {1 - passes['queued'] / first:.3f} of a step at batch 1 (device alone {passes['queued']:.3f} ms)"
    for name, one in (("default", passes), ("batch-invariant", result.get("batch_invariant_decoding", {}))):
        if "by_batch" not in one:
            continue
        single = one["by_width"][1]
        for by in ("by_batch", "by_width"):
            yield f"{name} {by}: { {key: f'{value:.3f} ({value / single:.2f})' for key, value in one[by].items()} }"
        yield f"{name} trees: {one['tree']:.3f} ({one['tree'] / single:.2f})"
    for rows, seen in decoded["profile"].items():
        yield f"profile, {rows}: {seen['total_us']:.0f} us"
        for name, (count, took) in seen["kernels"].items():
            yield f"  {count:4} x {took / max(1, count):8.2f} us  {name[:70]}"
