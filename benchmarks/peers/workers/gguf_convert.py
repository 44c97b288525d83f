"""Write a Llama checkpoint as GGUF for llama.cpp, weights in bf16 or q8_0. Needs numpy and gguf, not torch.

    python -m benchmarks.peers.workers.gguf_convert CHECKPOINT FILE.gguf bf16|q8_0

Norms are float32, as in llama.cpp's own converter. The end-of-sequence id in the file is that of a special token that
occurs in no text: llama.cpp ignores the end by forbidding its token, while the other programs let the model write it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from benchmarks.peers.workers.gguf_names import HEADS, PERMUTED, gguf_name

_TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


def convert(checkpoint: Path, file: Path, precision: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    _write_config(writer, config)
    writer.add_file_type(_FILE_TYPES[precision])
    _write_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), config)
    for name, weight in _tensors(checkpoint / "model.safetensors"):
        _write_tensor(writer, name, weight, config, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Byte-level BPE with single digits, which llama.cpp calls "smollm" after SmolLM's tokenizer."""
    special = {token["id"] for token in tokenizer["added_tokens"]}
    ordered = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([_harmless(text, index, index in special) for text, index in ordered])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for _, index in ordered]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(unwritten_token(special, config))
    writer.add_pad_token_id(unwritten_token(special, config))


def unwritten_token(special: set[int], config: dict[str, Any]) -> int:
    """A special token that neither begins nor ends a text."""
    ends = config["eos_token_id"]
    return max(special - {config["bos_token_id"], *(ends if isinstance(ends, list) else [ends])})


def _harmless(text: str, index: int, is_special: bool) -> str:
    """llama.cpp treats some token texts as ends whatever the file says, so special tokens are named by their id."""
    return f"<special {index}>" if is_special else text


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bfloat16 weights as uint16, since numpy has no bfloat16."""
    data = np.memmap(file, mode="r", dtype=np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        yield name, data[start:end].view(np.uint16).reshape(entry["shape"])


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, weight: np.ndarray, config: dict[str, Any], precision: str
) -> None:
    if name.endswith(PERMUTED):
        weight = interleave(weight, config[HEADS[name.split(".")[-2]]])
    if weight.ndim == 1:
        writer.add_tensor(gguf_name(name), _float32(weight))
        return
    packed = weight.copy() if precision == "bf16" else quantize(_float32(weight), _TYPES[precision])
    writer.add_tensor(gguf_name(name), packed.view(np.uint8), raw_dtype=_TYPES[precision])


def _float32(weight: np.ndarray) -> np.ndarray:
    return (weight.astype(np.uint32) << 16).view(np.float32)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of heads for llama.cpp, which rotates 2i with 2i + 1; transformers rotates i with i + half. [rows, cols]"""
    rows, cols = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
