"""What int8 activations cost, by type of GGUF file: the compiled kernels against the float path of the same weights.

    python -m benchmarks.quality.gguf_types [--only smollm2 gemma3 Q4_0 ..] [--text heldout_code] [--tokens 20000] [--save]

For each type, the embedded target is written with the `gguf` package; its MLP is padded so that rows consist of whole blocks
of 256, and all matrices can have the type. The texts are ones it was not trained on. smollm2 and gemma3 are real models,
fetched by `make models`.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from transformers import AutoModelForCausalLM

from benchmarks.common.paths import RESULTS, SHARED
from benchmarks.quality.block_encoders import encode
from foredraft.model import EMBEDDED, LoadOptions, load_model, load_tokenizer
from foredraft.tools.quality import Predictions, Window, cut, predict, tokens_of
from recipes.real_models import GEMMA3, SMOLLM2, models_folder

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
REAL = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
_WINDOW_LEN = 512
_BLOCK = 256
_FLOAT32 = LoadOptions(dtype="float32", device="cpu")
_AS_IT_RUNS = LoadOptions(device="cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """perplexity_increase: in percent of the float path's. agreement: positions with the same likeliest token, in percent."""

    model: str
    text: str
    num_tokens: int
    reference_perplexity: float
    perplexity_increase: float
    agreement: float


def write_target(kind: str, path: Path) -> None:
    """Write the embedded target as a GGUF file without a tokenizer, with its matrices in one type."""
    hf = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target")
    config: Any = hf.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(_padded_len(config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, parameter in hf.named_parameters():
        name = names.get_name(key, try_suffixes=(".weight",))
        _add(writer, str(name), _converted(key, parameter.detach().float().numpy(), config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _padded_len(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _converted(key: str, array: npt.NDArray[Any], config: Any) -> npt.NDArray[Any]:
    """Permute the rows of q and k as llama.cpp's converter does, and pad the MLP to whole blocks with neurons that do nothing."""
    if ".q_proj." in key or ".k_proj." in key:
        parts = array.reshape(-1, 2, config.head_dim // 2, array.shape[1])
        return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(array.shape))
    missing = _padded_len(config.intermediate_size) - config.intermediate_size
    if ".gate_proj." in key or ".up_proj." in key:
        return np.pad(array, ((0, missing), (0, 0)))
    return np.pad(array, ((0, 0), (0, missing))) if ".down_proj." in key else array


def _add(writer: gguf.GGUFWriter, name: str, array: npt.NDArray[Any], kind: str) -> None:
    if array.ndim == 1 or kind == "F32":
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, encode(array, kind), raw_dtype=gguf.GGMLQuantizationType[kind])


def measured(name: str, text: str, file: Path, windows: Sequence[Window]) -> Row:
    reference, run = (_predictions(file, windows, options) for options in (_FLOAT32, _AS_IT_RUNS))
    return Row(
        name,
        text,
        len(run.loss),
        reference.perplexity,
        100 * (run.perplexity / reference.perplexity - 1),
        100 * float((run.likeliest == reference.likeliest).double().mean()),
    )


def _predictions(file: Path, windows: Sequence[Window], options: LoadOptions) -> Predictions:
    model = load_model(file, options)
    try:
        return predict(model, windows)
    finally:
        del model
        gc.collect()


def windows_of(source: Path, text: str, max_tokens: int) -> list[Window]:
    content = gzip.decompress((SHARED / "data" / "corpus" / f"{text}.txt.gz").read_bytes()).decode()
    return cut(*tokens_of(content, load_tokenizer(source, _FLOAT32), max_tokens), _WINDOW_LEN)


def measure_real(name: str, text: str, max_tokens: int) -> Row:
    file = models_folder() / REAL[name].file
    return measured(name, text, file, windows_of(file, text, max_tokens))


def measure_type(kind: str, text: str, max_tokens: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_target(kind, file)
        return measured(kind, text, file, windows_of(EMBEDDED / "target", text, max_tokens))


HEAD = "| model or type | text | tokens | perplexity | rises by | likeliest token kept |\n|---|---|---|---|---|---|"


def as_markdown(row: Row) -> str:
    return (
        f"| {row.model} | {row.text} | {row.num_tokens:,} | {row.reference_perplexity:.3f} | "
        f"{row.perplexity_increase:+.2f} % | {row.agreement:.1f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*REAL, *TYPES], default=[*REAL, *TYPES])
    parser.add_argument("--text", nargs="+", default=["heldout_code"], help="corpora: heldout_code, tinystories_val")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gguf-types.json and .md")
    args = parser.parse_args()
    rows = []
    print(HEAD)
    for text in args.text:
        for name in args.only:
            measure: Callable[[str, str, int], Row] = measure_real if name in REAL else measure_type
            rows.append(measure(name, text, args.tokens))
            print(as_markdown(rows[-1]), flush=True)
    if args.save:
        (RESULTS / "gguf-types.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        (RESULTS / "gguf-types.md").write_text("\n".join([HEAD, *map(as_markdown, rows)]) + "\n")


if __name__ == "__main__":
    main()
