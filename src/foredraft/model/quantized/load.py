"""Hugging Face checkpoints with quantized weights on a CPU: their linear layers keep the weights as stored.

transformers loads everything else, into a subclass of the model's class whose quantized layers read their file. No quantization package
is needed, and no floating-point matrix is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from foredraft.errors import ModelError
from foredraft.model.diagnosis import why_half_loaded, why_not_found, why_not_loaded
from foredraft.model.options import LoadOptions
from foredraft.model.quantized.awq import Awq
from foredraft.model.quantized.bitsandbytes import BitsAndBytes
from foredraft.model.quantized.compressed_tensors import COMPRESSED_TENSORS, CompressedTensors
from foredraft.model.quantized.format import QuantizedFormat, Settings
from foredraft.model.quantized.gptq import Gptq
from foredraft.model.quantized.hub import folder_of
from foredraft.model.quantized.mxfp4 import Mxfp4
from foredraft.model.quantized.plan import Plan
from foredraft.model.quantized.skeleton import Skeleton
from foredraft.model.quantized.tensors import LayerTensors, TensorFiles, UnreadableError
from foredraft.model.stored import PermutedLinear, StoredLinear

FORMATS: Mapping[str, Callable[[Settings], QuantizedFormat]] = {
    "gptq": Gptq,
    "awq": Awq,
    COMPRESSED_TENSORS: CompressedTensors,
    "mxfp4": Mxfp4,
    "bitsandbytes": BitsAndBytes,
}
"""By `quant_method` in config.json."""


def is_stored_quantized(config: PretrainedConfig, device: torch.device) -> bool:
    """Whether load_quantized reads such a checkpoint for this device. transformers loads all others."""
    return device.type == "cpu" and _settings_of(config).get("quant_method") in FORMATS


def quantization_of(config: PretrainedConfig) -> str | None:
    """The `quant_method` of a checkpoint; None for one that is not quantized."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "quantization_config")


def load_quantized(name: str, config: PretrainedConfig, dtype: torch.dtype, options: LoadOptions) -> PreTrainedModel:
    """A model whose quantized layers are stored ones (model/stored.py). dtype: of everything else.

    Raises a one-line ModelError for tensors that are missing, unknown or of other shapes than the configuration implies, and for settings
    that are not supported.
    """
    try:
        return _load(name, config, dtype, options)
    except UnreadableError as error:
        raise ModelError(f"{name}: {error}") from error
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: {why_not_loaded(name, error)}") from error


def _load(name: str, config: PretrainedConfig, dtype: torch.dtype, options: LoadOptions) -> PreTrainedModel:
    settings = _settings_of(config)
    quantized_format = FORMATS[settings["quant_method"]](settings)
    folder = _folder(name, options)
    files = TensorFiles(folder)
    skeleton = Skeleton(_unquantized(config), dtype, trust_remote_code=options.trust_remote_code)
    layer_of = {tensor: quantized_format.layer_of(tensor, files.dtype(tensor)) for tensor in files}
    layers = {layer for layer in layer_of.values() if layer is not None}
    plan = _plan(quantized_format, files, layers, skeleton)
    names_in_model = {in_file: in_model for in_model, in_file in plan.biases.items()}
    empty_biases = {f"{layer}.bias" for layer in layers} - names_in_model.keys()
    others = [tensor for tensor in files if layer_of[tensor] is None and tensor not in empty_biases]
    state = {names_in_model.get(tensor, tensor): files.read(tensor) for tensor in others}
    hf, report = _load_others(skeleton, plan, state, dtype)
    reason = _unknown(files, layers, report) or why_half_loaded(name, hf.config, report)
    if reason is not None:
        raise ModelError(f"{name}: {reason}")
    if hf.can_generate() and (folder / "generation_config.json").exists():
        hf.generation_config = GenerationConfig.from_pretrained(folder)
    return hf


def _folder(name: str, options: LoadOptions) -> Path:
    try:
        return folder_of(name, options.revision)
    except Exception as error:
        raise ModelError(f"{name}: {why_not_found(name, error, options.revision)}") from error


def _plan(quantized_format: QuantizedFormat, files: TensorFiles, layers: set[str], skeleton: Skeleton) -> Plan:
    if not layers:
        raise UnreadableError("config.json has a quantization_config, but no weight in the files is quantized")
    plan = Plan(skeleton)
    for layer in sorted(layers):
        if quantized_format.is_excluded(layer):
            raise UnreadableError(f"{layer} is quantized, but quantization_config lists it among those that are not")
        quantized_format.place(LayerTensors(files, layer), plan)
    return plan


def _load_others(
    skeleton: Skeleton, plan: Plan, state: dict[str, Tensor], dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, with everything that is not stored taken from `state`, and the library's report of loading that."""
    model_class: Any = type(skeleton.model)
    config = copy.deepcopy(skeleton.model.config)
    if plan.has_head():
        config.tie_word_embeddings = False
    hf, report = _storing(model_class, plan, dtype).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        experts_implementation="eager",  # reads one expert at a time
        ignore_mismatched_sizes=True,  # refused by the caller, with the reason
        output_loading_info=True,
    )
    hf.__class__ = model_class
    for layer in _stored_layers(hf):
        del layer.weight
    return hf, report


def _storing(model_class: Any, plan: Plan, dtype: torch.dtype) -> Any:
    """A subclass whose quantized layers are stored ones from the beginning, so that the library loads only the others."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        plan.apply(self, dtype)
        for layer in _stored_layers(self):
            layer.weight = torch.empty(0)  # some classes look at the weights of layers that they would initialize
            layer.weight._is_hf_initialized = True

    return type(model_class.__name__, (model_class,), {"__init__": __init__, "__module__": model_class.__module__})


def _stored_layers(hf: PreTrainedModel) -> list[Any]:
    return [module for module in hf.modules() if isinstance(module, StoredLinear | PermutedLinear)]


def _unknown(files: TensorFiles, layers: set[str], report: dict[str, Any]) -> str | None:
    """Why a tensor that neither the format nor the model knows must not be ignored: it belongs to a quantized layer, or it is not
    floating point, as every plain weight is."""
    unexpected = sorted(set(report.get("unexpected_keys") or ()) & set(files))
    for name in unexpected:
        if not files.is_floating(name) or name.rpartition(".")[0] in layers:
            return f"{name} ({files.dtype(name)}) is neither part of its quantization format nor a weight of the model"
    return None


def _settings_of(config: PretrainedConfig) -> Settings:
    settings = getattr(config, "quantization_config", None)
    return settings if isinstance(settings, Mapping) else {}


def _unquantized(config: PretrainedConfig) -> PretrainedConfig:
    config = copy.deepcopy(config)
    del config.quantization_config
    return config
