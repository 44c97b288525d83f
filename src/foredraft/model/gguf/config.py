"""A GGUF file's configuration as one of the Hugging Face class of its architecture."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from foredraft.errors import ModelError, one_line
from foredraft.model.gguf.architectures import ARCHITECTURES, Architecture
from foredraft.model.gguf.container import GGUFFile
from foredraft.model.gguf.metadata import Metadata
from foredraft.model.gguf.rope import rope_parameters
from foredraft.model.gguf.tensors import refuse_unsupported_type
from foredraft.model.gguf.tokenizer import end_ids

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_LAYER = re.compile(r"blk\.(\d+)\.")
_DTYPES = {frozenset({"F32"}): torch.float32, frozenset({"F16"}): torch.float16}


def architecture_of(metadata: Metadata, file: GGUFFile) -> Architecture:
    """Raises ModelError for an unsupported architecture, and for a file without a language model."""
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise ModelError(f"{file.path}: a GGUF file of type {kind[:40]!r}, not a model; give the model's own file")
    if metadata.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF files of architecture {metadata.architecture[:40]!r} are not supported; give the original "
            f"checkpoint, or one of {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[metadata.architecture]


def config_of(file: GGUFFile) -> PretrainedConfig:
    """Raises ModelError for missing or impossible metadata."""
    metadata = Metadata(file)
    architecture = architecture_of(metadata, file)
    for entry in file.tensors.values():
        refuse_unsupported_type(file, entry)
    fields = _common(metadata, file, architecture)
    fields |= architecture.more(metadata, file, fields)
    try:
        config: PretrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # the library's own checks of these values
        raise ModelError(f"{file.path}: its metadata does not describe a model: {one_line(error)}") from error
    config.name_or_path = str(file.path)
    return config


def _common(metadata: Metadata, file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    num_heads = metadata.integer("{arch}.attention.head_count")
    hidden_size, vocab_size = metadata.integer("{arch}.embedding_length"), _vocab_size(file)
    head_dim = metadata.integer("{arch}.attention.key_length", max(1, hidden_size // num_heads))
    if metadata.integer("{arch}.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: its keys and values have different lengths, which is not supported")
    context_len = metadata.integer("{arch}.context_length")
    epsilon, epsilon_key = architecture.epsilon
    return {
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("{arch}.feed_forward_length", hidden_size),
        "num_hidden_layers": _num_layers(metadata, file),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context_len,
        "rope_parameters": rope_parameters(metadata, file, head_dim, context_len),
        epsilon: metadata.number(epsilon_key),
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": _dtype(file),
        **_special_ids(metadata, vocab_size),
    }


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{file.path}: it has no tensor {EMBEDDING!r} with a row for each token; give the model's own file"
        )
    return embedding.shape[0]


def _num_layers(metadata: Metadata, file: GGUFFile) -> int:
    """The number of layers in the metadata, which must be that of the file's tensors."""
    said = metadata.integer("{arch}.block_count")
    present = {int(match[1]) for match in map(_LAYER.match, file.tensors) if match is not None}
    if len(present) != said or max(present) != said - 1:
        raise ModelError(
            f"{file.path}: its metadata specifies {said} layers, but its tensors make up {len(present)}; download it again"
        )
    return said


def _dtype(file: GGUFFile) -> torch.dtype:
    """The dtype of a file of plain numbers; bfloat16 for a quantized one."""
    kinds = frozenset(entry.kind for entry in file.tensors.values() if len(entry.shape) > 1)
    return _DTYPES.get(kinds, torch.bfloat16)


def _special_ids(metadata: Metadata, vocab_size: int) -> dict[str, Any]:
    ends = end_ids(metadata, vocab_size)
    return {
        "bos_token_id": metadata.token_id("bos", vocab_size),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.token_id("padding", vocab_size),
    }
