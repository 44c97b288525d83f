"""vLLM's CPU build in float32 with foredraft's proposer, its own n-gram or no drafts, depending on the worker's mode. It runs in this
process, so that calls of the proposer can be timed. In a job with the mode "cancelled", other requests run beside the texts and are
aborted.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.peers.workers.protocol import Count, Counts, Ids, Job, Run, Settings, serve, settings_from_command_line
from benchmarks.peers.workers.vllm_worker import Counters, set_variables

NUM_CANCELLED, STEPS_BETWEEN = 10, 7


def plugin(method: str | list[str], tokens: int | str, most: int) -> dict[str, Any]:
    speculative = {"method": "custom_class", "model": "foredraft.integrations.vllm.Proposer"}
    return {
        "speculative_config": {**speculative, "num_speculative_tokens": most},
        "additional_config": {"foredraft": {"method": method, "speculative_tokens": tokens}},
    }


def options_of(mode: str, gamma: int) -> dict[str, Any]:
    """gamma: the number of draft tokens where it is fixed."""
    ngram = {"method": "ngram", "num_speculative_tokens": gamma, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return {
        "plain": {},
        "ngram": {"speculative_config": ngram},
        "suffix": plugin("suffix", gamma, gamma),
        "suffix-auto": plugin("suffix", "auto", 2 * gamma),
        "suffix-ngram-auto": plugin(["suffix", "ngram"], "auto", 2 * gamma),
    }[mode]


@dataclass(frozen=True)
class PluginCounts(Counts):
    """call_ms: the median time of a call of the proposer with a full batch of texts; None if there was no such call."""

    call_ms: float | None = None


class TimedCalls:
    """Times the calls of foredraft's proposer that have exactly `batch` texts."""

    def __init__(self, batch: int) -> None:
        from foredraft.integrations.vllm import Proposer

        self.milliseconds: list[float] = []
        original = Proposer.propose

        def timed(proposer: Any, sampled_token_ids: Any, *args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            drafts = original(proposer, sampled_token_ids, *args, **options)
            if len(sampled_token_ids) == batch:
                self.milliseconds.append(1e3 * (time.perf_counter() - started))
            return drafts

        Proposer.propose = timed  # type: ignore[assignment, method-assign]

    def median(self) -> float | None:
        """Median over the calls since the last time."""
        found, self.milliseconds = self.milliseconds, []
        return statistics.median(found) if found else None


def load(settings: Settings) -> tuple[dict[str, str], Any]:
    sys.path.insert(0, str(ROOT / "src"))
    import vllm
    from vllm import LLM, SamplingParams

    calls = TimedCalls(settings.batch)
    llm = LLM(
        str(settings.models / "target"),
        dtype=settings.precision,
        max_model_len=settings.context,
        max_num_seqs=settings.batch,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **options_of(settings.mode, settings.gamma),
    )
    counters = Counters(llm)

    def write(job: Job) -> tuple[Ids, Count]:
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        cancelled = job.prompts[:NUM_CANCELLED] if job.mode == "cancelled" else []
        texts = texts_of(llm.llm_engine, params, job.prompts, cancelled)
        return texts, lambda: PluginCounts(**vars(counters.since_last()), call_ms=calls.median())

    def pipeline(job: Job) -> Run:
        return write

    return {"vllm": vllm.__version__}, pipeline


def texts_of(engine: Any, params: Any, prompts: Ids, cancelled: Ids) -> Ids:
    """cancelled: prompts of additional requests, which are aborted one after another while the texts are written."""
    asked = {f"text {i}": ids for i, ids in enumerate(prompts)} | {
        f"cancelled {i}": ids for i, ids in enumerate(cancelled)
    }
    for name in sorted(asked, key=lambda name: name.split()[1]):
        engine.add_request(name, {"prompt_token_ids": asked[name]}, params)
    texts: dict[str, list[int]] = {}
    num_steps, open_names = 0, [f"cancelled {i}" for i in range(len(cancelled))]
    while engine.has_unfinished_requests():
        texts |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
        num_steps += 1
        if open_names and num_steps % STEPS_BETWEEN == 0:
            engine.abort_request([open_names.pop()])
    return [texts[f"text {i}"] for i in range(len(prompts))]


if __name__ == "__main__":
    set_variables(settings_from_command_line())
    serve(load)
