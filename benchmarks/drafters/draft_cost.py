"""What drafting a round costs, by number of tokens: token by token, in one pass, and compared with a bare pass.

    python -m benchmarks.drafters.draft_cost [--draft MODEL] [--quantization int8] [--batch 1 8] [--temperature 0 0.8] [--rounds 200]
        [--threads 1] [--cpu-time] [--name NAME]
    python -m benchmarks.drafters.draft_cost --block-head HEAD [--target MODEL] ..

The draft model drafts with the methods "draft_model" and "pard"; the time is the same whether or not it has learned to read mask
tokens. A round is one call of the drafter for all sequences. Between rounds each text grows by half a draft and one token, as if half
of the draft had been accepted. The bare pass of the model has as many rows as PARD's and computes logits for as many of them, but
chooses no tokens. The three take turns, round by round; figures are medians. `one pass / bare pass` is the median of PARD's rounds
over the median of the bare passes.

With --block-head, a DFlash or DSpark head of the target drafts instead, from made-up hidden states. Its bare pass reads the states of
the new tokens and the whole block of every sequence, and computes the block's logits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.paths import RESULTS
from benchmarks.common.reports import listed, save
from foredraft.drafters import DFlashDrafter, DraftModelDrafter, PardDrafter
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import Drafter, DraftRequest, Features
from foredraft.heads import DFlashHead, attach_head
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.sampling import Sampler, SamplingParams
from foredraft.utils.machine import this_machine

START, MASK = 64, 3
"""Tokens of each text before its first draft; the id used for the mask token."""


class Texts:
    """Random texts, which all grow by the same number of tokens each round."""

    def __init__(self, batch: int, growth: int, vocab_size: int, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=1 << 20).resolve({})
        noise = torch.Generator().manual_seed(0)
        self._ids = [torch.randint(4, vocab_size, (1 << 12,), generator=noise).tolist() for _ in range(batch)]
        self._samplers = [Sampler(params, ids[:1], noise) for ids in self._ids]
        self._growth, self.length = growth, START
        self.tokens = [ids[:START] for ids in self._ids]

    def grow(self) -> None:
        for tokens, ids in zip(self.tokens, self._ids, strict=True):
            tokens += ids[self.length : self.length + self._growth]
        self.length += self._growth

    def requests(self, gamma: int) -> list[DraftRequest]:
        pairs = zip(self.tokens, self._samplers, strict=True)
        return [DraftRequest(b, tokens, gamma, sampler) for b, (tokens, sampler) in enumerate(pairs)]


class Clock:
    """Wall-clock time, or this process's processor time, which shows what one thread costs while others use the processor too."""

    now: Callable[[], float] = time.perf_counter


def seconds_of(call: Callable[[], Any]) -> float:
    start = Clock.now()
    call()
    return Clock.now() - start


