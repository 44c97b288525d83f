"""One pass of a decoder over static inputs, and the loop in which a draft model generates. Nothing here waits for the device or reads a
number back, so that all of it can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.gpu import kernels, rows
from foredraft.gpu.inputs import BY_KEY, Inputs
from foredraft.gpu.kernels import Tiles
from foredraft.gpu.outputs import Outputs
from foredraft.gpu.weights import DeviceStack, Linear, Shape
from foredraft.sampling import inverse_cdf, shared_scores, tempered

FINAL_NORM = -1
"""The tap for the input of the head."""

_PROGRAMS, _MOST_PARTS, _LEAST_KEYS = 256, 16, 64
"""Attention is split among about two programs per multiprocessor of a GPU, each with at least one block of keys; merging more parts of a
row costs more than reading them."""


class Products(Protocol):
    """The matrix products of a layer, with what is computed right after them. x: [T, k]"""

    def linear(self, x: Tensor, matrix: Linear) -> Tensor:
        """-> [T, n]"""
        ...

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        """silu(gate) * up -> [T, n / 2]"""
        ...

    def add(self, residual: Tensor, x: Tensor, matrix: Linear) -> None:
        """residual += a product of x"""
        ...


class LibraryProducts:
    """PyTorch's products, which are faster for many rows. The order of a row's sums may depend on the number of rows."""

    def linear(self, x: Tensor, matrix: Linear) -> Tensor:
        return functional.linear(x, matrix.weight, matrix.bias)

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        return kernels.gated(self.linear(x, gate_up))

    def add(self, residual: Tensor, x: Tensor, matrix: Linear) -> None:
        residual.addmm_(x, matrix.weight.T)
        if matrix.bias is not None:
            residual.add_(matrix.bias)


class OwnProducts:
    """Our products. A row's sums are made in the same order in every pass."""

    def __init__(self, tiles: Tiles, gated_tiles: Tiles) -> None:
        self._tiles, self._gated_tiles = tiles, gated_tiles

    def linear(self, x: Tensor, matrix: Linear) -> Tensor:
        return kernels.linear(x, matrix, self._tiles)

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        return kernels.gated_linear(x, gate_up, self._gated_tiles)

    def add(self, residual: Tensor, x: Tensor, matrix: Linear) -> None:
        kernels.add_linear(residual, x, matrix, self._tiles)


class Arithmetic(NamedTuple):
    """The order in which sums are made, given the number of rows. parts: into how many parts attention splits the keys of each row."""

    products: Callable[[int], Products]
    parts: Callable[[int, Shape], int]


def _parts_for(num_rows: int, shape: Shape) -> int:
    """Fewer parts for more rows; a power of two."""
    most = min(_MOST_PARTS, _PROGRAMS // (num_rows * shape.num_kv_heads), shape.cos.shape[0] // _LEAST_KEYS)
    return 1 << max(0, most.bit_length() - 1)


_FOR_FEW = OwnProducts(kernels.FEW_ROWS, kernels.FEW_GATED_ROWS)
_FOR_ANY = OwnProducts(kernels.ANY_ROWS, kernels.ANY_GATED_ROWS)
_FOR_MANY = LibraryProducts()

FASTEST = Arithmetic(lambda num_rows: _FOR_FEW if num_rows <= kernels.FEW_ROWS.rows else _FOR_MANY, _parts_for)
"""The order of a row's sums may depend on the number of rows."""

ROW_EXACT = Arithmetic(lambda num_rows: _FOR_ANY, lambda num_rows, shape: 1)
"""A row's sums are made in the same order in every pass."""


def read(
    stack: DeviceStack, inputs: Inputs, arithmetic: Arithmetic, taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """-> logits of the wanted rows [wanted, V], and the tapped hidden states (see model.Body) of all rows [T, len(taps) * hidden],
    or None without taps"""
    num_rows, shape = inputs.bucket.num_rows, stack.shape
    products, parts = arithmetic.products(num_rows), arithmetic.parts(num_rows, shape)
    residual = kernels.embed(inputs.ids, inputs.chosen, stack.embedding)
    hidden: dict[int, Tensor] = {}
    for index, layer in enumerate(stack.layers):
        if index in taps:
            hidden[index] = residual.clone()  # the layers add to the original
        qkv = products.linear(kernels.norm(residual, layer.input_norm, shape.epsilon), layer.qkv)
        queries = kernels.rotate_and_store(qkv, inputs, index, layer, shape)
        products.add(residual, kernels.attend(queries, inputs, index, layer, shape, parts), layer.out)
        gated = products.gated(kernels.norm(residual, layer.post_norm, shape.epsilon), layer.gate_up)
        products.add(residual, gated, layer.down)
    normed = kernels.norm(residual, stack.final_norm, shape.epsilon)
    hidden |= {len(stack.layers): residual, FINAL_NORM: normed}
    features = torch.cat([hidden[tap] for tap in taps], dim=-1) if taps else None
    wanted = normed if inputs.bucket.wants_all else normed[inputs.wanted]
    return arithmetic.products(inputs.bucket.num_wanted).linear(wanted, stack.head), features


def generate(
    stack: DeviceStack,
    inputs: Inputs,
    step: Inputs,
    vocab_size: int,
    arithmetic: Arithmetic,
    outputs: Outputs,
    token_probs: Tensor | None = None,
) -> None:
    """Read, then generate bucket.depth tokens after each span, chosen from the first vocab_size ids. step: inputs with one row per span,
    which are filled here. outputs: filled with the ids, -1 where a row has a NaN. token_probs: required if any token is drawn, [depth,
    spans, V] float32, filled with the distributions (rows at temperature 0 are meaningless)"""
    bucket = inputs.bucket
    rows.begin(inputs, step)
    for place in range(bucket.depth):
        logits = read(stack, step if place else inputs, arithmetic)[0][: bucket.num_spans, :vocab_size]
        if token_probs is None:
            chosen = rows.top_two(logits)[0]
        else:
            keys = None if inputs.keys is None else inputs.keys[place]
            chosen, probs = draw(logits, inputs.temperatures, inputs.uniforms[place], keys)
            token_probs[place].copy_(probs)
        rows.advance(chosen, outputs.ids[place], step)
    outputs.send()


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits / T), or choose the most likely id where T is 0. logits: [R, V], temperatures, uniforms: [R] float64;
    keys: [R] int64, of the noise where uniforms are BY_KEY -> ids [R], -1 where there is a NaN; probabilities [R, V] float32"""
    is_greedy = temperatures == 0
    token_probs = tempered(logits, torch.where(is_greedy, 1.0, temperatures))
    ids = torch.where(is_greedy, logits.argmax(-1), inverse_cdf(token_probs, uniforms.clamp(min=0)))
    if keys is not None:
        ids = torch.where(uniforms == BY_KEY, shared_scores(token_probs, keys).argmax(-1), ids)
    return torch.where(token_probs[:, 0].isnan(), -1, ids), token_probs
