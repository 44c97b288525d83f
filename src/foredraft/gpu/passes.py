"""One pass of a decoder over static inputs, and the loop in which a draft model goes on by itself. Nothing in here waits for
the device or reads a number back, so that all of it can be captured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.gpu import kernels
from foredraft.gpu.inputs import NO_SPAN, Inputs
from foredraft.gpu.weights import DeviceStack, Linear
from foredraft.sampling import inverse_cdf, tempered

Product = Callable[[Tensor, Linear], Tensor]


def library_product(x: Tensor, matrix: Linear) -> Tensor:
    """The fastest there is; which sums it takes may depend on the number of rows. x: [T, k] -> [T, n]"""
    return functional.linear(x, matrix.weight, matrix.bias)


def read(stack: DeviceStack, inputs: Inputs, product: Product) -> Tensor:
    """-> logits of the wanted rows [wanted, V]"""
    residual = functional.embedding(inputs.ids, stack.embedding)
    delta: Tensor | None = None
    epsilon = stack.shape.epsilon
    for index, layer in enumerate(stack.layers):
        normed = kernels.add_norm(residual, delta, layer.input_norm, epsilon)
        qkv = product(normed, layer.qkv)
        queries = kernels.rotate_and_store(qkv, inputs, index, layer, stack.shape)
        delta = product(kernels.attend(queries, inputs, index, layer, stack.shape), layer.out)
        normed = kernels.add_norm(residual, delta, layer.post_norm, epsilon)
        delta = product(kernels.gated(product(normed, layer.gate_up)), layer.down)
    normed = kernels.add_norm(residual, delta, stack.final_norm, epsilon)
    return product(normed[inputs.wanted], stack.head)


def write(
    stack: DeviceStack, inputs: Inputs, step: Inputs, vocab_size: int, product: Product, laws: Tensor | None = None
) -> Tensor:
    """Read, and go on: bucket.depth tokens of the first vocab_size ids behind each span. step: inputs of a row for each
    span, which are filled here. laws: where any is drawn, [depth, spans, V] float32, written to (rows at temperature 0 are
    of no use). -> ids [depth, spans], -1 where a row is no law (NaN)"""
    bucket = inputs.bucket
    last = inputs.wanted[: bucket.num_spans]
    spans = torch.arange(bucket.num_spans, device=last.device)
    step.stores.copy_(inputs.stores)
    step.capacities.copy_(inputs.capacities)
    step.positions.copy_(inputs.positions[last])
    step.row_spans.copy_(torch.where(step.capacities > 0, spans, NO_SPAN))
    step.wanted.copy_(spans)
    logits = read(stack, inputs, product)[: bucket.num_spans, :vocab_size]
    ids: list[Tensor] = []
    for place in range(bucket.depth):
        if ids:
            step.ids.copy_(ids[-1].clamp(min=0))
            step.positions.add_(1)
            logits = read(stack, step, product)[:, :vocab_size]
        if laws is None:
            ids.append(likeliest(logits))
        else:
            chosen, law = drawn(logits, inputs.temperatures, inputs.uniforms[place])
            laws[place].copy_(law)
            ids.append(chosen)
    return torch.stack(ids)


def likeliest(logits: Tensor) -> Tensor:
    """[R, V] -> ids [R], -1 where there is a NaN"""
    ids = logits.argmax(-1)  # of NaN, if there is one
    return torch.where(logits.gather(1, ids[:, None])[:, 0].isnan(), -1, ids)


def drawn(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """From softmax(logits / T), or the likeliest where T is 0. logits: [R, V], temperatures, uniforms: [R] float64 -> ids
    [R], -1 where there is a NaN; laws [R, V] float32"""
    is_greedy = temperatures == 0
    laws = tempered(logits, torch.where(is_greedy, 1.0, temperatures))
    ids = torch.where(is_greedy, logits.argmax(-1), inverse_cdf(laws, uniforms))
    return torch.where(laws[:, 0].isnan(), -1, ids), laws
