"""The speed of decoder families that the kernels run in one call, each against a Llama that reads as many bytes per token.

    python -m benchmarks.kernels.families [--only gemma2 gpt_oss] [--quantization int8] [--context 64]

Random checkpoints with a family's proportions; both models take turns, round by round. Speeds are medians of plain
decoding on one thread, and the ratio is the median of the rounds' ratios. The bytes of a mixture of experts are those of
the experts that its routers chose, as counted by the kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.common.paths import RESULTS
from foredraft.kernels import DrawSpec, load_kernels, why_none
from foredraft.model import LanguageModel, LoadOptions, Read
from foredraft.model.packed import weight_bytes
from foredraft.model.prepare import prepare, rounded_groups
from foredraft.model.probe import probe
from foredraft.model.stack import StackBody
from foredraft.utils.tensors import num_bytes

_LAYERS, _VOCABULARY, _HIDDEN = 8, 8192, 1024
_WINDOW = 512
_MORE = 64
_COMMON: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 2816,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
_GEMMA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": _WINDOW,
    "layer_types": _ALTERNATING,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 1 / 64,
    "logits_scaling": 8.0,
}
_EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 1408, "num_local_experts": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": _WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", _GRANITE),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"intermediate_size": 4096}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"head_dim": 64, "sliding_window": _WINDOW, "layer_types": _ALTERNATING}),
    "glm4": ("glm4", {"head_dim": 64}),
    "mixtral": ("mixtral", _EXPERTS),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 704},
    ),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "head_dim": 64, "sliding_window": _WINDOW, "layer_types": _ALTERNATING}),
}
"""Name -> model type, and the settings that differ from the common ones."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A family compared with a Llama. megabytes: read per token. experts: read per token over all layers; 0 if it has none."""

    family: str
    quantization: str
    context: int
    megabytes: float
    llama_megabytes: float
    experts: float
    tokens_per_s: float
    llama_tokens_per_s: float
    ratio: float


class Decoder:
    """A random model that decodes after a context."""

    def __init__(self, config: Any, quantization: str, context: int) -> None:
        torch.manual_seed(0)
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        _sharpen_routers(hf)
        options = LoadOptions(device="cpu", quantization=quantization)
        self._model: LanguageModel = probe(
            hf,
            config.model_type,
            config.max_position_embeddings,
            partial(prepare, name="random", options=options),
            rounded_groups(options),
        )
        if not isinstance(self._model.body, StackBody):
            raise SystemExit(f"{config.model_type} does not run as one call")
        self._body, self._config = self._model.body, config
        self._tokens = torch.randint(5, _VOCABULARY, (context,)).tolist()
        self._cache = self._model.scratch_cache([context + _MORE])
        self._model.read([Read(0, self._tokens[:-1], 0)], self._cache)
        self.num_passes = self.num_experts_read = 0

    def tokens_per_s(self, count: int) -> float:
        """The speed of plain decoding of `count` tokens after the context."""
        reads, before = [Read(0, self._tokens[-1:], 1)], self._body.num_experts_read
        start = time.perf_counter()
        generated = self._model.generate(reads, [count], _VOCABULARY, self._cache, [DrawSpec()]).ids
        took = time.perf_counter() - start
        self._cache.keep_prefix_of(0, self._tokens[:-1])
        self.num_passes += len(generated[0])
        self.num_experts_read += self._body.num_experts_read - before
        return len(generated[0]) / took

    @property
    def experts_per_token(self) -> float:
        return self.num_experts_read / max(1, self.num_passes)

    @property
    def bytes_per_token(self) -> float:
        """Every weight once, except the embedding and the experts that no router chose."""
        hf: Any = self._model.hf
        embedding = hf.get_input_embeddings().weight
        experts = [
            num_bytes(module.buffers()) for name, module in hf.named_modules() if _is_of_an_expert(name, self._config)
        ]
        rest = weight_bytes(hf) - num_bytes([embedding]) - sum(experts)
        num_experts = len(experts) // 2  # each expert has two matrices
        return rest + (sum(experts) / num_experts * self.experts_per_token if num_experts else 0.0)


def _sharpen_routers(hf: PreTrainedModel) -> None:
    """Scale the routers: a random router's choices depend on rounding, so the probe would see other experts than the library's."""
    for module in hf.modules():
        if type(module).__name__.endswith("Router"):
            module.weight.data *= 20


def _is_of_an_expert(name: str, config: Any) -> bool:
    """Whether a module's name is that of an expert's packed matrix: up0, down0, up1, ..."""
    return is_mixture(config) and re.fullmatch(r"(up|down)\d+", name.rpartition(".")[2]) is not None


def is_mixture(config: Any) -> bool:
    return getattr(config, "num_experts_per_tok", None) is not None


def num_weights_read(config: Any) -> int:
    """The number of matrix weights that are read per token."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    embedding = hf.get_input_embeddings().weight
    total = 0
    for name, parameter in hf.named_parameters():
        if parameter is embedding or parameter.dim() < 2 or name.endswith("_bias"):
            continue
        is_expert = parameter.dim() == 3
        total += (
            parameter.numel() * config.num_experts_per_tok // parameter.shape[0] if is_expert else parameter.numel()
        )
    return total


def equal_llama(config: Any) -> Any:
    """The configuration of a Llama that reads as many weights per token."""
    llama = CONFIG_MAPPING["llama"](**_COMMON)
    missing = num_weights_read(config) - num_weights_read(llama)
    llama.intermediate_size += round(missing / (3 * _HIDDEN * _LAYERS))
    return llama


def compare(name: str, quantization: str, context: int, rounds: int, count: int) -> Comparison:
    model_type, settings = FAMILIES[name]
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **settings})
    decoders = [Decoder(each, quantization, context) for each in (config, equal_llama(config))]
    speeds = [[decoder.tokens_per_s(count) for decoder in decoders] for _ in range(rounds + 1)][1:]
    ours, llamas = zip(*speeds, strict=True)
    return Comparison(
        name,
        quantization,
        context,
        decoders[0].bytes_per_token / 1e6,
        decoders[1].bytes_per_token / 1e6,
        decoders[0].experts_per_token,
        statistics.median(ours),
        statistics.median(llamas),
        statistics.median(a / b for a, b in speeds),
    )


def row(result: Comparison) -> str:
    experts = f"{result.experts:.0f}" if result.experts else ""
    return (
        f"| {result.family} | {result.quantization} | {result.context} | {result.megabytes:.1f} | "
        f"{result.llama_megabytes:.1f} | {experts} | {result.tokens_per_s:.1f} | {result.llama_tokens_per_s:.1f} | "
        f"{result.ratio:.2f} |"
    )


HEAD = (
    "| family | precision | context | MB a token | Llama's | experts a token | tokens/s | Llama's | ratio |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--quantization", nargs="+", default=["int8"], help="none, int8, int4")
    parser.add_argument("--context", type=int, nargs="+", default=[64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/families.json and .md")
    args = parser.parse_args()
    if load_kernels() is None:
        raise SystemExit(f"nothing to measure here: {why_none()}")
    torch.set_num_threads(args.threads)
    print(HEAD)
    results = []
    for quantization in args.quantization:
        for name in args.only:
            for context in args.context:
                results.append(compare(name, quantization, context, args.rounds, args.tokens))
                print(row(results[-1]), flush=True)
    if args.save:
        (RESULTS / "families.json").write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
        (RESULTS / "families.md").write_text("\n".join([HEAD, *map(row, results)]) + "\n")


if __name__ == "__main__":
    main()
