"""What a trained draft model gains: over another one, on a domain that is new to it, and compared with the predicted τ.

    python -m benchmarks.training.trained_drafts drafts [--target DIR] [--draft DIR] [--other DIR] [--repeats 2] [--num-prompts 12]
        [--name embedded]
    python -m benchmarks.training.trained_drafts domain [--budget 7m] [--generations N] [--temperature 0] [--dtype bfloat16]
        [--draft DIR] [--name embedded]
    python -m benchmarks.training.trained_drafts predicted [--draft DIR] [--num-texts 64]
    python -m benchmarks.training.trained_drafts shapes
    python -m benchmarks.training.trained_drafts vocabulary

drafts: tokens per second and τ of two draft models for one target at γ = 4, greedy and at temperature 0.8, on held-out code
and stories. Every prompt runs with both in turn; ratios have a percentile bootstrap interval over prompts.
domain: `foredraft train distill --init` from the draft model on a part of networkx (or on the target's continuations of its
beginnings), and τ on held-out files of networkx before and after.
predicted: the expected τ against the engine's τ under rejection sampling, on the same prompts.
shapes: the drafting time of draft models of other depths and widths (with random weights, which take the same time).
vocabulary: the share of the target's tokens that the most frequent ids of training text cover, and the drafting time of a
draft model whose lm_head has only those.

Each part rewrites its own entry of training.json, and training.md from all entries. The corpora are not part of the repository.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.paths import RESULTS, SHARED
from benchmarks.common.prompts import story_prompts
from foredraft import LLM, SamplingParams
from foredraft.bench.statistics import bootstrap
from foredraft.kernels import DrawSpec
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.train import evaluate
from foredraft.train.corpus import read_file, split_held_out
from foredraft.tune.rounds import Recorder
from foredraft.utils.machine import this_machine

CORPUS = SHARED / "data" / "corpus"
FILES = "# ===== file: "
GAMMA, MAX_TOKENS = 4, 96
TEMPERATURES = (0.0, 0.8)


def held_out_texts() -> dict[str, tuple[str, ...]]:
    return {
        "code": read_file(CORPUS / "heldout_code.txt.gz", separator_line=FILES).documents,
        "stories": read_file(CORPUS / "tinystories_val.txt.gz").documents,
    }


def prompts_of(num: int) -> dict[str, list[str]]:
    """The beginnings of held-out files, cut at the end of a line, and the first words of stories."""
    code = [cut for text in held_out_texts()["code"] if (cut := text[:240].rpartition("\n")[0].rstrip())]
    return {"code": [code[i * len(code) // num] for i in range(num)], "stories": story_prompts(num)}


def drafts(args: argparse.Namespace) -> dict[str, Any]:
    """The draft model's figures compared with the other's."""
    pair = {
        name: LLM(args.target, at, speculative_tokens=GAMMA)
        for name, at in (("ours", args.draft), ("other", args.other))
    }
    plain = pair["ours"].with_drafter("none")
    everyone = {**pair, "plain": plain}
    result: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        for kind, prompts in prompts_of(args.num_prompts).items():
            result[f"{kind}, temperature {temperature:g}"] = compare(everyone, prompts, temperature, args.repeats)
            print(kind, temperature, json.dumps(result[f"{kind}, temperature {temperature:g}"]), flush=True)
    return {"machine": asdict(this_machine()), "target": Path(args.target).name, "of": result}


def compare(everyone: dict[str, LLM], prompts: list[str], temperature: float, repeats: int) -> dict[str, Any]:
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True)
    names = list(everyone)
    for llm in everyone.values():
        llm.generate(prompts[0], params)
    sums = {name: np.zeros((3, len(prompts))) for name in names}  # tokens, seconds, target passes
    for repeat in range(repeats):
        for place, prompt in enumerate(prompts):
            for name in names[(place + repeat) % 3 :] + names[: (place + repeat) % 3]:
                started = time.perf_counter()
                (output,) = everyone[name].generate(prompt, params)
                seconds = time.perf_counter() - started
                stats = output.metrics.stats
                sums[name][:, place] += (stats.num_emitted_tokens, seconds, stats.num_steps)

    def speed(name: str, drawn: Any) -> Any:
        return sums[name][0][drawn].sum(-1) / sums[name][1][drawn].sum(-1)

    def ratio(of: str, to: str) -> dict[str, Any]:
        value = float(speed(of, np.arange(len(prompts))) / speed(to, np.arange(len(prompts))))
        interval = bootstrap(len(prompts), lambda drawn: speed(of, drawn) / speed(to, drawn))
        return {"value": value, "interval": None if interval is None else [interval.low, interval.high]}

    return {
        "speed_over_other": ratio("ours", "other"),
        "speed_over_plain": ratio("ours", "plain"),
        "other_over_plain": ratio("other", "plain"),
        "tau": float(sums["ours"][0].sum() / sums["ours"][2].sum()),
        "other_tau": float(sums["other"][0].sum() / sums["other"][2].sum()),
    }


def domain(args: argparse.Namespace) -> dict[str, Any]:
    """Documents of networkx are assigned to training or to the held-out part by their content."""
    documents = read_file(CORPUS / "networkx.txt.gz", separator_line=FILES).documents
    train, rest = split_held_out(documents, 0.1)
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Path(folder) / f"networkx_{name}.txt.gz" for name in ("train", "held_out")}
        for name, side in (("train", train), ("held_out", rest)):
            sides[name].write_bytes(gzip.compress("<|endoftext|>".join(side).encode()))
        out = Path(args.keep or Path(folder) / "draft")
        command = [
            *(sys.executable, "-m", "foredraft.cli", "train", "distill", "--target", str(args.target)),
            *("--init", str(args.draft), "--data", str(sides["train"])),
            *("--validation", f"networkx={sides['held_out']}", "--budget", args.budget, "--out", str(out)),
            *(part for one in args.temperature for part in ("--temperature", str(one))),
            *("--dtype", args.dtype, "--muon-learning-rate", "0.01", "--learning-rate", "0.001"),
            *(("--generations", str(args.generations), "--only-generations") if args.generations else ()),
            *(("--own-head",) if args.own_head else ()),
        ]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - started
        texts = {"networkx": tuple(rest)}
        return {
            "seconds": seconds,
            "temperatures": args.temperature,
            "own_head": args.own_head,
            "before": taus(args.target, args.draft, texts),
            "after": taus(args.target, out, texts),
        }


def taus(
    target: Path, draft: Path, texts: dict[str, tuple[str, ...]], *, num_texts: int = 24, measures: bool = False
) -> list[dict[str, Any]]:
    llm = LLM(target, draft, dtype="float32", speculative_tokens=GAMMA)
    reports = evaluate(llm, texts, TEMPERATURES, [GAMMA], num_texts=num_texts, max_tokens=MAX_TOKENS, measures=measures)
    return [
        {
            "kind": one.kind,
            "temperature": one.temperature,
            "acceptance_on_text": one.on_text.mean,
            "tau": one.expected[GAMMA].tau,
            "by_position": one.expected[GAMMA].by_position,
            "measured": one.measured.get(GAMMA),
        }
        for one in reports
    ]


def predicted(args: argparse.Namespace) -> dict[str, Any]:
    of = taus(args.target, args.draft, held_out_texts(), num_texts=args.num_texts, measures=True)
    return {"num_texts": args.num_texts, "of": of}


def shapes(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a round at γ = 4, medians: drafting, and the rest of the round."""
    variants: dict[str, dict[str, Any]] = {
        "1 layer, hidden 256, MLP 704": {},
        "the same with a head of its own": {"tie_word_embeddings": False},
        "1 layer, MLP 2,048": {"intermediate_size": 2048},
        "1 layer, hidden 384, MLP 1,024": {
            "hidden_size": 384,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "intermediate_size": 1024,
        },
        "2 layers, MLP 352": {"num_hidden_layers": 2, "intermediate_size": 352},
        "2 layers, MLP 704": {"num_hidden_layers": 2},
    }
    plain = LLM(args.target, method="none")
    result = {
        name: round_of(args.target, {"tie_word_embeddings": True, "num_hidden_layers": 1, **own})
        for name, own in variants.items()
    }
    recorder = Recorder()
    plain.engine.observers.append(recorder)
    plain.generate(["def area(width, height):"], SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
    step = float(np.median([one.seconds for one in recorder.rounds]))
    return {"machine": asdict(this_machine()), "plain_step": 1000 * step, "of": result}


def round_of(target: Path, fields: dict[str, Any]) -> dict[str, float]:
    config = AutoConfig.from_pretrained(SHARED / "models" / "draft")
    config.update(fields)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(target).save_pretrained(folder)
        llm = LLM(target, folder, speculative_tokens=GAMMA)
    recorder = Recorder()
    llm.engine.observers.append(recorder)
    for _ in range(2):
        recorder.take()
        llm.generate(["def area(width, height):"], SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
    full = [one for one in recorder.rounds if one.depth == GAMMA]
    return {
        "draft": 1000 * float(np.median([one.draft_seconds for one in full])),
        "verify": 1000 * float(np.median([one.seconds - one.draft_seconds for one in full])),
    }


def vocabulary(args: argparse.Namespace) -> dict[str, Any]:
    """By number of ids: the share of the target's tokens that are among them, and milliseconds of a draft."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    files = [CORPUS / f"{name}.txt.gz" for name in ("thealgorithms", "tinystories_train")]
    frequent = np.zeros(len(tokenizer), dtype=np.int64)
    for file in files:
        read = tokenizer([gzip.decompress(file.read_bytes()).decode()[:4_000_000]]).input_ids[0]
        frequent += np.bincount(read, minlength=len(tokenizer))
    order = np.argsort(-frequent)
    sizes = [len(tokenizer) >> shift for shift in range(3)] + [3 * len(tokenizer) // 4]
    llm = LLM(args.target, method="none")
    covered: dict[str, dict[int, float]] = {}
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True, seed=0)
        for kind, prompts in prompts_of(64).items():
            written = np.concatenate([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            shares = {size: float(np.isin(written, order[:size]).mean()) for size in sorted(sizes, reverse=True)}
            covered[f"{kind}, temperature {temperature:g}"] = shares
    drafts = {size: with_head_of(args.target, size) for size in sorted(sizes, reverse=True)}
    return {"machine": asdict(this_machine()), "covered": covered, "draft_ms": in_turns(drafts)}


def with_head_of(target: Path, size: int) -> LanguageModel:
    """A draft model of the embedded one's shape with a vocabulary of the first `size` ids, which takes as long as any of that size."""
    config = AutoConfig.from_pretrained(EMBEDDED / "draft")
    config.update({"vocab_size": size})
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        return load_model(folder, LoadOptions())


def in_turns(drafts: dict[int, LanguageModel], repeats: int = 400) -> dict[str, dict[int, float]]:
    """Milliseconds to draft four tokens after two, by sampling setting: medians, with the models in turn."""
    result = {}
    for name, spec in (("greedy", DrawSpec()), ("temperature 0.8", DrawSpec(0.8, uniforms=[0.3, 0.5, 0.7, 0.1]))):
        times: dict[int, list[float]] = {size: [] for size in drafts}
        for _ in range(repeats):
            for size, model in drafts.items():
                cache = model.scratch_cache([64])
                started = time.perf_counter()
                model.generate([Read(0, [1, 2], 1)], [GAMMA], size, cache, [spec])
                times[size].append(1000 * (time.perf_counter() - started))
        result[name] = {size: float(np.median(own)) for size, own in times.items()}
    return result


def lines_of(everything: dict[str, Any]) -> list[str]:
    lines = ["# Training: what the embedded draft model gains", ""]
    for name, result in everything.items():
        lines += [f"## {name}", ""]
        if name.startswith("drafts"):
            lines += [
                "| text | tokens/s over the other draft | τ | τ of the other | over plain | the other over plain |",
                "|---|---|---|---|---|---|",
            ]
            for kind, one in result["of"].items():
                cells = shown(one["speed_over_other"]), f"{one['tau']:.2f}", f"{one['other_tau']:.2f}"
                lines.append(
                    f"| {kind} | {' | '.join((*cells, shown(one['speed_over_plain']), shown(one['other_over_plain'])))} |"
                )
        elif name == "shapes":
            lines += [
                f"A plain step takes {result['plain_step']:.1f} ms.",
                "",
                "| draft | drafting, ms | the rest of the round, ms |",
                "|---|---|---|",
            ]
            lines += [f"| {shape} | {one['draft']:.1f} | {one['verify']:.1f} |" for shape, one in result["of"].items()]
        elif name == "vocabulary":
            sizes = list(next(iter(result["covered"].values())))
            lines += [f"| | {' | '.join(f'{int(size):,} ids' for size in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
            for kind, shares in result["covered"].items():
                lines.append(f"| {kind}: covered | {' | '.join(f'{shares[size]:.1%}' for size in sizes)} |")
            for kind, times in result["draft_ms"].items():
                lines.append(f"| {kind}: a draft, ms | {' | '.join(f'{times[size]:.3f}' for size in sizes)} |")
        elif name.startswith("domain"):
            lines += [
                f"Trained for {result['seconds']:.0f} s, loading included{trained_for(result)}.",
                "",
                "| temperature | τ before | τ after | |",
                "|---|---|---|---|",
            ]
            for before, after in zip(result["before"], result["after"], strict=True):
                change = after["tau"] / before["tau"] - 1
                lines.append(
                    f"| {before['temperature']:g} | {before['tau']:.3f} | {after['tau']:.3f} | {change:+.1%} |"
                )
        else:
            lines += [f"{result['num_texts']} texts of {MAX_TOKENS} tokens of each kind.", ""]
            lines += ["| text | temperature | τ predicted | τ measured | off by |", "|---|---|---|---|---|"]
            for one in result["of"]:
                off = one["tau"] / one["measured"] - 1
                lines.append(
                    f"| {one['kind']} | {one['temperature']:g} | {one['tau']:.3f} | {one['measured']:.3f} | {off:+.1%} |"
                )
        lines.append("")
    return lines


def trained_for(result: dict[str, Any]) -> str:
    temperatures = result.get("temperatures", list(TEMPERATURES))
    head = ", with a head of its own" if result.get("own_head") else ""
    return f", for temperature {' and '.join(f'{one:g}' for one in temperatures)}{head}"


def shown(ratio: dict[str, Any]) -> str:
    inner = ratio["interval"]
    return f"{ratio['value']:.2f}" + (f" ({inner[0]:.2f} to {inner[1]:.2f})" if inner else "")


OF_A_DRAFT = ("drafts", "domain", "predicted")
PARTS = {"drafts": drafts, "domain": domain, "predicted": predicted, "shapes": shapes, "vocabulary": vocabulary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--draft", type=Path, default=EMBEDDED / "draft")
    parser.add_argument("--other", type=Path, default=SHARED / "models" / "draft")
    parser.add_argument("--name", default="embedded")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--budget", default="7m")
    parser.add_argument(
        "--generations", type=int, default=0, help="domain: train on this many texts written by the target instead"
    )
    parser.add_argument(
        "--temperature", type=float, action="append", help="domain: temperature to train for; repeatable"
    )
    parser.add_argument("--own-head", action="store_true", help="domain: see `foredraft train distill`")
    parser.add_argument("--dtype", default="float32", help="domain: bfloat16 if the processor has bfloat16 products")
    parser.add_argument("--num-texts", type=int, default=64, help="predicted: texts of each kind")
    parser.add_argument("--keep", help="domain: folder in which to keep the draft model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.temperature = args.temperature or list(TEMPERATURES)
    result = json.loads(json.dumps(PARTS[args.part](args)))  # as it will be after reading it back
    file = args.out / "training.json"
    everything = json.loads(file.read_text()) if file.exists() else {}
    everything[f"{args.part}, {args.name}" if args.part in OF_A_DRAFT else args.part] = result
    file.write_text(json.dumps(everything, indent=1) + "\n")
    (args.out / "training.md").write_text("\n".join(lines_of(everything)))
    print("\n".join(lines_of(everything)))


if __name__ == "__main__":
    main()
