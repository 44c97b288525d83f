"""A GGUF file's rotary embedding as `rope_parameters` of a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import Any

from foredraft.errors import ModelError
from foredraft.model.gguf.container import GGUFFile
from foredraft.model.gguf.metadata import Metadata
from foredraft.model.gguf.tensors import read_floats

_DEFAULT_THETA = 10_000.0
_OF_EACH_FREQUENCY = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def rope_parameters(metadata: Metadata, file: GGUFFile, head_dim: int, context_len: int) -> dict[str, Any]:
    """Raises ModelError for an unknown kind of scaling."""
    rotated = metadata.integer("{arch}.rope.dimension_count", head_dim)
    parameters: dict[str, Any] = {
        "rope_theta": metadata.number("{arch}.rope.freq_base", _DEFAULT_THETA),
        "partial_rotary_factor": rotated / head_dim,
    }
    if _OF_EACH_FREQUENCY in file.tensors:
        return parameters | _by_frequency(file, rotated, context_len)
    if _LONG in file.tensors or _SHORT in file.tensors:
        return parameters | _by_length(metadata, file, rotated, context_len)
    return parameters | _scaling(metadata, file)


def _by_frequency(file: GGUFFile, rotated: int, context_len: int) -> dict[str, Any]:
    """One factor per frequency, as in Llama 3.1: longrope's form, with the same factors at every length."""
    factors = _factors(file, _OF_EACH_FREQUENCY, rotated)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context_len + 1,  # never reached: nothing changes with the length
    }


def _by_length(metadata: Metadata, file: GGUFFile, rotated: int, context_len: int) -> dict[str, Any]:
    original = metadata.integer("{arch}.rope.scaling.original_context_length", context_len)
    parameters = {
        "rope_type": "longrope",
        "short_factor": _factors(file, _SHORT, rotated),
        "long_factor": _factors(file, _LONG, rotated),
        "original_max_position_embeddings": original,
        "factor": context_len / original,
    }
    if "{arch}.rope.scaling.attn_factor" in metadata:
        parameters["attention_factor"] = metadata.number("{arch}.rope.scaling.attn_factor")
    return parameters


def _factors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    factors = [] if name not in file.tensors else read_floats(file, file.tensors[name]).flatten().tolist()
    if len(factors) != rotated // 2 or not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelError(
            f"{file.path}: its tensor {name} does not hold {rotated // 2} positive factors; download it again"
        )
    return factors


def _scaling(metadata: Metadata, file: GGUFFile) -> dict[str, Any]:
    kind = metadata.text("{arch}.rope.scaling.type", "none")
    factor = metadata.number("{arch}.rope.scaling.factor", metadata.number("{arch}.rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(metadata, factor)
    raise ModelError(
        f"{file.path}: its rotary embedding is scaled by {kind[:40]!r}, which is not supported; linear and yarn are"
    )


def _yarn(metadata: Metadata, factor: float) -> dict[str, Any]:
    scale = metadata.number("{arch}.rope.scaling.attn_factor", 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer("{arch}.rope.scaling.original_context_length"),
        "attention_factor": scale * (0.1 * math.log(factor) + 1.0) if factor > 1 else scale,
        "beta_fast": metadata.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
    }
