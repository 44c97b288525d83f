"""Load a hub id, a directory or a model in memory as a LanguageModel, or say in one line why that is impossible."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from foredraft.errors import ForedraftError, ModelError
from foredraft.model.checkpoint import is_gguf
from foredraft.model.context import context_len_of
from foredraft.model.encoder_inputs import feature_shape_of
from foredraft.model.formats import open_checkpoint
from foredraft.model.input_rounding import GroupOf, never
from foredraft.model.language_model import Body, LanguageModel, library_body
from foredraft.model.memory import is_spread, move, refuse_if_too_big
from foredraft.model.options import LoadOptions
from foredraft.model.pages import give_back
from foredraft.model.prepare import is_quantized, prepare, rounded_groups
from foredraft.model.probe import probe
from foredraft.model.quantized import quantization_of
from foredraft.model.ranks import Ranks, is_split, this_world
from foredraft.model.rounding import round_to_int4
from foredraft.model.source_probe import probe_encoder_decoder
from foredraft.model.tensor_parallel import lead_or_follow, refuse_unsplittable
from foredraft.utils.arguments import FOUR_BITS, refuse_offloaded

_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv")


def examine(source: str | os.PathLike[str], options: LoadOptions, *, has_weights: bool = True) -> PretrainedConfig:
    """Check everything that can be checked before the weights are read. Raises a one-line ModelError for anything that cannot work."""
    name = os.fspath(source)
    options.torch_device()
    checkpoint = open_checkpoint(name, options)
    checkpoint.check(has_weights=has_weights)
    config = checkpoint.config()
    refuse_unsupported(config, name)
    if config.is_encoder_decoder:
        _refuse_stored_quantization(name, checkpoint.quantization(config))
    if options.is_rounded:
        _refuse_second_rounding(name, checkpoint.quantization(config), options)
    if options.tp_plan is not None:
        _refuse_split(name, config, checkpoint.quantization(config))
    if options.device_map is not None or options.tp_plan is not None:
        _refuse_unplaceable(name)
    return config


def is_stored_in_few_bits(source: str | os.PathLike[str] | PreTrainedModel, options: LoadOptions) -> bool:
    """Whether the weights of a checkpoint, or of a model in memory, are quantized already."""
    if isinstance(source, PreTrainedModel):
        return is_quantized(source)
    checkpoint = open_checkpoint(os.fspath(source), options)
    checkpoint.check(has_weights=False)
    return checkpoint.quantization(checkpoint.config()) is not None


def _refuse_second_rounding(name: str, kind: str | None, options: LoadOptions) -> None:
    if kind is not None:
        raise ModelError(
            f"{name}: its weights are quantized already ({kind}), so they cannot be rounded to {options.quantization}; leave "
            "quantization out to run them as they are stored, or give the unquantized checkpoint"
        )


def _refuse_stored_quantization(name: str, kind: str | None) -> None:
    """Raise ModelError for an encoder-decoder whose weights are quantized."""
    if kind is not None:
        raise ModelError(f"{name}: this is a quantized encoder-decoder ({kind}); give a floating-point checkpoint")


def _refuse_split(name: str, config: PretrainedConfig, kind: str | None) -> None:
    """Raise ModelError for a model that cannot be split among ranks."""
    if kind is not None:
        raise ModelError(f"{name}: its weights are quantized ({kind}), but tp_plan splits only floating-point weights")
    if config.is_encoder_decoder:
        raise ModelError(f"{name}: this is an encoder-decoder, but tp_plan splits only decoder-only models")
    refuse_unsplittable(config, name, this_world().size)


def _refuse_unplaceable(name: str) -> None:
    if is_gguf(Path(name)):
        raise ModelError(f"{name}: a GGUF file is loaded onto one device: leave out device_map and tp_plan")
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("device_map and tp_plan need accelerate: pip install 'foredraft[accelerate]'")


def load_model(source: str | os.PathLike[str] | PreTrainedModel, options: LoadOptions) -> LanguageModel:
    """Raises a one-line ModelError if the checkpoint is missing, corrupt, too big, or of an unsupported kind."""
    if isinstance(source, PreTrainedModel):
        return _load_from_memory(source, options)
    name = os.fspath(source)
    config = examine(name, options)
    dtype = options.torch_dtype(config)
    if options.tp_plan is not None:
        return _load_share(name, config, dtype, options)
    if options.device_map is not None:
        return _rounded_and_examined(open_checkpoint(name, options).model(config, dtype).eval(), name, options)
    refuse_if_too_big(name, dtype, options.torch_device())
    hf = open_checkpoint(name, options).model(config, dtype)
    if not is_quantized(hf):
        move(hf, options.torch_device())
    return _rounded_and_examined(hf.eval(), name, options)


def _load_share(name: str, config: PretrainedConfig, dtype: torch.dtype, options: LoadOptions) -> LanguageModel:
    """Load this process's share of a model. All ranks load and probe it in step; see lead_or_follow."""
    ranks, device = Ranks(this_world()), options.torch_device()
    on_this_device = ranks.world.local_size if device.type == "cpu" else 1
    refuse_if_too_big(name, dtype, device, on_this_device / ranks.world.size)
    hf = open_checkpoint(name, options).model(config, dtype)
    return lead_or_follow(_examined(hf.eval(), name), ranks)


