"""OpenVINO GenAI: one pipeline each for plain decoding, for a draft model and for prompt lookup, on the CPU plugin.

The precisions of inference and of the KV cache are OpenVINO's defaults; both are reported. γ is set per request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.workers.protocol import Count, Counts, Ids, Job, Run, Settings, serve


def load(settings: Settings) -> tuple[dict[str, str], Any]:
    folder = settings.models / f"openvino-{settings.precision}"
    pipelines: dict[str, Any] = {}

    def pipeline(job: Job) -> Run:
        if job.mode not in pipelines:
            pipelines[job.mode] = _pipeline(folder, job.mode, settings)
        return lambda job: _write(pipelines[job.mode], job)

    return _facts(folder, settings), pipeline


def _facts(folder: Path, settings: Settings) -> dict[str, str]:
    """Read from the smallest model, which is compiled only for this."""
    core = openvino.Core()
    exported = [folder / name for name in ("draft", "target") if (folder / name).exists()]
    if not exported:
        raise FileNotFoundError(
            f"there is no model in {folder}: run benchmarks.peers.compare --setup openvino --models ..."
        )
    smallest = exported[0]
    compiled = core.compile_model(smallest / "openvino_model.xml", "CPU", _properties(settings))
    precision, cache = (compiled.get_property(key) for key in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"))
    return {
        "openvino": openvino.__version__,
        "openvino-genai": genai.__version__,
        "inference precision": precision.get_type_name(),
        "cache precision": cache.get_type_name(),
    }


def _properties(settings: Settings) -> dict[str, Any]:
    return {"INFERENCE_NUM_THREADS": settings.threads, "PERFORMANCE_HINT": "LATENCY"}


def _pipeline(folder: Path, mode: str, settings: Settings) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = settings.cache_gib
    # a prompt is read at once, as in the pipeline without a scheduler
    scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, settings.batch * settings.context)
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = max(settings.batch, 1)
    properties = _properties(settings)
    more: dict[str, Any] = {}
    if mode == "draft_model":
        more["draft_model"] = genai.draft_model(folder / "draft", "CPU", **properties)
    elif mode == "ngram":
        more["prompt_lookup"] = True
    elif mode != "plain":
        raise ValueError(f"no mode {mode}")
    # given a scheduler, the pipeline uses continuous batching
    return genai.LLMPipeline(folder / "target", "CPU", scheduler_config=scheduler, **properties, **more)


def _write(pipeline: Any, job: Job) -> tuple[Ids, Count]:
    result = pipeline.generate(_inputs(job.prompts), _config(job))
    ids = [list(map(int, row)) for row in result.tokens]
    return ids, lambda: _counts(result)


def _counts(result: Any) -> Counts:
    """Passes are counted for the whole batch. Only the pipeline with a draft model counts draft tokens."""
    passes = len(result.perf_metrics.raw_metrics.m_batch_sizes) if len(result.tokens) == 1 else None
    metrics = getattr(result, "extended_perf_metrics", None)
    if metrics is None:
        return Counts(passes)
    return Counts(passes, None, metrics.get_num_draft_tokens(), metrics.get_num_accepted_tokens())


def _inputs(prompts: Ids) -> Any:
    """Left-padded; the mask is 1 for tokens of the prompt."""
    longest = max(map(len, prompts))
    ids = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts], dtype=np.int64)
    mask = np.array([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=np.int64)
    return genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))


def _config(job: Job) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = job.max_tokens
    config.ignore_eos = True
    config.apply_chat_template = False
    config.do_sample = job.temperature > 0
    if job.temperature > 0:
        config.temperature, config.top_p, config.rng_seed = job.temperature, 1.0, job.seed
    if job.mode in {"draft_model", "ngram"}:
        config.num_assistant_tokens = job.gamma
    if job.mode == "ngram":
        config.max_ngram_size = 3
    return config


if __name__ == "__main__":
    serve(load)
