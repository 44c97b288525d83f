"""Where the layers of a checkpoint belong in a model."""

from __future__ import annotations

import pytest
import torch

from foredraft.model.quantized.skeleton import Destination, Skeleton
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.zoo import SPECIES


def skeleton(name: str) -> Skeleton:
    return Skeleton(SPECIES[name].config(), torch.float32, trust_remote_code=False)


def test_a_layer_is_found_by_its_name() -> None:
    llama = skeleton("llama")
    assert all(parameter.is_meta for parameter in llama.model.parameters())
    name = "model.layers.1.self_attn.k_proj.weight"
    assert llama.destination(name) == Destination(name)
    assert llama.destination("layers.1.self_attn.k_proj.weight") == Destination(name)
    assert llama.linear_shape(name) == (32, 64)


def test_a_transposed_layer_has_the_shape_of_a_linear_one() -> None:
    assert skeleton("gpt2").linear_shape("transformer.h.0.attn.c_attn.weight") == (192, 64)


def test_the_experts_of_a_mixture_are_parts_of_one_parameter() -> None:
    mixtral = skeleton("mixtral")
    parameter = "model.layers.0.mlp.experts.gate_up_proj"
    stored = "model.layers.0.block_sparse_moe.experts.3"
    assert mixtral.destination(f"{stored}.w1.weight") == Destination(parameter, 3, 0, 2)
    assert mixtral.destination(f"{stored}.w3.weight") == Destination(parameter, 3, 1, 2)
    assert mixtral.destination(f"{stored}.w2.weight") == Destination(parameter.replace("gate_up", "down"), 3, 0, 1)
    assert mixtral.experts_shape(parameter) == (4, 192, 64)
    assert not mixtral.is_transposed(parameter)


def test_transposed_experts_have_the_shape_of_linear_layers() -> None:
    gpt_oss = skeleton("gpt_oss")
    parameter = "model.layers.0.mlp.experts.gate_up_proj"
    assert gpt_oss.is_transposed(parameter)
    assert gpt_oss.experts_shape(parameter) == (4, 192, 64)


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_proj.weight", "something.weight"])
def test_a_layer_that_the_model_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(UnreadableError, match="has no such weight"):
        skeleton("llama").destination(name)


def test_weights_of_other_kinds_are_refused() -> None:
    llama = skeleton("llama")
    with pytest.raises(
        UnreadableError, match="belongs to a LlamaRMSNorm; only linear layers and experts may be quantized"
    ):
        llama.linear_shape("model.norm.weight")
    with pytest.raises(UnreadableError, match="quantized as the experts of a mixture, but the model has none there"):
        llama.experts_shape("model.layers.0.mlp.up_proj.weight")
