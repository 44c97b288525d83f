"""Two files that people use: their logits are those of the model that transformers dequantises, and their texts make sense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from foredraft import LLM, SamplingParams
from foredraft.model import LoadOptions
from foredraft.model.gguf import GGUFCheckpoint
from foredraft.model.stored import materialize

SMOLLM2, GEMMA3 = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
TEXT = "The Danube rises in the Black Forest and flows 2,850 km east, through ten countries, to the Black Sea."

pytestmark = [pytest.mark.slow, pytest.mark.real_model]


def dequantised(path: Path, config: PretrainedConfig) -> PreTrainedModel:
    """The model as dequantised by transformers, with the configuration that it reads. config: gives the names of the parameters. The
    file is read once, since that takes transformers most of a minute."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read["config"]), dtype=torch.float32)
    model.load_state_dict(read["tensors"], strict=False)
    model.tie_weights()
    return model.eval()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_logits_are_those_of_transformers(name: str, real_models: Path) -> None:
    checkpoint = GGUFCheckpoint(str(real_models / name), LoadOptions(dtype="float32", kernels="torch"))
    ids = checkpoint.tokenizer()(TEXT, return_tensors="pt").input_ids
    model = checkpoint.model(checkpoint.config(), torch.float32)
    materialize(model)
    theirs = dequantised(real_models / name, model.config)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("name", "words"), [(SMOLLM2, "Paris"), (GEMMA3, "France")])
def test_the_models_continue_a_text(name: str, words: str, real_models: Path) -> None:
    llm = LLM(real_models / name, method="none", dtype="float32")
    (output,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=12))
    assert words in output.outputs[0].text


def test_the_chat_model_ends_its_answer(real_models: Path) -> None:
    llm = LLM(real_models / SMOLLM2, method="none", dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France? One sentence."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=60))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
