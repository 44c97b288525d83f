"""An encoder-decoder run by the library's own code, with our attention.

The encoder reads each source once; the keys and values that the decoder's cross attention computes from it are kept. A decoder pass is a
flattened ragged batch like any other, except that its layers attend to the sources as well. The library is given a cache which says that
every source is projected already, so that it projects none again; nobody reads the keys of that cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from foredraft.engine.sources import SourceKeys
from foredraft.errors import ModelError
from foredraft.kernels import Kernels
from foredraft.model.batch import RaggedBatch, Reading, padded_batch
from foredraft.model.routing import route, routed
from foredraft.model.rows import rule_of
from foredraft.model.source_attention import DecoderMetadata, EncoderMetadata, PositionBias, readable, rows_of_sources
from foredraft.model.warm_up import WarmUpSizes

_CROSS_NAMES = ("EncDecAttention", "encoder_attn", "cross_attn")


class EncoderDecoderBody:
    """Leaves hf unchanged until `take_over`. kernels: for attention; None: PyTorch's. Raises ModelError for a model whose cross attention
    does not have one of the known names."""

    is_batch_invariant = False

    def __init__(self, hf: PreTrainedModel, kernels: Kernels | None = None) -> None:
        self._hf = hf
        self.kernels = kernels
        self._encoder, self._decoder = hf.get_encoder(), hf.get_decoder()
        self._row_rule = rule_of(hf)
        self._is_taken_over = False
        arguments = inspect.signature(hf.forward).parameters
        self._keeps_rows = "logits_to_keep" in arguments
        self._decoder_takes_positions = "decoder_position_ids" in arguments
        self._encoder_takes_positions = "position_ids" in inspect.signature(self._encoder.forward).parameters
        self._cross = cross_attentions(self._decoder)
        if not self._cross:
            raise ModelError(f"{type(hf).__name__}: its decoder has no cross-attention under a known name")
        with torch.inference_mode():
            self._encoder_biases, self._decoder_biases = biases_of(self._encoder), biases_of(self._decoder)
            one_row = hf.get_input_embeddings().weight.new_zeros(1, next(iter(self._cross.values())).key.in_features)
            self._encoded = BaseModelOutput(last_hidden_state=one_row[None])
            self._projected = _ProjectedSources(self._cross, one_row)

    def read_sources(self, sources: Sequence[SourceKeys]) -> None:
        """Encode these sources in one pass, and fill in their keys and values."""
        self.project(sources, self._encode(sources))

    def project(self, sources: Sequence[SourceKeys], rows: Tensor) -> None:
        """Fill in the keys and values of these sources from an encoder's output for all their tokens in order: [T, width], or more
        rows."""
        projected = {layer: cross.projected(rows) for layer, cross in self._cross.items()}
        for source, own in zip(sources, rows_of_sources(sources), strict=True):
            source.encoded = rows[own].clone() if source.keeps_encoded else None
            source.layers = {
                layer: (readable(keys[:, own]), readable(values[:, own])) for layer, (keys, values) in projected.items()
            }

    def _encode(self, sources: Sequence[SourceKeys]) -> Tensor:
        """[T, width], followed by rows of padding"""
        ids = [token for keys in sources for token in keys.source.ids]
        positions = [position for keys in sources for position in range(keys.length)]
        missing = self._row_rule.pad(len(ids)) - len(ids)
        ids, positions = ids + [0] * missing, positions + [0] * missing
        inputs = {"input_ids": self._tensor(ids)[None], "attention_mask": self._all_seen(len(ids))}
        if self._encoder_takes_positions:
            inputs["position_ids"] = self._tensor(positions)[None]
        metadata = EncoderMetadata(sources, missing, self._encoder_biases, self.kernels)
        with self._routed(), _positions_set(self._encoder, self._tensor(positions)):
            rows: Tensor = self._encoder(**inputs, attention_metadata=metadata).last_hidden_state[0]
        return rows

    @torch.inference_mode()
    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        """taps: none, see LanguageModel.new_cache."""
        num_wanted = len(batch.wanted)
        batch = padded_batch(batch, self._row_rule)
        wanted, positions = self._tensor(batch.wanted), self._tensor(batch.positions)
        inputs: dict[str, Any] = {
            "decoder_input_ids": self._tensor(batch.ids)[None],
            "decoder_attention_mask": self._all_seen(len(batch.ids)),
            "use_cache": False,
            "attention_metadata": DecoderMetadata(batch.spans, self.kernels, biases=self._decoder_biases),
        }
        if self._decoder_takes_positions:
            inputs["decoder_position_ids"] = positions[None]
        if self._keeps_rows:
            inputs["logits_to_keep"] = wanted
        with self._routed(), _positions_set(self._decoder, positions):
            outputs = self._hf(encoder_outputs=self._encoded, past_key_values=self._projected, **inputs)
        logits: Tensor = outputs.logits[0]
        return Reading((logits if self._keeps_rows else logits[wanted])[:num_wanted])

    def take_over(self) -> None:
        """Keep the model routed, see LibraryBody."""
        route(self._hf)
        self._is_taken_over = True

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Nothing to prepare."""

    def _routed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._is_taken_over else routed(self._hf)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._hf.device)

    def _all_seen(self, num_rows: int) -> Tensor:
        """Without this mask the library would hide padding ids, and take the batch for packed training sequences."""
        return torch.ones(1, num_rows, dtype=torch.bool, device=self._hf.device)


