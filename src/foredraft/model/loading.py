"""From a hub id, a directory or a model in memory to a LanguageModel, or to one line that says why not."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from foredraft.errors import ModelError, one_line
from foredraft.gpu import Graphs, why_not
from foredraft.kernels import Kernels, load_kernels, quantize_int8, unquantized
from foredraft.model.checkpoint import refuse_unusable
from foredraft.model.device_stack import DeviceStackBody
from foredraft.model.diagnosis import why_half_loaded, why_not_found, why_not_loaded
from foredraft.model.language_model import Body, LanguageModel
from foredraft.model.library import LibraryBody
from foredraft.model.packed import Int8Linear, NativeLinear, PackedLinear, int8_is_exact, pack_linears, packs
from foredraft.model.pages import give_back
from foredraft.model.probe import probe
from foredraft.model.stack import StackBody, has_stack_form
from foredraft.utils import arguments

logger = logging.getLogger("foredraft")

DTYPES = {name: getattr(torch, name) for name in arguments.DTYPES}
_DEFAULT_CONTEXT = 2048
_GROWING_ROPES = ("dynamic", "longrope")
_FLOATING = ("F64", "F32", "F16", "BF16")
_LONGEST_HEADER = 100_000_000
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How checkpoints are loaded. dtype "auto" is the checkpoint's own; device "auto" is CUDA where there is one.

    quantization: "int8" rounds linear layers to eight bits as they are loaded, the rest runs in bfloat16; None or
    "none" leaves the weights as they are. kernels: "auto" runs compiled ones where they can be had, "torch" never.
    batch_invariant: on a GPU, products whose rows do not see each other, so that a text never depends on the batch or on
    drafts; on a CPU compiled kernels are so anyway.
    """

    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    kernels: str = "auto"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.quantization not in (None, *arguments.QUANTIZATIONS):
            raise ModelError(f'quantization must be "int8" or "none", not {self.quantization!r}')
        if self.kernels not in ("auto", "torch"):
            raise ModelError(f'kernels must be "auto" or "torch", not {self.kernels!r}')

    def torch_device(self) -> torch.device:
        """Raises ModelError for a name that is none, and for a device that is not there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ModelError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}") from error
        _refuse_absent(device)
        return device

    def torch_dtype(self, config: PretrainedConfig) -> torch.dtype:
        """The dtype to load in. Raises ModelError for a name that is none."""
        dtype = self.dtype
        if isinstance(dtype, str) and dtype != "auto":
            if dtype not in DTYPES:
                raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
            dtype = DTYPES[dtype]
        if dtype == "auto":
            dtype = getattr(config.get_text_config(), "dtype", None) or torch.float32
        if dtype == torch.float16 and self.torch_device().type == "cpu":
            logger.warning("float16 is slow and narrow on a CPU: loading in bfloat16")
            dtype = torch.bfloat16
        assert isinstance(dtype, torch.dtype)
        return dtype


def _refuse_absent(device: torch.device) -> None:
    if device.type == "meta":
        raise ModelError("device meta holds no numbers: give auto, cpu, cuda or cuda:N")
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ModelError(f"device {device} cannot be used: PyTorch finds no CUDA device here; give cpu, or auto")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {device} cannot be used: there are {torch.cuda.device_count()}, counted from cuda:0")


def examine(source: str | os.PathLike[str], options: LoadOptions, *, has_weights: bool = True) -> PretrainedConfig:
    """Check all that can be checked before the weights are read. Raises ModelError, one line, for what cannot work."""
    name = os.fspath(source)
    options.torch_device()
    refuse_unusable(name, has_weights=has_weights)
    config = load_config(name, options)
    refuse_unsupported(config, name)
    return config


def load_model(source: str | os.PathLike[str] | PreTrainedModel, options: LoadOptions) -> LanguageModel:
    """Raises ModelError, one line, where the checkpoint is missing, corrupt, too big, or of a kind that cannot work."""
    if isinstance(source, PreTrainedModel):
        return _load_from_memory(source, options)
    name = os.fspath(source)
    config = examine(name, options)
    dtype = options.torch_dtype(config)
    refuse_if_too_big(name, dtype, options.torch_device())
    try:
        hf, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            ignore_mismatched_sizes=True,  # refused below, with the reason
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"{name}: {why_not_loaded(name, error)}") from error
    reason = why_half_loaded(name, hf.config, report)
    if reason is not None:
        raise ModelError(f"{name}: {reason}")
    if getattr(hf, "hf_device_map", None) is None and not _is_quantised(hf):
        move(hf, options.torch_device())
    hf.eval()
    return _examined(hf, name, prepare=lambda ours: _prepare(ours, name, options))


def _load_from_memory(source: PreTrainedModel, options: LoadOptions) -> LanguageModel:
    """The owner's model stays as it is: what is quantised is a copy."""
    name = source.config.name_or_path or type(source).__name__
    if options.quantization == "int8":
        return _examined(copy.deepcopy(source).eval(), name, prepare=lambda ours: _prepare(ours, name, options))
    source.eval()
    return _examined(source, name)


