"""An encoder-decoder run as two kernel calls: one of the encoder for its sources, and one of the decoder for a pass. A draft model that
shares the target's encoder is a decoder alone.

Both are stacks as stack.py runs them; the decoder's layers attend to the sources too. Only models that source_families.py describes run
this way, and the probe compares their logits with the library's forward.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine.region import padded
from foredraft.engine.sources import SourceKeys
from foredraft.engine.token_tree import TreeShape
from foredraft.kernels import (
    CacheSpan,
    DrawSpec,
    Joined,
    Kernels,
    NormWeights,
    PackedMatrix,
    Stack,
    StackBatch,
    StackLayer,
    WeightFormat,
    WeightMemory,
    WeightSource,
)
from foredraft.model.batch import RaggedBatch, Reading
from foredraft.model.generation import Generated, Generation
from foredraft.model.layers import Packer, joined_bias, take_mlp
from foredraft.model.packed import NativeLinear
from foredraft.model.pages import give_back, mapped_files
from foredraft.model.source_attention import encoded_rows, readable, rows_of_sources
from foredraft.model.source_families import (
    LayerParts,
    SourceFamily,
    bias_tables_of,
    position_rows_of,
    source_family_of,
    source_form_of,
)
from foredraft.model.stored import source_of
from foredraft.model.taps import FINAL_NORM
from foredraft.model.warm_up import WarmUpSizes
from foredraft.sampling import Pending, TokenProbs

_NO_ROTATION = (torch.zeros(1, 1), torch.zeros(1, 1))
_NO_NORM = NormWeights()


class DecoderStackBody:
    """A decoder whose sources carry an encoder's output (SourceKeys.encoded): a draft model that shares its target's encoder.

    hf: its decoder's layers are taken from it, one matrix at a time; the embeddings stay. family: the model's. head: its lm_head, packed.
    weight_format: what its matrices become.
    """

    is_batch_invariant = False

    @torch.inference_mode()
    def __init__(
        self,
        hf: PreTrainedModel,
        family: SourceFamily,
        head: PackedMatrix,
        kernels: Kernels,
        weight_format: WeightFormat,
    ) -> None:
        self.kernels, self.family, self.head = kernels, family, head
        memory = WeightMemory()
        self._keys_of_sources = _take_source_keys(hf, family, kernels, weight_format, memory)
        self._decoder = _take_stack(hf, hf.get_decoder(), family, head, kernels, weight_format, memory)
        self._keys_like = torch.empty(self._decoder.num_kv_heads, 0, self._decoder.head_dim, dtype=torch.bfloat16)

    def read_sources(self, sources: Sequence[SourceKeys]) -> None:
        """Fill in the keys and values of these sources from the output of the target's encoder, which is then dropped unless it is to be
        kept."""
        self._project(sources, encoded_rows(sources))

    def _project(self, sources: Sequence[SourceKeys], encoded: Tensor) -> None:
        """encoded: [R, hidden] bfloat16, for all their tokens in order"""
        states = self.kernels.linear(self._keys_of_sources, encoded)
        shape = (len(states), self._decoder.num_layers, 2, self._decoder.num_kv_heads, self._decoder.head_dim)
        for source, rows in zip(sources, rows_of_sources(sources), strict=True):
            layers = readable(states.view(shape)[rows].permute(1, 2, 3, 0, 4))
            source.encoded = encoded[rows].clone() if source.keeps_encoded else None
            source.layers = {layer: (keys, values) for layer, (keys, values) in enumerate(layers)}

    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        """taps: none, see LanguageModel.new_cache."""
        return Reading(self.kernels.read(self._decoder, self._located(batch), _NO_ROTATION)[0])

    @property
    def can_adjust(self) -> bool:
        """See GeneratingBody."""
        return True

    def can_generate(self, specs: Sequence[DrawSpec]) -> bool:
        """All specs are supported."""
        return True

    def generate(
        self, batch: RaggedBatch, lens: Sequence[int], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> Generation:
        """See LanguageModel.launch_generation. Runs in one call."""
        ids, probs, kept_ids = self.kernels.generate(
            self._decoder, self._located(batch), _NO_ROTATION, lens, vocab_size, specs
        )
        return Generation(Pending.of(Generated(ids, None if probs is None else TokenProbs(probs, kept_ids))))

    def grow(
        self, batch: RaggedBatch, shapes: Sequence[TreeShape], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> list[list[int]]:
        """See LanguageModel.grow."""
        parents = [shape.parents for shape in shapes]
        return self.kernels.grow(self._decoder, self._located(batch), _NO_ROTATION, parents, vocab_size, specs)

    def take_over(self) -> None:
        """Nothing to do: the model's layers have been taken already."""

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Nothing to prepare."""

    def _located(self, batch: RaggedBatch) -> StackBatch:
        return batch.located(self._decoder.num_layers, self._keys_like)


class SourceStackBody(DecoderStackBody):
    """With an encoder of its own. hf: its layers and its head are taken from it. Raises ValueError for a model without this form, see
    has_source_stack_form."""

    @torch.inference_mode()
    def __init__(self, hf: PreTrainedModel, kernels: Kernels, weight_format: WeightFormat) -> None:
        family = source_family_of(hf)
        if family is None:
            raise ValueError(f"{type(hf).__name__} is not an encoder-decoder that runs as two calls")
        head = _take_head(hf, kernels, weight_format)
        super().__init__(hf, family, head, kernels, weight_format)
        self._encoder = _take_stack(hf, hf.get_encoder(), family, head, kernels, weight_format, WeightMemory())

    def read_sources(self, sources: Sequence[SourceKeys]) -> None:
        """Encode these sources in one pass, and fill in their keys and values."""
        self._project(sources, self._encode([keys.source.ids for keys in sources]))

    def _encode(self, sources: Sequence[Sequence[int]]) -> Tensor:
        """-> [R, hidden] bfloat16, of all their tokens"""
        stack, spans, first = self._encoder, [], 0
        for ids in sources:
            # all layers write their keys and values to the same memory, because no later layer reads them
            room = torch.zeros(2, stack.num_kv_heads, padded(len(ids)), stack.head_dim, dtype=torch.bfloat16)
            stores = array("q", [part.data_ptr() for part in room] * stack.num_layers)
            spans.append((CacheSpan(first, len(ids), 0, room.shape[2], stores), room))
            first += len(ids)
        positions = [position for ids in sources for position in range(len(ids))]
        flat = [token for ids in sources for token in ids]
        batch = StackBatch(flat, positions, None, [], [span for span, _ in spans])
        encoded = self.kernels.read(stack, batch, _NO_ROTATION, (FINAL_NORM,))[1]
        assert encoded is not None
        return encoded


def has_source_stack_form(hf: Any) -> bool:
    """Whether SourceStackBody computes the same as this model."""
    return source_family_of(hf) is not None


def _take_head(hf: Any, kernels: Kernels, weight_format: WeightFormat) -> PackedMatrix:
    """The head, with the bias that some families add to its logits."""
    bias = getattr(hf, "final_logits_bias", None)
    assert bias is None or hf.lm_head.bias is None
    matrix = kernels.pack(source_of(hf.lm_head, weight_format), hf.lm_head.bias if bias is None else bias.flatten())
    hf.lm_head = NativeLinear(matrix, kernels)
    return matrix


def _take_source_keys(
    hf: Any, family: SourceFamily, kernels: Kernels, weight_format: WeightFormat, memory: WeightMemory
) -> PackedMatrix:
    """[layers * 2 * heads * D, hidden]: the projections of a source to the keys and values of all decoder layers, as one product."""
    decoder = hf.get_decoder()
    crosses = [parts.cross for parts in family.layers_of(decoder)]
    linears = [getattr(cross, name) for cross in crosses for name in family.qkv[1:]]
    sources: list[WeightSource] = [source_of(linear, weight_format) for linear in linears]
    matrix = kernels.pack(Joined(sources), joined_bias(linears), memory)
    decoder.source_keys = NativeLinear(matrix, kernels)
    return matrix


def _take_stack(
    hf: Any,
    stack: Any,
    family: SourceFamily,
    head: PackedMatrix,
    kernels: Kernels,
    weight_format: WeightFormat,
    memory: WeightMemory,
) -> Stack:
    """Each layer is replaced by a holder of its packed matrices, so that it is never in memory twice. head: not run for an encoder."""
    form, layers, biases = source_form_of(hf, stack, family), getattr(stack, family.layers), bias_tables_of(stack)
    parts, files, taken = family.layers_of(stack), mapped_files(), []
    embedding_norm, final_norm = (
        None if name is None else getattr(stack, name) for name in (family.embedding_norm, family.final_norm)
    )
    before = embedding_norm  # as in BART: the norm after one part is the norm before the next
    for index, layer in enumerate(parts):
        packer = Packer(kernels, weight_format, memory, files)
        weights = list(layers[index].parameters())
        norms = [before, *layer.norms[:-1]] if family.norms_residual else layer.norms
        of_stream = None if family.norms_residual or index else embedding_norm
        taken.append(_take_layer(layer, norms, of_stream, biases.get(index), family, packer))
        before = layer.mlp_norm
        layers[index] = packer.holder
        give_back(weights, files)
    last = before if family.norms_residual else final_norm
    embedding = stack.embed_tokens.weight.detach().to(torch.bfloat16).contiguous()
    return Stack(taken, embedding, _norm(last), head, form, position_rows=position_rows_of(stack))


def _take_layer(
    parts: LayerParts,
    norms: Sequence[Any],
    residual_norm: Any,
    bias: Tensor | None,
    family: SourceFamily,
    packer: Packer,
) -> StackLayer:
    """norms: before attention, before cross attention if there is any, and before the MLP."""
    qkv, ups = (
        [getattr(owner, name) for name in names]
        for owner, names in ((parts.attention, family.qkv), (parts.mlp, family.up_of(parts.mlp)))
    )
    out = getattr(parts.attention, family.out)
    cross_query, cross_out = (
        None if parts.cross is None else getattr(parts.cross, name) for name in (family.qkv[0], family.out)
    )
    return StackLayer(
        attention_norm=_norm(norms[0]),
        mlp_norm=_norm(norms[-1]),
        attention_post_norm=_NO_NORM,
        mlp_post_norm=_NO_NORM,
        q_norm=None,
        k_norm=None,
        qkv=packer.pack("qkv", Joined([packer.source(linear) for linear in qkv]), joined_bias(qkv)),
        out=packer.pack("out", packer.source(out), out.bias),
        mlps=[take_mlp(ups, getattr(parts.mlp, family.down), packer, is_gated=len(ups) == 2)],
        rotary_table=-1,
        residual_norm=_norm(residual_norm),
        cross_norm=_norm(None if parts.cross is None else norms[1]),
        cross_query=None if cross_query is None else packer.pack("query", packer.source(cross_query), cross_query.bias),
        cross_out=None if cross_out is None else packer.pack("cross", packer.source(cross_out), cross_out.bias),
        bias=bias,
    )


def _norm(norm: Any) -> NormWeights:
    """norm: may be None."""
    if norm is None:
        return _NO_NORM
    bias = getattr(norm, "bias", None)
    return NormWeights(norm.weight.detach().float(), None if bias is None else bias.detach().float())
