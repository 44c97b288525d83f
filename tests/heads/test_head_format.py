"""Which heads are rounded to which precision."""

from __future__ import annotations

import pytest
from torch import nn

from foredraft.heads import head_format
from foredraft.heads.head_format import NOT_ROUNDED, ROUNDED, HeadFormat
from foredraft.kernels import quantize_int4, quantize_int8, unquantized


@pytest.mark.parametrize(("num_weights", "expected"), [(99, quantize_int8), (100, quantize_int4)])
def test_a_large_head_is_rounded_to_four_bits(
    num_weights: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_format, "LARGE_HEAD", 100)
    head = nn.Sequential(nn.Linear(40, 1), nn.Linear(1, num_weights - 40), nn.Embedding(1000, 2), nn.LayerNorm(40))
    assert ROUNDED.of_eagle(head) is expected
    assert NOT_ROUNDED.of_eagle(head) is unquantized
    assert HeadFormat.same(quantize_int8).of_eagle(head) is quantize_int8