def _load_from_memory(source: PreTrainedModel, options: LoadOptions) -> LanguageModel:
    """Leave the owner's model unchanged: only a copy is quantised."""
    name = source.config.name_or_path or type(source).__name__
    if is_split(source):
        raise ModelError(
            f'{name}: other processes hold part of its weights: give its name or directory, and tp_plan="auto"'
        )
    kind = quantization_of(source.config) if is_quantized(source) else None
    if source.config.is_encoder_decoder:
        _refuse_stored_quantization(name, kind)
    if options.is_rounded:
        _refuse_second_rounding(name, kind, options)
        return _rounded_and_examined(copy.deepcopy(source).eval(), name, options)
    source.eval()
    return _examined(source, name)


def load_tokenizer(source: str | os.PathLike[str], options: LoadOptions) -> PreTrainedTokenizerBase:
    """Raises ModelError if there is none."""
    tokenizer = open_checkpoint(os.fspath(source), options).tokenizer()
    give_back([])  # large vocabularies free much memory that the C library would keep
    return tokenizer


def load_config(name: str, options: LoadOptions) -> PretrainedConfig:
    """Raises ModelError for a checkpoint without a readable configuration."""
    checkpoint = open_checkpoint(name, options)
    checkpoint.check(has_weights=False)
    return checkpoint.config()


def refuse_unsupported(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError for a model that its configuration alone rules out."""
    if config.is_encoder_decoder:
        _refuse_encoder_decoder(config, name)
    text = config.get_text_config()
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    recurrent = sorted(k for k in kinds | {str(text.model_type)} if any(word in k for word in _RECURRENT))
    if recurrent:
        raise _recurrent(name, recurrent[0])


_REFUSED_ENCODER_DECODERS = {
    "longt5": "does not pass its arguments on to its attention",
    "switch_transformers": "builds its attention masks itself",
    "nllb-moe": "builds its attention masks itself",
    "led": "has its own kind of attention, which sees windows of the source",
    "prophetnet": "has its own kind of attention, which predicts several tokens at once",
    "bigbird_pegasus": "has its own kind of attention, which sees blocks of the source",
    "pegasus_x": "has its own kind of attention, which sees blocks of the source",
}


def _refuse_encoder_decoder(config: PretrainedConfig, name: str) -> None:
    kind = str(config.model_type)
    why = _REFUSED_ENCODER_DECODERS.get(kind)
    if why is None and type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and feature_shape_of(config) is None:
        why = "does not generate text from text"
    if why is not None:
        raise ModelError(
            f"{name}: this is an encoder-decoder ({kind}) that {why}; T5, mT5, UMT5, BART, mBART, PLBart, Marian, Pegasus, Blenderbot, "
            "M2M100, T5Gemma and Whisper are supported"
        )


def _recurrent(name: str, kind: str) -> ModelError:
    return ModelError(
        f"{name}: {kind} keeps a recurrent state, which cannot forget a rejected draft token; "
        "use a model whose only memory is attention"
    )


def _rounded_and_examined(hf: PreTrainedModel, name: str, options: LoadOptions) -> LanguageModel:
    if options.quantization in FOUR_BITS:
        round_to_int4(hf, name, options)
    return _examined(hf, name, lambda ours: prepare(ours, name, options), rounded_groups(options))


def _refuse_placement(hf: PreTrainedModel, name: str) -> None:
    """Raise ModelError if a device map has put parts of the model where a pass cannot use them."""
    try:
        refuse_offloaded(getattr(hf, "hf_device_map", None) or {})
    except ForedraftError as error:
        raise ModelError(f"{name}: {error}") from None
    if hf.config.is_encoder_decoder and is_spread(hf):
        raise ModelError(f"{name}: this is an encoder-decoder spread over several devices: give one device")


def _examined(
    hf: PreTrainedModel,
    name: str,
    prepare_body: Callable[[PreTrainedModel], Body] = library_body,
    group_of: GroupOf = never,
) -> LanguageModel:
    refuse_unsupported(hf.config, name)
    _refuse_placement(hf, name)
    if getattr(hf, "_is_stateful", False):
        raise _recurrent(name, type(hf).__name__)
    if hf.config.is_encoder_decoder:
        model = probe_encoder_decoder(hf, name, prepare_body, group_of)
    else:
        model = probe(hf, name, context_len_of(hf.config, name), prepare_body, group_of)
    give_back([])  # layout and probing have freed memory that the C library would keep
    return model
