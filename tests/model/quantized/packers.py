"""Packers for every format, written from its specification one value at a time: the reference that the readers are tested with.

A packer takes a weight [out, in] and returns the tensors of its layer and the dequantised weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Parts = dict[str, Tensor]
Packer = Callable[[Tensor], tuple[Parts, Tensor]]
"""weight [out, in] -> (tensors by their names below the layer's, the dequantized weight [out, in] float32)"""

GROUP = 32


@dataclass(frozen=True)
class Kind:
    """A way to store a checkpoint: a packer and its quantization_config."""

    pack: Packer
    settings: dict[str, Any] = field(default_factory=dict)


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Pack consecutive values along the last dimension into int32, the first one lowest. values: [..., w * 32 / bits] -> [..., w]"""
    per_word = 32 // bits
    padded = nn.functional.pad(values.to(torch.int64), (0, -values.shape[-1] % per_word))
    words = torch.zeros(*padded.shape[:-1], padded.shape[-1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= (padded[..., place::per_word] & (2**bits - 1)) << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Quantise. -> q [out, in] of 0 .. 2^bits - 1, z [out, groups] and s [out, groups] in dtype: weight is about s * (q - z)."""
    out, width = weight.shape
    grouped = weight.view(out, width // group, group)
    top = 2**bits - 1
    if symmetric:
        scales = (grouped.abs().amax(-1) / (top // 2)).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).to(torch.int64)
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.to(torch.int64).view(out, width), zeros, scales


def dequantized(codes: Tensor, zeros: Tensor, scales: Tensor, group_of_input: Tensor) -> Tensor:
    return ((codes - zeros[:, group_of_input]).double() * scales.double()[:, group_of_input]).float()


def in_order(width: int, group: int) -> Tensor:
    return torch.arange(width) // group


def shuffled_groups(width: int, group: int) -> Tensor:
    """The group of each input, in random order as after act-order."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    groups = torch.empty(width, dtype=torch.int64)
    groups[order] = in_order(width, group)
    return groups


def gptq(
    bits: int = 4, *, symmetric: bool = True, version: int = 1, act_order: bool = False, group: int = GROUP
) -> Kind:
    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        width = weight.shape[1]
        size = width if group == -1 else group
        groups = shuffled_groups(width, size) if act_order else in_order(width, size)
        order = torch.argsort(groups, stable=True)
        codes, zeros, scales = rounded(weight[:, order], bits, size, symmetric=symmetric, dtype=torch.float16)
        codes = codes[:, torch.argsort(order)]
        parts = {
            "qweight": pack_words(codes, bits).T.contiguous(),
            "qzeros": pack_words(zeros.T - (1 if version == 1 else 0), bits),
            "scales": scales.T.contiguous(),
            "g_idx": groups.to(torch.int32),
        }
        return parts, dequantized(codes, zeros, scales, groups)

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Kind(pack, settings)


AWQ_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def awq() -> Kind:
    def interleaved(values: Tensor) -> Tensor:
        """Nibble j of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[j] of its eight. values: [rows, out]"""
        eights = values.view(values.shape[0], -1, 8)
        return torch.stack([eights[..., output] for output in AWQ_OUTPUT_OF_NIBBLE], dim=-1).flatten(1)

    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, zeros, scales = rounded(weight, 4, GROUP, symmetric=False, dtype=torch.float16)
        parts = {
            "qweight": pack_words(interleaved(codes.T.contiguous()), 4),
            "qzeros": pack_words(interleaved(zeros.T.contiguous()), 4),
            "scales": scales.T.contiguous(),
        }
        return parts, dequantized(codes, zeros, scales, in_order(weight.shape[1], GROUP))

    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Kind(pack, settings)


def packed(bits: int = 4, *, symmetric: bool = True, strategy: str = "group", act_order: bool = False) -> Kind:
    """compressed-tensors, pack-quantized."""

    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        out, width = weight.shape
        size = GROUP if strategy == "group" else width
        groups = shuffled_groups(width, size) if act_order else in_order(width, size)
        order = torch.argsort(groups, stable=True)
        codes, zeros, scales = rounded(weight[:, order], bits, size, symmetric=symmetric, dtype=torch.bfloat16)
        codes = codes[:, torch.argsort(order)]
        parts = {  # both are stored with half of the range added, which undoes the subtraction above
            "weight_packed": pack_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out, width]),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_words(zeros.T.contiguous(), bits).T.contiguous()
        if act_order:
            parts["weight_g_idx"] = groups.to(torch.int32)
        return parts, dequantized(codes, zeros, scales, groups)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": GROUP if strategy == "group" else None, "actorder": "group" if act_order else None}
    return Kind(pack, _compressed("pack-quantized", weights, None))


def integers(*, symmetric: bool = True, strategy: str = "channel") -> Kind:
    """compressed-tensors, int-quantized: W8A8."""

    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        grouped = weight if strategy == "channel" else weight.reshape(1, -1)
        width = grouped.shape[1]
        codes, zeros, scales = rounded(grouped, 8, width, symmetric=symmetric, dtype=torch.bfloat16)
        numbers = dequantized(codes, zeros, scales, in_order(width, width)).view(weight.shape)
        parts = {"weight": (codes - 128).to(torch.int8).view(weight.shape), "weight_scale": scales}
        if strategy == "tensor":
            parts["weight_scale"] = scales.view(1)
        if not symmetric:
            parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return parts, numbers

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": None}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Kind(pack, _compressed("int-quantized", weights, activations))


def _compressed(name: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(sign * value / 192 for sign in (1, -1) for value in (0, 1, 128, 192, 64, 96, 32, 48))


def bitsandbytes(kind: str = "nf4", *, nested: bool = False, block: int = 64) -> Kind:
    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        flat = nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
        absmax = flat.abs().amax(1).clamp(min=1e-8)
        state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
        parts: Parts = {"weight.quant_map": table}
        if nested:
            parts, absmax = _nested(parts, absmax)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        else:
            parts["weight.absmax"] = absmax
        codes = (flat / absmax[:, None])[..., None].sub(table).abs().argmin(-1)
        numbers = (table[codes] * absmax[:, None]).flatten()[: weight.numel()].view(weight.shape)
        pairs = nn.functional.pad(codes.flatten()[: weight.numel()], (0, weight.numel() % 2)).view(-1, 2)
        parts["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return parts, numbers

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Kind(pack, settings | {"bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"]})


def _nested(parts: Parts, absmax: Tensor) -> tuple[Parts, Tensor]:
    """Quantise the scales to eight bits, with a table of 256 values and a scale for each 256 of them."""
    table = torch.linspace(-1, 1, 256)
    above = absmax - 0.25
    blocks = nn.functional.pad(above, (0, -len(above) % 256)).view(-1, 256)
    outer = blocks.abs().amax(1)
    codes = (blocks / outer[:, None])[..., None].sub(table).abs().argmin(-1)
    restored = (table[codes] * outer[:, None]).flatten()[: len(absmax)] + 0.25
    stored = codes.flatten()[: len(absmax)].to(torch.uint8)
    return parts | {
        "weight.absmax": stored,
        "weight.nested_absmax": outer,
        "weight.nested_quant_map": table,
    }, restored


def int8_rows() -> Kind:
    """LLM.int8() of bitsandbytes."""

    def pack(weight: Tensor) -> tuple[Parts, Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * 127 / largest[:, None]).round()
        parts = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, (codes.double() * largest.double()[:, None] / 127).float()

    return Kind(pack, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]})


MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(weight: Tensor) -> tuple[Parts, Tensor]:
    """Pack experts [experts, out, in]. -> ({"_blocks", "_scales"}, the dequantised experts)"""
    table = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
    grouped = weight.view(*weight.shape[:2], -1, 32)
    exponents = torch.floor(torch.log2(grouped.abs().amax(-1))) - 2
    codes = (grouped / 2.0 ** exponents[..., None])[..., None].sub(table).abs().argmin(-1)
    blocks = (codes[..., 0::2] + codes[..., 1::2] * 16).to(torch.uint8)
    numbers = (table[codes] * 2.0 ** exponents[..., None]).view(weight.shape)
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}, numbers


KINDS: dict[str, Kind] = {
    "gptq": gptq(),
    "gptq, asymmetric": gptq(symmetric=False),
    "gptq, version 2, asymmetric": gptq(symmetric=False, version=2),
    "gptq, act-order": gptq(act_order=True),
    "gptq, act-order, asymmetric": gptq(act_order=True, symmetric=False),
    "gptq, 8 bits": gptq(8),
    "gptq, 8 bits, asymmetric, act-order": gptq(8, symmetric=False, act_order=True),
    "gptq, a group a row": gptq(group=-1),
    "awq": awq(),
    "W4A16": packed(),
    "W4A16, asymmetric": packed(symmetric=False),
    "W4A16, channels": packed(strategy="channel"),
    "W4A16, channels, asymmetric": packed(strategy="channel", symmetric=False),
    "W4A16, act-order": packed(act_order=True),
    "W8A16": packed(8),
    "W8A16, asymmetric": packed(8, symmetric=False),
    "W8A8": integers(),
    "W8A8, asymmetric": integers(symmetric=False),
    "W8A8, one scale": integers(strategy="tensor"),
    "nf4": bitsandbytes(),
    "nf4, nested": bitsandbytes(nested=True),
    "fp4": bitsandbytes("fp4"),
    "nf4, blocks across rows": bitsandbytes(block=128),
    "LLM.int8()": int8_rows(),
}


@torch.no_grad()
def save_quantized(
    model: PreTrainedModel, directory: Path, kind: Kind, *, skip: tuple[str, ...] = ("lm_head",), **changes: Any
) -> PreTrainedModel:
    """Save a checkpoint whose linear layers are stored in this kind. -> the model itself, now with the dequantised weights

    skip: layers that are not quantised. changes: to the quantization_config.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, Conv1D) or name in skip:
            continue
        weight = module.weight.data
        parts, numbers = kind.pack((weight.T if type(module) is Conv1D else weight).contiguous().float())
        module.weight.data.copy_(numbers.T if type(module) is Conv1D else numbers)
        del state[f"{name}.weight"]
        state |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    write(model, directory, state, kind.settings | changes)
    return model


EXPERT_NAMES = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj"), "down_proj"),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3"), "w2"),
}
"""The names in checkpoints, by model type: the list of experts; gates and values; down."""


