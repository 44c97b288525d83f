"""How long a step of training an EAGLE-3 head takes, by the precision of its products and by what computes its loss.

    python -m benchmarks.training.head_steps --text FILE [--target DIR] [--rounds 5]

FILE: the text to train on, 8 blocks of 512 tokens per step. The settings take turns, one step each; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from foredraft.kernels import Kernels, load_kernels
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.train.corpus import read_file
from foredraft.train.eagle3 import Eagle3Kind
from foredraft.train.losses import DistillationLoss
from foredraft.train.objectives import in_precision, micro_batches
from foredraft.train.optimiser import LearningRates, Optimiser

BATCH_SIZE, CONTEXT, PROGRESS = 8, 512, 0.25


def new_step(target: LanguageModel, dtype: str, kernels: Kernels | None) -> Callable[[Tensor], None]:
    """A function that trains a new head for one step on ids [BATCH_SIZE, CONTEXT + 1]."""
    kind = Eagle3Kind(shares_lm_head=True)
    head = kind.new(target, [], seed=0)
    optimiser = Optimiser(head, "muon", LearningRates(), clip=1.0)
    objective = in_precision(kind.objectives(head, target)(DistillationLoss(temperature=0.8, kernels=kernels)), dtype)

    def step(ids: Tensor) -> None:
        for rows in micro_batches(ids[:, :-1], kind.num_logits(head, target)):
            sums = objective(head, ids[rows, :-1], ids[rows, 1:], PROGRESS)
            (sums.loss / ids[:, 1:].numel()).backward()
        optimiser.clip_gradients()
        optimiser.step(PROGRESS)

    return step


def read_ids(text: Path, target: str, num_steps: int) -> Tensor:
    """[num_steps, BATCH_SIZE, CONTEXT + 1]; a file that is too short is repeated"""
    tokenizer = load_tokenizer(target, LoadOptions())
    wanted = num_steps * BATCH_SIZE * (CONTEXT + 1)
    ids = torch.tensor([token for document in read_file(text).documents for token in tokenizer.encode(document)])
    return ids.repeat(-(-wanted // len(ids)))[:wanted].view(num_steps, BATCH_SIZE, CONTEXT + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--target", default=str(EMBEDDED / "target"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    kernels = load_kernels()
    target = load_model(args.target, LoadOptions(device="cpu"))
    target.take_over()
    steps = {
        (dtype, name): new_step(target, dtype, used)
        for dtype in ("float32", "bfloat16")
        for name, used in (("PyTorch", None), ("compiled kernels", kernels))
    }
    seconds: dict[tuple[str, str], list[float]] = {setting: [] for setting in steps}
    for number, ids in enumerate(read_ids(args.text, args.target, args.rounds + 1)):
        for setting, step in steps.items():
            started = time.perf_counter()
            step(ids)
            if number:  # the first step includes compilation
                seconds[setting].append(time.perf_counter() - started)
    print("| products | loss by | a step, s | tokens/s |\n|---|---|---|---|")
    for (dtype, name), measured in seconds.items():
        median = statistics.median(measured)
        print(f"| {dtype} | {name} | {median:.2f} | {BATCH_SIZE * CONTEXT / median:,.0f} |")


if __name__ == "__main__":
    main()
