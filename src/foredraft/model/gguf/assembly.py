"""The Hugging Face model of a GGUF file: quantized matrices become stored layers, everything else parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from foredraft.errors import ModelError, one_line
from foredraft.kernels import Alternating, Joined, RowSlice, WeightSource
from foredraft.model.gguf.architectures import Architecture
from foredraft.model.gguf.container import GGUFFile, TensorEntry
from foredraft.model.gguf.names import Sources, sources_of
from foredraft.model.gguf.tensors import GGUFRows, Order, is_float, order_of_heads, read_floats
from foredraft.model.stored import StoredEmbedding, StoredExperts, StoredLinear

Entries = tuple[TensorEntry, ...]

_QUERIES = re.compile(r"blk\.\d+\.attn_q\.(weight|bias)")
_KEYS = re.compile(r"blk\.\d+\.attn_k\.(weight|bias)")
_NORM = "norm.weight"
_HEAD = "lm_head.weight"


@torch.no_grad()
def assemble(
    file: GGUFFile, architecture: Architecture, gguf_name: str, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """gguf_name: the architecture's. dtype: of everything but quantized matrices. Raises ModelError for tensors that are missing, left
    over, or of another shape than the configuration describes."""
    hf = _skeleton(file, config, dtype)
    parameters = dict(hf.named_parameters())
    if config.tie_word_embeddings:
        parameters.pop(_HEAD, None)
    sources = sources_of(parameters, file, gguf_name, config.num_hidden_layers)
    for name, entries in sources.items():
        _check_shape(file, hf, name, tuple(parameters[name].shape), entries)
    _fill_buffers(hf)
    _Filler(file, architecture, config, dtype).fill(hf, sources)
    if config.tie_word_embeddings:
        _tie(hf)
    return hf.eval()


def _skeleton(file: GGUFFile, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory for its weights."""
    try:
        with torch.device("meta"):
            # eager experts are read one at a time, so they can stay stored
            hf: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    except Exception as error:  # the library's own checks of a configuration
        raise ModelError(f"{file.path}: its metadata does not describe a model: {one_line(error)}") from error
    return hf


def _check_shape(file: GGUFFile, hf: nn.Module, name: str, wanted: tuple[int, ...], entries: Entries) -> None:
    stored = _joined_shape(entries)
    if len(stored) == 3 and getattr(hf.get_submodule(name.rpartition(".")[0]), "is_transposed", False):
        stored = (stored[0], stored[2], stored[1])
    if stored != wanted:
        raise ModelError(
            f"{file.path}: its tensor {entries[0].name!r} is {list(entries[0].shape)}, but its metadata describes a {name} of "
            f"{list(wanted)}; download it again, or convert it again"
        )


def _joined_shape(entries: Entries) -> tuple[int, ...]:
    """The shape of one tensor, or of several whose outputs are joined: experts' [experts, out, in] or [experts, out]. Empty if they
    cannot be joined."""
    first = entries[0].shape
    if len(entries) == 1:
        return first
    can_join = len(first) > 1 and all(entry.shape == first for entry in entries)
    return (first[0], len(entries) * first[1], *first[2:]) if can_join else ()


def _fill_buffers(hf: Any) -> None:
    """Let the library compute what is not loaded: rotary frequencies, the scale of embeddings."""
    for module in hf.modules():
        missing = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in missing:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if missing:
            hf._init_weights(module)


def _tie(hf: Any) -> None:
    """Make the head read the embedding's weight."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if isinstance(embedding, StoredEmbedding):
        hf.set_output_embeddings(StoredLinear(embedding.source))
    else:
        head.weight = embedding.weight


def _alternating(parts: Sequence[WeightSource]) -> WeightSource:
    """Gates and values in turn, if there are both."""
    return Alternating(*parts) if len(parts) == 2 else Joined(parts)


def _joined(parts: list[Tensor], experts: Any) -> Tensor:
    """Gates and values [experts, out, ..], one after the other or in turn, as in their class."""
    return torch.cat(parts, dim=1) if experts.is_concatenated else torch.stack(parts, dim=2).flatten(1, 2)


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _are_experts(entries: Entries) -> bool:
    return len(entries[0].shape) == 3 and not any(is_float(entry) for entry in entries)


class _Filler:
    """Puts a file's tensors into a model."""

    def __init__(self, file: GGUFFile, architecture: Architecture, config: Any, dtype: torch.dtype) -> None:
        self._file, self._architecture, self._config, self._dtype = file, architecture, config, dtype

    def fill(self, hf: nn.Module, sources: Sources) -> None:
        for name, entries in sources.items():
            owner, _, attribute = name.rpartition(".")
            module: Any = hf.get_submodule(owner)
            if len(entries) == 1 and not is_float(entries[0]) and self._can_stay_stored(module, attribute):
                hf.set_submodule(owner, self._stored(module, entries[0]))
                continue
            if _are_experts(entries):
                delattr(module, attribute)
                setattr(module, attribute, self._stored_experts(entries, module))
                continue
            value = self._parameter(name, entries, module)
            # a stored layer's bias is a buffer; its weight was placed before
            setattr(module, attribute, value if isinstance(module, StoredLinear) else _fixed(value))

    @staticmethod
    def _can_stay_stored(module: nn.Module, attribute: str) -> bool:
        return attribute == "weight" and (type(module) is nn.Linear or isinstance(module, nn.Embedding))

    def _stored(self, module: Any, entry: TensorEntry) -> nn.Module:
        source = GGUFRows(self._file, entry, self._order(entry))
        if isinstance(module, nn.Embedding):
            return StoredEmbedding(source, self._dtype, module)
        return StoredLinear(source)

    def _stored_experts(self, entries: Entries, module: Any) -> StoredExperts:
        """From tensors [experts, out, in] whose outputs are joined."""
        parts = [(GGUFRows(self._file, entry), entry.shape[1]) for entry in entries]
        join = Joined if module.is_concatenated else _alternating
        sources = [
            join([RowSlice(rows, expert * height, (expert + 1) * height) for rows, height in parts])
            for expert in range(entries[0].shape[0])
        ]
        return StoredExperts(sources, self._dtype, is_transposed=module.is_transposed)

    def _parameter(self, name: str, entries: Entries, module: Any) -> Tensor:
        parts = [read_floats(self._file, entry, self._order(entry)) for entry in entries]
        value = parts[0] if len(parts) == 1 else _joined(parts, module)
        if value.dim() == 3 and module.is_transposed:
            value = value.transpose(1, 2).contiguous()
        if name.endswith(_NORM) and self._architecture.norm_offset:
            value = value.float() - self._architecture.norm_offset
        value = value.to(self._dtype)
        for entry in entries:
            self._file.forget_pages(entry, 0, entry.num_bytes)
        return value

    def _order(self, entry: TensorEntry) -> Order | None:
        if not self._architecture.has_permuted_heads:
            return None
        num_rows = entry.shape[0]
        if _QUERIES.fullmatch(entry.name):
            return order_of_heads(num_rows, self._config.num_attention_heads)
        if _KEYS.fullmatch(entry.name):
            return order_of_heads(num_rows, self._config.num_key_value_heads)
        return None
