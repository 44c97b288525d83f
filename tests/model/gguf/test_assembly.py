"""The logits of a file are those of the model that it was written from, and of transformers' own reading of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foredraft.errors import ModelError
from foredraft.kernels import load_kernels
from foredraft.kernels.weights import INT8
from foredraft.model import LoadOptions
from foredraft.model.batch import Read
from foredraft.model.families import FAMILIES
from foredraft.model.gguf import GGUFCheckpoint
from foredraft.model.gguf.architectures import ARCHITECTURES
from foredraft.model.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES
from foredraft.model.loading import load_model
from foredraft.model.stack import StackBody
from foredraft.model.stored import StoredEmbedding, StoredExperts, StoredLinear, materialize
from tests.model import zoo
from tests.model.gguf.writing import finish, tensors_of, write_model

FLOAT = LoadOptions(dtype="float32", kernels="torch")
LONG = torch.arange(3, 3 + 3 * zoo.WINDOW)[None]
"""Texts longer than a sliding window."""

SPECIES: dict[str, zoo.Species] = {
    **{
        name: zoo.SPECIES[name]
        for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "granite", "olmo2")
    },
    **{name: zoo.SPECIES[name] for name in ("phi3", "cohere", "glm4", "gpt_oss")},
    "cohere2": zoo.Species(
        "cohere2",
        {
            **zoo.SPECIES["cohere2"].settings,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "gemma": zoo.Species("gemma", {"head_dim": 16}),
    "mixtral": zoo.Species("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": zoo.Species("starcoder2"),
    "smollm3": zoo.Species("smollm3", {"num_hidden_layers": 4}),
    **{name: zoo.STACK_FORMS[name] for name in ("biases", "linear rope", "yarn rope", "narrow heads")},
}
WIDE = zoo.Species("llama", {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8})


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=LONG, use_cache=False).logits
    return logits


def load(path: Path, options: LoadOptions = FLOAT) -> PreTrainedModel:
    checkpoint = GGUFCheckpoint(str(path), options)
    checkpoint.check(has_weights=True)
    config = checkpoint.config()
    return checkpoint.model(config, options.torch_dtype(config))


@pytest.mark.parametrize("name", SPECIES)
def test_logits_are_those_of_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    model = zoo.random_model(SPECIES[name].config())
    path = write_model(model, tmp_path / "model.gguf")
    torch.testing.assert_close(logits_of(load(path)), logits_of(model), atol=1e-4, rtol=1e-5)


def reference(path: Path, config: Any = None) -> PreTrainedModel:
    """The file as transformers dequantises it. config: replaces the one that transformers makes."""
    config = config or AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def test_every_family_of_the_compiled_decoder_has_an_architecture() -> None:
    classes = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture.model_type] for architecture in ARCHITECTURES.values()}
    written_as_llama = {"MistralForCausalLM", "MixtralForCausalLM"}
    assert set(FAMILIES) <= classes | written_as_llama


def as_gpt_oss_files_are(tensor: str) -> str:
    if tensor.endswith("_exps.weight"):
        return "MXFP4"
    is_plain = tensor.endswith(".bias") or "ffn_gate_inp" in tensor
    return "F32" if is_plain else "Q8_0"


def filled(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """A gpt-oss model with the numbers that the `gguf` package reads from a file."""
    file = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for index, layer in enumerate(model.model.layers):
        for suffix, ending in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (file.pop(f"blk.{index}.ffn_{part}_exps.{suffix}") for part in ("gate", "up", "down"))
            both = np.empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]), np.float32)
            both[:, 0::2], both[:, 1::2] = gate, up
            for name, array in (("gate_up_proj", both), ("down_proj", down)):
                array = array if suffix == "bias" else array.swapaxes(1, 2)
                getattr(layer.mlp.experts, name + ending).data = torch.from_numpy(array.copy())
    for name, array in tensors_of(model, "gpt-oss").items():
        if name in file:
            array[...] = file.pop(name)  # a view of the parameter
    assert not file
    return model


@pytest.mark.parametrize("options", [FLOAT, LoadOptions()])
def test_gpt_oss_in_mxfp4_gives_the_logits_of_transformers(options: LoadOptions, tmp_path: Path) -> None:
    model = zoo.random_model(SPECIES["gpt_oss"].config())
    path = write_model(model, tmp_path / "model.gguf", as_gpt_oss_files_are)
    expected = logits_of(filled(model, path))
    ours = load(path, options)
    assert len([module for module in ours.modules() if isinstance(module, StoredExperts)]) == 4
    if options is FLOAT:
        torch.testing.assert_close(logits_of(ours), expected, atol=1e-4, rtol=1e-5)
    else:
        body = load_model(path, options)
        assert isinstance(body.body, StackBody) or load_kernels() is None
        reads = [Read(0, LONG[0].tolist(), LONG.shape[1])]
        logits = body.read(reads, body.scratch_cache([LONG.shape[1]]))
        difference = (logits - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
        assert float(difference.median()) < 0.05  # bfloat16, eight-bit activations


@pytest.mark.parametrize("kind", [*FLOAT_TYPES, *BLOCK_TYPES])
def test_every_type_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    path = write_model(zoo.random_model(WIDE.config()), tmp_path / "model.gguf", kind)
    torch.testing.assert_close(logits_of(load(path)), logits_of(reference(path)), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3", "gemma3"])
def test_a_quantized_file_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    path = write_model(zoo.random_model(SPECIES[name].config()), tmp_path / "model.gguf", "Q4_1")
    model = load(path)
    # transformers' configuration lacks logit caps, windows and head sizes
    torch.testing.assert_close(logits_of(model), logits_of(reference(path, model.config)), atol=1e-4, rtol=1e-5)


def test_rotary_frequency_factors_are_those_of_llama_3(tmp_path: Path) -> None:
    """The converter writes Llama 3.1's scaling as one factor for each frequency."""
    species = zoo.STACK_FORMS["llama3 rope"]
    model = zoo.random_model(species.config())
    plain = replace(species, settings={}).config()
    plain_model = AutoModelForCausalLM.from_config(plain)
    factors = plain_model.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert float(factors.max()) > 7

    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors.numpy().astype(np.float32))

    path = write_model(model, tmp_path / "model.gguf", change=add_factors)
    torch.testing.assert_close(logits_of(load(path)), logits_of(model), atol=1e-4, rtol=1e-5)


