"""Attention over caches, compared with a formula in float64, and what the bits of a row depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foredraft.kernels import AttentionShape, AttentionSpan, Kernels

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Heads:
    """num_kv key-value heads, each with `groups` query heads."""

    num_kv: int
    groups: int
    key_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """query: [Hq, R, Dk]; keys, values: [H, capacity, D], start + R of them used; mask: [R, N] or None. num_seen: see AttentionSpan."""

    start: int
    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    num_seen: int = 0

    @property
    def num_rows(self) -> int:
        return self.query.shape[1]

    @property
    def end(self) -> int:
        return self.num_seen or self.start + self.num_rows

    def rows(self, first: int, last: int) -> Sequence:
        """The same sequence, with only these rows to be read."""
        mask = None if self.mask is None else self.mask[first:last]
        return replace(self, start=self.start + first, query=self.query[:, first:last], mask=mask)


def sequence(heads: Heads, start: int, num_rows: int, *, seed: int = 0, has_mask: bool = False) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    capacity = -(-(start + num_rows) // 64) * 64

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(BF16)

    mask = None
    if has_mask:
        mask = torch.rand(num_rows, capacity, generator=generator) < 0.5
        mask[torch.arange(num_rows), torch.arange(start, start + num_rows)] = True
    return Sequence(
        start,
        randn(heads.num_kv * heads.groups, num_rows, heads.key_width),
        randn(heads.num_kv, capacity, heads.key_width),
        randn(heads.num_kv, capacity, heads.value_width),
        mask,
    )


def attend(kernels: Kernels, sequences: list[Sequence], shape: AttentionShape) -> list[Tensor]:
    """Attend in one call. -> [R, Hq, Dv] for each sequence"""
    spans, first = [], 0
    for s in sequences:
        padded = -(-s.end // 16) * 16
        mask = None if s.mask is None else s.mask[:, :padded].contiguous()
        rows = slice(first, first + s.num_rows)
        spans.append(AttentionSpan(rows, s.start, s.keys[:, :padded], s.values[:, :padded], mask, s.num_seen))
        first += s.num_rows
    query = torch.cat([s.query for s in sequences], dim=1)
    return list(kernels.attend(spans, query, shape, first).split([s.num_rows for s in sequences]))


def formula(s: Sequence, shape: AttentionShape) -> Tensor:
    groups = s.query.shape[0] // s.keys.shape[0]
    keys = s.keys[:, : s.end].double().repeat_interleave(groups, 0)
    values = s.values[:, : s.end].double().repeat_interleave(groups, 0)
    scores = s.query.double() @ keys.transpose(1, 2) * shape.scale
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    distance = torch.arange(s.start, s.start + s.num_rows)[:, None] - torch.arange(s.end)
    if shape.bias is not None:
        farthest = shape.bias.shape[1] // 2
        scores = scores + shape.bias.double()[:, farthest - distance.clamp(-farthest, farthest)]
    seen = (distance >= 0) & (distance < (shape.window or s.end))
    if s.num_seen:
        seen = torch.ones_like(seen)
    if s.mask is not None:
        seen &= s.mask[:, : s.end]
    scores = scores.masked_fill(~seen, -torch.inf)
    if shape.sinks is not None:
        scores = torch.cat([scores, shape.sinks.double()[:, None, None].expand(-1, s.num_rows, 1)], -1)
    return (scores.softmax(-1)[..., : s.end] @ values).transpose(0, 1)


def assert_near(ours: Tensor, true: Tensor) -> None:
    assert ours.dtype == BF16
    error = (ours.double() - true).abs()
    assert (error <= 2.0**-8 * true.abs() + 1e-5).all(), float(error.max())


HEADS = [
    Heads(1, 1, 16, 16),
    Heads(2, 3, 16, 16),
    Heads(2, 1, 40, 24),
    Heads(3, 2, 20, 72),
    Heads(1, 9, 64, 128),
    Heads(2, 2, 128, 64),
    Heads(2, 2, 96, 80),
    Heads(1, 3, 160, 48),
    Heads(1, 2, 7, 5),
]
SPANS = [(0, 1), (0, 40), (5, 3), (15, 1), (16, 1), (63, 1), (64, 7), (130, 40)]
SHAPES = [{}, {"window": 1}, {"window": 7}, {"window": 16}, {"softcap": 2.0}, {"window": 20, "softcap": 3.0}]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("settings", SHAPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_spans_of_different_lengths_in_one_call_follow_the_formula(
    kernels: Kernels, heads: Heads, settings: dict[str, float], has_mask: bool, has_sinks: bool
) -> None:
    sinks = torch.randn(heads.num_kv * heads.groups) if has_sinks else None
    shape = AttentionShape(heads.key_width**-0.5, sinks=sinks, **settings)
    sequences = [sequence(heads, *span, seed=i, has_mask=has_mask and i % 2 == 0) for i, span in enumerate(SPANS)]
    for s, ours in zip(sequences, attend(kernels, sequences, shape), strict=True):
        assert_near(ours, formula(s, shape))


@pytest.mark.parametrize("start", [1000, 1023, 4090])
def test_attention_over_many_keys_follows_the_formula(kernels: Kernels, start: int) -> None:
    s = sequence(Heads(2, 2, 64, 64), start, 9)
    shape = AttentionShape(0.125)
    assert_near(attend(kernels, [s], shape)[0], formula(s, shape))


@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("score", [200.0, 1e4, 1e6, 1e8, 1e10, 1e20, 1e38])
def test_large_scores_follow_the_formula(kernels: Kernels, score: float, num_rows: int) -> None:
    """One key in sixteen has this score and the others 0, whole blocks of keys or not, and values up to 1e37."""
    s = sequence(Heads(1, 2, 16, 16), 100 - num_rows, num_rows)
    query, keys, values = s.query * 0, s.keys * 0, s.values.clone()
    query[..., 0], keys[:, 3::16, 0] = score / 4, 4.0
    if score < 1e37:
        values[:, 4::16] = 1e37  # of keys whose weights are 0
    s = replace(s, query=query, keys=keys, values=values)
    [ours] = attend(kernels, [s], AttentionShape(1.0))
    assert_near(ours, formula(s, AttentionShape(1.0)))


@pytest.mark.parametrize("num_rows", [1, 40])
def test_scores_that_overflow_give_nan(kernels: Kernels, num_rows: int) -> None:
    s = sequence(Heads(1, 1, 16, 16), 100 - num_rows, num_rows)
    s = replace(s, query=s.query * 0 + 3e38, keys=s.keys * 0 - 3e38)
    [ours] = attend(kernels, [s], AttentionShape(1.0))
    assert ours.isnan().all()


@pytest.mark.parametrize("settings", [{}, {"window": 11}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_chunk_and_number_of_threads(
    kernels: Kernels, heads: Heads, has_mask: bool, settings: dict[str, float]
) -> None:
    shape = AttentionShape(heads.key_width**-0.5, **settings)
    s, company = sequence(heads, 41, 40, has_mask=has_mask), sequence(heads, 90, 3, seed=1)
    (whole,) = attend(kernels, [s], shape)
    assert torch.equal(attend(kernels, [company, s], shape)[1], whole)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for ends in ([0, 5, 6, 9, 23, 24, 40], range(41)):
            cuts = [s.rows(a, b) for a, b in pairwise(ends)]
            assert torch.equal(torch.cat([attend(kernels, [cut], shape)[0] for cut in cuts]), whole)
            # consecutive parts in one call too, since all keys are there
            assert torch.equal(torch.cat(attend(kernels, cuts, shape)), whole)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_what_is_after_a_span_in_the_cache_is_not_seen(kernels: Kernels, heads: Heads) -> None:
    for start, num_rows in SPANS:
        s = sequence(heads, start, num_rows)
        shape = AttentionShape(heads.key_width**-0.5)
        (expected,) = attend(kernels, [s], shape)
        for garbage in (3e38, -3e38, 0.0):
            s.keys[:, s.end :] = garbage
            s.values[:, s.end :] = garbage
            assert torch.equal(attend(kernels, [s], shape)[0], expected)


@pytest.mark.parametrize("width", [16, 20])
def test_queries_may_have_any_strides(kernels: Kernels, width: int) -> None:
    """Models pass [T, Hq, D] viewed as [Hq, T, D], sometimes with gaps."""
    heads = Heads(2, 3, width, 24)
    s = sequence(heads, 30, 11)
    shape = AttentionShape(0.3)
    (expected,) = attend(kernels, [s], shape)
    spans = [AttentionSpan(slice(0, 11), 30, s.keys[:, :48], s.values[:, :48])]
    by_row = s.query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.zeros(6, 11, 2 * width, dtype=BF16)
    wide[..., width:] = s.query
    by_column = s.query.transpose(1, 2).contiguous().transpose(1, 2)
    for query in (by_row, wide[..., width:], by_column):
        assert not query.is_contiguous()
        assert torch.equal(kernels.attend(spans, query, shape, 11), expected)


def test_rows_of_no_span_are_zero(kernels: Kernels) -> None:
    s = sequence(Heads(2, 1, 16, 16), 3, 4)
    query = torch.cat([s.query, torch.full((2, 3, 16), torch.nan, dtype=BF16)], dim=1)
    span = AttentionSpan(slice(0, 4), 3, s.keys[:, :16], s.values[:, :16])
    out = kernels.attend([span], query, AttentionShape(0.25), 7)
    assert torch.equal(out[:4], attend(kernels, [s], AttentionShape(0.25))[0])
    assert not out[4:].any()


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_visible_nan_gives_nan(kernels: Kernels, where: str, width: int) -> None:
    heads = Heads(2, 2, width, width)
    s = sequence(heads, 20, 4)
    (good,) = attend(kernels, [s], AttentionShape(0.25))
    if where == "query":
        s.query[3, 2] = torch.nan
        out = attend(kernels, [s], AttentionShape(0.25))[0]
        assert out[2, 3].isnan().all()
        others = torch.ones(4, 4, dtype=torch.bool)
        others[2, 3] = False
        assert torch.equal(out[others], good[others])
        return
    {"key": s.keys, "value": s.values}[where][1, 7] = torch.nan
    out = attend(kernels, [s], AttentionShape(0.25))[0]
    assert out[:, 2:].isnan().all()  # the queries of the second key-value head
    assert torch.equal(out[:, :2], good[:, :2])


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_masked_nan_does_not_affect_a_row(kernels: Kernels, bad: float, width: int) -> None:
    """A later row of the same pass, such as a draft token, only affects itself and the rows after it."""
    s = sequence(Heads(1, 2, width, width), 20, 4)
    (good,) = attend(kernels, [s], AttentionShape(0.25))
    s.keys[:, 22], s.values[:, 22] = torch.nan, bad
    (out,) = attend(kernels, [s], AttentionShape(0.25))
    assert out[2:].isnan().all()
    assert torch.equal(out[:2], good[:2])


@pytest.mark.parametrize("settings", [{}, {"window": 70}, {"window": 3}], ids=str)
@pytest.mark.parametrize("heads", [Heads(1, 3, 64, 64), Heads(2, 1, 40, 24)], ids=str)
def test_a_row_of_a_long_prompt_has_the_same_bits_alone(
    kernels: Kernels, heads: Heads, settings: dict[str, float]
) -> None:
    shape = AttentionShape(heads.key_width**-0.5, **settings)
    s = sequence(heads, 100, 200)
    (whole,) = attend(kernels, [s], shape)
    assert_near(whole, formula(s, shape))
    for row in (0, 1, 63, 64, 130, 199):
        assert torch.equal(attend(kernels, [s.rows(row, row + 1)], shape)[0][0], whole[row])


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_nan_outside_the_window_does_not_affect_a_row(kernels: Kernels, num_rows: int, width: int) -> None:
    s, shape = sequence(Heads(1, 3, width, width), 20, num_rows), AttentionShape(0.25, window=5)
    (good,) = attend(kernels, [s], shape)
    s.keys[:, 16], s.values[:, 16] = torch.nan, torch.nan  # position 20 is the last one that sees it
    (out,) = attend(kernels, [s], shape)
    assert out[0].isnan().all()
    assert torch.equal(out[1:], good[1:])


FARTHEST = (3, 20, 128)


@pytest.mark.parametrize("num_seen", [0, 1, 37, 100])
@pytest.mark.parametrize("farthest", FARTHEST)
@pytest.mark.parametrize("heads", [Heads(4, 1, 64, 64), Heads(2, 3, 40, 24)], ids=str)
def test_relative_bias_and_bidirectional_keys_follow_the_formula(
    kernels: Kernels, heads: Heads, farthest: int, num_seen: int
) -> None:
    """T5's attention in a decoder, in an encoder, and to a source. Rows have the same bits alone."""
    bias = torch.randn(heads.num_kv * heads.groups, 2 * farthest + 1, generator=torch.Generator().manual_seed(5))
    shape = AttentionShape(0.3, bias=bias)
    sequences = [replace(sequence(heads, *span, seed=i), num_seen=num_seen) for i, span in enumerate(SPANS)]
    sequences = [s for s in sequences if s.end <= s.keys.shape[1]]
    for s, ours in zip(sequences, attend(kernels, sequences, shape), strict=True):
        assert_near(ours, formula(s, shape))
        for row in {0, s.num_rows // 2, s.num_rows - 1}:
            assert torch.equal(attend(kernels, [s.rows(row, row + 1)], shape)[0][0], ours[row])


def test_what_is_after_bidirectional_keys_is_not_seen(kernels: Kernels) -> None:
    for num_rows in (1, 9):
        s = replace(sequence(Heads(2, 1, 64, 64), 0, num_rows), num_seen=21)
        (expected,) = attend(kernels, [s], AttentionShape(0.25))
        s.keys[:, 21:] = torch.nan
        s.values[:, 21:] = torch.nan
        assert torch.equal(attend(kernels, [s], AttentionShape(0.25))[0], expected)
