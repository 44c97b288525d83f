"""Linear layers whose weights are laid out once for the kernels that will run: ours, PyTorch's int8, or oneDNN's.

A plain `nn.Linear` has its weights laid out again in every pass; for the few rows of a verification that costs more than the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.kernels import (
    Kernels,
    PackedMatrix,
    QuantizedWeight,
    WeightFormat,
    WeightSource,
    check_channelwise_int8,
    dequantized,
    is_int8_exact,
    quantize_int8,
    read_all,
    unquantized,
)
from foredraft.model.pages import give_back, mapped_files
from foredraft.model.progress import with_bar
from foredraft.model.stored import StoredEmbedding, StoredLinear, is_linear, source_of, with_rows
from foredraft.utils.tensors import num_bytes

_TYPICAL_ROWS = 8
_INT_MM_UNIT = 16

Pack = Callable[[WeightSource, Tensor | None], nn.Module]
"""(weight [out, in], bias [out] or None) -> the layer that replaces it"""


class NativeLinear(nn.Module):
    """y = x W^T + b by the compiled kernels; a row's bits do not depend on the number of rows."""

    is_row_exact = True
    weight = None  # some of the library's code (T5's) compares dtypes with it, unless it is None

    def __init__(self, matrix: PackedMatrix, kernels: Kernels) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        self.matrix = matrix
        self._kernels = kernels
        for name, tensor in matrix.tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] bfloat16 -> [..., out]"""
        return self._kernels.linear(self.matrix, x)


class NativeEmbedding(nn.Module):
    """Rows of a packed matrix. stored: the layer that it replaces; its matrix is not kept, but what it does besides looking up rows
    is."""

    def __init__(self, matrix: PackedMatrix, kernels: Kernels, stored: StoredEmbedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.matrix, self.dtype = matrix, stored.dtype
        self._kernels = kernels
        self._original = (stored.original,)  # a tuple, so that its weight is not a parameter of this module
        for name, tensor in matrix.tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...] -> [..., hidden]"""
        rows = self.rows(ids.flatten())
        embedded: Tensor = with_rows(self._original[0], rows)(torch.arange(ids.numel()).view(ids.shape))
        return embedded

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix alone. ids: [R] -> [R, hidden]"""
        return self._kernels.rows(self.matrix, ids).to(self.dtype)


class Int8Linear(nn.Module):
    """The same numbers as NativeLinear in int8, by PyTorch's own integer product."""

    weight = None  # see NativeLinear
    _weight: Tensor
    _scales: Tensor
    _bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        check_channelwise_int8(weight)
        self.out_features, self.in_features = weight.shape
        self._missing = -self.in_features % _INT_MM_UNIT  # PyTorch's product is wrong for a single input
        self.register_buffer("_weight", nn.functional.pad(weight.codes, (0, self._missing)).T)
        self.register_buffer("_scales", weight.scales[:, 0])
        self.register_buffer("_bias", None if bias is None else bias.float())

    @classmethod
    def of(cls, source: WeightSource, bias: Tensor | None) -> Int8Linear:
        """Raises ValueError for a source that is not in int8 with one scale per output channel."""
        weight = read_all(source)
        if not isinstance(weight, QuantizedWeight):
            raise ValueError("int8 products need quantized weights")
        return cls(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        rows = x.reshape(-1, x.shape[-1]).float()
        largest = rows.abs().amax(1, keepdim=True)
        steps = torch.where(largest > 0, largest.new_tensor(127.0) / largest, 0.0)
        whole = nn.functional.pad((rows * steps).round().to(torch.int8), (0, self._missing))
        product = torch._int_mm(whole, self._weight)
        out = product.float() * (self._scales * (largest / 127))
        if self._bias is not None:
            out = out + self._bias
        return out.to(x.dtype).view(*x.shape[:-1], -1)


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed by oneDNN; it runs the kernel that `F.linear` would have chosen.

    weight: [out, in] bfloat16 on the CPU, not kept; bias: [out] or None.
    """

    weight = None  # see NativeLinear

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self.register_buffer("_bias", bias)
        self.num_bytes = num_bytes([weight])
        self._product = torch.ops.mkldnn._linear_pointwise.default

    @classmethod
    def of(cls, source: WeightSource, bias: Tensor | None) -> PackedLinear:
        return cls(dequantized(read_all(source)).to(torch.bfloat16), bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        out: Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return out

    def dense(self) -> dict[str, Tensor]:
        """weight [out, in] and bias, if there is one, as they were: recovered by products with the unit vectors, which are exact."""
        unit = torch.eye(self.in_features, dtype=torch.bfloat16)
        dense: dict[str, Tensor] = {"weight": self._product(unit, self._packed, None, "none", [], "").T}
        if isinstance(self._bias, Tensor):
            dense["bias"] = self._bias
        return dense


def dense_weights(hf: nn.Module) -> dict[str, Tensor]:
    """The model's state dict and the weights of the layers that oneDNN has packed, which it lacks."""
    packed = {name: module.dense() for name, module in hf.named_modules() if isinstance(module, PackedLinear)}
    return hf.state_dict() | {f"{name}.{key}": weight for name, kept in packed.items() for key, weight in kept.items()}


def packs(dtype: torch.dtype, device: torch.device, *, is_compiled: bool) -> bool:
    """Whether a model loaded like this is packed: in bfloat16 on the CPU, by the compiled kernels or on a processor with bfloat16
    products. is_compiled: whether those kernels run."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        return False
    return is_compiled or (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@cache
def int8_is_exact() -> bool:
    """Whether PyTorch's integer product is exact on this processor: without VNNI or similar it may saturate."""
    try:
        return is_int8_exact(lambda weight, x: Int8Linear(quantize_int8(weight), None)(x))
    except RuntimeError:
        return False


@torch.inference_mode()
def pack_linears(hf: PreTrainedModel, pack: Pack, weight_format: WeightFormat = unquantized) -> int:
    """Replace the model's linear layers in place -> how many. Each original's weights are freed as soon as they are packed, so the model
    is never in memory twice. Subclasses of nn.Linear (quantised ones) are left alone.

    weight_format: what the weights in memory become; stored ones keep their own.
    """
    count, files = 0, mapped_files()
    for parent in with_bar(list(hf.modules()), "Packing"):
        for name, child in list(parent.named_children()):
            if not is_linear(child):
                continue
            weights = list(child.parameters())
            setattr(parent, name, pack(source_of(child, weight_format), child.bias))
            give_back(weights, files)
            count += 1
    return count


@torch.inference_mode()
def pack_embedding(hf: PreTrainedModel, kernels: Kernels) -> None:
    """Replace a stored embedding with a packed one, and a head that shares its rows with one that multiplies the same memory."""
    stored = hf.get_input_embeddings()
    if not isinstance(stored, StoredEmbedding):
        return
    matrix = kernels.pack(stored.source)
    hf.set_input_embeddings(NativeEmbedding(matrix, kernels, stored))
    head = hf.get_output_embeddings()
    if isinstance(head, StoredLinear) and head.source is stored.source and head.bias is None:
        hf.set_output_embeddings(NativeLinear(matrix, kernels))


def weight_bytes(hf: PreTrainedModel) -> int:
    """Bytes of a model's weights in memory: shared ones count once, packed ones in their packed form."""
    tensors: list[Tensor] = [*hf.parameters(), *hf.buffers()]
    packed = sum(module.num_bytes for module in hf.modules() if isinstance(module, PackedLinear))
    return packed + num_bytes(tensors)
