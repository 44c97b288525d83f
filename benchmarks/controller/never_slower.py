"""What does "auto" cost where drafting does not pay, and how close does it come to the best fixed setting where it does?

    python -m benchmarks.controller.never_slower overhead [--model DIR] [--batches 1 4 16] [--budget 60]
    python -m benchmarks.controller.never_slower sweep [--model DIR] [--prompts 12] [--budget 300]
    python -m benchmarks.controller.never_slower switch [--model DIR] [--prompts 12]

overhead: plain decoding compared with "auto" with drafters that gain nothing: random tokens, a draft model with a shuffled
embedding, n-gram lookup on high-temperature text. The time in which the draft model reads tokens that it has missed counts.
sweep: code prompts and stories alternately, in one process, with every drafter at every fixed number of tokens and with "auto".
Also the rounds of a request before "auto" first uses the drafter that it uses most in the second half of that request.
switch: at a known position in a text, a correct drafter becomes wrong, a wrong one correct, or both at once: the rounds before
"auto" follows. The drafters take as long as the draft model.
All in one run, interleaved; end of sequence is ignored. Ratios are of total time, paired by prompt, with bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.prompts import code_prompts, story_prompts
from benchmarks.controller.switching_drafters import CorrectFirst, CorrectLast, SwitchingDrafter
from benchmarks.controller.zero_acceptance_drafters import RandomDrafter, shuffled_draft
from foredraft import LLM, SamplingParams
from foredraft.bench import Configuration, Workload, run_bench
from foredraft.bench.workload import Question
from foredraft.engine.draft_sources import DraftSources
from foredraft.engine.proposal import Drafter
from foredraft.engine.scheduler import Limits
from foredraft.engine.step import Step
from foredraft.model import EMBEDDED
from foredraft.utils.machine import this_machine

GROUPS = 12
"""The fewest groups of prompts that run together. Intervals are computed over groups."""


class BudgetRecorder:
    """An observer that records the drafter used for each sequence, round by round."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, list[tuple[str, int]]] = {}
        """By seq_id, for each round: the drafter that was used, and the length of the text before it."""

    def observe(self, step: Step) -> None:
        for item, num_kept in zip(step.scoring, step.num_kept, strict=True):
            name = item.drafter if item.max_draft else "plain"
            length = len(item.sequence.tokens) - num_kept
            self.by_sequence.setdefault(item.sequence.seq_id, []).append((name, length))

    def rounds_to_settle(self) -> list[int]:
        """For each sequence, the rounds before the first use of the drafter that its second half uses most."""
        counts = []
        for rounds in self.by_sequence.values():
            names = [name for name, _ in rounds]
            usual = Counter(names[len(names) // 2 :]).most_common(1)[0][0]
            counts.append(names.index(usual))
        return counts

    def rounds_to_follow(self, expected: str, switch: int) -> int:
        """For the last sequence: the rounds after the switch before most use the expected drafter; all of them if they never do."""
        names = [name for name, length in list(self.by_sequence.values())[-1] if length >= switch]
        uses = [i for i, name in enumerate(names) if name == expected]
        return next((i for i in uses if names[i : i + WINDOW].count(expected) >= MIN_COUNT), len(names))


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        draft = shuffled_draft(EMBEDDED / "draft", Path(folder) / "draft")
        llm = LLM(args.model, draft, dtype="bfloat16", quantization=args.quantization)
        drafters: dict[str, tuple[Any, float]] = {
            "random tokens": (RandomDrafter(llm.target.traits.vocab_size), 0.0),
            "shuffled draft model": ("draft_model", 0.0),
            "ngram, temperature 1.5": ("ngram", 1.5),
        }
        for batch_size in args.batches:
            for name, (method, temperature) in drafters.items():
                params = SamplingParams(
                    max_tokens=args.max_tokens,
                    temperature=temperature,
                    ignore_eos=True,
                    seed=1 if temperature else None,
                )
                auto = Configuration(method, "auto", batch_size)
                result = run_bench(
                    llm,
                    [Configuration.plain(batch_size), auto],
                    Workload.of(code_prompts(max(args.prompts, GROUPS * batch_size))),
                    params,
                    budget=args.budget,
                )
                compared, stats = result.compare(result.names[1]), result.figures(result.names[1]).stats
                rows.append(
                    {
                        "drafter": name,
                        "batch_size": batch_size,
                        "speedup": asdict(compared.speedup),
                        "median_speedup": asdict(compared.median_speedup),
                        "drafted_per_step": stats.num_draft_tokens / stats.num_steps,
                    }
                )
                print(_overhead_row(rows[-1]), flush=True)
    return {"rows": rows}


def _overhead_row(row: dict[str, Any]) -> str:
    return (
        f"| {row['drafter']} | {row['batch_size']} | {_ratio(row['speedup'])} | {_ratio(row['median_speedup'])} "
        f"| {row['drafted_per_step']:.3f} |"
    )


def _ratio(results: dict[str, Any]) -> str:
    inside = results["interval"]
    return f"{results['value']:.3f}" + ("" if inside is None else f" ({inside['low']:.3f} to {inside['high']:.3f})")


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(args.model, EMBEDDED / "draft", dtype="bfloat16", quantization=args.quantization)
    texts = zip(code_prompts(args.prompts), story_prompts(args.prompts), strict=True)
    questions = [
        Question(f"{kind}{number}", kind, (text,))
        for number, pair in enumerate(texts)
        for kind, text in zip(("code", "stories"), pair, strict=True)
    ]
    fixed = [Configuration(method, gamma) for method in args.methods for gamma in args.gammas]
    autos = [Configuration("+".join(args.methods), "auto"), *(Configuration(method, "auto") for method in args.methods)]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=True)
    result = run_bench(
        llm, [Configuration.plain(), *autos, *fixed], Workload("in turn", tuple(questions)), params, budget=args.budget
    )
    names = [configuration.name for configuration in fixed]
    results: dict[str, Any] = {"speedups": {}, "auto_over_best": {}}
    for part in ("code", "stories", None):
        speedups = {name: result.compare(name, part).speedup.value for name in result.names[1:]}
        best = max(names, key=lambda name: speedups[name])
        results["speedups"][part or "both in turn"] = speedups
        results["auto_over_best"][part or "both in turn"] = {
            "best_fixed": best,
            **{auto.name: asdict(result.compare(auto.name, part, baseline=best).speedup) for auto in autos},
        }
    results["rounds_to_settle"] = settling(llm, args.methods, questions, params)
    print(sweep_table(results))
    return results


def settling(llm: LLM, methods: Sequence[str], questions: Sequence[Question], params: SamplingParams) -> dict[str, Any]:
    """Generate from the questions once more with every drafter to choose from, and record each round."""
    auto, recorder = llm.with_drafter(list(methods), "auto"), BudgetRecorder()
    for question in questions[:4]:
        auto.generate(question.turns[0], params)
    auto.engine.observers.append(recorder)
    for question in questions:
        auto.generate(question.turns[0], params)
    rounds = recorder.rounds_to_settle()
    return {"median": median(rounds), "most": max(rounds), "requests": len(rounds)}


def sweep_table(results: dict[str, Any]) -> str:
    parts = list(results["speedups"])
    lines = ["| | " + " | ".join(parts) + " |", "|---" * (len(parts) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join(f"{results['speedups'][part][name]:.2f}" for part in parts) + " |"
        for name in results["speedups"][parts[0]]
    ]
    for name in list(results["auto_over_best"][parts[0]])[1:]:
        ratios = (results["auto_over_best"][part] for part in parts)
        lines.append(
            f"| {name} over the best fixed | "
            + " | ".join(f"{_ratio(r[name])}, {r['best_fixed']}" for r in ratios)
            + " |"
        )
    settled = results["rounds_to_settle"]
    lines.append("")
    lines.append(
        f"Rounds before the drafter of a request's second half is used: {settled['median']} in the median, at most "
        f"{settled['most']}, over {settled['requests']} requests."
    )
    return "\n".join(lines)


SWITCHES: dict[str, tuple[list[Callable[[Drafter], SwitchingDrafter]], str]] = {
    "right to wrong": ([CorrectFirst], "plain"),
    "wrong to right": ([CorrectLast], "CorrectLast"),
    "another drafter": ([CorrectFirst, CorrectLast], "CorrectLast"),
}
"""The drafters, and which of them should be used after the switch."""
WINDOW, MIN_COUNT = 8, 6
"""A round with the expected drafter is where "auto" follows, if at least MIN_COUNT of the WINDOW rounds from it on use that drafter."""


def switch(args: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(args.model, EMBEDDED / "draft", dtype="bfloat16", quantization=args.quantization)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    plain = replace(params, speculative_tokens=0)
    texts = []
    for prompt in code_prompts(args.prompts + 1):
        (output,) = llm.generate(prompt, plain)
        texts.append((output.prompt_token_ids, [*output.prompt_token_ids, *output.outputs[0].token_ids]))
    results: dict[str, Any] = {}
    for name, (kinds, expected) in SWITCHES.items():
        sources = DraftSources(llm.target, llm._builder.models.drafts)
        timed = sources.drafters(["draft_model"], Limits(), llm.engine.pool)
        drafters = [kind(timed["draft_model"]) for kind in kinds]
        auto, recorder = llm.with_drafter(drafters, "auto"), BudgetRecorder()
        auto.engine.observers.append(recorder)
        rounds = []
        for prompt_ids, truth in texts:
            position = len(prompt_ids) + args.max_tokens // 2
            for drafter in drafters:
                drafter.expect(truth, position)
            (output,) = auto.generate([prompt_ids], params)
            assert output.outputs[0].token_ids == truth[len(prompt_ids) :], "speculation changed the text"
            rounds.append(recorder.rounds_to_follow(expected, position))
        results[name] = {"first_text": rounds[0], "later_texts": sorted(rounds[1:])}
        print(f"| {name} | {rounds[0]} | {median(rounds[1:])} | {max(rounds[1:])} |", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "sweep", "switch"))
    parser.add_argument("--model")
    parser.add_argument("--quantization")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--methods", nargs="+", default=["suffix", "draft_model"])
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each comparison")
    parser.add_argument("--out", type=Path, help="save the result as JSON")
    args = parser.parse_args()
    results = {"overhead": overhead, "sweep": sweep, "switch": switch}[args.what](args)
    if args.out is not None:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        args.out.write_text(json.dumps({"machine": asdict(this_machine()), "settings": settings, **results}, indent=1))


if __name__ == "__main__":
    main()
