"""Sampling and verification over a vocabulary of 151,936, against the floor: the time to read the logits once.

    python -m benchmarks.kernels.large_vocabulary [--vocab 151936] [--rows 8] [--draft-tokens 5] [--out benchmarks/results]

Logits are 2.5 times a standard normal, with 40 random ids per row raised by 14 down to 2, so that top-p 0.9 keeps tens of
ids, as with a language model. Draft tokens are sampled from the draft's distributions. Medians of interleaved runs. The
floor is computed from the bandwidth of a copy of the logits, timed in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.paths import RESULTS
from foredraft import Proposal, SamplingParams
from foredraft.engine.proposal import CERTAIN
from foredraft.sampling import Row, Sampler, choose, pick, token_probs_of
from foredraft.verify import verify

GREEDY = {"temperature": 0.0}
TOP_P = {"temperature": 0.8, "top_p": 0.9}


def samplers(count: int, settings: dict[str, Any], generator: torch.Generator) -> list[Sampler]:
    params = SamplingParams(max_tokens=None, **settings).resolve({})
    return [Sampler(params, [1, 2, 3], generator, child=i) for i in range(count)]


def sampled_proposal(logits: Tensor, who: list[Sampler], num_draft: int, vocab: int) -> Proposal:
    """num_draft tokens per row, sampled from the draft's distributions. logits: [B * K, V], row-major"""
    rows = [Row(sampler, [1, 2, 3]) for sampler in who for _ in range(num_draft)]
    law = token_probs_of(logits, rows)
    ids, _ = pick(law, rows)
    shape = (len(who), num_draft)
    order = torch.arange(len(rows)).reshape(shape)
    return Proposal(ids.reshape(shape), torch.full((len(who),), num_draft), order, law.dense(vocab))


def greedy_proposal(target: Tensor, num_rows: int, num_draft: int) -> Proposal:
    ids = target.reshape(num_rows, num_draft + 1, -1)[:, :num_draft].argmax(-1)
    lens = torch.full((num_rows,), num_draft)
    return Proposal(ids, lens, torch.full_like(ids, CERTAIN))


def cases(args: argparse.Namespace, target: Tensor, draft: Tensor) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    num_rows, num_draft, vocab = args.rows, args.draft_tokens, args.vocab
    history = [[1, 2, 3]] * num_rows
    greedy, top_p = samplers(num_rows, GREEDY, generator), samplers(num_rows, TOP_P, generator)
    seeded = samplers(num_rows, {**TOP_P, "seed": 1}, generator)
    rejection = samplers(num_rows, {**TOP_P, "verification": "rejection"}, generator)
    full = samplers(num_rows, {"temperature": 0.8}, generator)
    certain = greedy_proposal(target, num_rows, num_draft)
    sampled = sampled_proposal(draft, top_p, num_draft, vocab)
    dense = sampled_proposal(draft, full, num_draft, vocab)
    one_row, elsewhere = target[:num_rows], torch.empty_like(target)
    return {
        "copy of the logits (floor: half of it)": lambda: elsewhere.copy_(target),
        "verify greedy": lambda: verify(target, certain, greedy, history),
        "verify top-p 0.9, block": lambda: verify(target, sampled, top_p, history),
        "verify top-p 0.9, rejection": lambda: verify(target, sampled, rejection, history),
        "verify top-p 0.9, certain drafts": lambda: verify(target, certain, top_p, history),
        "verify top-p 0.9, coupled": lambda: verify(target, certain, seeded, history),
        "verify all ids kept, block": lambda: verify(target, dense, full, history),
        "sample one token a row, greedy": lambda: choose(one_row, [Row(s, [1, 2, 3]) for s in greedy]),
        "sample one token a row, top-p 0.9": lambda: choose(one_row, [Row(s, [1, 2, 3]) for s in top_p]),
    }


def measure(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each function; the functions alternate."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for index in range(rounds + 2):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            if index >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(outcome) for name, outcome in times.items()}


def peaked(shape: tuple[int, int]) -> Tensor:
    """Random logits [R, V] in bfloat16 with a few likely ids per row."""
    logits = torch.randn(shape) * 2.5
    head = torch.randint(shape[1], (shape[0], 40))
    return logits.scatter_add_(1, head, torch.linspace(14, 2, 40).expand(shape[0], -1)).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = (args.rows * (args.draft_tokens + 1), args.vocab)
    target = peaked(shape)
    noise = torch.randn(args.rows * args.draft_tokens, args.vocab)
    kept = target.reshape(args.rows, args.draft_tokens + 1, -1)[:, :-1].reshape(noise.shape)
    draft = (kept.float() + noise).to(torch.bfloat16)

    outcome = measure(cases(args, target, draft), args.rounds)
    floor = outcome["copy of the logits (floor: half of it)"] / 2
    megabytes = target.numel() * target.element_size() / 1e6
    lines = [
        f"{args.rows} rows x {args.draft_tokens} draft tokens, V = {args.vocab:,}: {megabytes:.0f} MB of bfloat16 logits, "
        f"{torch.get_num_threads()} threads; reading them once takes {floor:.1f} ms",
        "",
        "| what | ms | over the floor |",
        "|---|---|---|",
        *(f"| {name} | {ms:.1f} | {ms / floor:.1f} |" for name, ms in outcome.items()),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "vocabulary.json").write_text(json.dumps({"milliseconds": outcome, "floor": floor}, indent=1) + "\n")
    (args.out / "vocabulary.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
