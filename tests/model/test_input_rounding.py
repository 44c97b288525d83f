"""The effect of rounding inputs is measured on one sequence, whose inputs are rounded; nothing else is changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.errors import ModelError
from foredraft.kernels import InMemory, load_kernels, quantize_int4, why_none
from foredraft.model import LoadOptions
from foredraft.model.input_rounding import everywhere, never, rounded, rounded_inputs, where_stored
from foredraft.model.prepare import prepare, rounded_groups
from foredraft.model.probe import probe
from foredraft.model.stored import StoredLinear
from tests.model import zoo

NEEDS_KERNELS = pytest.mark.skipif(load_kernels() is None, reason=f"no kernels: {why_none()}")
DEEP = zoo.Species(
    "llama",
    {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 32, "num_attention_heads": 4},
)
INT8 = LoadOptions(device="cpu", quantization="int8")


def test_rounded_inputs_are_multiples_of_their_groups_step() -> None:
    x = torch.tensor([[12.7, -1.26, 0.04, 0.0], [0.0, 0.0, 254.0, 3.1]])
    expected = torch.tensor([[12.7, -1.3, 0.04, 0.0], [0.0, 0.0, 254.0, 4.0]])
    assert torch.allclose(rounded(x, 2), expected, rtol=1e-6)


def test_only_the_given_sequence_is_rounded() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    x = torch.randn(1, 5, 64).repeat(3, 1, 1)
    exact = model(x)
    with rounded_inputs(model, everywhere, 1) as rounds:
        noisy = model(x)
    assert rounds
    assert torch.equal(noisy[[0, 2]], exact[[0, 2]])
    error = (noisy[1] - exact[1]).norm() / exact[1].norm()
    assert 0.002 < error < 0.03, "two roundings to 127 steps"
    assert torch.equal(model(x), exact), "the hooks are gone"


def test_stored_weights_are_rounded_in_their_own_groups() -> None:
    stored = StoredLinear(InMemory(quantize_int4(torch.randn(8, 64))))
    floating = StoredLinear(InMemory(torch.randn(8, 64)))
    plain = torch.nn.Linear(64, 8)
    assert [where_stored(layer) for layer in (stored, floating, plain)] == [32, None, None]
    assert [everywhere(layer) for layer in (stored, plain)] == [32, 64]
    assert never(stored) is None


@pytest.mark.slow
@NEEDS_KERNELS
def test_a_deep_model_loads_in_int8_with_exact_rows() -> None:
    hf = zoo.random_model(DEEP.config()).to(torch.bfloat16)
    model = probe(hf, "deep", 256, lambda ours: prepare(ours, "deep", INT8), rounded_groups(INT8))
    assert model.traits.row_exact


@pytest.mark.slow
@NEEDS_KERNELS
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_deep_model_whose_rows_affect_each_other_is_refused(share: float) -> None:
    """share: the part of every row's logits that is replaced by another row's."""

    def leaky(ours: object) -> object:
        body = prepare(ours, "deep", INT8)  # type: ignore[arg-type]

        class Leaky(type(body)):  # type: ignore[misc]
            def __call__(self, *args: object, **kwargs: object) -> object:
                reading = super().__call__(*args, **kwargs)
                mixed: Tensor = (1 - share) * reading.logits + share * reading.logits.roll(1, 0)
                return reading._replace(logits=mixed)

        body.__class__ = Leaky
        return body

    hf = zoo.random_model(DEEP.config()).to(torch.bfloat16)
    with pytest.raises(ModelError, match="share a pass"):
        probe(hf, "deep", 256, leaky, rounded_groups(INT8))  # type: ignore[arg-type]
