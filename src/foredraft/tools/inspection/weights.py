"""Predicts how much memory weights take, in the model and while they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.kernels import INT4_GROUP
from foredraft.model import LoadOptions
from foredraft.model.packed import packs, weight_bytes
from foredraft.model.prepare import compiled_kernels
from foredraft.model.quantized.load import quantization_of
from foredraft.utils.arguments import FOUR_BITS
from foredraft.utils.tensors import num_bytes

_BYTES_PER_OUTPUT = 8
PRECISIONS = ("bfloat16", "int8", "int4")
"""The precisions that a head can run in, and that costs of passes are given for. In int4 the target's lm_head has eight bits."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The dtype of weights in the file (stored_in), while they are read (read_in), and in the loaded model (dtype).

    dtype: of weights that are not quantised. is_packed: whether linear layers are repacked for their kernels, one after the other,
    each into a new copy.
    """

    stored_in: torch.dtype
    read_in: torch.dtype
    dtype: torch.dtype
    quantization: str | None
    is_packed: bool

    def packed_bytes(self, weight: Tensor, num_outputs: int, *, is_head: bool = False) -> int:
        """Bytes of one packed matrix. In int8 each output has a scale and a correction, in int4 each group of inputs a float16 scale."""
        if self.quantization is None:
            return weight.numel() * self.dtype.itemsize
        has_groups = self.quantization in FOUR_BITS and weight.numel() // num_outputs % INT4_GROUP == 0
        if has_groups and not (is_head and self.quantization == "int4"):
            return weight.numel() // 2 + weight.numel() // INT4_GROUP * torch.float16.itemsize
        return weight.numel() + _BYTES_PER_OUTPUT * num_outputs


def layout_of(config: PretrainedConfig, options: LoadOptions) -> Layout:
    device, read_in = options.torch_device(), options.torch_dtype(config)
    stored_in = getattr(config.get_text_config(), "dtype", None) or read_in
    if options.is_rounded and device.type == "cpu" and quantization_of(config) is None:
        return Layout(stored_in, read_in, torch.bfloat16, options.quantization, is_packed=True)
    is_compiled = compiled_kernels(options) is not None
    return Layout(stored_in, read_in, read_in, None, is_packed=packs(read_in, device, is_compiled=is_compiled))


def predicted_weights(
    name: str, config: PretrainedConfig, skeleton: PreTrainedModel | None, layout: Layout
) -> int | None:
    """Bytes: from the file sizes for a quantised checkpoint or one without a skeleton, from the parameters for any other."""
    if Path(name).is_file():  # one file, quantised or not: packed, it stays as large
        return Path(name).stat().st_size
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    if files and (quantization_of(config) is not None or skeleton is None):
        return sum(file.stat().st_size for file in files)
    if skeleton is None or quantization_of(config) is not None:
        return None
    if not layout.is_packed:
        return weight_bytes(skeleton)
    matrices = _matrices(skeleton)
    replaced = {id(weight): weight for weight, _ in matrices}
    replaced.pop(id(skeleton.get_input_embeddings().weight), None)  # an lm_head that shares it is copied
    kept: int = weight_bytes(skeleton) - num_bytes(replaced.values())
    head = getattr(skeleton.get_output_embeddings(), "weight", None)
    return kept + sum(layout.packed_bytes(weight, out, is_head=weight is head) for weight, out in matrices)


def matrix_bytes(weight: Tensor, precision: str, *, is_head: bool = False) -> int:
    """Bytes of one matrix [out, in] in one of PRECISIONS. is_head: whether it is the target's lm_head"""
    bfloat16 = torch.bfloat16
    quantization = None if precision == "bfloat16" else precision
    layout = Layout(bfloat16, bfloat16, bfloat16, quantization, is_packed=True)
    return layout.packed_bytes(weight, weight.shape[0], is_head=is_head)


