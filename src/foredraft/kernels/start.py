"""Loads the compiled kernels if they run here: once per process, and only after a self-test."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from foredraft.kernels.build import INSTRUCTIONS, BuildError, library
from foredraft.kernels.decoder import AttentionShape, AttentionSpan
from foredraft.kernels.native import Kernels
from foredraft.kernels.weights import QuantizedWeight, quantize_int4, quantize_int8, unquantized

logger = logging.getLogger("foredraft")

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "f16c")
_NEEDED = {
    "amx": (*_AVX512, "amx_tile", "amx_int8", "amx_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma", "f16c"),
}
"""The processor flags that each of build.INSTRUCTIONS needs, as Linux names them."""

_HEAD_WIDTHS = (40, 64)
"""The second width uses AMX tiles where there are any, the first other loops."""

_ROW_COUNTS = (1, 2, 5, 8, 17, 40)


def load_kernels() -> Kernels | None:
    """The kernels, or None if they cannot be used here; the log says why, once."""
    return _outcome()[0]


def why_none() -> str | None:
    """The reason, in one line, why load_kernels returns None; None if it does not."""
    return _outcome()[1]


@cache
def _outcome() -> tuple[Kernels | None, str | None]:
    reason: str | None = f"the processor lacks {' or '.join(_NEEDED['avx2'])}"
    try:
        usable = usable_instructions()
    except BuildError as error:
        usable, reason = [], str(error)
    for instructions in usable:
        try:
            kernels = Kernels(library(instructions))
            reason = self_test(kernels)
        except (BuildError, OSError) as error:
            reason = str(error)
        if reason is None:
            return kernels, None
        logger.debug("kernels for %s are not used: %s", instructions, reason)
    logger.warning("compiled kernels are not used (%s): PyTorch's own kernels run instead, more slowly", reason)
    return None, reason


def usable_instructions() -> list[str]:
    """Those of build.INSTRUCTIONS that this processor supports, fastest first. Raises BuildError if it cannot be determined."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        raise BuildError("they need Linux on x86") from None
    return [name for name in INSTRUCTIONS if flags.issuperset(_NEEDED[name])]


def self_test(kernels: Kernels) -> str | None:
    """The fault of the kernels on this machine, or None: integer products must be exact, attention correct, and rows independent of
    how many share a call."""
    if not is_int8_exact(lambda weight, x: kernels.linear(kernels.pack(quantize_int8(weight)), x)):
        return "their int8 products are not exact here"
    if not all(_is_grouped_exact(kernels, weight) for weight in _grouped_cases()):
        return "their products with groups of inputs are not exact here"
    weight, x = _hard_case()
    for packed in (quantize_int8(weight), unquantized(weight), *_grouped_cases(), quantize_int4(weight)):
        matrix = kernels.pack(packed)
        whole = _bits(kernels.linear(matrix, x))  # as bits: some are NaN, because sums of groups overflow
        if any(not torch.equal(_bits(kernels.linear(matrix, x[:count])), whole[:count]) for count in _ROW_COUNTS):
            return "a row's bits depend on how many rows share its product here"
    return _attention_self_test(kernels)


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16)


def _attention_self_test(kernels: Kernels) -> str | None:
    """The fault of attention, or None: rows must match a reference, and have the same bits when computed alone. Windows are tested
    here, because the few tokens of a model's probe do not fill them."""
    generator = torch.Generator().manual_seed(0)
    sinks, bias = torch.randn(4, generator=generator), torch.randn(4, 2 * 18 + 1, generator=generator)
    shapes = (
        (AttentionShape(0.2), 0),
        (AttentionShape(0.2, window=9, softcap=1.5), 0),
        (AttentionShape(0.2, 20, sinks=sinks), 0),
        (AttentionShape(0.2, bias=bias), 0),
        (AttentionShape(0.2, bias=bias), 43),
    )
    for width, (shape, num_seen) in product(_HEAD_WIDTHS, shapes):
        query, keys, values = (torch.randn(4, 48, width, generator=generator).to(torch.bfloat16) for _ in range(3))
        reason = _attention_fault(kernels, query, keys[:2], values[:2], shape, num_seen)
        if reason is not None:
            return reason
    return None


def _attention_fault(
    kernels: Kernels, query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, num_seen: int
) -> str | None:
    def attend(first: int, last: int) -> Tensor:
        span = AttentionSpan(slice(0, last - first), first, keys, values, num_seen=num_seen)
        return kernels.attend([span], query[:, first:last], shape, last - first)

    whole = attend(0, 48)
    if not torch.allclose(whole.double(), attended(query, keys, values, shape, num_seen), 2.0**-8, 1e-5):
        return "their attention is wrong here"
    if any(not torch.equal(attend(row, row + 1)[0], whole[row]) for row in (0, 15, 16, 47)):
        return "a row's bits depend on how many rows share its attention here"
    return None


