"""The embedded target as a GGUF file with its tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from transformers import AutoModelForCausalLM

from foredraft.model import EMBEDDED
from tests.cli.conftest import TEMPLATE
from tests.model.gguf.writing import write_model

TARGET = EMBEDDED / "target"


def write_embedded_target(path: Path, kind: str) -> Path:
    """Write the file. kind: the type of the matrices."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype="float32")
    return write_model(model, path, kind, _write_tokenizer)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = json.loads((TARGET / "tokenizer.json").read_text())
    vocabulary, special = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = [gguf.TokenType.CONTROL if id_ in special else gguf.TokenType.NORMAL for id_ in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
