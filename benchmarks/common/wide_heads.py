"""Widen a head for a widened target, so that it drafts what the small head drafts.

    python -m benchmarks.common.wide_heads SMALL_HEAD SMALL_TARGET WIDE_TARGET OUT

WIDE_TARGET is made by shared/tools/widen.py. EAGLE-3, Medusa and block heads (DFlash, DSpark) become as wide as the target, and cost what heads of that width cost.
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

from foredraft.heads import (
    DFlashConfig,
    DFlashHead,
    EagleConfig,
    EagleHead,
    MedusaConfig,
    MedusaHead,
    TargetEnds,
    TargetShape,
    load_head,
)
from foredraft.heads.config import HeadCheckpoint, Markov
from foredraft.heads.saving import save_block_head, save_eagle1, save_eagle3, save_medusa
from foredraft.model import LanguageModel, LoadOptions, load_model

Head = EagleHead | DFlashHead | MedusaHead
Config = EagleConfig | DFlashConfig | MedusaConfig

_READS_FEATURES = ("fc.weight", "feature_fc.weight")
_WRITES_BACK = ("o_proj.weight", "down_proj.weight")
_BLOCKS = "blocks."  # of Medusa, which add to the stream


def wide_taps(taps: tuple[int, ...], num_layers: int, wide_layers: int) -> tuple[int, ...]:
    """The layers of the widened target that correspond to these layers of the small one, which are spread evenly over it."""
    return tuple(round(tap * (wide_layers - 1) / max(num_layers - 1, 1)) for tap in taps)


@torch.no_grad()
def widen_head(head: Head, num_layers: int, target: LanguageModel, seed: int = 0) -> Head:
    """Widen a head, in float32. num_layers: of the small target. target: the widened one.

    Raises ValueError for an EAGLE-3 or block head that has embeddings or an lm_head of its own, and for a block head whose correction reads
    hidden states.
    """
    config = head.config
    if not (isinstance(config, MedusaConfig) or _projects(config) or _depends_on_target(config)):
        raise ValueError(
            f"a head of this kind cannot be widened: {config.kind}, or it has embeddings or an lm_head of its own"
        )
    ends = TargetEnds(target.hf)
    wide = _new_head(_wide_config(config, num_layers, target.hf.config), ends)
    generator = torch.Generator().manual_seed(seed)
    small = {name: weight.float() for name, weight in head.state_dict().items()}
    weights = {
        name: _wide_weight(name, small[name], weight.shape, _num_parts(name, config), generator)
        for name, weight in wide.state_dict().items()
    }
    wide.load_state_dict(weights, assign=True)
    return wide


def _new_head(config: Config, ends: TargetEnds) -> Head:
    if isinstance(config, MedusaConfig):
        return MedusaHead(config, ends.lm_head)
    if isinstance(config, DFlashConfig):
        return DFlashHead(config, ends.embed, ends.lm_head)
    return EagleHead(config, ends.embed, ends.lm_head)


def _projects(config: Config) -> bool:
    """Whether it projects the target's states and otherwise does not depend on its width."""
    return isinstance(config, EagleConfig) and config.projects_features


def _depends_on_target(config: EagleConfig | DFlashConfig) -> bool:
    """Whether it uses the target's embeddings and lm_head, and its other parts are those of its layers or do not depend on its width."""
    if config.owns_embeddings or config.owns_lm_head:
        return False
    if isinstance(config, EagleConfig):
        return config.kind == "eagle3" and not config.fc_norm
    correction = config.correction
    has_known_correction = correction is None or (isinstance(correction, Markov) and correction.kind == "vanilla")
    return config.convolution is None and has_known_correction


def _wide_config(config: Config, num_layers: int, target: LlamaConfig) -> Config:
    if isinstance(config, MedusaConfig):
        return replace(config, target_hidden_size=target.hidden_size)
    taps = wide_taps(config.taps, num_layers, target.num_hidden_layers)
    if _projects(config):
        return replace(config, taps=taps, target_hidden_size=target.hidden_size)
    layer = copy.deepcopy(config.layer)
    ratio = target.hidden_size // layer.hidden_size
    groups = layer.num_attention_heads // layer.num_key_value_heads
    layer.rms_norm_eps /= ratio
    layer.hidden_size, layer.intermediate_size = target.hidden_size, target.intermediate_size
    layer.num_attention_heads = target.num_attention_heads
    layer.num_key_value_heads = target.num_attention_heads // groups
    return replace(config, layer=layer, taps=taps, target_hidden_size=target.hidden_size)


def _wide_weight(name: str, small: Tensor, shape: torch.Size, parts: int, generator: torch.Generator) -> Tensor:
    """parts: the number of vectors as wide as the stream that a matrix reads side by side.

    Entries that are not the small head's cost time and change nothing: random, except where the stream's zeros must stay zeros."""
    if small.shape == shape:
        return small
    if small.ndim == 1 and name.startswith(_BLOCKS):
        return torch.cat([small, torch.zeros(shape[0] - small.shape[0])])
    if small.ndim == 1:
        ratio = shape[0] / small.shape[0]
        return torch.cat([small * ratio**-0.5, torch.ones(shape[0] - small.shape[0])])
    if name in _READS_FEATURES or name.endswith(_WRITES_BACK) or name.startswith(_BLOCKS):
        wide = torch.zeros(shape)
    else:
        wide = 0.5 * shape[1] ** -0.5 * torch.randn(shape, generator=generator)
        wide[: small.shape[0]] = 0
    width, wide_width = small.shape[1] // parts, shape[1] // parts
    for part in range(parts):
        columns = small[:, part * width : (part + 1) * width]
        wide[: small.shape[0], part * wide_width : part * wide_width + width] = columns
    return wide


def _num_parts(name: str, config: Config) -> int:
    """Several layers' states, or an embedding and a state."""
    if name in _READS_FEATURES:
        return len(config.taps)
    reads_pairs = isinstance(config, EagleConfig) and name.startswith("layers.0.self_attn.")
    return 2 if reads_pairs and not name.endswith(_WRITES_BACK) else 1


def save_head(head: Head, folder: Path, target: LanguageModel, target_name: str) -> None:
    architectures = [type(target.hf).__name__]
    if isinstance(head, MedusaHead):
        save_medusa(head, folder, target_name)
    elif isinstance(head, DFlashHead):
        save_block_head(head, folder, target_name, architectures)
    elif _projects(head.config):
        save_eagle1(head, folder, target_name, architectures)
    else:
        save_eagle3(head, folder, target_name, architectures)


def _loaded(checkpoint: HeadCheckpoint, ends: TargetEnds) -> Head:
    if isinstance(checkpoint.config, MedusaConfig):
        return MedusaHead.of(checkpoint, ends.lm_head)
    if isinstance(checkpoint.config, DFlashConfig):
        return DFlashHead.of(checkpoint, ends.embed, ends.lm_head)
    return EagleHead.of(checkpoint, ends.embed, ends.lm_head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("head", "small_target", "target", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.small_target)
    checkpoint = load_head(str(args.head), TargetShape.of(config))
    target = load_model(str(args.target), LoadOptions(device="cpu"))
    ends = TargetEnds(target.hf)
    wide = widen_head(_loaded(checkpoint, ends), config.num_hidden_layers, target)
    args.out.mkdir(parents=True, exist_ok=True)
    save_head(wide, args.out, target, args.target.name)


if __name__ == "__main__":
    main()
