"""The tensors of a GGUF file that make up each parameter of the Hugging Face class."""

from __future__ import annotations

import re
from collections.abc import Iterable

from foredraft.errors import ModelError
from foredraft.model.gguf.container import GGUFFile, TensorEntry

_SUFFIXES = (".weight", ".bias")
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)(_bias)?")
_EXPERT_TENSORS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_HEAD = {"lm_head.weight": "output.weight", "lm_head.bias": "output.bias"}
"""The table leaves the head out if the original model's is tied."""

_ROUTER = re.compile(r"model\.layers\.(\d+)\.\w+\.gate\.weight")
_NO_PARAMETERS = frozenset(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))
"""Tensors that are part of the configuration."""

Sources = dict[str, tuple[TensorEntry, ...]]


def sources_of(parameters: Iterable[str], file: GGUFFile, architecture: str, num_layers: int) -> Sources:
    """The tensors of each parameter: one, or several that are joined along its outputs.

    Raises ModelError for a parameter without its tensors, and for a tensor without a parameter.
    """
    names = _gguf_names(parameters, architecture, num_layers)
    missing = [wanted for tensors in names.values() for wanted in tensors if wanted not in file.tensors]
    if missing:
        raise ModelError(
            f"{file.path}: it lacks {len(missing)} of the model's tensors, including {missing[0]!r}; download it again, or "
            "convert it again"
        )
    used = {tensor for tensors in names.values() for tensor in tensors}
    unknown = sorted(file.tensors.keys() - used - _NO_PARAMETERS)
    if unknown:
        raise ModelError(
            f"{file.path}: it has {len(unknown)} tensors that the model has no place for, including {unknown[0][:80]!r}; this "
            "variant is not supported"
        )
    return {parameter: tuple(file.tensors[tensor] for tensor in tensors) for parameter, tensors in names.items()}


def _gguf_names(parameters: Iterable[str], architecture: str, num_layers: int) -> dict[str, tuple[str, ...]]:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == architecture)
    tensor_map = get_tensor_name_map(kind, num_layers)
    names = {}
    for parameter in parameters:
        experts, router = _EXPERTS.fullmatch(parameter), _ROUTER.fullmatch(parameter)
        if experts is not None:
            suffix = "bias" if experts[3] else "weight"
            names[parameter] = tuple(f"blk.{experts[1]}.{name}.{suffix}" for name in _EXPERT_TENSORS[experts[2]])
        elif router is not None:
            names[parameter] = (f"blk.{router[1]}.ffn_gate_inp.weight",)
        else:
            # if the table has no name, the parameter's own is reported as missing in the file
            name = _HEAD.get(parameter) or tensor_map.get_name(parameter, try_suffixes=_SUFFIXES)
            names[parameter] = (_with_suffix(name or parameter),)
    return names


def _with_suffix(name: str) -> str:
    """Every tensor of a file has a suffix, even if the parameter has none, as with attention sinks."""
    return name if name.endswith(_SUFFIXES) else f"{name}.weight"
