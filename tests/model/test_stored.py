"""Layers with stored weights compute the same as those with their weights in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foredraft.kernels import InMemory, quantize_int8
from foredraft.model.stack import has_stack_form
from foredraft.model.stored import (
    PermutedLinear,
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
    materialize,
    materialize_experts,
)
from tests.model.zoo import SPECIES


def stored(model: Any) -> Any:
    """The model with its linear layers and embedding stored in int8; the lm_head stays tied to the embedding."""
    embedding = model.get_input_embeddings()
    source = InMemory(quantize_int8(embedding.weight.detach()))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                is_tied = child.weight is embedding.weight
                weight = source if is_tied else InMemory(quantize_int8(child.weight.detach()))
                setattr(parent, name, StoredLinear(weight, child.bias))
    model.set_input_embeddings(StoredEmbedding(source, model.dtype, embedding))
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
@torch.inference_mode()
def test_a_stored_model_equals_its_materialized_one(name: str) -> None:
    torch.manual_seed(0)
    model = stored(AutoModelForCausalLM.from_config(SPECIES[name].config()).eval())
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    before = model(input_ids=ids).logits
    materialize(model)
    assert not [module for module in model.modules() if isinstance(module, StoredLinear | StoredEmbedding)]
    assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-5)


@torch.inference_mode()
def test_a_tied_head_is_materialized_once() -> None:
    config = SPECIES["llama"].config()
    config.tie_word_embeddings = True
    model: Any = stored(AutoModelForCausalLM.from_config(config).eval())
    materialize(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@torch.inference_mode()
def test_a_layer_with_permuted_inputs_equals_the_plain_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 12, generator=generator), torch.randn(5, generator=generator)
    order = torch.randperm(12, generator=generator)
    layer = PermutedLinear(StoredLinear(InMemory(weight[:, order]), bias), order)
    x = torch.randn(2, 3, 12, generator=generator)
    expected = nn.functional.linear(x, weight, bias)
    assert torch.allclose(layer(x), expected, atol=1e-5)
    plain = layer.materialized(torch.float32)
    assert torch.equal(plain.weight, weight)
    assert torch.allclose(plain(x), expected, atol=1e-6)


@torch.inference_mode()
def test_materializing_undoes_permuted_inputs() -> None:
    layer = PermutedLinear(StoredLinear(InMemory(torch.arange(4.0)[None])), torch.tensor([2, 0, 3, 1]))
    model: Any = AutoModelForCausalLM.from_config(SPECIES["llama"].config())
    model.model.layers[0].mlp.down_proj = layer
    assert not has_stack_form(model)
    materialize(model)
    assert model.model.layers[0].mlp.down_proj.weight.tolist() == [[1.0, 3.0, 0.0, 2.0]]


@pytest.mark.parametrize("is_transposed", [False, True])
@torch.inference_mode()
def test_stored_experts_behave_like_a_parameter(is_transposed: bool) -> None:
    weights = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    experts = StoredExperts([InMemory(weight) for weight in weights], torch.float32, is_transposed=is_transposed)
    expected = weights.transpose(1, 2) if is_transposed else weights
    assert experts.shape == expected.shape
    assert torch.equal(experts[torch.tensor(1)], expected[1])
    owner = nn.Module()
    owner.up = experts
    materialize_experts(owner)
    assert isinstance(owner.up, nn.Parameter)
    assert torch.equal(owner.up, expected)
