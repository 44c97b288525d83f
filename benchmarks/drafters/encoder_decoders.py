"""An encoder-decoder on its task: quality of the texts, tokens per second and τ, with each drafter and without.

    python -m benchmarks.drafters.encoder_decoders --target DIR --test FILE.jsonl [--draft DIR] [--decoder DIR] [--wide WIDTH]
        [--precision bfloat16] [--gamma 4] [--prompts 50] [--max-tokens 96] [--threads 1] [--name translation] [--out benchmarks/results]

recipes/encoder-decoder.sh makes the directories and FILE (its test.jsonl: one record with source and text per line). Batch 1, greedy and
at temperature 1 with a seed. --wide uses copies of the target, and of the decoder over its encoder, that write the same texts and cost
as much as models of this width (benchmarks/common/wide_t5.py). Every system writes every prompt, in an order that rotates. Speed ratios
compare seconds per token, paired by prompt; their intervals are bootstrapped over prompts. BLEU and ROUGE-L compare the texts with those
of the file: greedy, they must be the same to the last digit for all drafters. transformers' generation, plain and assisted, runs on the
same weights in --transformers-dtype: there bfloat16 is slower than float32 on a processor without bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from benchmarks.common.paths import RESULTS
from benchmarks.common.reports import save
from benchmarks.common.text_scores import bleu, rouge_l
from benchmarks.common.wide_t5 import WideSize, widen
from benchmarks.drafters.embedded_pair_speed import interval
from foredraft import LLM, SamplingParams
from foredraft.engine.stats import SpeculationStats
from foredraft.heads.decoder_draft import decoder_to_train, save_decoder
from foredraft.model import LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.utils.machine import this_machine

TEMPERATURES = (0.0, 1.0)
_HEAD_SIZE = 64


@dataclass
class System:
    """write: source ids -> ids of the text, and the speculation statistics."""

    name: str
    write: Callable[[list[int]], tuple[list[int], SpeculationStats]]
    is_ours: bool = True
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def measure(self, source: list[int]) -> None:
        start = time.perf_counter()
        ids, stats = self.write(source)
        self.seconds.append((time.perf_counter() - start) / max(1, len(ids)))
        self.texts.append(ids)
        self.stats += stats


def ours(name: str, llm: LLM, temperature: float, max_tokens: int) -> System:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=7 if temperature else None)

    def write(source: list[int]) -> tuple[list[int], SpeculationStats]:
        (output,) = llm.generate([source], params)
        return list(output.outputs[0].token_ids), output.metrics.stats

    return System(name, write)


def of_transformers(name: str, model: PreTrainedModel, assistant: Any, temperature: float, max_tokens: int) -> System:
    settings: dict[str, Any] = {"do_sample": bool(temperature)}
    if temperature:
        settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    if assistant is not None:
        settings["assistant_model"] = assistant
    num_start = 1

    def write(source: list[int]) -> tuple[list[int], SpeculationStats]:
        ids = torch.tensor([source])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **settings)
        return out[0, num_start:].tolist(), SpeculationStats()

    return System(name, write, is_ours=False)


def wide_size(config: Any, width: int) -> WideSize:
    """Heads and neurons grow with the width, layers half as fast."""
    times = width // config.d_model
    return WideSize(width, width // _HEAD_SIZE, config.d_ff * times, config.num_layers * max(1, times // 2))


def widened_target(name: str, size: WideSize, out: Path) -> str:
    """Save a widened copy of a target in the folder `out`."""
    target: Any = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32)
    wide = widen(target, size)
    wide.generation_config = target.generation_config
    wide.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(name) / file, out)
    return str(out)


def widened_decoder(name: str, target: LanguageModel, size: WideSize, out: Path) -> str:
    """Save a widened copy of a decoder over the target's encoder in the folder `out`. The number of its layers stays the same."""
    decoder: Any = decoder_to_train(name, target)
    wide = widen(decoder, size._replace(num_layers=decoder.config.num_decoder_layers))
    out.mkdir()
    save_decoder(wide, out, name, torch.float32)
    return str(out)


def widened(args: argparse.Namespace, folder: Path) -> tuple[str, str | None]:
    """The target, and the decoder over its encoder, at the requested width. folder: where widened copies are saved."""
    if not args.wide:
        return args.target, args.decoder
    target = load_model(args.target, LoadOptions(device="cpu", dtype="float32"))
    size = wide_size(target.hf.config, args.wide)
    decoder = widened_decoder(args.decoder, target, size, folder / "decoder") if args.decoder else None
    return widened_target(args.target, size, folder / "target"), decoder


@dataclass
class Loaded:
    """llms: by drafter, plain first. models: transformers' target and assistant model, by the name of the system."""

    llms: dict[str, LLM]
    models: dict[str, tuple[Any, Any]]


