"""Layers whose weights are not in memory compute what the same layers do with their weights in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foredraft.kernels import InMemory, quantize_int8
from foredraft.model.stored import StoredEmbedding, StoredLinear, materialize
from tests.model.zoo import SPECIES


def stored(model: Any) -> Any:
    """The model with its linear layers and its embedding stored in int8, the head tied to the embedding if it was."""
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
def test_a_stored_model_is_its_materialized_one(name: str) -> None:
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
