"""Predicts a model's report from its configuration and file headers, without reading a weight."""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.heads.loading import count_mtp_layers
from foredraft.model import LanguageModel, LoadOptions, Read, Traits
from foredraft.model.auto_class import auto_class_of
from foredraft.model.context import context_len_of
from foredraft.model.encoder_inputs import encoder_inputs_of
from foredraft.model.loading import load_config, refuse_unsupported
from foredraft.model.structure import cache_width_of
from foredraft.tools.inspection.report import Costs, ModelReport
from foredraft.tools.inspection.weights import layout_of, load_bytes, pass_bytes, predicted_weights

logger = logging.getLogger("foredraft")


def predict(source: str | os.PathLike[str], options: LoadOptions) -> ModelReport:
    """Read the configuration and file headers only. Raises ModelError for a model that the configuration rules out."""
    name = os.fspath(source)
    config = load_config(name, options)
    refuse_unsupported(config, name)
    context_len, layout = context_len_of(config, name), layout_of(config, options)
    skeleton = _skeleton(config, layout.dtype, options)
    weights = predicted_weights(name, config, skeleton, layout)
    bytes_per_token, logit_width = _dry_read(skeleton, context_len) if skeleton is not None else (None, None)
    return ModelReport(
        name=name,
        architecture=_architecture(config),
        attention=_attention_kinds(config),
        dtype=str(layout.dtype).removeprefix("torch."),
        num_parameters=None if skeleton is None else sum(p.numel() for p in skeleton.parameters()),
        context_len=context_len,
        num_tokens=None,
        logit_width=logit_width,
        predicted=Costs(weights, bytes_per_token or _cache_by_config(config, layout.dtype)),
        quantization=layout.quantization,
        load_bytes=load_bytes(skeleton, layout, weights),
        pass_bytes=pass_bytes(skeleton),
        num_mtp_layers=count_mtp_layers(name, config),
    )


def _skeleton(config: PretrainedConfig, dtype: torch.dtype, options: LoadOptions) -> PreTrainedModel | None:
    """The model on the meta device, without storage; None if its code needs real tensors."""
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = auto_class_of(config).from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=options.trust_remote_code
            )
    except Exception as error:  # any model's own code
        logger.debug("the model cannot be built without its weights: %s", error)
        return None
    skeleton.eval()
    return skeleton


def _dry_read(skeleton: PreTrainedModel, context_len: int) -> tuple[int | None, int | None]:
    """(cache bytes per token, logit width), from a pass of two tokens on the meta device. (None, None) if the model depends on
    values, as expert routers do."""
    try:
        model = LanguageModel(skeleton, Traits("", 0, context_len, 0, False))
        sources = []
        if skeleton.config.is_encoder_decoder:
            sources = [encoder_inputs_of(skeleton, "").random(2, torch.Generator())]
        cache = model.scratch_cache([2], sources=sources)
        logits = model.read([Read(0, [0, 0], 2)], cache)
    except Exception as error:  # any model's own code
        logger.debug("the model cannot be run without its weights: %s", error)
        return None, None
    return cache.region(0).bytes_per_token, int(logits.shape[-1])


def _cache_by_config(config: PretrainedConfig, dtype: torch.dtype) -> int | None:
    """Bytes per token of the keys and values of all layers; None unless the configuration uses the usual names."""
    text: Any = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if not layers or not getattr(text, "num_attention_heads", None):
        return None
    return int(layers * cache_width_of(text) * dtype.itemsize)


def _architecture(config: PretrainedConfig) -> str:
    names = getattr(config, "architectures", None)
    return str(names[0]) if names else str(config.model_type)


def _attention_kinds(config: PretrainedConfig) -> dict[str, int]:
    text: Any = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        is_sliding = bool(window) and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if is_sliding else "full_attention"] * int(getattr(text, "num_hidden_layers", 0))
    return dict(Counter(_kind_name(str(kind), window) for kind in kinds))


def _kind_name(kind: str, window: int | None) -> str:
    name = kind.removesuffix("_attention")
    return f"{name} ({window})" if name == "sliding" and window else name