def attended(query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, num_seen: int = 0) -> Tensor:
    """Reference attention over a whole sequence. query: [Hq, N, D]; keys, values: [H, N, D]. num_seen: see AttentionSpan
    -> [N, Hq, D] float64"""
    groups = query.shape[0] // keys.shape[0]
    keys, values = (each.double().repeat_interleave(groups, 0) for each in (keys, values))
    scores = shape.scale * query.double() @ keys.transpose(1, 2)
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if shape.bias is not None:
        places, farthest = torch.arange(scores.shape[1]), shape.bias.shape[1] // 2
        scores += shape.bias.double()[:, (places - places[:, None]).clamp(-farthest, farthest) + farthest]
    seen = torch.ones(scores.shape[1:], dtype=torch.bool)
    seen = seen.tril() if num_seen == 0 else seen & (torch.arange(scores.shape[1]) < num_seen)
    if shape.window:
        seen = seen.triu(1 - shape.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if shape.sinks is not None:
        sinks = shape.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=2)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return (weights @ values).transpose(0, 1)


def is_int8_exact(linear: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether an int8 linear layer, (weight, x) -> y, equals integer arithmetic, with the largest numbers too."""
    weight, x = _hard_case()
    return torch.equal(linear(weight, x), linear_int8(weight, x))


def _hard_case() -> tuple[Tensor, Tensor]:
    """weight: [80, 320], x: [17, 320] bfloat16, with rows at the ends of the range."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_ROW_COUNTS), 320, generator=generator).to(torch.bfloat16)
    x[0], x[1, ::2] = 127.0, -3e38
    weight = torch.randn(80, 320, generator=generator)
    weight[0], weight[1] = 1.0, -1.0
    return weight, x


def _is_grouped_exact(kernels: Kernels, weight: QuantizedWeight) -> bool:
    """Whether the product equals the reference, for rows of integers with 127 in every group, so that nothing is rounded."""
    x = torch.randint(
        -127, 128, (max(_ROW_COUNTS), weight.shape[1]), generator=torch.Generator().manual_seed(1)
    ).float()
    x[0], x[1], x[2, ::2], x[:, ::16] = 127.0, -127.0, -127.0, 127.0
    matrix = kernels.pack(weight)
    exact = linear_grouped(weight, x, matrix.row_steps).to(torch.bfloat16)
    return torch.equal(kernels.linear(matrix, x.to(torch.bfloat16)), exact)


def _grouped_cases() -> list[QuantizedWeight]:
    """Weights [80, 320] of every layout, with codes at the ends of their range. Scales and offsets are chosen so that float32 represents
    every sum exactly."""
    generator = torch.Generator().manual_seed(2)
    levels = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
    cases = []
    for bits, group, has_offsets, table in (
        (4, 32, False, None),
        (4, 80, True, None),
        (4, 32, False, levels),
        (8, 16, False, None),
        (8, 32, True, None),
    ):
        most = 1 << (bits - 1)
        codes = torch.randint(-most, most, (80, 320), generator=generator)
        codes[0], codes[1], codes[2, ::2] = most - 1, -most, -most
        scales = 0.5 + 0.5 * torch.randint(0, 2, (80, 320 // group), generator=generator)
        offsets = torch.randint(-8, 8, scales.shape, generator=generator).float() if has_offsets else None
        kept = codes.to(torch.int8) if table is None else table[codes + most]
        cases.append(QuantizedWeight(kept, scales, offsets, group, bits, table))
    return cases


def linear_grouped(weight: QuantizedWeight, x: Tensor, row_steps: int = 127) -> Tensor:
    """Reference product with a scale for each group, up to rounding. weight: [n, k], x: [T, k]. row_steps: see PackedMatrix
    -> [T, n] float64"""
    rows, scales = _whole_rows(x.reshape(-1, weight.group), row_steps)
    return (rows * scales.double()).view(x.shape) @ weight.dequantized().double().T


def _whole_rows(x: Tensor, steps: int = 127) -> tuple[Tensor, Tensor]:
    """Round rows to integers from -steps to steps -> [T, k] int64, and the scale of each row [T, 1]"""
    largest = x.float().abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.div(torch.tensor(float(steps)), largest), torch.zeros(()))
    return (x.float() * inverse).round().to(torch.int64), largest / steps


def linear_int8(weight: Tensor, x: Tensor) -> Tensor:
    """Reference int8 product, in integer arithmetic. weight: [n, k] float, x: [T, k] bfloat16 -> [T, n] bfloat16"""
    codes, scales, *_ = quantize_int8(weight)
    rows, row_scales = _whole_rows(x)
    return ((rows @ codes.T.to(torch.int64)).float() * (scales[:, 0] * row_scales)).to(torch.bfloat16)