def pass_bytes(skeleton: PreTrainedModel | None) -> dict[str, int] | None:
    """Bytes, by precision, of the matrices that a pass reads, however few rows it has. None without a skeleton, and for a mixture of
    experts, of which a pass reads only a part."""
    if skeleton is None or any(parameter.ndim == 3 for parameter in skeleton.parameters()):
        return None
    head = getattr(skeleton.get_output_embeddings(), "weight", None)
    matrices = [
        (weight if weight.shape[0] == outputs else weight.T, weight is head) for weight, outputs in _matrices(skeleton)
    ]
    return {
        precision: sum(matrix_bytes(weight, precision, is_head=is_head) for weight, is_head in matrices)
        for precision in PRECISIONS
    }


def load_bytes(skeleton: PreTrainedModel | None, layout: Layout, weights: int | None) -> int | None:
    """Peak bytes on the host while loading.

    First all weights are read; if the library converts them, the file's pages stay mapped until the last conversion. Then matrices
    are packed one after the other, and each original is freed. Originals that are views of the file enter memory only then. So the
    peak is the largest of three: the weights as read, the matrices packed so far plus the originals being packed, and all other
    weights plus the original of the lm_head, which is packed last.
    """
    if skeleton is None or weights is None:
        return weights
    read = _bytes_in(skeleton, layout.read_in)
    is_converted = layout.stored_in != layout.read_in
    is_one_by_one = (layout.stored_in, layout.read_in) == (torch.float16, torch.bfloat16)
    file = _bytes_in(skeleton, layout.stored_in) if is_converted and not is_one_by_one else 0
    if not layout.is_packed:
        return read + file
    head = skeleton.get_output_embeddings()
    if is_converted:
        packing = max((_packed_at_once(layer, layout) for layer in _layers_of(skeleton)), default=0)
        return max(read + file, max(read, weights) + packing)
    head_bytes = 0 if head is None else head.weight.numel() * layout.read_in.itemsize
    head_packed = 0 if head is None else layout.packed_bytes(head.weight, head.weight.shape[0], is_head=True)
    packing = max((_packing_bytes(layer, layout) for layer in _layers_of(skeleton)), default=0)
    return max(read, weights - head_packed + packing, weights + head_bytes)


def _matrices(skeleton: nn.Module) -> list[tuple[Tensor, int]]:
    """The matrices that packing replaces: the weight of every linear layer, with its number of outputs."""
    linears: list[Any] = [m for m in skeleton.modules() if type(m) is torch.nn.Linear]
    transposed: list[Any] = [m for m in skeleton.modules() if type(m) is Conv1D]
    return [(m.weight, m.weight.shape[0]) for m in linears] + [(m.weight, m.weight.shape[1]) for m in transposed]


def _layers_of(skeleton: PreTrainedModel) -> list[nn.Module]:
    lists = [list(module) for module in skeleton.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _packing_bytes(layer: nn.Module, layout: Layout) -> int:
    """The most memory that packing a layer takes beyond its packed matrices: the originals of the two largest (gate and up, which are
    joined) while the last one (down) is not packed yet."""
    matrices = _matrices(layer)
    joined = sum(sorted(weight.numel() for weight, _ in matrices)[-2:])
    return joined * layout.read_in.itemsize - sum(layout.packed_bytes(*matrix) for matrix in matrices[-1:])


def _packed_at_once(layer: nn.Module, layout: Layout) -> int:
    """The largest packed matrix: gate and up joined."""
    return sum(sorted(layout.packed_bytes(*matrix) for matrix in _matrices(layer))[-2:])


def _bytes_in(skeleton: PreTrainedModel, dtype: torch.dtype) -> int:
    """The size that the weights would have in this dtype."""
    num_floats = sum(int(p.numel()) for p in skeleton.parameters() if p.is_floating_point())
    total: int = weight_bytes(skeleton) + (dtype.itemsize - skeleton.dtype.itemsize) * num_floats
    return total
