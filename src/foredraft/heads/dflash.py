"""Block drafters with injected features (DFlash, z-lab, and related heads) as plain PyTorch modules, over our cache.

The target's features of each token, fused to the head's width, give the keys and values of every layer: the context. A block of rows,
the pending token followed by mask tokens, is read over the context in one pass. Its rows see each other too, and each gives the
token at its own position, or the one after. A head may correct these given the tokens drafted before (corrections.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from foredraft.engine.cache import KVCache
from foredraft.engine.region import Region
from foredraft.heads.config import Convolution, DFlashConfig, HeadCheckpoint
from foredraft.heads.corrections import BlockReading, correction_of
from foredraft.heads.markov_chains import MarkovChains
from foredraft.heads.module import Embed, LayeredHead, LMHead
from foredraft.kernels import Kernels

_Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """One block. rows: its rows of the pass. start: the position of the first row, after the context that the region holds."""

    region: Region
    rows: slice
    start: int


class DFlashAttention(nn.Module):
    """Attention of one layer over context and block."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        layer = config.layer
        self.index, self.head_dim = index, layer.head_dim
        self.is_causal, self.window = config.is_causal[index], config.window(index)
        self.window_from_block = config.window_from_block
        width, kv_width = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
        self.q_proj = nn.Linear(layer.hidden_size, width, bias=layer.attention_bias)
        self.k_proj = nn.Linear(layer.hidden_size, kv_width, bias=layer.attention_bias)
        self.v_proj = nn.Linear(layer.hidden_size, kv_width, bias=layer.attention_bias)
        self.o_proj = nn.Linear(width, layer.hidden_size, bias=layer.attention_bias)
        self.q_norm = LlamaRMSNorm(layer.head_dim, layer.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(layer.head_dim, layer.rms_norm_eps)

    def keys_and_values(self, x: Tensor, angles: _Angles) -> tuple[Tensor, Tensor]:
        """x: [R, H] -> [Hkv, R, D] each"""
        key = self.k_norm(self._heads(self.k_proj(x)))
        _, key = apply_rotary_pos_emb(key, key, *angles, unsqueeze_dim=0)
        return key, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, angles: _Angles, spans: Sequence[BlockSpan]) -> Tensor:
        """The rows of each span attend to its context, and to the rows of the span. x: [R, H] -> [R, H]"""
        query = self.q_norm(self._heads(self.q_proj(x)))
        query, _ = apply_rotary_pos_emb(query, query, *angles, unsqueeze_dim=0)
        key, value = self.keys_and_values(x, angles)
        attended = []
        for span in spans:
            keys, values = span.region.write(self.index, key[:, span.rows], value[:, span.rows], span.start)
            end = span.start + span.rows.stop - span.rows.start
            attended.append(
                functional.scaled_dot_product_attention(
                    query[None, :, span.rows],
                    keys[None, :, :end],
                    values[None, :, :end],
                    attn_mask=self._mask(span.start, end, x.device),
                    enable_gqa=True,
                )[0]
            )
        out: Tensor = self.o_proj(torch.cat(attended, dim=1).transpose(0, 1).flatten(1))
        return out

    def _mask(self, start: int, end: int, device: torch.device) -> Tensor | None:
        """[end - start, end] bool, which keys a row sees; None: all"""
        if not self.is_causal and self.window is None:
            return None
        keys, rows = torch.arange(end, device=device), torch.arange(start, end, device=device)[:, None]
        return self.sees(keys, rows, start)

    def sees(self, keys: Tensor, rows: Tensor, start: int | Tensor) -> Tensor:
        """Whether rows of a block that begins at `start` see keys. All are positions, and broadcast."""
        ahead = keys - rows
        seen = ahead <= 0 if self.is_causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.window is None:
            return seen
        return seen & (keys >= start - self.window if self.window_from_block else ahead.abs() < self.window)

    def _heads(self, x: Tensor) -> Tensor:
        """[R, heads * head_dim] -> [heads, R, head_dim]"""
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)


