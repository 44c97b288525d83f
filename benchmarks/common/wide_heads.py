"""Widen a head for a widened target, so that it drafts what the small head drafts.

    python -m benchmarks.common.wide_heads SMALL_HEAD SMALL_TARGET WIDE_TARGET OUT

WIDE_TARGET is made by shared/tools/widen.py. An EAGLE-3 head becomes as wide as the target, and costs what a head of that width costs.
An EAGLE-1 head that projects the target's states keeps its own width; its norms share one epsilon, which cannot suit both widths, so its
drafts change by some thousandths.

The residual stream is padded with zeros: extra heads and neurons write nothing back. Norms divide by the root mean square, which the
zeros make smaller; their weights and epsilon are scaled to compensate.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from foredraft.heads import EagleConfig, EagleHead, TargetEnds, TargetShape, load_head
from foredraft.heads.saving import save_eagle1, save_eagle3
from foredraft.model import LanguageModel, LoadOptions, load_model

_WRITES_BACK = ("o_proj.weight", "down_proj.weight")


def wide_taps(taps: tuple[int, ...], num_layers: int, wide_layers: int) -> tuple[int, ...]:
    """The layers of the widened target that correspond to these layers of the small one, which are spread evenly over it."""
    return tuple(round(tap * (wide_layers - 1) / max(num_layers - 1, 1)) for tap in taps)


@torch.no_grad()
def widen_head(head: EagleHead, num_layers: int, target: LanguageModel, seed: int = 0) -> EagleHead:
    """Widen a head, in float32. num_layers: of the small target. target: the widened one.

    Raises ValueError for an EAGLE-3 head that has embeddings or an lm_head of its own, and for other heads.
    """
    config = head.config
    is_plain = config.kind == "eagle3" and not (config.owns_embeddings or config.owns_lm_head or config.fc_norm)
    if not is_plain and not config.projects_features:
        raise ValueError("only EAGLE-3 heads with the target's embeddings and lm_head, and EAGLE-1 heads that project")
    ends = TargetEnds(target.hf)
    wide = EagleHead(_wide_config(config, num_layers, target.hf.config), ends.embed, ends.lm_head)
    generator = torch.Generator().manual_seed(seed)
    small = {name: weight.float() for name, weight in head.state_dict().items()}
    weights = {
        name: _wide_weight(name, small[name], weight.shape, len(config.taps), generator)
        for name, weight in wide.state_dict().items()
    }
    wide.load_state_dict(weights, assign=True)
    return wide


def _wide_config(config: EagleConfig, num_layers: int, target: LlamaConfig) -> EagleConfig:
    taps = wide_taps(config.taps, num_layers, target.num_hidden_layers)
    if config.projects_features:
        return replace(config, taps=taps, target_hidden_size=target.hidden_size)
    layer = copy.deepcopy(config.layer)
    ratio = target.hidden_size // layer.hidden_size
    groups = layer.num_attention_heads // layer.num_key_value_heads
    layer.rms_norm_eps /= ratio
    layer.hidden_size, layer.intermediate_size = target.hidden_size, target.intermediate_size
    layer.num_attention_heads = target.num_attention_heads
    layer.num_key_value_heads = target.num_attention_heads // groups
    return replace(config, layer=layer, taps=taps, target_hidden_size=target.hidden_size)


def _wide_weight(name: str, small: Tensor, shape: torch.Size, num_taps: int, generator: torch.Generator) -> Tensor:
    """Entries that are not the small head's cost time and change nothing: random, except where the stream's zeros must stay zeros."""
    if small.shape == shape:
        return small
    if small.ndim == 1:
        ratio = shape[0] / small.shape[0]
        return torch.cat([small * ratio**-0.5, torch.ones(shape[0] - small.shape[0])])
    if name in ("fc.weight", "feature_fc.weight") or name.endswith(_WRITES_BACK):
        wide = torch.zeros(shape)
    else:
        wide = 0.5 * shape[1] ** -0.5 * torch.randn(shape, generator=generator)
        wide[: small.shape[0]] = 0
    parts = _num_parts(name, num_taps)
    width, wide_width = small.shape[1] // parts, shape[1] // parts
    for part in range(parts):
        columns = small[:, part * width : (part + 1) * width]
        wide[: small.shape[0], part * wide_width : part * wide_width + width] = columns
    return wide


def _num_parts(name: str, num_taps: int) -> int:
    """The number of vectors as wide as the stream that a matrix reads side by side: several layers' states, or an embedding and a state."""
    if name in ("fc.weight", "feature_fc.weight"):
        return num_taps
    return 2 if name.startswith("layers.0.self_attn.") and not name.endswith(_WRITES_BACK) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("head", "small_target", "target", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.small_target)
    checkpoint = load_head(str(args.head), TargetShape.of(config))
    target = load_model(str(args.target), LoadOptions(device="cpu"))
    ends = TargetEnds(target.hf)
    wide = widen_head(EagleHead.of(checkpoint, ends.embed, ends.lm_head), config.num_hidden_layers, target)
    args.out.mkdir(parents=True, exist_ok=True)
    save = save_eagle1 if wide.config.projects_features else save_eagle3
    save(wide, args.out, args.target.name, [type(target.hf).__name__])


if __name__ == "__main__":
    main()
