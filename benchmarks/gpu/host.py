"""The processor time of a step next to a device that takes no time: scheduling, tables, verification, commits.

    TRITON_INTERPRET=1 python -m benchmarks.gpu.host [--steps 200]

While a device waits for the processor, it does nothing. Toy models of 32 and two layers run as on a GPU, except that their passes
compute nothing: each predicts the same token with certainty, so every draft token is accepted. The remaining time is foredraft's own.
Microseconds per step, median and minimum, by number of sequences and draft tokens; one thread. On a CUDA device, launches and copies
add to this.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from foredraft.drafters import build
from foredraft.drafters.context import DrafterContext
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.gpu import Inputs, at_once
from foredraft.model import LanguageModel, Traits
from foredraft.model.device_stack import DeviceStackBody
from foredraft.sampling import SamplingParams

VOCAB_SIZE, CONTEXT, TOKEN = 96, 8192, 7


class Idle(DeviceStackBody):
    """A body whose passes take no time on the device."""

    def _compute(self, inputs: Inputs, vocab_size: int, taps: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        bucket = inputs.bucket
        law = torch.zeros(VOCAB_SIZE).index_fill_(0, torch.tensor([TOKEN]), 1.0)
        if not bucket.depth:
            return ((1000 * law).expand(bucket.num_wanted, -1),)
        self._outputs_of(bucket).ids.fill_(TOKEN)
        return (law.expand(bucket.depth, bucket.num_spans, -1),) if bucket.noise else ()


class Ahead(LanguageModel):
    """A model that runs ahead of the processor, as on a device."""

    runs_ahead = True


def toy(num_layers: int) -> LanguageModel:
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=num_layers,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
    )
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    body = Idle(hf, CONTEXT, at_once, is_batch_invariant=False)
    return Ahead(hf, Traits("toy", VOCAB_SIZE, CONTEXT, 256 * num_layers, row_exact=False), body)


def step_us(target: LanguageModel, draft: LanguageModel, batch: int, gamma: int, temperature: float, steps: int) -> str:
    pool = MemoryPool(1 << 30)
    drafter = build("draft_model", DrafterContext(VOCAB_SIZE, pool, draft))
    engine = Engine(target, drafter, pool, speculative_tokens=gamma)
    params = SamplingParams(temperature=temperature, max_tokens=CONTEXT, ignore_eos=True).resolve({})
    for place in range(batch):
        engine.add([1 + place, 2, 3, 4], params)
    for _ in range(20):
        engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(1e6 * (time.perf_counter() - started))
    return f"{torch.tensor(times).median():.0f} ({min(times):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target, draft = toy(32), toy(2)
    for temperature in (0.0, 0.8):
        for batch in (1, 8, 32):
            plain, drafting = (step_us(target, draft, batch, gamma, temperature, steps) for gamma in (0, 4))
            print(f"temperature {temperature}, {batch} sequences: plain {plain}, with four draft tokens {drafting}")


if __name__ == "__main__":
    main()
