"""Fixtures: a toy target in a folder, with the embedded pair's tokenizer, and a text to train on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from foredraft.model import EMBEDDED

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
WORDS = ["the", "cat", "sat", "on", "a", "red", "mat", "and", "saw", "one", "more", "dog", "run", "home"]


def make_toy(folder: Path, *, num_layers: int = 3, width: int = 16, seed: int = 0) -> Path:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # a distribution that is not flat
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(EMBEDDED / "target" / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    lines = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 14)) for i in range(1, 60)]
    file.write_text("<|endoftext|>".join(lines))
    return file


def make_toy_t5(folder: Path, *, num_layers: int = 3, seed: int = 0) -> Path:
    """Make an encoder-decoder with the same tokenizer."""
    config = T5Config(
        vocab_size=4096,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=num_layers,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(EMBEDDED / "target" / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def toy_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_t5(tmp_path_factory.mktemp("toy_t5"))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Pairs in which each text is the reversed source."""
    file = tmp_path / "pairs.tsv"
    sources = [[WORDS[(i * j) % len(WORDS)] for j in range(1, 3 + i % 9)] for i in range(1, 60)]
    file.write_text("".join(f"{' '.join(words)}\t{' '.join(words[::-1])}\n" for words in sources))
    return file
