"""A request's output: its metrics in one line, and all of it as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foredraft.cli.render.units import milliseconds_text, number_text

if TYPE_CHECKING:
    from foredraft.text.outputs import CompletionOutput, RequestMetrics, RequestOutput


def metrics_line(metrics: RequestMetrics, num_tokens: int) -> str:
    """How long one request took, and how its drafts fared."""
    parts = [f"{num_tokens} tokens"]
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:.1f} tokens/s")
    if metrics.time_to_first_token is not None:
        parts.append(f"first after {milliseconds_text(metrics.time_to_first_token)}")
    if metrics.inter_token_latency is not None:
        parts.append(f"then {milliseconds_text(metrics.inter_token_latency)} each")
    stats = metrics.speculative_decoding
    if stats.num_spec_steps:
        parts.append(f"accepted {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens")
        parts.append(f"τ {number_text(stats.mean_acceptance_length)}")
    if stats.num_near_ties:
        parts.append(f"{stats.num_near_ties} near ties")
    return ", ".join(parts)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """One request. text, token_ids and finish_reason are those of its first text; `choices` lists several."""
    first, num_output = output.outputs[0], sum(len(text.token_ids) for text in output.outputs)
    fields: dict[str, Any] = {"prompt": output.prompt, **_text_as_json(first)}
    if output.prompt is None:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if len(output.outputs) > 1:
        fields["choices"] = [{"index": text.index, **_text_as_json(text)} for text in output.outputs]
    num_prompt = len(output.prompt_token_ids)
    fields["usage"] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    return fields | {"metrics": asdict(output.metrics)}


def _text_as_json(text: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": text.text,
        "token_ids": text.token_ids,
        "finish_reason": text.finish_reason,
        "stop_reason": text.stop_reason,
    }
    return fields | {"error": text.error} if text.error else fields