def test_a_tied_head_is_read_from_the_embedding(tmp_path: Path) -> None:
    model = zoo.random_model(WIDE.config())
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    path = write_model(model, tmp_path / "model.gguf", "Q8_0")
    ours = load(path)
    materialize(ours)
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    torch.testing.assert_close(logits_of(ours), logits_of(reference(path)), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_stay_in_the_file_for_the_kernels(name: str, tmp_path: Path) -> None:
    species = SPECIES[name]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    path = write_model(
        zoo.random_model(replace(species, settings={**species.settings, **sizes}).config()), tmp_path / "m.gguf", "Q4_0"
    )
    model = load(path, LoadOptions())
    experts = [module for module in model.modules() if isinstance(module, StoredExperts)]
    assert len(experts) == 2 * model.config.num_hidden_layers
    expected = logits_of(load(path))
    materialize(model)
    assert not [module for module in model.modules() if isinstance(module, StoredExperts)]
    difference = (logits_of(model) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(difference.median()) < 0.05  # bfloat16


def test_matrices_stay_in_the_file_for_the_kernels(tmp_path: Path) -> None:
    path = write_model(zoo.random_model(WIDE.config()), tmp_path / "model.gguf", "Q4_K")
    model = load(path, LoadOptions())
    assert model.dtype == torch.bfloat16
    assert isinstance(model.get_input_embeddings(), StoredEmbedding)
    matrices = [module for module in model.modules() if isinstance(module, StoredLinear)]
    assert len(matrices) == 2 * 7 + 1
    assert sum(parameter.numel() for parameter in model.parameters()) == 5 * 256
    close = logits_of(model).float() - logits_of(reference(path))
    assert float(close.abs().mean()) < 0.1


def test_an_unquantized_file_has_ordinary_layers_in_their_dtype(tmp_path: Path) -> None:
    path = write_model(zoo.random_model(WIDE.config()), tmp_path / "model.gguf", "BF16")
    model = load(path, LoadOptions())
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q6_K"])
def test_a_loaded_model_reads_ragged_batches(kind: str, tmp_path: Path) -> None:
    path = write_model(zoo.random_model(WIDE.config()), tmp_path / "model.gguf", kind)
    model = load_model(path, FLOAT)
    assert model.traits.vocab_size == zoo.VOCAB_SIZE
    assert model.traits.context_len == zoo.CONTEXT


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-all"])
def test_a_quantized_file_is_not_quantized_again(quantization: str, tmp_path: Path) -> None:
    path = write_model(zoo.random_model(WIDE.config()), tmp_path / "model.gguf", "Q4_0")
    with pytest.raises(
        ModelError, match=rf"quantized already \(Q4_0\).* rounded to {quantization}; leave quantization"
    ):
        load_model(path, LoadOptions(quantization=quantization))
    assert load_model(path, LoadOptions(quantization="none")).hf.dtype == torch.bfloat16


def test_an_unquantized_file_may_be_quantized(tmp_path: Path) -> None:
    path = write_model(zoo.random_model(WIDE.config()), tmp_path / "model.gguf", "F16")
    model = load_model(path, LoadOptions(quantization="int4"))
    if load_kernels() is not None:
        assert model.hf.lm_head.matrix.layout.kind == INT8


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    finish(writer)
    with pytest.raises(ModelError, match="architecture 'mamba' are not supported"):
        GGUFCheckpoint(str(tmp_path / "model.gguf"), FLOAT).config()
