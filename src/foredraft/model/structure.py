"""Find a Hugging Face decoder's layers and its final norm, and make the same decoder with fewer layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.errors import ModelError


def decoder_layers(hf: PreTrainedModel) -> nn.ModuleList:
    """A decoder's layers, whatever its family calls them. Raises ModelError if none of its module lists has as many entries."""
    layers = find_layers(hf)
    if layers is None:
        num_layers = hf.config.get_text_config().num_hidden_layers
        raise ModelError(
            f"{type(hf).__name__}: its {num_layers} layers are not in a list, so their hidden states cannot be read"
        )
    return layers


def find_layers(hf: PreTrainedModel) -> nn.ModuleList | None:
    """The same; None if none of its module lists has as many entries."""
    num_layers = hf.config.get_text_config().num_hidden_layers
    lists = (module for module in hf.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == num_layers), None)


def cache_width_of(config: PretrainedConfig) -> int:
    """How many numbers, of keys and values, a layer caches per token, if the configuration uses the usual names."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: the cache holds the expanded heads
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim)


def final_norm_of(hf: PreTrainedModel) -> nn.Module:
    """The norm after the last layer, whatever its family calls it: the last of the layers' siblings that has a vector of weights. Raises
    ModelError if there is none."""
    width = (int(hf.config.get_text_config().hidden_size),)
    siblings: list[nn.Module] = list(_parent_of(hf, decoder_layers(hf)).children())
    for module in reversed(siblings):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == width:
            return module
    raise ModelError(f"{type(hf).__name__}: it has no norm after its last layer, which a trained exit would replace")


class DecoderParts(NamedTuple):
    """The parts from which more layers of a decoder's family are made.

    layer: their class, made from a configuration and an index. norm: the final one, of which copies are made. rotary_emb: computes cos
    and sin for all layers. float32: tensors that are kept in float32, by parts of their names.
    """

    layer: type[nn.Module]
    norm: nn.Module
    rotary_emb: nn.Module
    float32: tuple[str, ...] = ()

    @classmethod
    def of(cls, hf: PreTrainedModel) -> DecoderParts:
        """The parts of a model, even if its layers have been taken for kernels. Raises ModelError for a decoder whose layers compute
        their own rotary angles, or have none."""
        layers = decoder_layers(hf)
        rotary_emb = getattr(_parent_of(hf, layers), "rotary_emb", None)
        if not isinstance(rotary_emb, nn.Module):
            raise ModelError(
                f"{type(hf).__name__}: its layers do not share a rotary embedding, so layers cannot be added"
            )
        float32 = tuple(getattr(hf, "_keep_in_fp32_modules_strict", None) or ())
        return cls(type(decoder_layers(_skeleton(hf))[-1]), final_norm_of(hf), rotary_emb, float32)


def shortened(hf: PreTrainedModel, num_layers: int, exit: nn.Module | None) -> PreTrainedModel:
    """The model with only its first layers: modules on the paths to a change are new, all others are the same. exit: replaces the final
    norm."""
    layers = decoder_layers(hf)
    parent = _parent_of(hf, layers)
    changed: dict[str, nn.Module] = {_path_of(hf, parent, layers): nn.ModuleList(layers[:num_layers])}
    if exit is not None:
        changed[_path_of(hf, parent, final_norm_of(hf))] = exit
    shorter: PreTrainedModel = _with_modules(hf, changed)
    return shorter


def _skeleton(hf: PreTrainedModel) -> PreTrainedModel:
    """The model as its class constructs it, without storage."""
    config = copy.deepcopy(hf.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return type(hf)(config)


def _parent_of(hf: PreTrainedModel, child: nn.Module) -> nn.Module:
    modules: Iterator[nn.Module] = hf.modules()
    return next(module for module in modules if any(each is child for each in module.children()))


def _path_of(hf: PreTrainedModel, parent: nn.Module, child: nn.Module) -> str:
    name = next(name for name, module in parent.named_children() if module is child)
    return next(f"{path}.{name}" if path else name for path, module in hf.named_modules() if module is parent)


def _with_modules(module: Any, changed: dict[str, nn.Module]) -> Any:
    """A copy with other modules at these paths. Everything that is not on these paths is the same object, parameters included."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    for name in {path.split(".")[0] for path in changed}:
        inside = {path.partition(".")[2]: new for path, new in changed.items() if path.split(".")[0] == name}
        other._modules[name] = inside[""] if "" in inside else _with_modules(module._modules[name], inside)
    return other
