"""Do two models fit, what will they cost, and what exactness does this machine give: the answers as data."""

from __future__ import annotations

import copy
import logging
import mmap
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from foredraft.engine.engine import NEAR_TIE
from foredraft.errors import ModelError, VocabularyError
from foredraft.model import (
    LanguageModel,
    LoadOptions,
    Read,
    Traits,
    available_memory,
    check_vocabulary,
    load_model,
    load_tokenizer,
)
from foredraft.model.loading import compiled_kernels, context_len_of, load_config, refuse_unsupported
from foredraft.model.packed import packs, weight_bytes
from foredraft.utils.machine import MachineReport, this_machine

logger = logging.getLogger("foredraft")

CACHE_SHARE = 0.5
"""Of the memory that is free once the weights are there, what an engine takes at most for keys and values by default."""

_BYTES_PER_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """In bytes; None where it cannot be told."""

    weight_bytes: int | None
    cache_bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model.

    attention: how many layers of each kind. num_tokens: in the tokenizer. logit_width: may be wider, padded.
    predicted: from the configuration and the file headers. measured: after loading; None if it was not loaded.
    row_exact: whether a row's bits were seen not to depend on its company; None if it was not loaded.
    quantization: what the linear layers are rounded to as they are loaded. load_bytes: predicted, what loading holds on
    the host when it holds most.
    """

    name: str
    architecture: str
    attention: dict[str, int]
    dtype: str
    num_parameters: int | None
    context_len: int
    num_tokens: int | None
    logit_width: int | None
    predicted: Costs
    measured: Costs | None = None
    row_exact: bool | None = None
    quantization: str | None = None
    load_bytes: int | None = None

    @property
    def costs(self) -> Costs:
        """The best that is known."""
        return self.measured or self.predicted


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Of target and draft together. when: "free", or "free after loading". num_full_contexts: how many sequences of the
    target's full context the default cache budget holds.

    process_bytes: what this process held before anything was loaded, its libraries above all; 0 on another device.
    peak_bytes: the most that it will hold on the device, while it loads or later, with one text that grows to the full
    context. What a pass needs for a moment is not in it.
    """

    device: str
    when: str
    available_bytes: int | None
    weight_bytes: int | None
    cache_bytes_per_token: int | None
    full_context_bytes: int | None
    num_full_contexts: int | None
    process_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """fits: whether target and draft can work together here; reason: in one line, why not."""

    fits: bool
    reason: str | None
    target: ModelReport
    draft: ModelReport | None
    memory: MemoryReport
    machine: MachineReport
    exactness: str

    def as_dict(self) -> dict[str, Any]:
        """The whole report, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Layout:
    """How weights lie in the file, as they are read, and in the model in the end.

    dtype: in the end, of all that is not quantised. is_packed: linear layers are then laid out for their kernels, one
    after the other, each in a copy of its own.
    """

    stored_in: torch.dtype
    read_in: torch.dtype
    dtype: torch.dtype
    quantization: str | None
    is_packed: bool

    def packed_bytes(self, weight: Tensor, num_outputs: int) -> int:
        """Of one matrix; in int8 each output has a scale and a correction."""
        if self.quantization is None:
            return weight.numel() * self.dtype.itemsize
        return weight.numel() + _BYTES_PER_OUTPUT * num_outputs


Source = str | os.PathLike[str]


def inspect_models(target: Source, draft: Source | None, options: LoadOptions, *, load: bool = True) -> Inspection:
    """Predict everything first; load only what fits, and then measure. load=False only predicts.

    Raises ModelError where a checkpoint is missing, corrupt, or of a kind that cannot work.
    """
    sources = [target] if draft is None else [target, draft]
    reports = [_predict(source, options) for source in sources]
    tokenizers = [_tokenizer(source, options) for source in sources]
    reports = [
        replace(report, num_tokens=None if tokenizer is None else len(tokenizer))
        for report, tokenizer in zip(reports, tokenizers, strict=True)
    ]
    # asked here: libraries, configurations and tokenizers are there, and no weight is
    process = resident_bytes() if options.torch_device().type == "cpu" else 0
    memory = _memory(reports, options, process, is_loaded=False)
    reason = _difference(tokenizers) or _too_big(memory)
    if load and reason is None:
        reports, memory = _measure(sources, reports, options, process)
    return Inspection(
        fits=reason is None,
        reason=reason,
        target=reports[0],
        draft=reports[1] if len(reports) > 1 else None,
        memory=memory,
        machine=this_machine(),
        exactness=exactness_of(reports[0]),
    )


def exactness_of(target: ModelReport) -> str:
    """What greedy and seeded texts share with plain decoding's, on this machine. The draft's own bits never matter."""
    if target.row_exact is None:
        return "unknown until the target is loaded"
    if target.row_exact:
        return f"bit-identical in {target.dtype}: greedy and seeded texts are plain decoding's, token for token"
    if target.dtype == "float32":
        return f"identical except where the top two of log p + noise are closer than {NEAR_TIE:g}; those are counted"
    return (
        f"identical except at near ties: in {target.dtype} this machine's kernels change a row's last bits with its "
        f"company, by more than the {NEAR_TIE:g} within which ties are counted"
    )


def _tokenizer(source: Source, options: LoadOptions) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(source, options)
    except ModelError as error:
        logger.warning("%s", error)
        return None


def _difference(tokenizers: list[PreTrainedTokenizerBase | None]) -> str | None:
    target, draft = tokenizers[0], tokenizers[-1]
    if len(tokenizers) < 2 or target is None or draft is None:
        return None
    try:
        check_vocabulary(target, draft)
    except VocabularyError as error:
        return str(error)
    return None


def _too_big(memory: MemoryReport) -> str | None:
    if memory.weight_bytes is None or memory.available_bytes is None or memory.weight_bytes <= memory.available_bytes:
        return None
    return (
        f"the weights take {memory.weight_bytes / 2**30:.1f} GiB and {memory.available_bytes / 2**30:.1f} GiB are free "
        f"on {memory.device}: use smaller models, or a quantised checkpoint"
    )


def _predict(source: Source, options: LoadOptions) -> ModelReport:
    """Without touching a weight. Raises ModelError for what the configuration alone rules out."""
    name = os.fspath(source)
    config = load_config(name, options)
    refuse_unsupported(config, name)
    context_len, layout = context_len_of(config, name), _layout(config, options)
    skeleton = _skeleton(config, layout.dtype, options)
    weights = _predicted_weights(name, config, skeleton, layout)
    bytes_per_token, logit_width = _dry_read(skeleton, context_len) if skeleton is not None else (None, None)
    return ModelReport(
        name=name,
        architecture=_architecture(config),
        attention=_attention_kinds(config),
        dtype=str(layout.dtype).removeprefix("torch."),
        num_parameters=None if skeleton is None else sum(p.numel() for p in skeleton.parameters()),
        context_len=context_len,
        num_tokens=None,
        logit_width=logit_width,
        predicted=Costs(weights, bytes_per_token or _cache_by_config(config, layout.dtype)),
        quantization=layout.quantization,
        load_bytes=_load_bytes(skeleton, layout, weights),
    )


def _layout(config: PretrainedConfig, options: LoadOptions) -> Layout:
    device, read_in = options.torch_device(), options.torch_dtype(config)
    stored_in = getattr(config.get_text_config(), "dtype", None) or read_in
    if options.quantization is not None and device.type == "cpu" and not _is_quantised(config):
        return Layout(stored_in, read_in, torch.bfloat16, options.quantization, is_packed=True)
    is_compiled = compiled_kernels(options) is not None
    return Layout(stored_in, read_in, read_in, None, is_packed=packs(read_in, device, is_compiled=is_compiled))


def _is_quantised(config: PretrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _skeleton(config: PretrainedConfig, dtype: torch.dtype, options: LoadOptions) -> PreTrainedModel | None:
    """The model without memory behind it; None where its code needs real tensors to be built."""
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=options.trust_remote_code
            )
    except Exception as error:  # any model's own code
        logger.debug("no skeleton: %s", error)
        return None
    skeleton.eval()
    return skeleton


def _dry_read(skeleton: PreTrainedModel, context_len: int) -> tuple[int | None, int | None]:
    """(cache bytes per token, logit width), by reading two tokens that have shapes only. Nones where the model looks at
    values on the way, as routers of experts do."""
    model = LanguageModel(skeleton, Traits("", 0, context_len, 0, False))
    cache = model.scratch_cache([2])
    try:
        logits = model.read([Read(0, [0, 0], 2)], cache)
    except Exception as error:  # any model's own code
        logger.debug("no dry read: %s", error)
        return None, None
    return cache.region(0).bytes_per_token, int(logits.shape[-1])


def _cache_by_config(config: PretrainedConfig, dtype: torch.dtype) -> int | None:
    """Keys and values of every layer, where the configuration uses the usual names."""
    text: Any = config.get_text_config()
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not layers or not heads:
        return None
    if getattr(text, "kv_lora_rank", None):  # latent attention: what is kept are the expanded heads
        widths = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        widths = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    return int(layers * widths * dtype.itemsize)


def _predicted_weights(
    name: str, config: PretrainedConfig, skeleton: PreTrainedModel | None, layout: Layout
) -> int | None:
    """A quantised checkpoint, or one that cannot be sketched, by its files; any other by its parameters."""
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    if files and (_is_quantised(config) or skeleton is None):
        return sum(file.stat().st_size for file in files)
    if skeleton is None or _is_quantised(config):
        return None
    if not layout.is_packed:
        return weight_bytes(skeleton)
    matrices = _matrices(skeleton)
    replaced = {id(weight): weight for weight, _ in matrices}
    replaced.pop(id(skeleton.get_input_embeddings().weight), None)  # a head that shares it gets a copy of its own
    kept: int = weight_bytes(skeleton) - sum(_num_bytes(weight) for weight in replaced.values())
    return kept + sum(layout.packed_bytes(weight, out) for weight, out in matrices)


def _matrices(skeleton: nn.Module) -> list[tuple[Tensor, int]]:
    """What packing replaces: the weight of every linear layer, and how many outputs it has."""
    linears: list[Any] = [m for m in skeleton.modules() if type(m) is torch.nn.Linear]
    transposed: list[Any] = [m for m in skeleton.modules() if type(m) is Conv1D]
    return [(m.weight, m.weight.shape[0]) for m in linears] + [(m.weight, m.weight.shape[1]) for m in transposed]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _load_bytes(skeleton: PreTrainedModel | None, layout: Layout, weights: int | None) -> int | None:
    """On the host. First all is read; where it is converted, the file's own pages stay until the last of it is. Then layer
    after layer is laid out and given back, so there is never more than the larger of what was read and what remains, and
    what one layer (or the head, the last of all) takes on its way."""
    if skeleton is None or weights is None:
        return weights
    read = _bytes_in(skeleton, layout.read_in)
    file = _bytes_in(skeleton, layout.stored_in) if layout.stored_in != layout.read_in else 0
    if not layout.is_packed:
        return read + file
    head = skeleton.get_output_embeddings()
    at_the_head = 0 if head is None else head.weight.numel() * layout.read_in.itemsize
    on_the_way = max((_laying_out(layer, layout) for layer in _layers_of(skeleton)), default=0)
    return max(read + file, max(read, weights) + on_the_way, weights + at_the_head)


def _layers_of(skeleton: PreTrainedModel) -> list[nn.Module]:
    lists = [list(module) for module in skeleton.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _laying_out(layer: nn.Module, layout: Layout) -> int:
    """What a layer takes at most before its own weights are given back: the two largest matrices (gate and up) are joined, in
    int8 rounded, and packed as all but the last (down) are by then."""
    matrices = _matrices(layer)
    joined = sum(sorted(weight.numel() for weight, _ in matrices)[-2:])
    rounded = 0 if layout.quantization is None else joined
    return joined * layout.read_in.itemsize + rounded + sum(layout.packed_bytes(*matrix) for matrix in matrices[:-1])


def _bytes_in(skeleton: PreTrainedModel, dtype: torch.dtype) -> int:
    """Of its weights, if they were in another dtype."""
    num_floats = sum(int(p.numel()) for p in skeleton.parameters() if p.is_floating_point())
    found: int = weight_bytes(skeleton) + (dtype.itemsize - skeleton.dtype.itemsize) * num_floats
    return found


def _architecture(config: PretrainedConfig) -> str:
    names = getattr(config, "architectures", None)
    return str(names[0]) if names else str(config.model_type)


def _attention_kinds(config: PretrainedConfig) -> dict[str, int]:
    text: Any = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        is_sliding = bool(window) and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if is_sliding else "full_attention"] * int(getattr(text, "num_hidden_layers", 0))
    return dict(Counter(_kind_name(str(kind), window) for kind in kinds))


def _kind_name(kind: str, window: int | None) -> str:
    name = kind.removesuffix("_attention")
    return f"{name} ({window})" if name == "sliding" and window else name


def _measure(
    sources: list[Source], reports: list[ModelReport], options: LoadOptions, process: int | None
) -> tuple[list[ModelReport], MemoryReport]:
    # held together: what is free is asked while both are there
    models = [load_model(source, options) for source in sources]
    measured = [_measured(report, model) for report, model in zip(reports, models, strict=True)]
    return measured, _memory(measured, options, process, is_loaded=True)


def _measured(report: ModelReport, model: LanguageModel) -> ModelReport:
    return replace(
        report,
        dtype=str(model.hf.dtype).removeprefix("torch."),
        context_len=model.traits.context_len,
        logit_width=model.traits.vocab_size,
        measured=Costs(weight_bytes(model.hf), model.traits.bytes_per_token),
        row_exact=model.traits.row_exact,
    )


def _memory(reports: list[ModelReport], options: LoadOptions, process: int | None, *, is_loaded: bool) -> MemoryReport:
    device = options.torch_device()
    free = available_memory(device)
    weights = _sum(report.costs.weight_bytes for report in reports)
    per_token = _sum(report.costs.cache_bytes_per_token for report in reports)
    full = None if per_token is None else per_token * reports[0].context_len
    room = None if free is None or weights is None else CACHE_SHARE * (free - (0 if is_loaded else weights))
    return MemoryReport(
        device=str(device),
        when="free after loading" if is_loaded else "free",
        available_bytes=free,
        weight_bytes=weights,
        cache_bytes_per_token=per_token,
        full_context_bytes=full,
        num_full_contexts=None if room is None or not full else max(0, int(room // full)),
        process_bytes=process,
        peak_bytes=_sum([process, _peak(reports, device)]),
    )


def _peak(reports: list[ModelReport], device: torch.device) -> int | None:
    """Beside the process itself. Models are loaded one after the other, on the host; then a text grows to the target's
    context."""
    weights = [report.costs.weight_bytes for report in reports]
    cache = [_largest_cache(report.costs.cache_bytes_per_token, reports[0].context_len) for report in reports]
    peaks = [_sum([*weights, *cache])]
    if device.type == "cpu":
        peaks += [_sum([*weights[:i], report.load_bytes]) for i, report in enumerate(reports)]
    return None if None in peaks else max(peak for peak in peaks if peak is not None)


def _largest_cache(bytes_per_token: int | None, context_len: int) -> int | None:
    """A cache grows by doubling, and what it grows from is there until it has moved."""
    if bytes_per_token is None:
        return None
    moving = 2 ** ((context_len - 1).bit_length() - 1) if context_len > 1 else 0
    return bytes_per_token * (context_len + moving)


def resident_bytes() -> int | None:
    """What this process holds in memory now, shared libraries included; None where the system does not say."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return num_pages * mmap.PAGESIZE


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
