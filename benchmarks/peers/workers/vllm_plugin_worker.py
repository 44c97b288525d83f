"""One engine of vLLM's CPU build, run by its interpreter: a line of JSON with options, then one with prompts for each round.

The engine runs in this process, so that a call of foredraft's proposer can be timed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

CONCURRENCY = 8
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preempted": "vllm:num_preemptions",
}


class TimedCalls:
    """Of foredraft's proposer, with as many texts as run at once. milliseconds: of each call."""

    def __init__(self) -> None:
        from foredraft.integrations.vllm import Proposer

        self.milliseconds: list[float] = []
        original = Proposer.propose

        def timed(proposer: Any, sampled_token_ids: Any, *args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            drafts = original(proposer, sampled_token_ids, *args, **options)
            if len(sampled_token_ids) == CONCURRENCY:
                self.milliseconds.append(1e3 * (time.perf_counter() - started))
            return drafts

        Proposer.propose = timed  # type: ignore[method-assign]


def counts_of(llm: Any) -> dict[str, int]:
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: int(values.get(theirs, 0)) for name, theirs in COUNTERS.items()}


def write(llm: Any, asked: dict[str, Any], calls: TimedCalls) -> dict[str, Any]:
    """cancelled: prompts beside the others, each of which is aborted after a few steps."""
    from vllm import SamplingParams

    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
    before, calls.milliseconds = counts_of(llm), []
    started = time.perf_counter()
    prompts = {f"text {i}": ids for i, ids in enumerate(asked["prompts"])}
    prompts |= {f"cancelled {i}": ids for i, ids in enumerate(asked["cancelled"])}
    for name, ids in sorted(prompts.items(), key=lambda item: item[0].split()[1]):
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    texts, num_steps = {}, 0
    cancelled = [name for name in prompts if name.startswith("cancelled")]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
        num_steps += 1
        if cancelled and num_steps % 7 == 0:
            engine.abort_request([cancelled.pop()])
    seconds = time.perf_counter() - started
    counts = {name: value - before[name] for name, value in counts_of(llm).items()}
    return {
        "texts": [texts[f"text {i}"] for i in range(len(asked["prompts"]))],
        "seconds": seconds,
        "steps": num_steps,
        "call_ms": statistics.median(calls.milliseconds) if calls.milliseconds else None,
        **counts,
    }


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    from vllm import LLM

    calls = TimedCalls()
    given = json.loads(sys.stdin.readline())
    llm = LLM(
        given["model"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=CONCURRENCY,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **given["options"],
    )
    print(json.dumps({"pid": os.getpid()}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(write(llm, json.loads(line), calls)), file=out, flush=True)


if __name__ == "__main__":
    main()