class BlockConvolution(nn.Module):
    """DFlash-2's convolutions around a part of a layer: one on its input and one on its output, over the rows of a block up to each
    row itself. A kernel is the sum of a fixed one per channel and one that each row computes for groups of channels."""

    def __init__(self, form: Convolution, width: int, block_size: int) -> None:
        super().__init__()
        self._num_taps, self._group_size, self._block_size = form.num_taps, form.group_size, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, form.num_taps, width))
        self.kernel_projection = nn.Linear(width, 2 * form.num_taps * (width // form.group_size), bias=False)

    def forward(self, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """x: [R, H], blocks one after another -> [R, H]"""
        added = self.kernel_projection(x).view(len(x), 2, self._num_taps, -1)
        added = added.repeat_interleave(self._group_size, dim=-1)
        before, after = (self.base_kernel + added).unbind(1)
        return self._convolved(inner(self._convolved(x, before)), after)

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x: [R, H], kernel: [R, taps, H] -> [R, H]"""
        blocks = functional.pad(x.view(-1, self._block_size, x.shape[-1]), (0, 0, self._num_taps - 1, 0))
        # a window ends with the row itself, which is tap 0: hence the flip
        windows = blocks.unfold(1, self._num_taps, 1).flip(-1).flatten(0, 1)
        return torch.einsum("rht,rth->rh", windows, kernel)


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        width, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn = DFlashAttention(config, index)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = Qwen3MLP(config.layer)
        self.has_convolutions = config.convolution is not None
        if config.convolution is not None:
            self.attention_conv = BlockConvolution(config.convolution, width, config.block_size)
            self.mlp_conv = BlockConvolution(config.convolution, width, config.block_size)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x: [R, H], blocks one after another. attend: computes attention from its inputs, [R, H] -> [R, H]. -> [R, H]"""
        inputs = self.input_layernorm(x)
        x = x + (self.attention_conv(inputs, attend) if self.has_convolutions else attend(inputs))
        inputs = self.post_attention_layernorm(x)
        out: Tensor = x + (self.mlp_conv(inputs, self.mlp) if self.has_convolutions else self.mlp(inputs))
        return out


class DFlashHead(LayeredHead):
    """embed, lm_head: the target's, used if the head has none of its own. Its weights are on the meta device until they are loaded
    (`of`)."""

    def __init__(self, config: DFlashConfig, embed: Embed, lm_head: LMHead) -> None:
        super().__init__(config, embed, lm_head)
        self.config = config
        width, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        with torch.device("meta"):
            if config.owns_embeddings:
                self.embed_tokens = nn.Embedding(config.layer.vocab_size, width)
            self.fc = nn.Linear(config.feature_size, width, bias=False)
            self.hidden_norm = LlamaRMSNorm(width, eps)
            self.layers = nn.ModuleList(DFlashLayer(config, index) for index in range(config.num_layers))
            self.norm = LlamaRMSNorm(width, eps)
            if config.owns_lm_head:
                self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
            self.correction = None if config.correction is None else correction_of(config.correction, config)
        self.rotary_emb = LlamaRotaryEmbedding(config.layer)
        self.chains: MarkovChains | None = None

    @classmethod
    def of(
        cls, checkpoint: HeadCheckpoint, embed: Embed, lm_head: LMHead, dtype: torch.dtype = torch.float32
    ) -> DFlashHead:
        """The head of a checkpoint, for inference."""
        assert isinstance(checkpoint.config, DFlashConfig)
        return cls(checkpoint.config, embed, lm_head).loaded(checkpoint, dtype)

    def compile_chains(self, kernels: Kernels | None) -> None:
        """Let the kernels write whole chains, if there are any kernels and they support the head's correction."""
        if kernels is not None:
            self.chains = MarkovChains.of(self.correction, self.target_ids, kernels)

    @property
    def lm_heads(self) -> list[nn.Module]:
        """The modules that write logits besides the lm_head."""
        tables = (getattr(self.correction, name, None) for name in ("markov_w2", "readout"))
        return [table for table in tables if table is not None]

    @torch.inference_mode()
    def inject(self, region: Region, tokens: Sequence[int], features: Tensor) -> None:
        """Append the keys and values of these tokens to the context that the region holds; room must have been reserved. features:
        [len(tokens), feature_size], the target's"""
        start = len(region.tokens)
        context = self.hidden_norm(self.fc(features.to(self.dtype)))
        angles = self._angles(range(start, start + len(tokens)))
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            key, value = attention.keys_and_values(context, angles)
            region.write(index, key, value, start)
        region.tokens.extend(tokens)

    @torch.inference_mode()
    def read(self, seq_ids: Sequence[int], pending: Sequence[int], cache: KVCache) -> BlockReading:
        """Read a block for each sequence in one pass, from its pending token on, after the context in the cache, which stays as it is.
        Room for the block must have been reserved. The logits are not corrected."""
        size, spans = self.config.block_size, list[BlockSpan]()
        for index, seq_id in enumerate(seq_ids):
            region = cache.region(seq_id)
            spans.append(BlockSpan(region, slice(index * size, (index + 1) * size), len(region.tokens)))
        ids = torch.full((len(seq_ids), size), self.config.mask_token, device=self.norm.weight.device)
        ids[:, 0] = torch.tensor(list(pending))
        x = self.embed(ids.flatten()).to(self.dtype)
        angles = self._angles([span.start + place for span in spans for place in range(size)])
        for layer in self.layers:
            attention: Any = layer.self_attn
            x = layer(x, partial(attention, angles=angles, spans=spans))
        x = self.norm(x)
        return BlockReading(*(each.view(len(seq_ids), size, -1) for each in (self.logits(x), x)))

    def angles(self, positions: Tensor) -> _Angles:
        """positions: [B, R] -> cos and sin, [B, R, head_dim] each"""
        cos, sin = self.rotary_emb(self.norm.weight, positions)
        return cos, sin

    def _angles(self, positions: Sequence[int]) -> _Angles:
        """cos and sin, [R, head_dim] each"""
        cos, sin = self.angles(torch.tensor([list(positions)], device=self.norm.weight.device))
        return cos[0], sin[0]
