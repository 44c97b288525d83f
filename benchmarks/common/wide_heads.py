"""A head for a widened target that drafts what the small one drafts. An EAGLE-3 head is widened alike, and costs what a head of that
width costs; an EAGLE-1 head that projects the target's states keeps its own width, but for an epsilon that its norms share: what it drafts changes by
some thousandths.

    python -m benchmarks.common.wide_heads SMALL_HEAD SMALL_TARGET WIDE_TARGET OUT

WIDE_TARGET: as shared/tools/widen.py makes it. The residual stream is padded with zeros: extra heads and neurons write nothing back.
Norms divide by the root of the mean square, which zeros make smaller: their weights and their epsilon make up for that.
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
    """The layers of the widened target that read what these layers of the small one read. It spreads the small one's evenly."""
    return tuple(round(tap * (wide_layers - 1) / max(num_layers - 1, 1)) for tap in taps)


@torch.no_grad()
def widen_head(head: EagleHead, num_layers: int, target: LanguageModel, seed: int = 0) -> EagleHead:
    """num_layers: of the target that the head is for. target: the widened one. In float32.

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
    """What is not the small one's costs time and changes nothing: random, where no zeros of the stream have to stay zeros."""
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
    """Vectors as wide as the stream that a matrix reads, side by side: states of several layers, or an embedding and a state."""
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
