"""Explain in one line why a checkpoint cannot be used, and what to do, from the library's exceptions and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.errors import one_line
from foredraft.model.checkpoint import raw_config
from foredraft.model.hub_errors import NO_CONFIG, why_not_on_hub
from foredraft.model.shared_encoder import shares_encoder

_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def why_not_found(name: str, error: BaseException, revision: str | None) -> str:
    """Explain what the library raised while it looked for a checkpoint."""
    said = _why_not_ours(name, error)
    if said is not None:
        return said
    if raw_config(name):
        return f"its config.json cannot be used: {' '.join(str(error).split())[:300]}"
    return why_not_on_hub(error, revision)


def why_not_loaded(name: str, error: BaseException) -> str:
    """Explain what the library raised while it read the weights."""
    return _why_not_ours(name, error) or f"the checkpoint cannot be loaded: {one_line(error)}"


def _why_not_ours(name: str, error: BaseException) -> str | None:
    """Explain an error about an architecture that the library does not have; None for any other error."""
    text = str(error)
    if "trust_remote_code" in text:
        return (
            "its architecture is code that comes with the checkpoint, and is not run unless you allow it; read it, and give "
            "trust_remote_code=True (--trust-remote-code)"
        )
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        config = raw_config(name)
        kind = config.get("model_type")
        if kind is None and not Path(name).is_dir():
            return NO_CONFIG
        if kind is None and "speculators_model_type" in config:
            return (
                "it is a head, which drafts for another model: give it as draft_model (--draft-model), without a method"
            )
        if kind is None:
            return "its config.json does not set model_type, which names the architecture: add it"
        known = f"transformers {transformers.__version__}"
        return f"{known} does not support the architecture {kind!r}; upgrade transformers, or use another model"
    return None


def why_half_loaded(name: str, config: PretrainedConfig, report: dict[str, Any]) -> str | None:
    """report: the library's loading report. The library fills missing weights, and those of another shape, with random numbers, and
    ignores weights that the model has no place for. -> None if the whole model was loaded"""
    if shares_encoder(raw_config(name)):
        return "it is a decoder over another model's encoder, and drafts for that model: give it as draft_model (--draft-model)"
    unsaid = _unsaid(name, config)
    mismatched, missing = sorted(report.get("mismatched_keys") or ()), sorted(report.get("missing_keys") or ())
    if mismatched:
        key, theirs, ours = mismatched[0]
        return (
            f"the weights do not have the shapes that config.json describes: {key} is {list(theirs)} in the file but "
            f"{list(ours)} in the model{unsaid or '; download the checkpoint again'}"
        )
    if missing:
        return (
            f"the checkpoint lacks {len(missing)} of the model's weights, including {missing[0]}"
            f"{unsaid or '; download it again, or load it as the kind of model it is'}"
        )
    if report.get("unexpected_keys") and "num_hidden_layers" in unsaid:
        return f"the checkpoint has weights that the model has no place for{unsaid}"
    return None


def _unsaid(name: str, config: PretrainedConfig) -> str:
    """Name the sizes that config.json does not give, and the defaults that the library uses instead."""
    raw = raw_config(name)
    if not raw:
        return ""
    text = config.get_text_config()
    said = raw.keys() | next((raw[key].keys() for key in ("text_config",) if isinstance(raw.get(key), dict)), set())
    taken = {
        field: getattr(text, field, None)
        for field in _SHAPE
        if field not in said and text.attribute_map.get(field, field) not in said
    }
    gaps = ", ".join(
        f"{field} ({value} is transformers' default)" for field, value in taken.items() if value is not None
    )
    return f"; config.json does not set {gaps}: add the model's own" if gaps else ""


@torch.inference_mode()
def why_not_finite(hf: PreTrainedModel) -> str:
    """Explain why the logits of a model are not finite."""
    for key, weight in hf.named_parameters():
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
            return f"its weights contain NaN or infinity, for example in {key}; download the checkpoint again, or use another"
    return (
        f"its own forward pass produces NaN or infinity in {str(hf.dtype).removeprefix('torch.')}, though its weights are "
        "finite; try another dtype (float32)"
    )
