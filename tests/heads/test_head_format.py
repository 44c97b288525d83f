"""Which heads are rounded to which precision."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import AutoConfig

from foredraft.heads import TargetShape, head_format, load_head
from foredraft.heads.head_format import NOT_ROUNDED, ROUNDED, HeadFormat
from foredraft.kernels import quantize_int4, quantize_int8, unquantized
from foredraft.model import EMBEDDED
from tests.heads.random_heads import embedded_head

SHAPE = TargetShape.of(AutoConfig.from_pretrained(EMBEDDED / "target"))


@pytest.mark.parametrize(("num_weights", "expected"), [(99, quantize_int8), (100, quantize_int4)])
def test_a_large_eagle_head_is_rounded_to_four_bits(
    num_weights: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_format, "LARGE_HEAD", 100)
    head = nn.Sequential(nn.Linear(40, 1), nn.Linear(1, num_weights - 40), nn.Embedding(1000, 2), nn.LayerNorm(40))
    eagle, medusa = (load_head(str(embedded_head(method)), SHAPE).config for method in ("eagle", "medusa"))
    assert ROUNDED.of(eagle, head) is expected
    assert ROUNDED.of(medusa, head) is quantize_int8
    assert NOT_ROUNDED.of(eagle, head) is unquantized
    assert HeadFormat.same(quantize_int8).of(eagle, head) is quantize_int8