def load(args: argparse.Namespace, target: str, decoder: str | None) -> Loaded:
    quantization = args.precision if args.precision in ("int8", "int4") else None
    settings: dict[str, Any] = {
        "seed": 0,
        "enable_prefix_caching": False,
        "dtype": "bfloat16" if quantization else args.precision,
        "quantization": quantization,
    }
    drafting = {**settings, "speculative_tokens": args.gamma, "draft_quantization": quantization}
    llms = {"plain": LLM(target, method="none", **settings), "suffix": LLM(target, method="suffix", **drafting)}
    dtype = getattr(torch, args.transformers_dtype)
    loaded: Any = AutoModelForSeq2SeqLM.from_pretrained(target, dtype=dtype).eval()
    models: dict[str, tuple[Any, Any]] = {"transformers": (loaded, None)}
    if decoder:
        llms["decoder over the target's encoder"] = LLM(target, decoder, **drafting)
    if args.draft:
        llms["draft model"] = LLM(target, args.draft, **drafting)
        assistant: Any = AutoModelForSeq2SeqLM.from_pretrained(args.draft, dtype=dtype).eval()
        assistant.generation_config.num_assistant_tokens = args.gamma
        models["transformers, assisted"] = (loaded, assistant)
    return Loaded(llms, models)


def systems_of(loaded: Loaded, temperature: float, max_tokens: int) -> list[System]:
    systems = [ours(name, llm, temperature, max_tokens) for name, llm in loaded.llms.items()]
    return systems + [of_transformers(name, *pair, temperature, max_tokens) for name, pair in loaded.models.items()]


def run(systems: Sequence[System], sources: Sequence[list[int]]) -> None:
    for system in systems:
        system.write(sources[0])
    for index, source in enumerate(sources):
        shift = index % len(systems)
        for system in [*systems[shift:], *systems[:shift]]:
            system.measure(source)


def rows_of(systems: Sequence[System], references: Sequence[str], decode: Callable[[list[int]], str]) -> list[Any]:
    plain = systems[0]
    rows = []
    for system in systems:
        ratios = [a / b for a, b in zip(plain.seconds, system.seconds, strict=True)]
        texts = [decode(ids) for ids in system.texts]
        rows.append(
            {
                "system": system.name,
                "tokens_per_second": 1 / statistics.median(system.seconds),
                "over_plain": statistics.median(ratios),
                "over_plain_interval": interval(ratios),
                "tau": system.stats.mean_acceptance_length,
                "alpha": system.stats.conditional_acceptance,
                "same_texts": sum(a == b for a, b in zip(system.texts, plain.texts, strict=True)),
                "bleu": bleu(texts, references),
                "rouge_l": rouge_l(texts, references),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]], num_prompts: int) -> str:
    lines = [
        "| system | tokens/s | over plain | τ | α | BLEU | ROUGE-L | plain's texts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        low, high = r["over_plain_interval"]
        tau, alpha = ("" if r[key] is None else f"{r[key]:.2f}" for key in ("tau", "alpha"))
        lines.append(
            f"| {r['system']} | {r['tokens_per_second']:.1f} | {r['over_plain']:.2f} ({low:.2f} to {high:.2f}) | {tau} | {alpha} | "
            f"{r['bleu']:.4f} | {r['rouge_l']:.4f} | {r['same_texts']} of {num_prompts} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--draft")
    parser.add_argument("--decoder")
    parser.add_argument("--wide", type=int)
    parser.add_argument("--precision", choices=["float32", "bfloat16", "int8", "int4"], default="bfloat16")
    parser.add_argument("--transformers-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="translation")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    records = [json.loads(line) for line in args.test.read_text(encoding="utf-8").splitlines()][: args.prompts]
    tokenizer = load_tokenizer(args.target, LoadOptions())
    sources = [tokenizer(record["source"])["input_ids"] for record in records]
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": asdict(this_machine()), "wide": args.wide}
    report |= {"precision": args.precision, "transformers' precision": args.transformers_dtype}
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(args, *widened(args, Path(folder)))
    parts = []
    for temperature in TEMPERATURES:
        systems = systems_of(loaded, temperature, args.max_tokens)
        run(systems, sources)
        rows = rows_of(
            systems,
            [record["text"] for record in records],
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        )
        report[f"temperature {temperature:g}"] = rows
        title = f"{'greedy' if not temperature else f'temperature {temperature:g}'}, {len(records)} prompts"
        parts.append(f"**{args.name}, {args.precision}, γ = {args.gamma}, {title}**\n\n{table(rows, len(records))}")
    machine = this_machine()
    parts.append(
        f"{machine.processor}, {machine.cpu_capability}, {machine.num_threads} threads, "
        f"transformers in {args.transformers_dtype}, {report['date']}"
    )
    save(
        report, "\n\n".join(parts) + "\n", args.out, args.name, f"wide-{args.wide}" if args.wide else "", args.precision
    )


if __name__ == "__main__":
    main()