@torch.no_grad()
def save_quantized_experts(model: PreTrainedModel, directory: Path, kind: Kind) -> PreTrainedModel:
    """Save a checkpoint of a mixture of which only the experts are stored in this kind. -> as save_quantized"""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder, ups, down = EXPERT_NAMES[model.config.model_type]
    for name, experts in model.named_modules():
        if not name.endswith("mlp.experts"):
            continue
        for stacked, names in ((experts.gate_up_proj.data, ups), (experts.down_proj.data, (down,))):
            for expert in range(len(stacked)):
                for weight, part in zip(stacked[expert].chunk(len(names)), names, strict=True):
                    tensors, numbers = kind.pack(weight.contiguous())
                    weight.copy_(numbers)
                    prefix = f"{name.replace('mlp.experts', folder)}.{expert}.{part}"
                    state |= {f"{prefix}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        del state[f"{name}.gate_up_proj"], state[f"{name}.down_proj"]
    write(model, directory, state, kind.settings)
    return model


@torch.no_grad()
def save_mxfp4(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Save a checkpoint of gpt-oss with its experts in MXFP4. -> as save_quantized"""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            continue
        tensors, numbers = mxfp4(parameter.data.transpose(1, 2).contiguous())
        parameter.data.copy_(numbers.transpose(1, 2))
        del state[name]
        state |= {f"{name}{part}": tensor.contiguous() for part, tensor in tensors.items()}
    not_converted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write(model, directory, state, {"quant_method": "mxfp4", "modules_to_not_convert": not_converted})
    return model


def write(model: PreTrainedModel, directory: Path, state: dict[str, Tensor], settings: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
