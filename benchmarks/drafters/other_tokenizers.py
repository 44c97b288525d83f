"""What a draft model with another tokenizer gains, and what its translation costs.

    python -m benchmarks.drafters.other_tokenizers [--target MODEL] --draft MODEL [--method slem tli] [--gamma 4 8]
        [--prompts stories|code] [--count 8] [--max-tokens 64] [--temperature 0] [--quantization int8] [--step-ms 12.4]

For each method and γ: τ; tokens per second, also over plain decoding's (systems alternate prompt by prompt, batch 1; medians); how many
texts are the same as plain decoding's (greedy or with a seed); the time per step spent on translation, and its share of a plain step of
this target, or of --step-ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.prompts import code_prompts, story_prompts
from foredraft import LLM, SamplingParams
from foredraft.text.outputs import RequestOutput
from foredraft.vocabulary import TranslatedHistory

PROMPTS: dict[str, Callable[[int], list[str]]] = {"stories": story_prompts, "code": code_prompts}


class Stopwatch:
    """Adds up the seconds spent on translating histories and drafts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("follow", "to_target"):
            setattr(TranslatedHistory, name, self._timed(getattr(TranslatedHistory, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: object) -> object:
            start = time.perf_counter()
            try:
                return original(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


@dataclass
class System:
    """A method at one γ. gamma: 0 for plain decoding."""

    name: str
    llm: LLM
    gamma: int
    texts: list[list[int]] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    translating_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int = 0

    def write(self, prompt: str, params: dict[str, Any], watch: Stopwatch) -> None:
        before, watch.seconds = time.perf_counter(), 0.0
        (output,) = self.llm.generate([prompt], SamplingParams(speculative_tokens=self.gamma, **params))
        seconds = time.perf_counter() - before
        self._record(output, seconds, watch.seconds)

    def _record(self, output: RequestOutput, seconds: float, translating: float) -> None:
        ids, metrics = output.outputs[0].token_ids, output.metrics.speculative_decoding
        num_steps = max(1, metrics.num_steps)
        self.texts.append(list(ids))
        self.speed.append(len(ids) / seconds)
        self.step_ms.append(1e3 * seconds / num_steps)
        self.translating_ms.append(1e3 * translating / num_steps)
        self.num_tokens += metrics.num_spec_steps + metrics.num_accepted_draft_tokens
        self.num_passes += metrics.num_spec_steps


def systems_for(args: argparse.Namespace) -> list[System]:
    options: dict[str, Any] = {"quantization": args.quantization, "num_threads": args.threads}
    systems: list[System] = []
    for method in args.method:
        llm = LLM(args.target, args.draft, method="draft_model", heterogeneous_vocab=method, **options)
        if llm.vocabularies is not None and not systems:
            print(llm.vocabularies)
        if not systems:
            systems.append(System("plain", llm, 0))
        systems += [System(f"{method} γ={gamma}", llm, gamma) for gamma in args.gamma]
    return systems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=None)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--method", nargs="+", default=["slem"])
    parser.add_argument("--gamma", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--prompts", choices=PROMPTS, default="stories")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--step-ms", type=float, default=None)
    args = parser.parse_args()
    params: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature, "ignore_eos": True}
    if args.temperature > 0:
        params["seed"] = 1
    systems, watch = systems_for(args), Stopwatch()
    for system in systems:
        system.llm.generate(["Once"], SamplingParams(max_tokens=8, temperature=0.0, speculative_tokens=system.gamma))
    for prompt in PROMPTS[args.prompts](args.count):
        for system in systems:
            system.write(prompt, params, watch)
    report(systems, args.step_ms)


def report(systems: list[System], step_ms: float | None) -> None:
    plain = systems[0]
    base = step_ms or statistics.median(plain.step_ms)
    print("| method | τ | tokens/s | gain | same texts | translation, ms per step | share of a plain step |")
    print("|---|---|---|---|---|---|---|")
    for system in systems:
        tau = system.num_tokens / system.num_passes if system.num_passes else 1.0
        gain = statistics.median(ours / own for ours, own in zip(system.speed, plain.speed, strict=True))
        same = sum(ours == own for ours, own in zip(system.texts, plain.texts, strict=True))
        translating = statistics.median(system.translating_ms)
        print(
            f"| {system.name} | {tau:.2f} | {statistics.median(system.speed):.1f} | {gain:.2f} | {same} of {len(plain.texts)} "
            f"| {translating:.3f} | {100 * translating / base:.1f} % of {base:.1f} ms |"
        )


if __name__ == "__main__":
    main()