def load_tokenizer(source: str | os.PathLike[str], options: LoadOptions) -> PreTrainedTokenizerBase:
    """Raises ModelError where there is none."""
    name = os.fspath(source)
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in _TOKENIZER_FILES):
        # the library would make one up for some architectures
        raise ModelError(f"{name}: no tokenizer in this directory; give tokenizer=, or token ids as prompts")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    except Exception as error:
        raise ModelError(
            f"{name}: no tokenizer could be loaded ({one_line(error)}); give tokenizer=, or token ids as prompts"
        ) from error
    return tokenizer


def refuse_unsupported(config: PretrainedConfig, name: str) -> None:
    """Raises ModelError for what the configuration alone rules out."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: an encoder-decoder ({config.model_type}); a causal decoder is needed")
    text = config.get_text_config()
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    recurrent = sorted(k for k in kinds | {str(text.model_type)} if any(word in k for word in _RECURRENT))
    if recurrent:
        raise _recurrent(name, recurrent[0])


def _recurrent(name: str, kind: str) -> ModelError:
    return ModelError(
        f"{name}: {kind} keeps a recurrent state, which cannot forget a rejected draft token; "
        "use a model whose only memory is attention"
    )


def load_config(name: str, options: LoadOptions) -> PretrainedConfig:
    refuse_unusable(name, has_weights=False)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    except Exception as error:
        raise ModelError(f"{name}: {why_not_found(name, error, options.revision)}") from error
    return config


def refuse_if_too_big(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """For local checkpoints, before any memory is touched: weights against what is free."""
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    free = available_memory(device) if files else None
    if free is None:
        return
    needed = sum(_loaded_size(file, dtype) for file in files)
    if needed > free:
        raise ModelError(
            f"{name}: its weights take {_gib(needed)} GiB and {_gib(free)} GiB of memory are free; "
            "use a smaller model, or a smaller dtype"
        )


def _loaded_size(file: Path, dtype: torch.dtype) -> int:
    """Bytes of a safetensors file's tensors once they are loaded: floating ones in `dtype`, others as they are."""
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(header_size, _LONGEST_HEADER)))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            return sum(
                prod(entry["shape"]) * dtype.itemsize
                if entry["dtype"] in _FLOATING
                else entry["data_offsets"][1] - entry["data_offsets"][0]
                for entry in tensors
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return file.stat().st_size  # corrupt: the loader will say so


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device, or None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return values[0] if values else None


def move(hf: PreTrainedModel, device: torch.device) -> None:
    """Raises ModelError for a device that is not there, or has no room."""
    try:
        hf.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device} cannot be used: {one_line(error)}") from error


@torch.inference_mode()
def _prepare(hf: PreTrainedModel, name: str, options: LoadOptions) -> Body:
    """Swap in what runs fastest on this processor. Changes the model, so it is only for those that were loaded here."""
    wants_int8 = options.quantization == "int8" and _can_be_int8(hf)
    if hf.device.type == "cuda" and options.kernels == "auto" and _fits_a_device(hf):
        context_len = context_len_of(hf.config, name)
        return DeviceStackBody(hf, context_len, Graphs(hf.device), is_batch_invariant=options.batch_invariant)
    weight_format = quantize_int8 if wants_int8 else unquantized
    kernels = _kernels_for(hf, options, wants_int8)
    if wants_int8:
        _narrow_the_rest(hf)
    if kernels is not None and has_stack_form(hf):
        return StackBody(hf, kernels, context_len_of(hf.config, name), weight_format)
    if kernels is not None:
        pack_linears(hf, lambda weight, bias: NativeLinear(kernels.pack(weight_format(weight), bias), kernels))
    elif wants_int8:
        pack_linears(hf, lambda weight, bias: Int8Linear(quantize_int8(weight), bias))
    elif packs(hf.dtype, hf.device, is_compiled=False):
        pack_linears(hf, PackedLinear)
    return LibraryBody(hf, kernels)


