"""foredraft's proposer in vLLM's CPU build, beside vLLM's own n-gram and no drafts: are texts the same, and what does it bring?

    python -m benchmarks.peers.vllm_plugin [--texts 100] [--rounds 5] [--max-tokens 64] [--name NAME]

Needs the environment that `python -m benchmarks.peers.compare --setup vllm` makes. The embedded target in float32, in which vLLM's rows
do not depend on their batch by much; greedy texts behind code and beginnings of stories, eight at once. In a first round requests are
cancelled beside them; its texts are compared and not timed (tests/integrations/vllm/test_in_vllm.py has preemption). In each further
round the systems take turns. Over n-gram: ratios of tokens a second, paired by round. τ: 1 + accepted tokens a draft, beside
that of foredraft's own engine with the same drafter and number of tokens. A call of the proposer: with eight texts, median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import foredraft
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.reports import save
from benchmarks.peers.workers.setup import missing, python_of
from foredraft import LLM, SamplingParams
from foredraft.model import EMBEDDED, LoadOptions, load_tokenizer
from foredraft.utils.machine import this_machine

GAMMA = 4
PROMPT_TOKENS = 48


def plugin(tokens: int | str, **options: Any) -> dict[str, Any]:
    speculative = {"method": "custom_class", "model": "foredraft.integrations.vllm.Proposer"}
    return {
        "speculative_config": {**speculative, "num_speculative_tokens": 8 if tokens == "auto" else tokens},
        "additional_config": {"foredraft": {"speculative_tokens": tokens, **options}},
    }


NGRAM = {"method": "ngram", "num_speculative_tokens": GAMMA, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SYSTEMS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "vLLM's ngram": {"speculative_config": NGRAM},
    "plug-in, suffix": plugin(GAMMA, method="suffix"),
    "plug-in, suffix, auto": plugin("auto", method="suffix"),
    "plug-in, suffix + ngram, auto": plugin("auto", method=["suffix", "ngram"]),
}


class Engine:
    """A process of vLLM's."""

    def __init__(self, options: dict[str, Any]) -> None:
        variables = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{Path(foredraft.__file__).parents[1]}:{ROOT}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [str(python_of("vllm")), "-m", "benchmarks.peers.workers.vllm_plugin_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT
        )
        self.ask({"model": str(EMBEDDED / "target"), "options": options})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        self._process.communicate()


def prompts_of(count: int) -> list[list[int]]:
    """Beginnings of stories and of this project's own modules, in turn."""
    tokenizer = load_tokenizer(EMBEDDED / "target", LoadOptions())
    names = ("girl", "boy", "dog", "cat", "bird", "fish", "tree", "star", "bear", "frog")
    places = ("in the park", "by the sea", "at home", "in a big forest", "on a farm")
    stories = [f"Once upon a time there was a little {name} {place}." for place in places for name in names]
    modules = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))]
    code = [text for text in modules if len(text) > 1000][: len(stories)]
    texts = [text for pair in zip(stories, code, strict=True) for text in pair][:count]
    return [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]


def own_tau(prompts: list[list[int]], max_tokens: int) -> float:
    """Of foredraft's own engine with suffix."""
    llm = LLM(EMBEDDED / "target", method="suffix", speculative_tokens=GAMMA, dtype="float32", max_num_seqs=8)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    stats = [output.metrics.speculative_decoding for output in outputs]
    steps = sum(each.num_spec_steps for each in stats)
    return 1 + sum(each.num_accepted_draft_tokens for each in stats) / steps


def run_rounds(prompts: list[list[int]], max_tokens: int, num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The answers of each system: one with cancelled requests beside the texts, and one for each round."""
    engines = {name: Engine(options) for name, options in SYSTEMS.items()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for number in range(num_rounds + 1):
        cancelled = [] if number else prompts[:10]
        for name, engine in engines.items():
            rounds[name].append(engine.ask({"prompts": prompts, "cancelled": cancelled, "max_tokens": max_tokens}))
    for engine in engines.values():
        engine.stop()
    return rounds


def rows_of(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    expected, ngram = rounds["no drafts"][0]["texts"], rounds["vLLM's ngram"][1:]
    rows = []
    for name, (checked, *answers) in rounds.items():
        calls = [answer["call_ms"] for answer in answers if answer["call_ms"] is not None]
        drafts = sum(answer["drafts"] for answer in answers)
        num_tokens = sum(map(len, expected))
        rows.append(
            {
                "system": name,
                "tokens_per_second": statistics.median(num_tokens / answer["seconds"] for answer in answers),
                "over_ngram": statistics.median(
                    theirs["seconds"] / answer["seconds"] for theirs, answer in zip(ngram, answers, strict=True)
                ),
                "tau": 1 + sum(answer["accepted"] for answer in answers) / drafts if drafts else None,
                "call_ms": statistics.median(calls) if calls else None,
                "same": num_same(answers[0]["texts"], expected),
                "same_beside_cancelled": num_same(checked["texts"], expected),
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
