"""What the draft of a round costs, by its number of tokens: in turn, in one pass, and beside the bare pass.

    python -m benchmarks.drafters.draft_cost [--draft MODEL] [--quantization int8] [--batch 1 8] [--temperature 0 0.8] [--rounds 200]
        [--threads 1] [--name NAME]

The draft model drafts by "draft_model" and by "pard"; the time is the same whether it has learned to read masks. A round is a call
of the drafter for every sequence, whose text has grown by half a draft and one token, as much as stands where every other token is
accepted. Beside it stands a pass of the model over as many rows as PARD's draft has, which gives as many rows of logits: nothing
is chosen from them. The three take turns, round by round; figures are medians. `over one pass` is the median of PARD's rounds
over that of the passes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.paths import RESULTS
from benchmarks.common.reports import listed, save
from foredraft.drafters import DraftModelDrafter, PardDrafter
from foredraft.engine.cache import MemoryPool
from foredraft.engine.proposal import Drafter, DraftRequest
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.sampling import Sampler, SamplingParams
from foredraft.utils.machine import this_machine

START, MASK = 64, 3
"""Tokens of each text before its first draft; the id that stands for the mask."""


class Texts:
    """Random ones, which grow by the same number of tokens each round."""

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


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(model: LanguageModel, batch: int, temperature: float, gamma: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a round."""
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
        """It leaves the masks behind its text in the cache, as a drafter does."""
        for b, tokens in enumerate(texts.tokens):
            cache.keep_prefix_of(b, tokens, at_most=texts.length - growth)
        masks = [MASK] * (gamma - 1)
        reads = [Read(b, [*tokens[-growth:], *masks], gamma) for b, tokens in enumerate(texts.tokens)]
        model.read(reads, cache)

    for _ in range(rounds):
        for name, drafter in drafters.items():
            requests = texts.requests(gamma)
            found[name].append(seconds_of(lambda drafter=drafter, requests=requests: drafter.propose(requests)))
        found["one pass"].append(seconds_of(one_pass))
        texts.grow()
    medians = {name: 1e3 * statistics.median(times[2:]) for name, times in found.items()}
    return {"batch": batch, "temperature": temperature, "gamma": gamma, "rows": batch * (growth + gamma - 1), **medians}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| batch | temperature | γ | rows | in turn, ms | in one pass, ms | the bare pass, ms | over one pass |",
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
    parser.add_argument("--name", help="keep the result in benchmarks/results/draft-cost-NAME.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.draft, LoadOptions(device="cpu", quantization=args.quantization))
    model.take_over()
    settings = [(batch, heat, gamma) for batch in args.batch for heat in args.temperature for gamma in args.gamma]
    measure(model, *settings[0], 20)  # warm
    rows = [measure(model, *setting, args.rounds) for setting in settings]
    facts = {"draft": args.draft.name, "quantization": args.quantization, "threads": args.threads}
    lines = [
        "# What the draft of a round costs",
        "",
        listed(facts),
        listed(asdict(this_machine())),
        "",
        *table(rows),
        "",
    ]
    if args.name is None:
        print("\n".join(lines))
    else:
        report = {**facts, "machine": asdict(this_machine()), "rows": rows}
        save(report, "\n".join(lines), RESULTS, "draft-cost", args.name)


if __name__ == "__main__":
    main()
