"""The models and prompts that the programs run: context sizes, long prompts, and operations of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers import model_sets
from benchmarks.peers.model_sets import MODEL_SETS, cache_gib, context_for, long_prompts, prompt_multiplications

CONFIG: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}


def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    assert not add_special_tokens
    return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts = ["one", "another", "third"]
    monkeypatch.setattr(model_sets, "conversation_starts", lambda count: texts)
    return texts


def test_long_prompts_have_their_length_and_begin_differently(questions: list[str]) -> None:
    prompts = long_prompts(tokenizer, 30, 3)
    assert [len(ids) for ids in prompts] == [30, 30, 30]
    texts = ["".join(map(chr, ids)) for ids in prompts]
    assert [text.split("\n\n")[0] for text in texts] == questions
    assert texts[2].startswith("third\n\none\n\nanother\n\nthird")


def test_the_operations_of_a_prompt_fit_the_size_of_the_model() -> None:
    length = 7
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    matrices = sum(module.weight.numel() for module in linear if module is not model.lm_head) * length
    head = model.lm_head.weight.numel()
    pairs = sum(1 for query in range(length) for key in range(query + 1))
    scores_and_sums = 2 * pairs * CONFIG["head_dim"] * CONFIG["num_attention_heads"] * CONFIG["num_hidden_layers"]
    assert prompt_multiplications(CONFIG, length) == matrices + head + scores_and_sums


def test_a_context_fits_the_request() -> None:
    assert [context_for(longest) for longest in (1, 1024, 1025, 4097)] == [1024, 1024, 1536, 4608]


def test_the_cache_fits_the_batch_with_room_to_spare() -> None:
    smollm2 = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
    for context, batch in ((1024, 1), (4608, 1), (1024, 32), (4608, 32)):
        exact = 2 * 2 * 30 * 3 * 64 * context * batch / 2**30
        assert 1.5 * exact <= cache_gib(smollm2, context, batch) < 1.5 * exact + 1


def test_folders_differ() -> None:
    folders = [model_set.folder for model_set in MODEL_SETS.values()]
    assert len(set(folders)) == len(folders)
    assert [name for name, model_set in MODEL_SETS.items() if model_set.has_draft] == ["embedded"]