class CrossAttention(NamedTuple):
    """The projections of one layer's cross attention, and the size of a head."""

    key: nn.Module
    value: nn.Module
    head_dim: int

    def projected(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [H, S, D] of an encoder's output [S, width]."""
        keys, values = (
            part(rows).view(len(rows), -1, self.head_dim).transpose(0, 1) for part in (self.key, self.value)
        )
        return keys, values


def cross_attentions(decoder: nn.Module) -> dict[int, CrossAttention]:
    """The cross attention of each layer, whatever the families call it."""
    found: dict[int, CrossAttention] = {}
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] in _CROSS_NAMES:
            key, value = (getattr(module, f"{which}_proj", None) or getattr(module, which) for which in ("k", "v"))
            head_dim = getattr(module, "head_dim", None) or module.key_value_proj_dim
            found[int(module.layer_idx)] = CrossAttention(key, value, int(head_dim))
    return found


def biases_of(stack: nn.Module) -> dict[int, PositionBias]:
    """The position biases of each layer's self-attention. A layer without a table of its own has that of the layer before it."""
    attentions = [
        module
        for name, module in stack.named_modules()
        if hasattr(module, "has_relative_attention_bias") and name.rpartition(".")[2] not in _CROSS_NAMES
    ]
    biases: dict[int, PositionBias] = {}
    for layer, module in enumerate(attentions):
        biases[layer] = PositionBias.of(module) if module.has_relative_attention_bias else biases[layer - 1]
    return biases


class _ProjectedSources(EncoderDecoderCache):  # type: ignore[misc]
    """Tells the library that all sources are projected, and that a pass begins at position 0: our attention knows the positions of the
    rows. Its keys are of one token, and nobody reads them."""

    def __init__(self, cross: Mapping[int, CrossAttention], like: Tensor) -> None:
        sources = DynamicCache()
        for layer in sorted(cross):
            sources.update(*cross[layer].projected(like), layer)
        super().__init__(_NoKeys(), sources)
        self.is_updated = dict.fromkeys(cross, True)


class _NoKeys(DynamicCache):  # type: ignore[misc]
    """The cache of a decoder's own keys, which stays empty: our regions hold them."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


@cache
def _takes_position_ids(forward: Callable[..., Tensor]) -> bool:
    return "position_ids" in inspect.signature(forward).parameters


@contextmanager
def _positions_set(stack: nn.Module, positions: Tensor) -> Iterator[None]:
    """While active, a position embedding (BART and similar models) returns the rows of these positions [R], not of the places in the
    pass."""
    table = getattr(stack, "embed_positions", None)
    if table is None:
        yield
        return

    if _takes_position_ids(table.forward.__func__):
        handle = table.register_forward_pre_hook(
            lambda _module, args, kwargs: (args, {**kwargs, "position_ids": positions}), with_kwargs=True
        )
    else:  # M2M100's sinusoids, after the padding id
        rows = positions[None] + table.padding_idx + 1
        handle = table.register_forward_hook(lambda _module, args, _output: table.weights[rows].to(args[1].dtype))
    try:
        yield
    finally:
        handle.remove()
