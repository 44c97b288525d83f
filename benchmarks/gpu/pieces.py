"""Pieces of a step measured alone: products of few rows and attention, in every variant of the kernels, against the bandwidth of a copy.
`one_gpu.py` runs them. The fastest variants belong in `kernels.TILES` and in foredraft/gpu/passes.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.device import DEVICE, DTYPE, HAS_GPU, median_ms, wait
from foredraft.gpu import DeviceLayer, Inputs, Linear, Shape, kernels
from foredraft.gpu.buckets import Bucket
from foredraft.gpu.kernels import Tiles
from foredraft.kernels import CacheSpan, StackBatch

CACHED = 1 << 28
"""Bytes, more than fit in a device's cache. Matrices of at least this size in total are read before one is read again."""

_ROUNDS = 8
"""How often a captured graph runs everything that it measures."""

TRIED = (
    kernels.FEW_ROWS,
    kernels.FEW_GATED_ROWS,
    kernels.ANY_ROWS,
    Tiles(columns=16, inner=256),
    Tiles(stages=6),
    Tiles(columns=64),
    Tiles(rows=32, stages=5),
)


def products(shapes: dict[str, tuple[int, int]], rows: Sequence[int]) -> dict[str, Any]:
    """shapes: [n, k] of matrices by name. -> bytes of the matrix per second, by name, rows and variant"""
    return {name: _product(n, k, rows) for name, (n, k) in shapes.items()}


def _product(n: int, k: int, rows: Sequence[int]) -> dict[int, dict[str, float]]:
    num_bytes = n * k * DTYPE.itemsize
    copies = [Linear(torch.randn(n, k, device=DEVICE, dtype=DTYPE)) for _ in range(-(-CACHED // num_bytes))]
    copies = copies if HAS_GPU else copies[:1]
    forms: dict[str, Callable[[Tensor, Linear], Tensor]] = {"library": lambda x, m: functional.linear(x, m.weight)}
    forms |= {_name(tiles): partial(kernels.linear, tiles=tiles) for tiles in TRIED}
    forms["gated"] = kernels.gated_linear
    forms["gated, any rows"] = partial(kernels.gated_linear, tiles=kernels.ANY_GATED_ROWS)
    result = {}
    for count in rows:
        x = torch.randn(count, k, device=DEVICE, dtype=DTYPE)
        seconds = {form: _seconds([partial(product, x, m) for m in copies]) for form, product in forms.items()}
        result[count] = {form: num_bytes / took for form, took in seconds.items()}
    return result


def _name(tiles: Tiles) -> str:
    return "x".join(map(str, tiles))


def attention(
    num_heads: int, num_kv_heads: int, contexts: Sequence[int], rows: Sequence[int], parts: Sequence[int]
) -> dict[str, dict[int, float]]:
    """For one sequence and heads 128 wide. -> seconds for one layer, by "rows at context" and by number of parts"""
    result = {}
    for context in contexts:
        shape = Shape(num_heads, num_kv_heads, 128, 1e-5, 128**-0.5, *(torch.ones(1, 64, device=DEVICE),) * 2)
        store = torch.randn(2, num_kv_heads, context, 128, device=DEVICE, dtype=DTYPE)
        for count in rows:
            inputs = Inputs(Bucket(count, 1, count), 1, DEVICE)
            places = list(range(context - count, context))
            stores = array("q", [store[0].data_ptr(), store[1].data_ptr()])
            span = CacheSpan(0, count, context - count, context, stores)
            inputs.fill(StackBatch([0] * count, places, None, list(range(count)), [span]))
            inputs.send()
            queries = torch.randn(count, num_heads, 128, device=DEVICE, dtype=DTYPE)
            result[f"{count} at {context}"] = {
                number: _seconds([partial(kernels.attend, queries, inputs, 0, _layer(), shape, number)] * 8)
                for number in parts
            }
    return result


def _layer() -> DeviceLayer:
    nothing = Linear(torch.empty(0))
    return DeviceLayer(torch.empty(0), torch.empty(0), None, None, nothing, nothing, nothing, nothing, 0)


def _seconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one run: the median over replays of all runs in a row, several times, so that the start of a replay does not count."""
    replay = _captured([*runs] * _ROUNDS) if HAS_GPU else (lambda: [run() for run in runs])
    return median_ms(replay, repeats=7) / 1000 / len(runs) / (_ROUNDS if HAS_GPU else 1)


def _captured(runs: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    for run in runs:
        run()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    return graph.replay


def table(result: dict[str, Any], bytes_per_second: float | None) -> Iterator[str]:
    """A summary of both, line by line."""
    for name, by_rows in result.get("products", {}).items():
        if isinstance(by_rows, dict) and bytes_per_second:
            for count, speeds in by_rows.items():
                forms = ["library", "gated", *sorted(speeds, key=lambda form: -speeds[form])[:3]]
                shares = ", ".join(f"{form} {speeds[form] / bytes_per_second:.2f}" for form in forms)
                yield f"product {name}, {count} rows, of a copy's bandwidth: {shares}"
    for name, by_parts in result.get("attention", {}).items():
        if isinstance(by_parts, dict):
            yield f"attention {name}: us by parts { {parts: round(1e6 * took, 1) for parts, took in by_parts.items()} }"
