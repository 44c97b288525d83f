"""A decoder run as one kernel call: embedding, layers, norm and head, without PyTorch operations in between.

The number of operations, not the multiplications, dominates the cost of a small model's pass. Only models that families.py describes run
this way, and the probe compares their logits with the library's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ModelError
from foredraft.kernels import (
    SILU,
    DrawSpec,
    Kernels,
    PackedMatrix,
    Stack,
    StackBatch,
    StackForm,
    StackLayer,
    WeightFormat,
    unquantized,
)
from foredraft.model.batch import RaggedBatch, Reading
from foredraft.model.exits import Exit, ExitAdapter
from foredraft.model.families import Family, family_of, form_of, layer_types_of
from foredraft.model.generation import Generated, Generation
from foredraft.model.layers import take_adapter, take_layers, take_norm
from foredraft.model.packed import NativeEmbedding, NativeLinear, pack_embedding
from foredraft.model.pages import give_back
from foredraft.model.rotary import rotation_table
from foredraft.model.stored import source_of
from foredraft.model.warm_up import WarmUpSizes
from foredraft.sampling import Pending, TokenProbs

_FIRST_POSITIONS = 512


class StackBody:
    """hf: its layers and its head are taken from it, one matrix at a time; the embedding stays. context_len: the longest sequence.
    weight_format: what its matrices become."""

    is_batch_invariant = False

    def __init__(
        self, hf: PreTrainedModel, kernels: Kernels, context_len: int, weight_format: WeightFormat = unquantized
    ) -> None:
        self.kernels = kernels
        self._hf = hf
        self._context_len = context_len
        family = family_of(hf)
        if family is None:
            raise ValueError(f"{type(hf).__name__} is not a decoder that runs as one call: see has_stack_form")
        self._family, self._table_kinds = family, layer_types_of(hf, family)
        self._stack = _take(hf, family, kernels, weight_format)
        self._keys_like = torch.empty(self._stack.num_kv_heads, 0, self._stack.head_dim, dtype=torch.bfloat16)
        self._rotation = self._tables(min(_FIRST_POSITIONS, context_len))

    @property
    def form(self) -> StackForm:
        """The form of its layers."""
        return self._stack.form

    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        return Reading(*self.kernels.read(self._stack, self._located(batch, taps), self._rotation_for(batch), taps))

    def first_layers(self, num_layers: int, exit: Exit | None, weight_format: WeightFormat) -> StackBody:
        """See ExitingBody."""
        body = copy(self)
        if exit is None:
            body._stack = self._stack.first_layers(num_layers)
        else:
            adapters = [] if exit.adapter is None else [self._take_adapter(exit.adapter, weight_format)]
            body._stack = self._stack.first_layers(num_layers, adapters, take_norm(exit.norm, self._family))
        return body

    def _take_adapter(self, adapter: ExitAdapter, weight_format: WeightFormat) -> StackLayer:
        """Raises ModelError if the target's MLPs are not like the adapter."""
        check_adapter(self.form)
        return take_adapter(adapter, self._family, self.form, self.kernels, weight_format)

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
        rotation = self._rotation_for(batch, max(lens))
        ids, probs, kept_ids = self.kernels.generate(
            self._stack, self._located(batch), rotation, lens, vocab_size, specs
        )
        return Generation(Pending.of(Generated(ids, None if probs is None else TokenProbs(probs, kept_ids))))

    def grow(
        self, batch: RaggedBatch, shapes: Sequence[TreeShape], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> list[list[int]]:
        """See LanguageModel.grow."""
        rotation = self._rotation_for(batch, max(shape.depth for shape in shapes))
        parents = [shape.parents for shape in shapes]
        return self.kernels.grow(self._stack, self._located(batch), rotation, parents, vocab_size, specs)

    @property
    def num_experts_read(self) -> int:
        """How often an expert's weights were read so far, over all layers: a measure of the bytes that a mixture's passes read."""
        return self._stack.num_experts_read

    def _located(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> StackBatch:
        return batch.located(self._stack.num_layers, self._keys_like, len(taps) * self._stack.hidden_size)

    def _rotation_for(self, batch: RaggedBatch, num_generated: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin, at least as far as this batch reaches."""
        end = max(span.start + span.num_rows for span in batch.spans) + num_generated
        if end > self._rotation[0].shape[1]:
            # no further than the context: some embeddings change every angle with the longest position they see
            self._rotation = self._tables(max(end, min(2 * end, self._context_len)))
        return self._rotation

    def _tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [tables, num_positions, rotary_dim / 2] each"""
        tables = [rotation_table(self._hf, num_positions, self._family.angles, kind) for kind in self._table_kinds]
        cos, sin = (torch.stack(part) for part in zip(*tables, strict=True))
        return cos, sin

    def take_over(self) -> None:
        """Nothing to do: the model's layers have been taken already."""

    def warm_up(self, sizes: WarmUpSizes) -> None:
        """Nothing to prepare."""


def has_stack_form(hf: Any) -> bool:
    """Whether StackBody computes the same as this model."""
    return family_of(hf) is not None


def check_adapter(form: StackForm) -> None:
    """Raises ModelError if an exit's adapter, which is SiLU-gated, cannot follow layers of this form: one form describes both."""
    if not form.is_gated or form.activation != SILU:
        raise ModelError(
            "an exit with an adapter needs a target with SiLU-gated MLPs: train one without an adapter (--adapter-size 0)"
        )


@torch.inference_mode()
def _take(hf: Any, family: Family, kernels: Kernels, weight_format: WeightFormat) -> Stack:
    form = form_of(hf, family)
    taken = take_layers(hf, family, form, kernels, weight_format)
    embedding = _take_ends(hf, kernels, weight_format)
    return Stack(taken, embedding, take_norm(hf.model.norm, family), hf.lm_head.matrix, form)


def _take_ends(hf: Any, kernels: Kernels, weight_format: WeightFormat) -> Tensor | PackedMatrix:
    """Pack the head -> the embedding [V, hidden]: packed if it was stored, else bfloat16."""
    pack_embedding(hf, kernels)
    head, embedding = hf.lm_head, hf.model.embed_tokens
    if not isinstance(head, NativeLinear):
        hf.lm_head = NativeLinear(kernels.pack(source_of(head, weight_format), head.bias), kernels)
    if isinstance(embedding, NativeEmbedding):
        return embedding.matrix
    give_back(weight for weight in head.parameters() if weight is not embedding.weight)
    embedding.weight = nn.Parameter(embedding.weight.to(torch.bfloat16).contiguous(), requires_grad=False)
    weight: Tensor = embedding.weight.detach()  # its memory stays, whatever becomes of the parameter
    return weight
