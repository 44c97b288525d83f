"""The kernels compared with plain PyTorch in float64, and the bits of their rows in every batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from foredraft.gpu import DeviceLayer, Inputs, Linear, Shape, bucket_for, kernels
from foredraft.gpu.buckets import Bucket
from foredraft.gpu.kernels import Tiles
from foredraft.kernels import CacheSpan, StackBatch

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HAS_GPU = torch.cuda.is_available()
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers, so such products need a GPU. The interpreter is slow,
# and there float16 differs from float32 only in rounding.
PRODUCT_DTYPES = [torch.float32, pytest.param(torch.float16, marks=[] if HAS_GPU else [pytest.mark.slow])]
by_product_dtype = pytest.mark.parametrize("dtype", [*PRODUCT_DTYPES, *[torch.bfloat16] * HAS_GPU], ids=str)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(ours: Tensor, expected: Tensor) -> bool:
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    return bool(error < DTYPES[ours.dtype])


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


@by_dtype
def test_embed(dtype: torch.dtype, device: torch.device) -> None:
    embedding, ids = random(9, 83, dtype=dtype, device=device), torch.tensor([8, 0, 8], device=device)
    nowhere = torch.zeros(1, dtype=torch.int64, device=device)
    assert torch.equal(kernels.embed(ids, nowhere, embedding), embedding[ids])


def test_placeholders_stand_for_chosen_tokens(device: torch.device) -> None:
    embedding = random(9, 83, dtype=torch.float32, device=device)
    chosen = torch.tensor([[1, 2], [-1, 4], [5, 6]], device=device)
    ids, address = torch.tensor([7, -1, -4, -3, 0, -6], device=device), torch.tensor([chosen.data_ptr()], device=device)
    assert torch.equal(kernels.embed(ids, address, embedding), embedding[[7, 1, 4, 0, 0, 6]])


@by_dtype
@pytest.mark.parametrize("width", [64, 83])
def test_norm(dtype: torch.dtype, width: int, device: torch.device) -> None:
    x, weight = random(3, width, dtype=dtype, device=device), random(width, dtype=dtype, device=device, seed=2)
    assert close(kernels.norm(x, weight, 1e-5), rms(x.double(), weight.double(), 1e-5))


@by_dtype
@pytest.mark.parametrize("width", [96, 1030])
def test_gated(dtype: torch.dtype, width: int, device: torch.device) -> None:
    gate_up = random(3, 2 * width, dtype=dtype, device=device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert close(kernels.gated(gate_up), functional.silu(gate) * up)


ALL_TILES = pytest.mark.parametrize("tiles", [kernels.FEW_ROWS, kernels.ANY_ROWS], ids=["few rows", "any rows"])


@by_product_dtype
@ALL_TILES
@pytest.mark.parametrize(("n", "k"), [(64, 64), (45, 300)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(dtype: torch.dtype, tiles: Tiles, n: int, k: int, has_bias: bool, device: torch.device) -> None:
    x, weight = random(19, k, dtype=dtype, device=device), random(n, k, dtype=dtype, device=device, seed=1)
    bias = random(n, dtype=dtype, device=device, seed=2) if has_bias else None
    whole = kernels.linear(x, Linear(weight, bias), tiles)
    assert close(whole, functional.linear(x.double(), weight.double(), None if bias is None else bias.double()))
    for count in (1, 2, 5, 16, 17):
        assert torch.equal(kernels.linear(x[:count].contiguous(), Linear(weight, bias), tiles), whole[:count])


@by_product_dtype
@ALL_TILES
def test_add_linear(dtype: torch.dtype, tiles: Tiles, device: torch.device) -> None:
    x, weight = random(19, 300, dtype=dtype, device=device), random(45, 300, dtype=dtype, device=device, seed=1)
    residual, bias = random(19, 45, dtype=dtype, device=device, seed=2), random(45, dtype=dtype, device=device, seed=3)
    expected = residual.double() + functional.linear(x.double(), weight.double(), bias.double())
    kernels.add_linear(residual, x, Linear(weight, bias), tiles)
    assert close(residual, expected)


@by_product_dtype
@pytest.mark.parametrize("tiles", [kernels.FEW_GATED_ROWS, kernels.ANY_GATED_ROWS], ids=["few rows", "any rows"])
def test_gated_linear(dtype: torch.dtype, tiles: Tiles, device: torch.device) -> None:
    x, weight = random(19, 300, dtype=dtype, device=device), random(90, 300, dtype=dtype, device=device, seed=1)
    whole = kernels.gated_linear(x, Linear(weight), tiles)
    gate, up = functional.linear(x.double(), weight.double()).chunk(2, dim=-1)
    assert close(whole, functional.silu(gate) * up)
    for count in (1, 5, 17):
        assert torch.equal(kernels.gated_linear(x[:count].contiguous(), Linear(weight), tiles), whole[:count])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="in the interpreter a row's bits are those of NumPy's product")
@ALL_TILES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_at_every_place(dtype: torch.dtype, tiles: Tiles, device: torch.device) -> None:
    x, weight = random(67, 4096, dtype=dtype, device=device), random(512, 4096, dtype=dtype, device=device, seed=1)
    whole = kernels.linear(x, Linear(weight), tiles)
    for first in range(0, 67, 7):
        for count in (1, 2, 5, 16, 33):
            part = x[first : first + count].contiguous()
            assert torch.equal(kernels.linear(part, Linear(weight), tiles), whole[first : first + count])


class Store:
    """Keys and values of a few sequences, each with its own room."""

    def __init__(self, capacities: Sequence[int], shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.device = shape, device
        sizes = [(shape.num_kv_heads, capacity, shape.head_dim) for capacity in capacities]
        self.keys = [random(*size, dtype=dtype, device=device, seed=i) for i, size in enumerate(sizes)]
        self.values = [random(*size, dtype=dtype, device=device, seed=100 + i) for i, size in enumerate(sizes)]

    def inputs(self, rows: Sequence[tuple[int, int]], spare: int = 0) -> Inputs:
        """The inputs of a pass. rows: (sequence, position) of each row; spare: padding rows after them."""
        bucket = Bucket(len(rows) + spare, len(self.keys), 1)
        inputs = Inputs(bucket, 1, self.device)
        spans = [
            CacheSpan(
                next((i for i, (owner, _) in enumerate(rows) if owner == index), 0),
                sum(owner == index for owner, _ in rows),
                min((position for owner, position in rows if owner == index), default=0),
                keys.shape[1],
                array("q", [keys.data_ptr(), values.data_ptr()]),
            )
            for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True))
        ]
        inputs.fill(StackBatch([0] * len(rows), [position for _, position in rows], None, [0], spans))
        inputs.send()
        return inputs


def shape_of(num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> Shape:
    angles = torch.arange(256)[:, None] / 100.0 ** (torch.arange(head_dim // 2) / head_dim)
    tables = (angles.cos().to(device), angles.sin().to(device))
    return Shape(num_heads, num_kv_heads, head_dim, 1e-5, head_dim**-0.5, *tables)


def layer_of(window: int = 0, q_norm: Tensor | None = None, k_norm: Tensor | None = None) -> DeviceLayer:
    nothing = Linear(torch.empty(0))
    return DeviceLayer(torch.empty(0), torch.empty(0), q_norm, k_norm, nothing, nothing, nothing, nothing, window)


HEADS = pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 18), (2, 2, 8)])
ROWS = [(0, 0), (0, 1), (1, 69), (1, 70), (1, 71), (2, 4)]


@by_product_dtype
@HEADS
@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("parts", [1, 4])
def test_attend(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, window: int, parts: int, device: torch.device
) -> None:
    shape = shape_of(num_heads, num_kv_heads, head_dim, device)
    store = Store([16, 80, 16], shape, dtype, device)
    queries = random(len(ROWS) + 2, num_heads, head_dim, dtype=dtype, device=device, seed=7)
    ours = kernels.attend(queries, store.inputs(ROWS, spare=2), 0, layer_of(window), shape, parts)
    for row, (owner, position) in enumerate(ROWS):
        first = max(0, position + 1 - window) if window else 0
        keys, values = (
            part[owner][:, first : position + 1].double().repeat_interleave(num_heads // num_kv_heads, 0)
            for part in (store.keys, store.values)
        )
        scores = torch.einsum("hd,hnd->hn", queries[row].double(), keys) * shape.scale
        expected = torch.einsum("hn,hnd->hd", scores.softmax(-1), values)
        assert close(ours[row].view(num_heads, head_dim), expected), (row, owner, position)
        query, inputs = queries[row : row + 1].contiguous(), store.inputs([(owner, position)])
        alone = kernels.attend(query, inputs, 0, layer_of(window), shape, parts)
        assert torch.equal(alone[0], ours[row])
    assert not ours[len(ROWS) :].any()


@by_dtype
@HEADS
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_store(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, device: torch.device
) -> None:
    shape = shape_of(num_heads, num_kv_heads, head_dim, device)
    store = Store([16, 80, 16], shape, dtype, device)
    before = [part.clone() for part in (*store.keys, *store.values)]
    norms = [random(head_dim, dtype=dtype, device=device, seed=i) for i in (8, 9)] if has_norm else [None, None]
    qkv = random(len(ROWS) + 2, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    queries = kernels.rotate_and_store(qkv, store.inputs(ROWS, spare=2), 0, layer_of(0, *norms), shape)
    parts = qkv.double().view(len(qkv), -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    def turned(x: Tensor, norm: Tensor | None, position: int) -> Tensor:
        x = x if norm is None else rms(x, norm.double(), shape.epsilon)
        low, high = x.chunk(2, dim=-1)
        cos, sin = shape.cos[position].double(), shape.sin[position].double()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    for row, (owner, position) in enumerate(ROWS):
        assert close(queries[row], turned(parts[0][row], norms[0], position))
        assert close(store.keys[owner][:, position], turned(parts[1][row], norms[1], position))
        assert torch.equal(store.values[owner][:, position].double(), parts[2][row])
    written = {(owner, position) for owner, position in ROWS}
    for index, (now, then) in enumerate(zip((*store.keys, *store.values), before, strict=True)):
        others = [p for p in range(now.shape[1]) if (index % len(store.keys), p) not in written]
        assert torch.equal(now[:, others], then[:, others])


def test_nothing_is_stored_or_read_past_a_sequences_room(device: torch.device) -> None:
    """Drafting continues until the longest draft of the batch is done; the other sequences have no room for that."""
    shape = shape_of(2, 2, 8, device)
    around = random(2, 3, 2, 16, 8, dtype=torch.float32, device=device)  # memory before and after belongs to others
    before = around.clone()
    bucket = bucket_for(1, 1, 1)
    inputs = Inputs(bucket, 1, device)
    span = CacheSpan(0, 1, 15, 16, array("q", [around[0, 1].data_ptr(), around[1, 1].data_ptr()]))
    inputs.fill(StackBatch([0], [16], None, [0], [span]))
    inputs.send()
    qkv = random(1, 6 * 8, dtype=torch.float32, device=device)
    queries = kernels.rotate_and_store(qkv, inputs, 0, layer_of(), shape)
    assert torch.equal(around, before)
    around[:, 0], around[:, 2] = torch.nan, torch.nan
    assert kernels.attend(queries, inputs, 0, layer_of(), shape).isfinite().all()
