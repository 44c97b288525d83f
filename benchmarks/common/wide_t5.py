"""Widen a T5, so that it costs as much as a large one and gives the small one's output.

The residual stream is padded with zeros: extra heads and neurons write nothing back, extra layers add nothing. So a benchmark has the
acceptance of a trained pair at the cost of a large target. Norms divide by the root mean square, which the zeros make smaller; their
weights and epsilon are scaled to compensate.
"""

from __future__ import annotations

import copy
import re
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

_LAYER = re.compile(r"^(encoder|decoder)\.block\.(\d+)\.")
_WRITES_BACK = ("o.weight", "wo.weight")


class WideSize(NamedTuple):
    """num_layers: of the encoder and of the decoder each; a stack without layers stays empty."""

    width: int
    num_heads: int
    mlp: int
    num_layers: int


@torch.no_grad()
def widen(model: T5ForConditionalGeneration, size: WideSize, seed: int = 0) -> T5ForConditionalGeneration:
    """The widened model, in float32. Raises ValueError for a size below the model's."""
    config = copy.deepcopy(model.config)
    depth = max(config.num_layers, config.num_decoder_layers)
    if size.width < config.d_model or size.num_heads < config.num_heads or size.mlp < config.d_ff:
        raise ValueError(
            f"{size} is below the model's width {config.d_model}, {config.num_heads} heads or MLP {config.d_ff}"
        )
    if size.num_layers < depth:
        raise ValueError(f"{size.num_layers} layers are fewer than the model's {depth}")
    ratio = config.d_model / size.width
    config.update({"d_model": size.width, "num_heads": size.num_heads, "d_ff": size.mlp})
    config.layer_norm_epsilon *= ratio
    config.num_layers = size.num_layers if config.num_layers else 0
    config.num_decoder_layers = size.num_layers if config.num_decoder_layers else 0
    wide = T5ForConditionalGeneration(config).float().eval()
    small, generator = model.float().state_dict(), torch.Generator().manual_seed(seed)
    scaled = _widened_scales(small, ratio, scales_outputs=config.scale_decoder_outputs)
    for name, weight in wide.state_dict().items():
        weight.copy_(_filler(name, weight, generator))
        if name in scaled:
            part = scaled[name]
            weight[tuple(slice(n) for n in part.shape)] = part
            weight[len(part) :] *= _extra_rows(name)
    return wide


def _widened_scales(weights: dict[str, Tensor], ratio: float, *, scales_outputs: bool) -> dict[str, Tensor]:
    """The weights, with norms scaled to give the same output. scales_outputs: logits are divided by the root of the width, as the last norm
    would be, so that norm stays.
    """
    scaled = {}
    for name, weight in weights.items():
        is_norm = "layer_norm" in name
        is_last = name == "decoder.final_layer_norm.weight" and scales_outputs
        scaled[name] = weight * ratio**0.5 if is_norm and not is_last else weight
    return scaled


def _filler(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Weights that cost time and change nothing, random where possible, so that no kernel can profit from zeros."""
    if name.endswith(_WRITES_BACK) or "relative_attention_bias" in name or not _LAYER.match(name):
        return torch.zeros_like(weight)
    return torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5


def _extra_rows(name: str) -> float:
    """The factor for rows after the model's own: 0 for those that would write into the padding of the stream."""
    return 0.0 if name.endswith(_WRITES_BACK) else 1.0
