"""transformers: generate, assisted generation and prompt lookup on one loaded target.

End-of-sequence ids are removed from the configuration, so that generation neither stops at one nor avoids it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.workers.protocol import Count, Counts, Ids, Job, Run, Settings, serve

_PAD = 3


def load(settings: Settings) -> tuple[dict[str, str], Any]:
    torch.set_num_threads(settings.threads)
    target = _model(settings.models / "target")
    draft = _model(settings.models / "draft") if (settings.models / "draft").exists() else None
    passes = _PassCounter(target)

    def write(job: Job) -> tuple[Ids, Count]:
        if len(job.prompts) > 1 and job.mode != "plain":
            raise ValueError("assisted generation takes one prompt at a time")
        passes.count = 0
        ids = _generate(target, draft, job)
        # the prompt's pass also writes a token and verifies a draft, like all others
        written = sum(map(len, ids))
        counts = Counts() if job.mode == "plain" else Counts(passes.count, None, None, written - passes.count)
        return ids, lambda: counts

    def pipeline(job: Job) -> Run:
        if job.mode not in {"plain", "draft_model", "ngram"}:
            raise ValueError(f"no mode {job.mode}")
        return write

    return {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "bfloat16"}, pipeline


def _model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


class _PassCounter:
    """Counts the passes of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def _generate(target: Any, draft: Any, job: Job) -> Ids:
    longest = max(map(len, job.prompts))
    ids = torch.tensor([[_PAD] * (longest - len(prompt)) + prompt for prompt in job.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job.prompts])
    out = target.generate(
        ids, attention_mask=mask, max_new_tokens=job.max_tokens, pad_token_id=_PAD, **_law(job), **_drafts(draft, job)
    )
    return out[:, longest:].tolist()


def _law(job: Job) -> dict[str, Any]:
    if job.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}


def _drafts(draft: Any, job: Job) -> dict[str, Any]:
    """γ tokens at every step: the library's schedule and confidence threshold must not change that."""
    if job.mode == "draft_model":
        draft.generation_config.num_assistant_tokens = job.gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return {"assistant_model": draft}
    if job.mode == "ngram":
        return {"prompt_lookup_num_tokens": job.gamma, "max_matching_ngram_size": 3}
    return {}


if __name__ == "__main__":
    serve(load)
