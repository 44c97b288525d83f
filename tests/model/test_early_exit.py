"""The first layers of a model alone: they give what transformers' own shorter model gives, with the same weights and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft.engine.memory_pool import MemoryPool
from foredraft.errors import ModelError
from foredraft.kernels import load_kernels, unquantized, why_none
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.model.early_exit import first_layers
from foredraft.model.exits import Exit
from foredraft.model.stack import StackBody
from foredraft.model.structure import final_norm_of
from tests.model.zoo import SPECIES, Maker

IDS = [5, 9, 33, 2, 71, 8, 8, 40, 17, 3, 90, 64, 21, 5, 9, 12, 7]
FLOAT32 = LoadOptions(dtype="float32", device="cpu", kernels="torch")
BF16 = LoadOptions(dtype="bfloat16", device="cpu")
NORMS = {
    "llama": "model.norm",
    "gemma2": "model.norm",
    "gpt2": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    "opt": "model.decoder.final_layer_norm",
}


def logits(model: LanguageModel) -> Tensor:
    cache = model.new_cache(MemoryPool(1 << 28))
    cache.reserve(0, len(IDS))
    return model.read([Read(0, IDS, len(IDS))], cache).float()


def shorter_by_the_library(path: Any) -> Tensor:
    """The logits of transformers with only the first layer loaded."""
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return out


def random_exit(target: LanguageModel, adapter_size: int) -> Exit:
    exit = Exit(final_norm_of(target.hf), 64, adapter_size).float()
    generator = torch.Generator().manual_seed(1)
    for parameter in exit.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5
    return exit.requires_grad_(False)


def distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """The relative error of each row."""
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


@pytest.mark.parametrize("name", sorted(SPECIES))
def test_first_layers_give_the_logits_of_a_shorter_model(checkpoint: Maker, name: str) -> None:
    target = load_model(checkpoint(name), FLOAT32)
    whole = logits(target)
    shorter = first_layers(target, 1, None, unquantized)
    assert torch.allclose(logits(shorter), shorter_by_the_library(checkpoint(name)), atol=2e-4, rtol=1e-4)
    assert torch.equal(logits(target), whole)  # the whole model is unchanged


@pytest.mark.parametrize(("name", "path"), NORMS.items())
def test_the_final_norm_is_found(checkpoint: Maker, name: str, path: str) -> None:
    hf = load_model(checkpoint(name), FLOAT32).hf
    assert final_norm_of(hf) is hf.get_submodule(path)


@pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")
@pytest.mark.parametrize(
    ("name", "adapter_size"),
    [("llama", 0), ("llama", 32), ("qwen3", 32), ("granite", 32), ("mixtral", 32), ("gemma2", 0), ("starcoder2", 0)],
)
def test_the_compiled_kernels_compute_a_trained_exit(checkpoint: Maker, name: str, adapter_size: int) -> None:
    """Compared with transformers' code in float32, with weights rounded to bfloat16."""
    target, reference = load_model(checkpoint(name), BF16), load_model(checkpoint(name), FLOAT32)
    for parameter in reference.hf.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert isinstance(target.body, StackBody)
    exit = random_exit(reference, adapter_size)
    for parameter in exit.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ours, theirs = (logits(first_layers(each, 1, exit, unquantized)) for each in (target, reference))
    assert float(distances(ours, theirs).median()) < 0.03
    assert float(distances(ours, logits(first_layers(reference, 1, None, unquantized))).median()) > 0.1


def test_impossible_layers_and_adapters_are_refused(checkpoint: Maker) -> None:
    target = load_model(checkpoint("llama"), FLOAT32)
    for num_layers in (0, 2):
        with pytest.raises(ModelError, match="has 2 layers: an early exit must come after 1 to 1 of them"):
            first_layers(target, num_layers, None, unquantized)
    if load_kernels() is not None:
        gemma = load_model(checkpoint("gemma2"), BF16)
        with pytest.raises(ModelError, match="needs a target with SiLU-gated MLPs"):
            first_layers(gemma, 1, random_exit(gemma, 32), unquantized)