def _fits_a_device(hf: PreTrainedModel) -> bool:
    """Whether our passes on a GPU compute what this model does, all of it on one, and run there."""
    spread = getattr(hf, "hf_device_map", None)
    is_whole = spread is None or len(set(spread.values())) == 1
    if not is_whole or _is_quantised(hf) or not has_stack_form(hf):
        return False
    reason = why_not(hf.device, hf.dtype)
    if reason is not None:
        logger.warning("kernels are not used on %s (%s): PyTorch's own run, more slowly", hf.device, reason)
    return reason is None


def _kernels_for(hf: PreTrainedModel, options: LoadOptions, wants_int8: bool) -> Kernels | None:
    """Ours compute in bfloat16 and int8 on the CPU."""
    fits = hf.device.type == "cpu" and (hf.dtype == torch.bfloat16 or wants_int8) and not _is_quantised(hf)
    return compiled_kernels(options) if fits else None


def compiled_kernels(options: LoadOptions) -> Kernels | None:
    """The kernels that are wanted, where they can be had."""
    return load_kernels() if options.kernels == "auto" else None


def _is_quantised(hf: PreTrainedModel) -> bool:
    return bool(getattr(hf, "is_quantized", False))


def _can_be_int8(hf: PreTrainedModel) -> bool:
    """Exact products of eight-bit integers need a processor that has them; elsewhere the model runs as it was loaded."""
    if _is_quantised(hf):
        reason = "the checkpoint is quantised already"
    elif hf.device.type != "cpu":
        reason = f"there are no exact int8 products on {hf.device.type}"
    elif load_kernels() is None and not int8_is_exact():
        reason = "this processor multiplies int8 inexactly"
    else:
        return True
    logger.warning("quantization is left out: %s", reason)
    return False


def _narrow_the_rest(hf: PreTrainedModel) -> None:
    """Everything but the matrices that will be quantised, in bfloat16. Buffers (rotary frequencies) stay."""
    matrices = {id(child.weight) for child in hf.modules() if type(child) in (torch.nn.Linear, Conv1D)}
    embedding = id(hf.get_input_embeddings().weight)
    for module in hf.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and (id(parameter) not in matrices or id(parameter) == embedding):
                parameter.data = parameter.data.to(torch.bfloat16)


def _examined(
    hf: PreTrainedModel, name: str, prepare: Callable[[PreTrainedModel], Body] = LibraryBody
) -> LanguageModel:
    refuse_unsupported(hf.config, name)
    if getattr(hf, "_is_stateful", False):
        raise _recurrent(name, type(hf).__name__)
    model = probe(hf, name, context_len_of(hf.config, name), prepare)
    give_back([])  # what laying out and trying it took is free, and the C library would keep it
    return model


def context_len_of(config: PretrainedConfig, name: str) -> int:
    """The longest sequence to read. Where the rotary embedding changes with the longest position of a pass, only as far
    as it does not: beyond, one request would rotate its neighbours, and cached keys would be stale."""
    text: Any = config.get_text_config()
    longest = next(
        (int(value) for value in (getattr(text, field, None) for field in _length_fields()) if value), _DEFAULT_CONTEXT
    )
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        if rope.get("rope_type", rope.get("type")) in _GROWING_ROPES:
            fixed = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limit = int(fixed or longest)
            if limit <= longest:
                logger.warning(
                    "%s: its rotary embedding (%s) changes past %d positions: the context ends there",
                    name,
                    rope.get("rope_type"),
                    limit,
                )
            longest = min(longest, limit)
    return longest


def _length_fields() -> Sequence[str]:
    return ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")


def _ropes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """One description, or one for each kind of layer."""
    if any(isinstance(value, dict) for value in parameters.values()):
        return [value for value in parameters.values() if isinstance(value, dict)]
    return [parameters]
