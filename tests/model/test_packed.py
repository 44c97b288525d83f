"""Packed layers give the bits of the layers they replace, for every number of rows the engine can produce."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from foredraft.kernels import linear_int8, quantize_int8
from foredraft.model import EMBEDDED, LoadOptions, load_model
from foredraft.model.packed import Int8Linear, PackedLinear, dense_weights, int8_is_exact, pack_linears, packs


def packs_here() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


pytestmark = pytest.mark.skipif(not packs_here(), reason="this processor has no bfloat16 products of its own")


class Two(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a = nn.Linear(256, 704, bias=bias)
        self.b = Conv1D(128, 704)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_packed_layers_give_the_same_bits_for_any_number_of_rows(bias: bool) -> None:
    torch.manual_seed(0)
    model = Two(bias).to(torch.bfloat16)
    x = torch.randn(1, 200, 256).to(torch.bfloat16)
    expected = model(x)
    assert pack_linears(model, PackedLinear.of) == 2  # type: ignore[arg-type]
    assert isinstance(model.a, PackedLinear)
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)
    whole = model(x)
    for num_rows in (2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 65, 200):
        assert torch.equal(model(x[:, 3 : 3 + num_rows]), whole[:, 3 : 3 + num_rows])


def test_only_models_that_foredraft_loads_are_packed() -> None:
    """A user's own model keeps its layers; one that foredraft loads does not keep the originals beside the packed ones."""
    ours = load_model(EMBEDDED / "target", LoadOptions(dtype="bfloat16", device="cpu"))
    assert not [m for m in ours.hf.modules() if type(m) is nn.Linear]
    theirs = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.bfloat16)
    load_model(theirs, LoadOptions())
    assert [m for m in theirs.modules() if type(m) is nn.Linear]
    assert packs(torch.bfloat16, torch.device("cpu"), is_compiled=False)
    assert not packs(torch.float32, torch.device("cpu"), is_compiled=True)


@pytest.mark.skipif(not int8_is_exact(), reason="PyTorch's int8 products are not exact on this processor")
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_int8_without_kernels_is_exact_for_any_number_of_rows(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for n, k in ((80, 320), (33, 100), (1, 7), (130, 2)):
        weight, shift = torch.randn(n, k, generator=generator), torch.randn(n, generator=generator)
        x = torch.randn(1, 70, k, generator=generator).to(torch.bfloat16)
        x[0, 0], x[0, 1], x[0, 2] = 0.0, 3e38, torch.nan
        layer = Int8Linear(quantize_int8(weight), shift if bias else None)
        whole = layer(x)
        assert whole.shape == (1, 70, n)
        assert not whole[0, 2].isfinite().any()
        if not bias:
            finite = torch.arange(70) != 2
            assert torch.equal(whole[0, finite], linear_int8(weight, x[0, finite]))
        for num_rows in (1, 2, 5, 16, 17, 65):
            rows = layer(x[:, 3 : 3 + num_rows])
            assert torch.equal(rows, whole[:, 3 : 3 + num_rows])


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_packed_weights_can_be_unpacked(bias: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 704, bias=bias), nn.LayerNorm(704), nn.Linear(704, 16, bias=bias)).bfloat16()
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert pack_linears(model, PackedLinear.of) == 2  # type: ignore[arg-type]
    found = dense_weights(model)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)
