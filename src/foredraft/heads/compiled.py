"""An EAGLE head run by the compiled kernels: a pass or a whole draft is one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.engine.cache import KVCache
from foredraft.engine.token_tree import TreeShape
from foredraft.heads.eagle import EagleHead, HeadReading
from foredraft.heads.vocabulary import to_target_vocabulary
from foredraft.kernels import (
    DrawSpec,
    FeatureFusion,
    InMemory,
    Interleaved,
    Joined,
    Kernels,
    NormWeights,
    PackedMatrix,
    Stack,
    StackBatch,
    StackForm,
    StackLayer,
    StackMlp,
    StatefulRows,
    States,
    WeightFormat,
    WeightMemory,
    WeightSource,
    unquantized,
)
from foredraft.model.batch import RaggedBatch, Read, flatten, remember
from foredraft.model.generation import Generated
from foredraft.model.layers import joined_bias
from foredraft.model.taps import FINAL_NORM
from foredraft.sampling import TokenProbs
from foredraft.utils.tensors import num_bytes

_FIRST_POSITIONS = 512


class CompiledEagle:
    """The counterpart of EagleHead in bfloat16, with matrices packed in weight_format.

    head: its weights are taken, and it is not kept. embedding, lm_head: the target's, used if the head has none; a head that drafts
    part of the vocabulary must have its own lm_head.
    """

    def __init__(
        self,
        head: EagleHead,
        embedding: Tensor | PackedMatrix,
        lm_head: PackedMatrix,
        kernels: Kernels,
        weight_format: WeightFormat = unquantized,
    ) -> None:
        self.config, self.dtype, self.windows = head.config, torch.bfloat16, head.windows
        self.weight_format = weight_format
        self.bytes_per_token = head.config.bytes_per_token(self.dtype)
        self._kernels, self._pack = kernels, _Packer(kernels, weight_format)
        self._unpacked_bytes = _unpacked_bytes(head)
        self._rotary_embedding = head.rotary_emb
        self._stack = self._take(head, embedding, lm_head)
        self._keys_like = torch.empty(self._stack.num_kv_heads, 0, self._stack.head_dim, dtype=self.dtype)
        self._rotation = self._table(_FIRST_POSITIONS)
        self._mask_state = None if head.config.mask_token is None else self._fused_mask(head)

    @staticmethod
    def supports(head: EagleHead) -> bool:
        """Whether the kernels can run this head."""
        config = head.config
        is_plain = config.layer.hidden_act == "silu" and config.hidden_size % 16 == 0 and config.layer.head_dim % 2 == 0
        norms_alone = (config.norm_before_fc or config.fc_norm) and not config.fuses_features
        return is_plain and not norms_alone and not getattr(config.layer, "mlp_bias", False)

    def fuse(self, features: Tensor) -> Tensor:
        """See EagleHead.fuse."""
        return self._kernels.fuse(self._stack, features)

    @property
    def mask_state(self) -> Tensor:
        """See EagleHead.mask_state."""
        assert self._mask_state is not None
        return self._mask_state

    def on_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: [n, D] -> [n, V]. Ids that the head cannot draft get -inf."""
        return to_target_vocabulary(logits, self.config.target_ids, self.config.vocab_size)

    def read(self, reads: Sequence[Read], states: Tensor, cache: KVCache) -> HeadReading:
        """See EagleHead.read."""
        batch = flatten(reads, cache)
        logits, hidden = self._kernels.read(
            self._stack, self._located(batch), self._rotation_for(batch), (self._tap,), states.contiguous()
        )
        assert hidden is not None
        remember(reads, batch)
        return HeadReading(logits, hidden[batch.wanted])

    def generate(
        self,
        reads: Sequence[Read],
        states: States,
        lens: Sequence[int],
        vocab_size: int,
        cache: KVCache,
        specs: Sequence[DrawSpec],
    ) -> Generated:
        """Read with these states [R, H], or with the features [R', F] of each read, and draft lens[i] >= 1 tokens after reads[i], chosen
        by specs[i]. The row of a draft token has the state of the row before. The last token is not read; the others are in the cache
        afterwards."""
        batch = flatten(reads, cache, lens)
        ids, probs, kept_ids = self._kernels.generate(
            self._stack,
            self._located(batch),
            self._rotation_for(batch, max(lens)),
            lens,
            vocab_size,
            specs,
            states,
        )
        for read, span, tokens in zip(reads, batch.spans, ids, strict=True):
            span.region.tokens.extend([*read.tokens, *tokens[:-1]])
        return Generated(ids, None if probs is None else TokenProbs(probs, kept_ids))

    def grow(
        self,
        reads: Sequence[Read],
        states: States,
        shapes: Sequence[TreeShape],
        vocab_size: int,
        cache: KVCache,
        specs: Sequence[DrawSpec],
    ) -> list[list[int]]:
        """Read with states or features as in generate, and grow a tree of shapes[i] after reads[i], with tokens chosen by specs[i],
        greedily or with shared noise. Afterwards the trees are not in the cache -> the token of each node, -1 where none has grown"""
        batch = flatten(reads, cache, [len(shape) for shape in shapes])
        depth = max(shape.depth for shape in shapes)
        grown = self._kernels.grow(
            self._stack,
            self._located(batch),
            self._rotation_for(batch, depth),
            [shape.parents for shape in shapes],
            vocab_size,
            specs,
            states,
        )
        remember(reads, batch)
        return grown

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights, packed."""
        tensors = [tensor for matrix in self._pack.packed for tensor in matrix.tensors.values()]
        return self._unpacked_bytes + num_bytes(tensors)

    @property
    def _tap(self) -> int:
        """The tap of the state that the next row reads."""
        return FINAL_NORM if self.config.norm_output else self.config.num_layers

    def _fused_mask(self, head: EagleHead) -> Tensor:
        return self.fuse(head.mask_hidden[0].detach().to(self.dtype))

    def _take_features(self, head: EagleHead) -> FeatureFusion | None:
        """What EagleHead.fuse does; None if it does nothing."""
        config = head.config
        if not config.fuses_features:
            return None
        fc = self._pack(head.feature_fc if config.projects_features else head.fc)
        norms = [head.input_norm] if config.norm_before_fc else [*head.fc_norm] if config.fc_norm else []
        weights = [norm.weight.detach().float() for norm in norms]
        return FeatureFusion(fc, torch.cat(weights) if weights else None, max(len(norms), 1))

    def _take(self, head: EagleHead, embedding: Tensor | PackedMatrix, lm_head: PackedMatrix) -> Stack:
        config, layer = head.config, head.config.layer
        form = StackForm(
            num_heads=layer.num_attention_heads,
            num_kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            rotary_dim=layer.head_dim,
            epsilon=layer.rms_norm_eps,
            scale=layer.head_dim**-0.5,
            logit_scale=config.logit_scale,
        )
        layers = [self._take_layer(head, index) for index in range(config.num_layers)]
        matrix = self._pack(head.lm_head) if config.owns_lm_head else lm_head
        num_ids = matrix.out_features if config.target_ids is None else config.vocab_size
        fusion = self._pack(head.fc) if config.kind == "eagle1" else None
        table = head.embed_tokens.weight.detach().bfloat16() if config.owns_embeddings else embedding
        stateful = StatefulRows(self._tap, num_ids, config.target_ids, fusion, self._take_features(head))
        return Stack(layers, table, _norm(head.norm), matrix, form, stateful)

    def _take_layer(self, head: EagleHead, index: int) -> StackLayer:
        layer: Any = head.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        hidden_norm = _norm(layer.hidden_norm) if layer.is_fused else NormWeights()
        input_norm = _norm(layer.input_layernorm)
        replaces_residual = layer.is_fused and layer.norm_before_residual
        return StackLayer(
            attention_norm=NormWeights() if replaces_residual else hidden_norm if layer.is_fused else input_norm,
            mlp_norm=_norm(layer.post_attention_layernorm),
            attention_post_norm=NormWeights(),
            mlp_post_norm=NormWeights(),
            q_norm=_norm(attention.q_norm).weight,
            k_norm=_norm(attention.k_norm).weight,
            qkv=self._pack(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._pack(attention.o_proj),
            mlps=[StackMlp(self._pack.interleaved(mlp.gate_proj, mlp.up_proj), self._pack(mlp.down_proj))],
            window=head.windows[index] or 0,
            residual_norm=hidden_norm if replaces_residual else NormWeights(),
            embedding_norm=input_norm if layer.is_fused else NormWeights(),
            is_fused=layer.is_fused,
        )

    def _located(self, batch: RaggedBatch) -> StackBatch:
        return batch.located(self._stack.num_layers, self._keys_like)

    def _rotation_for(self, batch: RaggedBatch, num_generated: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin, for at least the positions of this batch."""
        end = max(span.start + span.num_rows for span in batch.spans) + num_generated
        if end > self._rotation[0].shape[1]:
            self._rotation = self._table(2 * end)
        return self._rotation

    def _table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [1, num_positions, head_dim / 2] float32 each"""
        half = self._stack.head_dim // 2
        cos, sin = self._rotary_embedding(torch.zeros(1), torch.arange(num_positions)[None])
        return cos[..., :half].float().contiguous(), sin[..., :half].float().contiguous()


class _Packer:
    """Packs a head's matrices, in one format."""

    def __init__(self, kernels: Kernels, weight_format: WeightFormat) -> None:
        self._kernels, self._format, self._memory = kernels, weight_format, WeightMemory()
        self.packed: list[PackedMatrix] = []

    def __call__(self, *linears: Any) -> PackedMatrix:
        """Pack the matrices of linear layers that share an input as one."""
        sources = [InMemory(linear.weight.detach(), self._format) for linear in linears]
        return self._keep(sources[0] if len(sources) == 1 else Joined(sources), joined_bias(linears))

    def interleaved(self, gate: Any, up: Any) -> PackedMatrix:
        sources = [InMemory(linear.weight.detach(), self._format) for linear in (gate, up)]
        return self._keep(Interleaved(*sources), None)

    def _keep(self, source: WeightSource, bias: Tensor | None) -> PackedMatrix:
        matrix = self._kernels.pack(source, bias, self._memory)
        self.packed.append(matrix)
        return matrix


def _unpacked_bytes(head: EagleHead) -> int:
    """Bytes of norms and embeddings, in bfloat16."""
    packed = {
        id(tensor) for linear in head.modules() if isinstance(linear, nn.Linear) for tensor in linear.parameters()
    }
    return sum(each.numel() for each in head.parameters() if id(each) not in packed) * torch.bfloat16.itemsize


def _norm(module: nn.Module) -> NormWeights:
    """The weight of a norm; empty for nn.Identity."""
    weight = getattr(module, "weight", None)
    return NormWeights(None if weight is None else weight.detach().float())
