"""vLLM's CPU build: one engine per mode and γ, in this process, so that its times include no message passing."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.workers.protocol import Count, Counts, Ids, Job, Run, Settings, serve, settings_from_command_line

_COUNTERS = {
    "spec_steps": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


class Counters:
    """The engine's counters, as differences since the last reading."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._last = self._read()

    def _read(self) -> dict[str, int]:
        values = {metric.name: metric.value for metric in self._llm.get_metrics() if metric.name in _COUNTERS.values()}
        return {ours: int(values.get(theirs, 0)) for ours, theirs in _COUNTERS.items()}

    def since_last(self) -> Counts:
        """Accepted tokens that max_tokens cut off are included, so the number of passes cannot be derived."""
        now = self._read()
        new = {name: now[name] - self._last[name] for name in now}
        self._last = now
        return Counts(**new)


def load(settings: Settings) -> tuple[dict[str, str], Any]:
    import torch
    import vllm
    from vllm import LLM

    more: dict[str, Any] = {}
    if settings.mode != "plain":
        more["speculative_config"] = _speculation(settings)
    llm = LLM(
        str(settings.models / "target"),
        dtype="bfloat16",
        max_model_len=settings.context,
        max_num_seqs=max(settings.batch, 1),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=settings.mode == "plain",
        seed=0,
        **more,
    )

    counters = None if settings.mode == "plain" else Counters(llm)

    def write(job: Job) -> tuple[Ids, Count]:
        if (job.mode, job.gamma) != (settings.mode, settings.gamma):
            raise ValueError("this engine was started for another mode")
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job.prompts], _params(job), use_tqdm=False)
        return [
            list(output.outputs[0].token_ids) for output in outputs
        ], lambda: Counts() if counters is None else counters.since_last()

    def pipeline(job: Job) -> Run:
        return write

    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "dtype": "bfloat16"}
    return versions, pipeline


def _speculation(settings: Settings) -> dict[str, Any]:
    gamma = {"num_speculative_tokens": settings.gamma}
    if settings.mode == "draft_model":
        return {"method": "draft_model", "model": str(settings.models / "draft"), **gamma}
    if settings.mode == "ngram":
        return {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, **gamma}
    raise ValueError(f"no mode {settings.mode}")


def _params(job: Job) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=job.temperature,
        top_p=1.0,
        top_k=0,
        seed=None,
        max_tokens=job.max_tokens,
        ignore_eos=True,
        detokenize=False,
    )


def set_variables(settings: Settings) -> None:
    """Must be called before vLLM is imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE=str(settings.cache_gib),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{settings.threads - 1}",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )


if __name__ == "__main__":
    set_variables(settings_from_command_line())
    serve(load)
