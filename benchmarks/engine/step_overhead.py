"""What a step costs outside the models' forward passes, and whether texts are the same as plain decoding's.

    python -m benchmarks.engine.step_overhead [--target DIR] [--draft DIR] [--quantization int8] [--batch 1 8] [--gamma 2]
        [--methods none draft_model ...] [--shapes JSON ...] [--repetition-penalty 1.1] [--temperature 0.8]

For every drafter, and for every tree shape of drafters that take --draft: milliseconds per step, the share spent outside
the passes of models and heads, that share in milliseconds, and tokens per second over plain decoding's, on code prompts,
greedy, or without a seed at --temperature. Greedy texts are compared with plain decoding's. Systems alternate prompt by prompt; figures
are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.common.prompts import code_prompts
from foredraft import LLM, SamplingParams
from foredraft.engine.methods import DRAFT_METHODS
from foredraft.model import EMBEDDED


class Stopwatch:
    """Adds up the seconds spent in the passes of models and heads."""

    def __init__(self, models: list[object]) -> None:
        self.seconds = 0.0
        for model in models:
            for name in ("read", "generate", "fuse", "inject", "states", "logits_of"):  # the last three are of heads
                if hasattr(model, name):
                    self._watch(model, name)

    def _watch(self, model: object, name: str) -> None:
        original = getattr(model, name)

        def timed(*args: object) -> object:
            start = time.perf_counter()
            try:
                return original(*args)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(model, name, timed)


@dataclass
class System:
    name: str
    llm: LLM
    gamma: int | None
    watch: Stopwatch = field(init=False)
    num_steps: int = 0
    step_ms: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        models = [each for each in (self.llm.target, self.llm.draft) if each is not None]
        self.watch = Stopwatch([*models, *self.parts_of_head])

    @property
    def parts_of_head(self) -> list[object]:
        head = self.llm._builder.models.head
        return [each for each in (head, getattr(head, "model", None)) if each is not None]  # an early exit has a model

    def measure(self, prompts: list[str], params: SamplingParams) -> list[list[int]]:
        params = replace(params, speculative_tokens=self.gamma)
        for prompt in self.llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0)):
            assert prompt.finished  # warm up, and allocate the pages of the prompts
        requests = [self.llm.frontend.prepare(prompt, params) for prompt in prompts]
        for request in requests:
            self.llm.frontend.start(request)
        before, inside, start = self.num_steps, self.watch.seconds, time.perf_counter()
        while self.llm.engine.has_work:
            self.llm.engine.step()
            self.num_steps += 1
        took, inside = time.perf_counter() - start, self.watch.seconds - inside
        self.step_ms.append(1e3 * took / (self.num_steps - before))
        self.outside.append(1 - inside / took)
        texts = [request.output().outputs[0].token_ids for request in requests]
        self.speed.append(sum(map(len, texts)) / took)
        return texts


def systems(args: argparse.Namespace) -> list[System]:
    result = []
    for method in args.methods:
        draft = args.draft if method in DRAFT_METHODS else None
        llm = LLM(
            args.target,
            draft,
            method=method,
            quantization=args.quantization,
            dtype="bfloat16",
            enable_prefix_caching=False,
        )
        result.append(System(method, llm, 0 if method == "none" else args.gamma))
        if draft is not None:
            trees = {json.dumps(shape): llm.with_drafter(speculative_token_tree=shape) for shape in args.shapes}
            result += [System(f"{method}, {shape}", tree, None) for shape, tree in trees.items()]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--draft", type=Path, default=EMBEDDED / "draft")
    parser.add_argument("--methods", nargs="+", default=["none", "draft_model", "ngram", "suffix", "self-int8"])
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--shapes", nargs="*", type=json.loads, default=[])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        ignore_eos=True,
        repetition_penalty=args.repetition_penalty,
    )
    compared = systems(args)
    print(f"quantization {args.quantization}, γ = {args.gamma}, {args.max_tokens} tokens\n")
    print(
        "| batch | drafter | step, ms | outside passes | in ms | tokens/s | over plain | identical |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for batch in args.batch:
        prompts = code_prompts(batch * args.rounds)
        same = {system.name: 0 for system in compared}
        for system in compared:
            system.step_ms, system.outside, system.speed = [], [], []
        for r in range(args.rounds):
            some = prompts[r * batch : (r + 1) * batch]
            texts = {system.name: system.measure(some, params) for system in compared}
            for name, text in texts.items():
                same[name] += text == texts[compared[0].name]
        plain = compared[0].speed
        for system in compared:
            over = statistics.median(a / b for a, b in zip(system.speed, plain, strict=True))
            step, outside = statistics.median(system.step_ms), statistics.median(system.outside)
            print(
                f"| {batch} | {system.name} | {step:.2f} | {100 * outside:.1f} % | {step * outside:.2f} | {statistics.median(system.speed):.0f} "
                f"| {over:.2f} | {'' if args.temperature else f'{same[system.name]} of {args.rounds}'} |"
            )


if __name__ == "__main__":
    main()
