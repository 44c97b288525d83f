"""foredraft's proposer in vLLM's CPU build, compared with vLLM's own n-gram and with no drafts: are texts the same, and what does it gain?

    python -m benchmarks.peers.vllm_plugin [--texts 100] [--rounds 5] [--max-tokens 64] [--name NAME]

Needs the environment that `python -m benchmarks.peers.compare --setup vllm` makes. The embedded target runs in float32, in which vLLM's
rows depend little on their batch, and continues code and beginnings of stories greedily, eight texts at once. In a first round other
requests run and are cancelled at the same time; its texts are compared but not timed (tests/integrations/vllm/test_in_vllm.py covers
preemption). In each further round the systems take turns. Over n-gram: ratios of tokens per second, paired by round. τ: 1 + accepted
tokens per draft, also shown for foredraft's own engine with the same drafter and γ. A call: one call of the proposer with eight texts,
median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.reports import save
from benchmarks.peers.workers.client import Worker
from benchmarks.peers.workers.protocol import Job, Settings
from benchmarks.peers.workers.setup import missing
from foredraft import LLM, SamplingParams
from foredraft.engine.stats import SpeculationStats
from foredraft.model import EMBEDDED, LoadOptions, load_tokenizer
from foredraft.utils.machine import this_machine

GAMMA, BATCH, CONTEXT = 4, 8, 256
PROMPT_TOKENS = 48
SYSTEMS = {
    "no drafts": "plain",
    "vLLM's ngram": "ngram",
    "plug-in, suffix": "suffix",
    "plug-in, suffix, auto": "suffix-auto",
    "plug-in, suffix + ngram, auto": "suffix-ngram-auto",
}
"""Name of the system -> mode of the worker."""


def worker_of(mode: str) -> Worker:
    threads = os.cpu_count() or 1
    settings = Settings(EMBEDDED, "float32", threads, BATCH, mode, GAMMA, CONTEXT, cache_gib=1)
    return Worker("vllm_plugin_worker", "vllm", settings)


def prompts_of(count: int) -> list[list[int]]:
    """Beginnings of stories and of this project's own modules, alternately."""
    tokenizer = load_tokenizer(EMBEDDED / "target", LoadOptions())
    names = ("girl", "boy", "dog", "cat", "bird", "fish", "tree", "star", "bear", "frog")
    places = ("in the park", "by the sea", "at home", "in a big forest", "on a farm")
    stories = [f"Once upon a time there was a little {name} {place}." for place in places for name in names]
    modules = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))]
    code = [text for text in modules if len(text) > 1000][: len(stories)]
    texts = [text for pair in zip(stories, code, strict=True) for text in pair][:count]
    return [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]


def own_tau(prompts: list[list[int]], max_tokens: int) -> float:
    """τ of foredraft's own engine with suffix."""
    llm = LLM(EMBEDDED / "target", method="suffix", speculative_tokens=GAMMA, dtype="float32", max_num_seqs=BATCH)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    tau = sum((output.metrics.stats for output in outputs), SpeculationStats()).mean_acceptance_length
    assert tau is not None
    return tau


def run_rounds(prompts: list[list[int]], max_tokens: int, num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The answers of each system: the first beside cancelled requests, then one for each round."""
    workers = {name: worker_of(mode) for name, mode in SYSTEMS.items()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for mode in ("cancelled", *["plain"] * num_rounds):
        for name, worker in workers.items():
            rounds[name].append(worker.ask(Job(prompts, max_tokens, mode)))
    for worker in workers.values():
        worker.close()
    return rounds


def rows_of(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    expected, ngram = rounds["no drafts"][0]["ids"], rounds["vLLM's ngram"][1:]
    rows = []
    for name, (checked, *answers) in rounds.items():
        stats = [answer["stats"] for answer in answers]
        calls = [each["call_ms"] for each in stats if each["call_ms"] is not None]
        drafts = sum(each["spec_steps"] for each in stats)
        num_tokens = sum(map(len, expected))
        rows.append(
            {
                "system": name,
                "tokens_per_second": statistics.median(num_tokens / answer["seconds"] for answer in answers),
                "over_ngram": statistics.median(
                    theirs["seconds"] / answer["seconds"] for theirs, answer in zip(ngram, answers, strict=True)
                ),
                "tau": 1 + sum(each["accepted"] for each in stats) / drafts if drafts else None,
                "call_ms": statistics.median(calls) if calls else None,
                "same": num_same(answers[0]["ids"], expected),
                "same_beside_cancelled": num_same(checked["ids"], expected),
            }
        )
    return rows


def num_same(texts: list[list[int]], expected: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(texts, expected, strict=True))


def table(rows: list[dict[str, Any]], count: int, own: float) -> str:
    lines = [
        "| system | tokens/s | over vLLM's ngram | τ | a call, ms | same texts | beside cancelled requests |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tau, call = ("" if row[key] is None else f"{row[key]:.2f}" for key in ("tau", "call_ms"))
        lines.append(
            f"| {row['system']} | {row['tokens_per_second']:.0f} | {row['over_ngram']:.2f} | {tau} | {call} "
            f"| {row['same']} of {count} | {row['same_beside_cancelled']} of {count} |"
        )
    return "\n".join([*lines, "", f"foredraft's own engine with suffix, γ = {GAMMA}: τ {own:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--name", default="")
    args = parser.parse_args()
    reason = missing("vllm")
    if reason is not None:
        sys.exit(f"vllm is {reason}")
    prompts = prompts_of(args.texts)
    own = own_tau(prompts, args.max_tokens)
    rows = rows_of(run_rounds(prompts, args.max_tokens, args.rounds))
    machine = this_machine()
    report = {"date": time.strftime("%Y-%m-%d"), "machine": str(machine), "own_tau": own, "systems": rows}
    save(
        report, f"{table(rows, len(prompts), own)}\n\n{machine}, {report['date']}\n", RESULTS, "vllm-plugin", args.name
    )


if __name__ == "__main__":
    main()
