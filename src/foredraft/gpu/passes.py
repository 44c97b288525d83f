"""One pass of a decoder over static inputs, and the loop in which a draft model generates. Nothing here waits for the device or reads a
number back, so that all of it can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.gpu import kernels
from foredraft.gpu.inputs import BY_KEY, NO_SPAN, Inputs
from foredraft.gpu.weights import DeviceStack, Linear, Shape
from foredraft.sampling import inverse_cdf, shared_scores, tempered

FINAL_NORM = -1
"""The tap for the input of the head."""

_PROGRAMS, _MOST_PARTS, _LEAST_KEYS = 256, 16, 64
"""Attention is split among about two programs per multiprocessor of a GPU, each with at least one block of keys; merging more parts of a
row costs more than reading them."""


class Arithmetic(NamedTuple):
    """The order in which sums are made. product: of x [T, k] and a matrix -> [T, n]. parts: into how many parts attention splits the keys
    of each row, given the number of rows."""

    product: Callable[[Tensor, Linear], Tensor]
    parts: Callable[[int, Shape], int]


def _library_product(x: Tensor, matrix: Linear) -> Tensor:
    return functional.linear(x, matrix.weight, matrix.bias)


def _parts_for(num_rows: int, shape: Shape) -> int:
    """Fewer parts for more rows; a power of two."""
    most = min(_MOST_PARTS, _PROGRAMS // (num_rows * shape.num_kv_heads), shape.cos.shape[0] // _LEAST_KEYS)
    return 1 << max(0, most.bit_length() - 1)


FASTEST = Arithmetic(_library_product, _parts_for)
"""The order of a row's sums may depend on the number of rows."""

ROW_EXACT = Arithmetic(kernels.linear, lambda num_rows, shape: 1)
"""A row's sums are made in the same order in every pass."""


def read(
    stack: DeviceStack, inputs: Inputs, arithmetic: Arithmetic, taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """-> logits of the wanted rows [wanted, V], and the tapped hidden states (see model.Body) of all rows [T, len(taps) * hidden],
    or None without taps"""
    product, shape = arithmetic.product, stack.shape
    parts = arithmetic.parts(inputs.bucket.num_rows, shape)
    residual = functional.embedding(inputs.ids, stack.embedding)
    delta: Tensor | None = None
    epsilon = shape.epsilon
    hidden: dict[int, Tensor] = {}
    for index, layer in enumerate(stack.layers):
        normed = kernels.add_norm(residual, delta, layer.input_norm, epsilon)
        if index in taps:
            hidden[index] = residual.clone()  # later layers add to the original
        qkv = product(normed, layer.qkv)
        queries = kernels.rotate_and_store(qkv, inputs, index, layer, shape)
        delta = product(kernels.attend(queries, inputs, index, layer, shape, parts), layer.out)
        normed = kernels.add_norm(residual, delta, layer.post_norm, epsilon)
        delta = product(kernels.gated(product(normed, layer.gate_up)), layer.down)
    normed = kernels.add_norm(residual, delta, stack.final_norm, epsilon)
    hidden |= {len(stack.layers): residual, FINAL_NORM: normed}
    features = torch.cat([hidden[tap] for tap in taps], dim=-1) if taps else None
    return product(normed[inputs.wanted], stack.head), features


def generate(
    stack: DeviceStack,
    inputs: Inputs,
    step: Inputs,
    vocab_size: int,
    arithmetic: Arithmetic,
    token_probs: Tensor | None = None,
) -> Tensor:
    """Read, then generate bucket.depth tokens after each span, chosen from the first vocab_size ids. step: inputs with one row per span,
    which are filled here. token_probs: required if any token is drawn, [depth, spans, V] float32, filled with the distributions (rows at
    temperature 0 are meaningless). -> ids [depth, spans], -1 where a row has a NaN"""
    bucket = inputs.bucket
    last = inputs.wanted[: bucket.num_spans]
    spans = torch.arange(bucket.num_spans, device=last.device)
    step.stores.copy_(inputs.stores)
    step.capacities.copy_(inputs.capacities)
    step.positions.copy_(inputs.positions[last])
    step.row_spans.copy_(torch.where(step.capacities > 0, spans, NO_SPAN))
    step.wanted.copy_(spans)
    logits = read(stack, inputs, arithmetic)[0][: bucket.num_spans, :vocab_size]
    ids: list[Tensor] = []
    for place in range(bucket.depth):
        if ids:
            step.ids.copy_(ids[-1].clamp(min=0))
            step.positions.add_(1)
            logits = read(stack, step, arithmetic)[0][:, :vocab_size]
        if token_probs is None:
            ids.append(argmax(logits))
        else:
            keys = None if inputs.keys is None else inputs.keys[place]
            chosen, probs = draw(logits, inputs.temperatures, inputs.uniforms[place], keys)
            token_probs[place].copy_(probs)
            ids.append(chosen)
    return torch.stack(ids)


def argmax(logits: Tensor) -> Tensor:
    """[R, V] -> ids [R], -1 where there is a NaN"""
    ids = logits.argmax(-1)  # the index of a NaN, if there is one
    return torch.where(logits.gather(1, ids[:, None])[:, 0].isnan(), -1, ids)


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits / T), or choose the most likely id where T is 0. logits: [R, V], temperatures, uniforms: [R] float64;
    keys: [R] int64, of the noise where uniforms are BY_KEY -> ids [R], -1 where there is a NaN; probabilities [R, V] float32"""
    is_greedy = temperatures == 0
    token_probs = tempered(logits, torch.where(is_greedy, 1.0, temperatures))
    ids = torch.where(is_greedy, logits.argmax(-1), inverse_cdf(token_probs, uniforms.clamp(min=0)))
    if keys is not None:
        ids = torch.where(uniforms == BY_KEY, shared_scores(token_probs, keys).argmax(-1), ids)
    return torch.where(token_probs[:, 0].isnan(), -1, ids), token_probs