def measure(model: LanguageModel, batch: int, temperature: float, gamma: int, rounds: int) -> dict[str, Any]:
    """Medians, in milliseconds per round."""
    growth, size = 1 + gamma // 2, (model.traits.vocab_size, MemoryPool(1 << 31))
    drafters: dict[str, Drafter] = {
        "draft_model": DraftModelDrafter(model, *size),
        "pard": PardDrafter(model, MASK, *size),
    }
    rounds = min(rounds, (min(model.traits.context_len, 1 << 12) - START) // growth - 2)
    texts = Texts(batch, growth, model.traits.vocab_size, temperature)
    cache = model.scratch_cache([START + (rounds + 3) * growth + gamma] * batch)
    model.read([Read(b, tokens[:-growth], 0) for b, tokens in enumerate(texts.tokens)], cache)
    found: dict[str, list[float]] = {name: [] for name in (*drafters, "one pass")}

    def one_pass() -> None:
        """Leaves the masks in the cache after each text, as a drafter does."""
        for b, tokens in enumerate(texts.tokens):
            cache.keep_prefix_of(b, tokens, at_most=texts.length - growth)
        masks = [MASK] * (gamma - 1)
        reads = [Read(b, [*tokens[-growth:], *masks], gamma) for b, tokens in enumerate(texts.tokens)]
        model.read(reads, cache)

    for _ in range(rounds):
        for name, drafter in drafters.items():
            requests = texts.requests(gamma)
            found[name].append(seconds_of(partial(drafter.propose, requests)))
        found["one pass"].append(seconds_of(one_pass))
        texts.grow()
    medians = {name: 1e3 * statistics.median(times[2:]) for name, times in found.items()}
    return {"batch": batch, "temperature": temperature, "gamma": gamma, "rows": batch * (growth + gamma - 1), **medians}


class BlockTexts(Texts):
    """Random texts with made-up hidden states of the target."""

    def __init__(self, head: DFlashHead, *args: Any) -> None:
        super().__init__(*args)
        noise = torch.Generator().manual_seed(1)
        self.states = torch.randn(1 << 12, head.config.feature_size, generator=noise).to(head.dtype)

    def requests(self, gamma: int) -> list[DraftRequest]:
        features = self.states[: self.length - 1]
        return [replace(request, features=Features(features)) for request in super().requests(gamma)]


def measure_block(head: DFlashHead, batch: int, temperature: float, gamma: int, rounds: int) -> dict[str, Any]:
    """Medians, in milliseconds per round."""
    growth, vocab_size = 1 + gamma // 2, head.config.vocab_size
    drafter = DFlashDrafter(head, vocab_size, MemoryPool(1 << 31), 1 << 12)
    rounds = min(rounds, ((1 << 12) - START) // growth - 2)
    texts = BlockTexts(head, batch, growth, vocab_size, temperature)
    cache = KVCache(MemoryPool(1 << 31), head.bytes_per_token, 1 << 12)
    found: dict[str, list[float]] = {"block": [], "one pass": []}

    def one_pass() -> None:
        for b, tokens in enumerate(texts.tokens):
            start = cache.num_held(b)
            cache.reserve(b, texts.length + head.config.block_size)
            head.inject(cache.region(b), tokens[start : texts.length - 1], texts.states[start : texts.length - 1])
        head.read(range(batch), [tokens[-1] for tokens in texts.tokens], cache)

    for _ in range(rounds):
        requests = texts.requests(gamma)
        found["block"].append(seconds_of(partial(drafter.propose, requests)))
        found["one pass"].append(seconds_of(one_pass))
        texts.grow()
    medians = {name: 1e3 * statistics.median(times[2:]) for name, times in found.items()}
    return {
        "batch": batch,
        "temperature": temperature,
        "gamma": gamma,
        "rows": batch * head.config.block_size,
        **medians,
    }


def block_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| batch | temperature | γ | rows of blocks | draft, ms | bare pass, ms | draft / bare pass |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['batch']} | {row['temperature']:g} | {row['gamma']} | {row['rows']} | {row['block']:.3f} "
        f"| {row['one pass']:.3f} | {row['block'] / row['one pass']:.2f} |"
        for row in rows
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| batch | temperature | γ | rows | token by token, ms | in one pass, ms | bare pass, ms | one pass / bare pass |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["pard"] / row["one pass"]
        lines.append(
            f"| {row['batch']} | {row['temperature']:g} | {row['gamma']} | {row['rows']} | {row['draft_model']:.3f} "
            f"| {row['pard']:.3f} | {row['one pass']:.3f} | {ratio:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, default=EMBEDDED / "draft")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 2, 4, 6, 8])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time, for a shared machine")
    parser.add_argument("--name", help="save the result in benchmarks/results/draft-cost-NAME.md")
    parser.add_argument("--block-head", type=Path, help="a DFlash or DSpark head to use instead of a draft model")
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target", help="the target of the head")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.cpu_time:
        Clock.now = staticmethod(time.process_time)
    is_block = args.block_head is not None
    measured: Callable[..., dict[str, Any]] = measure_block if is_block else measure
    model: Any = load_model(
        args.target if is_block else args.draft, LoadOptions(device="cpu", quantization=args.quantization)
    )
    model.take_over()
    drafting = attach_head(str(args.block_head), model) if is_block else model
    settings = [(batch, heat, gamma) for batch in args.batch for heat in args.temperature for gamma in args.gamma]
    measured(drafting, *settings[0], 20)  # warm up
    rows = [measured(drafting, *setting, args.rounds) for setting in settings]
    name = (args.block_head or args.draft).name
    clock = "processor time" if args.cpu_time else "wall"
    facts = {"draft": name, "quantization": args.quantization, "threads": args.threads, "clock": clock}
    lines = [
        "# What drafting a round costs",
        "",
        listed(facts),
        listed(asdict(this_machine())),
        "",
        *(block_table(rows) if is_block else table(rows)),
        "",
    ]
    if args.name is None:
        print("\n".join(lines))
    else:
        report = {**facts, "machine": asdict(this_machine()), "rows": rows}
        save(report, "\n".join(lines), RESULTS, "draft-cost", args.name)


if __name__ == "__main__":
    main()
