"""Run by vLLM's own interpreter: writes greedy texts and counts drafts. JSON on standard input and output."""

from __future__ import annotations

import json
import sys
from typing import Any


def write(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "seed": 0}
    llm = LLM(asked["model"], disable_log_stats=False, **options, **asked["options"])
    params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"])
    outputs = llm.generate(asked["prompts"], params, use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "preempted": counts.get("vllm:num_preemptions", 0),
    }


if __name__ == "__main__":
    print(json.dumps(write(json.load(sys.stdin))))
