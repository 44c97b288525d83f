"""Attention compared with a plain formula, and what the bits of a row depend on."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foredraft.engine.region import KEY_MULTIPLE, Region
from foredraft.kernels import Kernels, load_kernels, why_none
from foredraft.model.attention import AttentionMetadata, attend
from foredraft.model.batch import Span
from foredraft.utils.machine import cpu_features


def read(states: list[Tensor], cuts: list[int], kernels: Kernels | None = None, **options: Any) -> Tensor:
    """states: query, key, value [1, H, N, D] -> [N, Hq, Dv], read in pieces of these sizes and the rest. kernels: the compiled ones, or
    None for PyTorch's."""
    length = states[0].shape[2]
    region = Region()
    region.resize(-(-length // KEY_MULTIPLE) * KEY_MULTIPLE)
    layer = nn.Module()
    layer.layer_idx = 0
    ends = sorted({min(end, length) for end in accumulate(cuts, initial=0)} | {length})
    parts = []
    for start, end in pairwise(ends):
        query, key, value = (state[:, :, start:end] for state in states)
        metadata = AttentionMetadata([Span(region, 0, end - start, start)], kernels=kernels)
        parts.append(attend(layer, query, key, value, None, attention_metadata=metadata, **options)[0][0])
    return torch.cat(parts)


def random_states(length: int, heads: int, groups: int, key_width: int, value_width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads * groups, key_width), (heads, key_width), (heads, value_width))
    return [torch.randn(1, h, length, width, generator=generator) for h, width in shapes]


def plain(states: list[Tensor], window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    query, key, value = (state[0].double() for state in states)
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * query.shape[2] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    place = torch.arange(query.shape[1])
    distance = place[:, None] - place[None]
    seen = (distance >= 0) & (distance < (window or query.shape[1]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[1]]
    return (weights @ value).transpose(0, 1)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shape", [(37, 2, 3, 16, 16), (21, 1, 1, 8, 24), (1100, 2, 1, 16, 8)])
def test_attention_by_torch_is_the_formula(
    shape: tuple[int, int, int, int, int], window: int | None, softcap: float | None, sinks: bool
) -> None:
    states = random_states(*shape)
    s_aux = torch.randn(shape[1] * shape[2]) if sinks else None
    ours = read(states, [5, 1, 9, 2], sliding_window=window, softcap=softcap, s_aux=s_aux)
    assert torch.allclose(ours.double(), plain(states, window, softcap, s_aux), atol=1e-5)


SHORT = [(70, 4, 2, 8, 8), (70, 1, 1, 16, 16)]
LONG = [(1050, 4, 1, 64, 64), (1050, 1, 8, 64, 64), (2070, 2, 2, 24, 16), (2070, 3, 1, 64, 64)]
QUICK = [*product(SHORT, [False, True]), (LONG[0], True)]
SLOW = [pair for pair in product(LONG, [False, True]) if pair not in QUICK]


@pytest.mark.skipif("amx_bf16" in cpu_features(), reason="PyTorch's products by AMX are never called exact")
@pytest.mark.parametrize(
    ("shape", "sinks"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)], ids=str
)
@torch.inference_mode()
def test_in_bfloat16_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int, int, int, int], sinks: bool) -> None:
    """With rows read five at a time, one at a time or all at once; past every 1,024 keys, where the order of products changes."""
    states = [state.bfloat16() for state in random_states(*shape)]
    options = {"s_aux": torch.randn(shape[1] * shape[2]).bfloat16()} if sinks else {}
    whole = read(states, [], **options)
    near = max(0, (shape[0] - 1) // 1024 * 1024 - 20)
    for sizes in ([5] * 14, [1] * 50, [2, 3, 17, 1, 1, 8]):
        assert torch.equal(read(states, [near, *sizes], **options), whole)


@pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shape", [(37, 2, 3, 16, 16), (21, 1, 1, 8, 24), (1100, 2, 1, 16, 8)])
def test_attention_by_the_compiled_kernels_is_the_formula(
    shape: tuple[int, int, int, int, int], window: int | None, softcap: float | None, sinks: bool
) -> None:
    states = [state.bfloat16() for state in random_states(*shape)]
    s_aux = torch.randn(shape[1] * shape[2]).bfloat16() if sinks else None
    options = {"kernels": load_kernels(), "sliding_window": window, "softcap": softcap, "s_aux": s_aux}
    whole = read(states, [], **options)
    expected = plain(states, window, softcap, s_aux)
    assert ((whole.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-5).all()
    assert torch.equal(read(states, [5, 1, 9, 2], **options), whole)
