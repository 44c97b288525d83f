"""The script that test_tensor_parallel.py runs under torchrun: prints texts of a split target, with and without drafts, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from foredraft import LLM, SamplingParams
from foredraft.model import EMBEDDED

PROMPTS = (
    "def read_lines(path):",
    "Once upon a time there was a",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):\n",
    "def read_lines(path):\n    with open(path) as",
    "for i in range(10):\n",
    "The quick brown fox",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
)
TREE = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]
CHOICES: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "speculative_tokens": 4},
    "draft_model, trees": {"method": "draft_model", "speculative_token_tree": TREE},
    "suffix": {"method": "suffix", "speculative_tokens": 4},
}


def make_llm(**settings: Any) -> LLM:
    return LLM(
        EMBEDDED / "target",
        EMBEDDED / "draft",
        method="none",
        dtype="float32",
        num_threads=1,
        max_num_seqs=8,
        **settings,
    )


class Text(NamedTuple):
    ids: list[int]
    num_near_ties: int


def texts_of(llm: LLM) -> Iterator[Text]:
    """Greedy and seeded texts, one by one and eight at a time."""
    kinds = [SamplingParams(max_tokens=24, temperature=0.0), SamplingParams(max_tokens=24, temperature=0.8, seed=7)]
    for params in kinds:
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS[:2]]
        for output in [*alone, *llm.generate(PROMPTS, params)]:
            yield Text(output.outputs[0].token_ids, output.metrics.stats.num_near_ties)


def weight_bytes(llm: LLM) -> int:
    """The size of this process's share of the weights."""
    shares = (p.to_local() if isinstance(p, DTensor) else p for p in llm.target.hf.parameters())
    return sum(share.numel() * share.element_size() for share in shares)


def measure(llm: LLM) -> dict[str, Any]:
    others = {name: llm.with_drafter(**choice) for name, choice in CHOICES.items()}
    return {
        "weight_bytes": weight_bytes(llm),
        "bytes_per_token": llm.target.traits.bytes_per_token,
        "texts": {name: list(texts_of(one)) for name, one in {"none": llm, **others}.items()},
        "accepted": {name: one.engine.stats.num_accepted_tokens for name, one in others.items()},
    }


if __name__ == "__main__":
    json.dump(measure(make_llm(tp_plan="auto")), sys.stdout)
