"""What a Llama-like decoder computes, in Triton: one program per row (and head), and products of few rows.

A program sums over its own row in an order that depends only on the row's position, so a row's bits depend neither on how many rows share
the launch nor on its place among them; the same holds for the products of `linear`. Keys and values are read and written where the cache
keeps them: the kernels are given addresses, so a captured graph finds a sequence that has moved.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which is how they are tested.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from foredraft.gpu import programs
from foredraft.gpu.inputs import Inputs
from foredraft.gpu.weights import DeviceLayer, Linear, Shape

_WIDEST_KEYS = 16_384
"""The most bytes in a block of keys: several such blocks, and of values, are loaded into shared memory at a time."""
_GATE_BLOCK = 1024
_NARROW = 2048
"""The widest row whose norm takes four warps instead of eight."""
_MUCH_SHARED_MEMORY = 160 << 10
"""Bytes of a multiprocessor that has room for three blocks of keys and values."""


class Tiles(NamedTuple):
    """Tiles of a product: rows of the pass and rows of the matrix per program, the step along the inner size, warps, and how many loads
    are in flight."""

    rows: int = 16
    columns: int = 32
    inner: int = 128
    warps: int = 4
    stages: int = 4


FEW_ROWS = Tiles(inner=256)
"""The fastest for up to 16 rows (docs/internals/gpu.md)."""
FEW_GATED_ROWS = Tiles(stages=3)
"""The same for a gated product, which has the most programs: those that use little memory share a multiprocessor."""
ANY_ROWS = Tiles(rows=64)
"""For any number of rows: almost as fast for one row as for 64."""
ANY_GATED_ROWS = Tiles(rows=64, columns=16)


def embed(ids: Tensor, chosen: Tensor, embedding: Tensor) -> Tensor:
    """ids: [T]; a negative one, -1 - i, is a placeholder for number i of the int64 numbers at the address `chosen` [1], or for 0 if that
    is negative. embedding: [V, N] -> [T, N]"""
    width = embedding.shape[1]
    out = embedding.new_empty(ids.shape[0], width)
    programs.embed[(ids.shape[0],)](ids, chosen, embedding, out, width, BLOCK=triton.next_power_of_2(width))
    return out


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm (arXiv:1910.07467). x: [T, N] -> [T, N]"""
    num_rows, width = x.shape
    out = torch.empty_like(x)
    num_warps = 4 if width <= _NARROW else 8
    programs.norm[(num_rows,)](x, weight, out, width, epsilon, BLOCK=triton.next_power_of_2(width), num_warps=num_warps)
    return out


