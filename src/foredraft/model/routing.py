"""Within `routed`, a Hugging Face model runs our attention and our experts; outside, those that its owner chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.model import attention, experts


@contextmanager
def routed(model: PreTrainedModel) -> Iterator[None]:
    """While active, the configurations of the model and of its parts name our functions."""
    configs = _configs_of(model)
    before = [(config._attn_implementation, config._experts_implementation) for config in configs]
    try:
        route(model)
        yield
    finally:
        # setting a configuration also sets those of its parts, so parts come after wholes
        for config, (attention_before, experts_before) in zip(configs, before, strict=True):
            config._attn_implementation = attention_before
            config._experts_implementation = experts_before


def route(model: PreTrainedModel) -> None:
    """Make the model run our functions from now on.

    Off the CPU the library's grouped kernels run the experts, because no exactness is promised there that ours would keep.
    """
    for config in _configs_of(model):
        route_config(config, model.device)


def route_config(config: PretrainedConfig, device: torch.device) -> None:
    """Make modules that are created from this configuration run our functions, on this device."""
    config._attn_implementation = attention.NAME
    if device.type == "cpu":
        config._experts_implementation = experts.NAME


def _configs_of(model: PreTrainedModel) -> list[PretrainedConfig]:
    """The model's configurations, wholes first. The stacks of some encoder-decoders (T5) have copies of their own."""
    configs = _with_parts(model.config)
    if model.config.is_encoder_decoder:
        configs += [stack.config for stack in (model.get_encoder(), model.get_decoder())]
    return configs


def _with_parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A configuration and those of its parts, wholes first."""
    configs = [config]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            configs += _with_parts(part)
    return configs
