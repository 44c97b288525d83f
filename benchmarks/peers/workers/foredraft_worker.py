"""foredraft: one engine for plain decoding (γ = 0) and the model-free drafters, one more for each method with a model, and
one for "auto", which uses foredraft's default drafter and number of draft tokens and learns while it is measured. A head and `suffix`
together ("eagle+suffix") choose the number of draft tokens in the same way.
"""

from __future__ import annotations

from typing import Any

import torch

import foredraft
from benchmarks.peers.systems import AUTO, HEAD, PLAIN
from benchmarks.peers.workers.protocol import Count, Counts, Ids, Job, Run, Settings, serve
from foredraft import LLM, SamplingParams
from foredraft.drafters import NgramDrafter, SuffixDrafter
from foredraft.engine.proposal import Drafter, DraftRequest, Proposal
from foredraft.engine.stats import SpeculationStats
from foredraft.text.outputs import RequestOutput

_QUANTIZATIONS = {"bf16": None, "int8": "int8", "int4": "int4"}
"""Precision -> quantization of the checkpoint. Any other precision is the GGUF file that llama.cpp reads."""
_GIB = 1 << 30


class _Lookups:
    """The model-free drafters in one engine, to save memory: the one in `chosen` drafts."""

    def __init__(self) -> None:
        self.known: dict[str, Drafter] = {"suffix": SuffixDrafter(), "ngram": NgramDrafter()}
        self.chosen = "suffix"

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return self.known[self.chosen].propose(requests)

    def forget(self, seq_ids: list[int]) -> None:
        for drafter in self.known.values():
            drafter.forget(seq_ids)


def load(settings: Settings) -> tuple[dict[str, str], Any]:
    torch.set_num_threads(settings.threads)
    lookups = _Lookups()
    shared = _engine(settings, lookups)
    others: dict[str, LLM] = {}

    def pipeline(job: Job) -> Run:
        if job.mode in lookups.known:
            lookups.chosen = job.mode
        elif job.mode != PLAIN:
            if job.mode not in others:
                others[job.mode] = shared.with_drafter("suffix") if job.mode == AUTO else _engine(settings, job.mode)
            return lambda job: _write(others[job.mode], job)
        return lambda job: _write(shared, job)

    versions = {"foredraft": foredraft.__version__, "torch": torch.__version__}
    return versions | {"dtype": "bfloat16", "weights": settings.precision}, pipeline


def _model(settings: Settings, name: str) -> str:
    is_checkpoint = settings.precision in _QUANTIZATIONS
    return str(settings.models / (name if is_checkpoint else f"{name}-{settings.precision}.gguf"))


def _engine(settings: Settings, method: str | Drafter) -> LLM:
    more: dict[str, Any] = {}
    if method == "draft_model":
        more["draft_model"] = _model(settings, "draft")
    elif method == HEAD:
        more["draft_model"] = str(settings.models / "head")
    return LLM(
        _model(settings, "target"),
        quantization=_QUANTIZATIONS.get(settings.precision),
        method=method,
        dtype="bfloat16",
        seed=0,
        num_threads=settings.threads,
        cache_memory=settings.cache_gib * _GIB,
        max_num_seqs=max(settings.batch, 1),
        enable_prefix_caching=False,
        **more,
    )


def _write(llm: LLM, job: Job) -> tuple[Ids, Count]:
    gamma = "auto" if job.mode in (AUTO, HEAD) else job.gamma
    params = SamplingParams(
        max_tokens=job.max_tokens,
        temperature=job.temperature,
        top_p=1.0,
        top_k=0,
        ignore_eos=True,
        speculative_tokens=gamma,
    )
    outputs = llm.generate(job.prompts, params)
    return [output.outputs[0].token_ids for output in outputs], lambda: _counts(outputs)


def _counts(outputs: list[RequestOutput]) -> Counts:
    stats = sum((output.metrics.stats for output in outputs), SpeculationStats())
    return Counts(stats.num_steps, stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_tokens)


if __name__ == "__main__":
    serve(load)
