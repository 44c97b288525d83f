"""Models in four bits: their text is the same with every drafter; some layers stay in eight bits, and embeddings are packed."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foredraft.kernels import InMemory, load_kernels, quantize_int4, quantize_int8, why_none
from foredraft.kernels.weights import INT4_GROUPS, INT8
from foredraft.llm import LLM
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model
from foredraft.model.packed import NativeEmbedding, NativeLinear
from foredraft.model.prepare import prepare
from foredraft.model.probe import probe
from foredraft.model.stack import StackBody
from foredraft.model.stored import StoredEmbedding, StoredLinear
from foredraft.sampling import SamplingParams
from tests.methods import all_methods
from tests.model.zoo import CONTEXT, SPECIES

pytestmark = pytest.mark.skipif(load_kernels() is None, reason=f"no kernels: {why_none()}")

INT4 = LoadOptions(dtype="bfloat16", device="cpu", quantization="int4")
PROMPTS = ["def area(radius):\n", "Once upon a time", "import os\n", "class Tree:\n"]


@cache
def pair() -> LLM:
    return LLM(EMBEDDED / "target", draft_model=EMBEDDED / "draft", dtype="bfloat16", quantization="int4")


def written(llm: LLM, batch: int) -> list[list[int]]:
    """Texts, alternately greedy and seeded."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for kind in kinds * 4]
    prompts = [prompt for prompt in PROMPTS for _ in kinds]
    texts: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        some = slice(first, first + batch)
        texts += [output.outputs[0].token_ids for output in llm.generate(prompts[some], params[some])]
    return texts


@cache
def plain() -> list[list[int]]:
    return written(pair().with_drafter("none"), 1)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("method", all_methods(["draft_model", "suffix", "ngram", "self-int8", "suffix+self-int4"]))
def test_texts_at_four_bits_are_plain_decodings(method: str, batch: int) -> None:
    assert written(pair().with_drafter(method, 4), batch) == plain()


def test_a_four_bit_copy_drafts_for_a_bfloat16_target() -> None:
    llm = LLM(EMBEDDED / "target", method="self-int4", speculative_tokens=3, dtype="bfloat16")
    assert written(llm, 8) == written(llm.with_drafter("none"), 1)
    assert llm.engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize(("quantization", "kind"), [("int4", INT8), ("int4-all", INT4_GROUPS)])
def test_the_lm_head_is_in_eight_bits_unless_all_is_in_four(quantization: str, kind: int) -> None:
    model = load_model(EMBEDDED / "draft", LoadOptions(device="cpu", quantization=quantization))
    head: Any = model.hf.get_output_embeddings()
    layers = [m for m in model.hf.modules() if isinstance(m, NativeLinear) and m is not head]
    assert head.matrix.layout.kind == kind
    assert {layer.matrix.layout.kind for layer in layers} == {INT4_GROUPS}
    assert model.traits.row_exact


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_layers_that_no_group_divides_stay_in_int8_with_a_log_message(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = SPECIES[name].config()
    if name == "llama":
        config.intermediate_size = 72
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "foredraft"):
        model = load_model(hf, INT4)
    kinds = {m.matrix.layout.kind for m in model.hf.modules() if isinstance(m, NativeLinear)}
    assert kinds == {INT4_GROUPS, INT8}
    assert ("their number of inputs is not divisible by 32" in caplog.text) == (name == "llama")
    assert not [m for m in hf.modules() if isinstance(m, NativeLinear | StoredLinear)]  # the owner's model is as it was


def test_without_kernels_int4_is_ignored_with_a_log_message(caplog: pytest.LogCaptureFixture) -> None:
    options = LoadOptions(dtype="bfloat16", device="cpu", quantization="int4", kernels="torch")
    model = load_model(EMBEDDED / "draft", options)
    assert "quantization is skipped: four-bit products need the compiled kernels" in caplog.text
    assert not [m for m in model.hf.modules() if isinstance(m, NativeLinear | StoredLinear)]


def stored(name: str, *, tied: bool) -> Any:
    """A model with stored linear layers in four bits and a stored embedding in eight bits."""
    torch.manual_seed(0)
    config = SPECIES[name].config()
    config.tie_word_embeddings = tied
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    embedding = model.get_input_embeddings()
    source = InMemory(quantize_int8(embedding.weight.detach()))
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight = source if child.weight is embedding.weight else InMemory(quantize_int4(child.weight.detach()))
                setattr(parent, child_name, StoredLinear(weight, child.bias))
    model.set_input_embeddings(StoredEmbedding(source, model.dtype, embedding))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_a_stored_embedding_is_packed_and_shared_with_its_head(name: str, tied: bool) -> None:
    """The probe compares the logits with those of the stored layers."""
    hf = stored(name, tied=tied)
    options = LoadOptions(dtype="bfloat16", device="cpu")
    model: LanguageModel = probe(hf, name, CONTEXT, lambda ours: prepare(ours, name, options))
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    assert isinstance(embedding, NativeEmbedding)
    assert isinstance(head, NativeLinear)
    assert (head.matrix is embedding.matrix) == tied
    assert isinstance(model.body, StackBody) or name == "gemma3"
    assert not [m for m in hf.modules() if isinstance(m, StoredEmbedding | StoredLinear | nn.Embedding)]
