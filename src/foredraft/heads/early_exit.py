"""Early exits: the target's first layers draft. For a text nothing is cached beyond the target's own cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from foredraft.heads.config import ExitConfig, HeadCheckpoint, TargetShape
from foredraft.kernels import WeightFormat, unquantized
from foredraft.model.early_exit import first_layers
from foredraft.model.exits import Exit
from foredraft.model.language_model import LanguageModel
from foredraft.model.structure import final_norm_of
from foredraft.utils.tensors import num_bytes


class EarlyExit:
    """model: the first layers of the target. It reads and writes the target's own cache. weight_bytes: of the exit's own weights."""

    bytes_per_token = 0

    def __init__(self, config: ExitConfig, model: LanguageModel, weight_bytes: int = 0) -> None:
        self.config, self.model, self.weight_bytes = config, model, weight_bytes
        self.dtype = model.hf.dtype

    @classmethod
    def after(cls, target: LanguageModel, layer: int) -> EarlyExit:
        """An untrained exit: the target's final norm follows its first `layer` layers. Raises ModelError for an impossible number of
        layers."""
        shape = TargetShape.of(target.hf.config)
        config = ExitConfig(
            layer=layer,
            is_trained=False,
            target_hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            draft_vocab_size=shape.vocab_size,
        )
        return cls(config, first_layers(target, layer, None, unquantized))

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint, target: LanguageModel, weight_format: WeightFormat) -> EarlyExit:
        """The exit of a checkpoint, for inference, in the target's precision."""
        assert isinstance(checkpoint.config, ExitConfig)
        exit = load_exit(checkpoint.config, checkpoint.tensors, target).to(target.hf.dtype)
        exit.requires_grad_(False).eval()
        weight_bytes = num_bytes(exit.parameters())
        return cls(checkpoint.config, first_layers(target, checkpoint.config.layer, exit, weight_format), weight_bytes)


def new_exit(target: LanguageModel, adapter_size: int) -> Exit:
    """An exit to train, in float32: the target's final norm, and an adapter that adds nothing yet, since its last matrix is zero."""
    exit = Exit(final_norm_of(target.hf), target.hf.config.get_text_config().hidden_size, adapter_size).float()
    if exit.adapter is not None:
        nn.init.zeros_(exit.adapter.down_proj.weight)
    return exit.requires_grad_(True)


def load_exit(config: ExitConfig, tensors: Mapping[str, Tensor], target: LanguageModel) -> Exit:
    """An exit with these weights, in float32."""
    exit = new_exit(target, config.adapter_size)
    exit.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return exit


def empty_exit(config: ExitConfig) -> Exit:
    """An exit on the meta device, for the shapes of its tensors."""
    with torch.device("meta"):
        norm = nn.LayerNorm(config.target_hidden_size, bias=config.norm_bias)
        return Exit(norm, config.target_hidden_size, config.adapter_size)