def rotate_and_store(qkv: Tensor, inputs: Inputs, index: int, layer: DeviceLayer, shape: Shape) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of queries and keys, after their norms if the layer has those; keys and values go to their
    slots in the cache. qkv: [T, (Hq + 2 Hkv) * D] -> queries [T, Hq, D]"""
    num_rows = qkv.shape[0]
    queries = qkv.new_empty(num_rows, shape.num_heads, shape.head_dim)
    programs.rotate_and_store[(num_rows, shape.num_heads + 2 * shape.num_kv_heads)](
        qkv,
        queries,
        inputs.positions,
        inputs.row_spans,
        inputs.stores[index],
        inputs.capacities,
        shape.cos,
        shape.sin,
        qkv if layer.q_norm is None else layer.q_norm,
        qkv if layer.k_norm is None else layer.k_norm,
        inputs.positions if inputs.slots is None else inputs.slots,
        shape.cos.shape[0],
        shape.epsilon,
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HALF=shape.head_dim // 2,
        HAS_NORM=layer.q_norm is not None,
        HAS_SLOTS=inputs.slots is not None,
        BLOCK=triton.next_power_of_2(shape.head_dim // 2),
        num_warps=1,
    )
    return queries


def attend(queries: Tensor, inputs: Inputs, index: int, layer: DeviceLayer, shape: Shape, parts: int = 1) -> Tensor:
    """Causal attention of each row over the keys of its own sequence, or in a tree of its path, in the order of position. queries:
    [T, Hq, D] -> [T, Hq * D]; rows of no sequence become zero.

    The softmax is accumulated online (arXiv:2205.14135), over blocks of keys at fixed places. parts, a power of two: the blocks are split
    among this many programs, whose sums are then merged (Flash-Decoding, Dao et al. 2023), because a few rows would otherwise leave most
    of the device idle. The number of parts decides the order of a row's sum.
    """
    num_rows = queries.shape[0]
    groups = shape.num_heads // shape.num_kv_heads
    width = max(16, triton.next_power_of_2(shape.head_dim))
    out = torch.empty_like(queries)
    reads, sums = queries, queries  # unused if there is one part
    if parts > 1:
        each = (num_rows, shape.num_kv_heads, parts, groups)
        reads = queries.new_empty(*each, shape.head_dim, dtype=torch.float32)
        sums = queries.new_empty(*each, 2, dtype=torch.float32)
    programs.attend[(num_rows, shape.num_kv_heads, parts)](
        queries,
        out,
        reads,
        sums,
        inputs.positions,
        inputs.row_spans,
        inputs.stores[index],
        inputs.capacities,
        inputs.positions if inputs.path_slots is None else inputs.path_slots,
        inputs.positions if inputs.starts is None else inputs.starts,
        inputs.positions if inputs.first_slots is None else inputs.first_slots,
        shape.scale,
        layer.window,
        GROUPS=groups,
        KV_HEADS=shape.num_kv_heads,
        WIDTH=shape.head_dim,
        PARTS=parts,
        HAS_SLOTS=inputs.slots is not None,
        BLOCK_G=max(16, triton.next_power_of_2(groups)),
        BLOCK_D=width,
        BLOCK_N=max(16, min(64, _WIDEST_KEYS // (width * queries.element_size()))),
        num_stages=_attention_stages(queries.device),
    )
    if parts > 1:
        programs.merge[(num_rows, shape.num_heads)](
            reads,
            sums,
            out,
            inputs.row_spans,
            GROUPS=groups,
            KV_HEADS=shape.num_kv_heads,
            WIDTH=shape.head_dim,
            PARTS=parts,
            BLOCK_D=width,
        )
    return out.view(num_rows, -1)


@cache
def _attention_stages(device: torch.device) -> int:
    """How many blocks of keys are in flight. Three are a fifth faster than two at 8,192 keys, and need 140 KiB of shared memory."""
    if device.type != "cuda":
        return 2
    available = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return 3 if available >= _MUCH_SHARED_MEMORY else 2


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. [T, 2 * I] -> [T, I]"""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    programs.gated[(num_rows, triton.cdiv(width, _GATE_BLOCK))](gate_up, out, width, BLOCK=_GATE_BLOCK)
    return out


def linear(x: Tensor, matrix: Linear, tiles: Tiles = FEW_ROWS) -> Tensor:
    """A product that computes each row independently: the inner size is never split, and summed in the same order for any number of rows.
    x: [T, k] -> [T, n]"""
    out = x.new_empty(x.shape[0], matrix.weight.shape[0])
    _multiply(x, matrix, out, tiles)
    return out


def add_linear(residual: Tensor, x: Tensor, matrix: Linear, tiles: Tiles = FEW_ROWS) -> None:
    """residual += a product like `linear`'s. residual: [T, n]"""
    _multiply(x, matrix, residual, tiles, adds=True)


def gated_linear(x: Tensor, gate_up: Linear, tiles: Tiles = FEW_GATED_ROWS) -> Tensor:
    """silu(gate) * up of a product like `linear`'s, without bias. x: [T, k] -> [T, n / 2]"""
    out = x.new_empty(x.shape[0], gate_up.weight.shape[0] // 2)
    _multiply(x, gate_up, out, tiles, is_gated=True)
    return out


def _multiply(
    x: Tensor, matrix: Linear, out: Tensor, tiles: Tiles, *, is_gated: bool = False, adds: bool = False
) -> None:
    num_rows, inner = x.shape
    num_columns = out.shape[1]
    programs.linear[(triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_columns, tiles.columns))](
        x,
        matrix.weight,
        x if matrix.bias is None else matrix.bias,
        out,
        num_rows,
        num_columns,
        inner,
        HAS_BIAS=matrix.bias is not None,
        IS_GATED=is_gated,
        ADDS=adds,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.inner,
        num_warps=tiles.warps,
        num_stages=max(1, tiles.stages * 2 // x.element_size()),  # as many bytes for any type
    )
