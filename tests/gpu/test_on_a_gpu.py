"""Tests that need a GPU: graphs, and texts that do not depend on drafts or the batch. Skipped where there is none."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.model import EMBEDDED
from foredraft.model.device_stack import DeviceStackBody

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PROMPTS = ["def area(width, height):", "Once upon a time", "class Stack:\n    def push(self, item):", "import os\n"]


@cache
def on_gpu(dtype: str, batch_invariant: bool) -> LLM:
    return LLM(
        EMBEDDED / "target",
        EMBEDDED / "draft",
        dtype=dtype,
        device="cuda",
        batch_invariant=batch_invariant,
        max_num_seqs=8,
        speculative_tokens=4,
    )


def test_a_model_on_a_gpu_runs_over_static_memory() -> None:
    assert isinstance(on_gpu("bfloat16", False).target.body, DeviceStackBody)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0, max_tokens=128), SamplingParams(seed=5, max_tokens=128)]
)
def test_batch_invariant_texts_do_not_depend_on_drafts_or_the_batch(dtype: str, params: SamplingParams) -> None:
    llm = on_gpu(dtype, True)
    assert llm.target.traits.row_exact
    together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
    plain = [output.outputs[0].token_ids for output in llm.with_drafter("none").generate(PROMPTS, params)]
    assert together == alone == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_memory_is_freed(temperature: float) -> None:
    llm = on_gpu("bfloat16", False)
    llm.generate(PROMPTS, SamplingParams(temperature=temperature, max_tokens=64))
    llm.engine.drop_retained()
    assert llm.engine.pool.used == 0
