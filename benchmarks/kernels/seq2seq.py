"""What a pass of an encoder-decoder costs: with the compiled stacks, with the library's code over packed matrices, and with the library.

    python -m benchmarks.kernels.seq2seq [--width 768] [--layers 8] [--rounds 21] [--save]

A random T5 in bfloat16, and with the compiled stacks also in int8. The bodies take turns, round by round; times are medians, and ratios
are medians of the rounds' ratios to the library's body. The floor is the bytes of the matrices that a pass of the decoder reads over the
bandwidth of a sum over 0.8 GB, measured in every round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from benchmarks.common.paths import RESULTS
from benchmarks.kernels.limits import Bandwidth, timed
from foredraft.engine.cache import KVCache
from foredraft.engine.sources import TokenSource
from foredraft.kernels import WeightMemory, load_kernels, why_none
from foredraft.model import LanguageModel, LoadOptions, Read
from foredraft.model.encoder_decoder import EncoderDecoderBody
from foredraft.model.language_model import Body, library_body
from foredraft.model.packed import NativeLinear, pack_linears
from foredraft.model.prepare import prepare, rounded_groups
from foredraft.model.source_probe import probe_encoder_decoder

_SOURCE, _TEXT, _ROWS = 64, 32, (1, 5, 8)
_VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class Result:
    """rows: of a pass of the decoder; 0: the encoder reads a source. ratio: how many times as fast as the library's body."""

    body: str
    precision: str
    rows: int
    milliseconds: float
    floor: float
    ratio: float


class Runner:
    """One body over its own model, with a source and a text in its cache."""

    def __init__(self, body: str, precision: str, hf: PreTrainedModel) -> None:
        self.body, self.precision = body, precision
        options = LoadOptions(
            dtype="bfloat16", device="cpu", quantization=None if precision == "bfloat16" else precision
        )
        makers: dict[str, Callable[[PreTrainedModel], Body]] = {
            "library": library_body,
            "packed": packed_body,
            "stacks": lambda ours: prepare(ours, body, options),
        }
        self._decoder_bytes = decoder_weights(hf) * (2 if precision == "bfloat16" else 1)
        self._model: LanguageModel = probe_encoder_decoder(hf, body, makers[body], rounded_groups(options))
        self._source = TokenSource(tuple(range(3, 3 + _SOURCE)))
        self._cache = self._new_cache()
        self._model.read([Read(0, list(range(_TEXT)), 0)], self._cache)

    def _new_cache(self) -> KVCache:
        return self._model.scratch_cache([_TEXT + max(_ROWS)], sources=[self._source])

    def floor(self, rows: int, bandwidth: float) -> float:
        """The floor in milliseconds. bandwidth: bytes per second."""
        return self._decoder_bytes / bandwidth * 1e3 if rows else 0.0

    def milliseconds(self, rows: int) -> float:
        if rows == 0:
            cache = self._new_cache()
            return timed(lambda: self._model.read([Read(0, [0], 0)], cache)) * 1e3
        tokens = list(range(10, 10 + rows))
        seconds = timed(lambda: self._model.read([Read(0, tokens, rows)], self._cache))
        del self._cache.region(0).tokens[_TEXT:]
        return seconds * 1e3


def packed_body(hf: PreTrainedModel) -> Body:
    """The library's code with foredraft's matrix products and attention."""
    kernels, memory = load_kernels(), WeightMemory()
    assert kernels is not None
    pack_linears(hf, lambda source, bias: NativeLinear(kernels.pack(source, bias, memory), kernels))
    return EncoderDecoderBody(hf, kernels)


def decoder_weights(hf: PreTrainedModel) -> int:
    """The number of matrix weights read by every pass of the decoder: its own, except those for the keys and values of sources, and the
    lm_head.
    """
    matrices = {
        name: p for name, p in hf.named_parameters() if p.dim() == 2 and "embed" not in name and "bias" not in name
    }
    own = (
        p.numel()
        for name, p in matrices.items()
        if name.startswith("decoder") and not name.endswith(("EncDecAttention.k.weight", "EncDecAttention.v.weight"))
    )
    return sum(own) + hf.lm_head.weight.numel()


def random_t5(width: int, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=width,
        d_kv=64,
        num_heads=width // 64,
        d_ff=width * 8 // 3 // 64 * 64,
        num_layers=layers,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    model: PreTrainedModel = T5ForConditionalGeneration(config).to(torch.bfloat16).eval()
    return model


def measure(runners: list[Runner], rounds: int) -> list[Result]:
    bandwidth, results = Bandwidth(), []
    for rows in (*_ROWS, 0):
        times: list[list[float]] = [[] for _ in runners]
        floors: list[list[float]] = [[] for _ in runners]
        for _ in range(rounds + 1):
            rate = bandwidth.bytes_per_second()
            for runner, taken, floor in zip(runners, times, floors, strict=True):
                taken.append(runner.milliseconds(rows))
                floor.append(runner.floor(rows, rate))
        for runner, taken, floor in zip(runners, times, floors, strict=True):
            ratio = statistics.median(a / b for a, b in zip(times[0][1:], taken[1:], strict=True))
            middle, least = statistics.median(taken[1:]), statistics.median(floor[1:])
            results.append(Result(runner.body, runner.precision, rows, middle, least, ratio))
    return results


HEAD = "| pass | body | precision | ms | floor, ms | times as fast as the library's body |\n|---|---|---|---|---|---|"


def row(result: Result) -> str:
    kind = f"{result.rows} rows" if result.rows else f"a source of {_SOURCE}"
    floor = f"{result.floor:.1f}" if result.rows else ""
    return f"| {kind} | {result.body} | {result.precision} | {result.milliseconds:.1f} | {floor} | {result.ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8, help="layers of the encoder and of the decoder, each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/seq2seq.json and .md")
    args = parser.parse_args()
    if load_kernels() is None:
        raise SystemExit(f"nothing to measure here: {why_none()}")
    torch.set_num_threads(args.threads)
    kinds = (("library", "bfloat16"), ("packed", "bfloat16"), ("stacks", "bfloat16"), ("stacks", "int8"))
    runners = [Runner(body, precision, random_t5(args.width, args.layers)) for body, precision in kinds]
    results = measure(runners, args.rounds)
    lines = [HEAD, *map(row, results)]
    print("\n".join(lines))
    if args.save:
        (RESULTS / "seq2seq.json").write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
        (RESULTS / "seq2seq.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
