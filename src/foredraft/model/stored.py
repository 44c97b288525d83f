"""Layers whose weights stay where they are stored, in a file or as another program's quantized tensors.

A body that has kernels packs them from their sources, so no floating-point matrix is ever in memory. The layers' own forward dequantizes
a block of rows at a time: slow but exact, and good enough as the reference of a probe.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.kernels import InMemory, WeightFormat, WeightSource, blocks_of, dequantized, read_all


class StoredLinear(nn.Module):
    """y = x W^T + b. source: of W [out, in]; bias: [out] or None."""

    weight = None  # not in memory; some of the library's code (T5's) looks at it
    bias: Tensor | None

    def __init__(self, source: WeightSource, bias: Tensor | None = None) -> None:
        super().__init__()
        self.source = source
        self.out_features, self.in_features = source.shape
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out] in the same dtype. Computed in float32: products of bfloat16 are slow on many processors."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        out = x.new_empty(*x.shape[:-1], self.out_features)
        for first, block in blocks_of(self.source):
            out[..., first : first + block.shape[0]] = wide @ dequantized(block).to(wide.dtype).T
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def materialized(self, dtype: torch.dtype) -> nn.Linear:
        """The same layer with its weight in memory."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = _in_memory(self.source, dtype)
        if self.bias is not None:
            linear.bias = _parameter(self.bias, dtype)
        return linear


class StoredEmbedding(nn.Module):
    """Rows of W [V, hidden], which are read when they are needed. source: of W. dtype: of the returned rows. original: the layer that
    this one replaces, without its weight; anything that it does besides looking up rows (Gemma's scaling) is left to it."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, original: nn.Embedding) -> None:
        super().__init__()
        self.source, self.dtype = source, dtype
        self.num_embeddings, self.embedding_dim = source.shape
        self._original = (original,)  # a tuple, so that its weight is not a parameter of this module

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...] -> [..., hidden]"""
        places, order = torch.unique(ids, return_inverse=True)
        embedded: Tensor = with_rows(self.original, self.rows(places))(order)
        return embedded

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix alone. ids: [R] -> [R, hidden]"""
        rows = [dequantized(self.source.rows(row, row + 1)) for row in ids.tolist()]
        return torch.cat(rows).to(self.dtype)

    def materialized(self) -> nn.Embedding:
        """The layer that this one replaces, with its weight in memory."""
        return with_rows(self.original, _in_memory(self.source, self.dtype))

    @property
    def original(self) -> nn.Embedding:
        return self._original[0]


def with_rows(original: nn.Embedding, rows: Tensor) -> nn.Embedding:
    """The same layer with other rows [N, hidden]."""
    embedding = copy.copy(original)
    embedding._parameters = {"weight": nn.Parameter(rows, requires_grad=False)}
    embedding.padding_idx = None
    return embedding


class PermutedLinear(nn.Module):
    """y = x[order] W^T + b: a linear layer whose inputs are sorted by their quantization groups ("act-order"). order: [in]"""

    linear: StoredLinear

    def __init__(self, linear: StoredLinear, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.order = order  # not a buffer: while it loads a model, the library replaces buffers that no file has

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        out: Tensor = self.linear(x[..., self.order])
        return out

    def materialized(self, dtype: torch.dtype) -> nn.Linear:
        """A plain layer with its weight in memory and its inputs in their original order."""
        linear = self.linear.materialized(dtype)
        linear.weight.data = linear.weight.data[:, torch.argsort(self.order)]
        return linear


class StoredExperts(nn.Module):
    """The weights of a mixture's experts, each read when it is needed, in place of a parameter [experts, out, in].

    sources: a weight [out, in] per expert. is_transposed: the parameter is [experts, in, out].
    """

    _is_hf_initialized = True  # transformers fills modules without this mark with random numbers

    def __init__(self, sources: Sequence[WeightSource], dtype: torch.dtype, *, is_transposed: bool) -> None:
        super().__init__()
        self.sources, self.dtype, self.is_transposed = list(sources), dtype, is_transposed
        num_outputs, num_inputs = self.sources[0].shape
        sides = (num_inputs, num_outputs) if is_transposed else (num_outputs, num_inputs)
        self.shape = torch.Size((len(self.sources), *sides))

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        """[out, in], or [in, out] if the parameter is transposed"""
        weight = dequantized(read_all(self.sources[int(expert)])).to(self.dtype)
        return weight.T if self.is_transposed else weight

    def materialized(self) -> nn.Parameter:
        """The parameter that this replaces."""
        weight = torch.empty(self.shape, dtype=self.dtype)
        for expert in range(len(self.sources)):
            weight[expert] = self[expert]
        return _parameter(weight, self.dtype)


def _parameter(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(tensor.to(dtype), requires_grad=False)


def _in_memory(source: WeightSource, dtype: torch.dtype) -> nn.Parameter:
    """The whole weight, read block by block."""
    weight = torch.empty(source.shape, dtype=dtype)
    for first, block in blocks_of(source):
        weight[first : first + block.shape[0]] = dequantized(block)
    return _parameter(weight, dtype)


def is_linear(module: Any) -> bool:
    """Whether it is a plain linear layer, in memory or stored, and not a (quantized) subclass of nn.Linear."""
    return type(module) in (nn.Linear, Conv1D, StoredLinear)


def source_of(linear: Any, weight_format: WeightFormat) -> WeightSource:
    """The rows of a linear layer's weight [out, in]. weight_format: what a weight in memory becomes; a stored one keeps its own
    format."""
    if isinstance(linear, StoredLinear):
        return linear.source
    weight = linear.weight.t() if type(linear) is Conv1D else linear.weight
    return InMemory(weight, weight_format)


def stored_linears(hf: nn.Module) -> list[WeightSource]:
    """The sources of the weights of stored linear layers and embeddings, each once."""
    sources = [module.source for module in hf.modules() if isinstance(module, StoredLinear | StoredEmbedding)]
    return list({id(source): source for source in sources}.values())


def stored_experts(hf: nn.Module) -> list[WeightSource]:
    """The sources of the weights of stored experts."""
    return [source for module in hf.modules() if isinstance(module, StoredExperts) for source in module.sources]


@torch.no_grad()  # not inference_mode, because the model may be trained further
def materialize(hf: PreTrainedModel) -> None:
    """Put all stored weights into memory, in the model's dtype, in place. Weights with the same source stay shared."""
    dtype = hf.dtype
    in_memory: dict[int, nn.Parameter] = {}
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PermutedLinear):
                setattr(parent, name, child.materialized(dtype))
            elif isinstance(child, StoredLinear | StoredEmbedding) and not isinstance(parent, PermutedLinear):
                module: Any = child.materialized() if isinstance(child, StoredEmbedding) else child.materialized(dtype)
                module.weight = in_memory.setdefault(id(child.source), module.weight)
                setattr(parent, name, module)
    materialize_experts(hf)


@torch.no_grad()
def materialize_experts(hf: nn.Module) -> None:
    """Put stored experts into memory, in place, in the dtype that they are read in."""
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, StoredExperts):
                delattr(parent, name)
                parent.register_parameter(name, child.materialized())
