"""EAGLE heads as plain PyTorch modules, over our attention and our cache: the reference for faster implementations.

A head's row P pairs the token at position P + 1 with the state of position P: the target's features of P, fused to the head's
width, or, for a draft token, the head's own state from the row before. So the head reads the last N - 1 tokens of a history of N,
and its region of the cache holds the history without its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from foredraft.engine.cache import KVCache
from foredraft.heads.config import EagleConfig
from foredraft.heads.module import Embed, LMHead, WindowedHead
from foredraft.model.attention import AttentionMetadata, LayerAttention, attend_spans, rule_of_mask
from foredraft.model.batch import RaggedBatch, Read, flatten, remember


class HeadReading(NamedTuple):
    """logits: [len(wanted), D]. states: [len(wanted), H], which the next row reads in place of features."""

    logits: Tensor
    states: Tensor


class EagleAttention(nn.Module):
    """Attention of one layer. window: how many tokens a row sees; None: all."""

    def __init__(self, config: EagleConfig, index: int, input_size: int, window: int | None) -> None:
        super().__init__()
        layer = config.layer
        self.index, self.head_dim = index, layer.head_dim
        self.kind = LayerAttention(rule_of_mask(None, window), layer.head_dim**-0.5)
        width, kv_width = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=layer.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=layer.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=layer.attention_bias)
        self.o_proj = nn.Linear(width, layer.hidden_size, bias=layer.attention_bias)
        normalizes = config.family == "qwen3"
        self.q_norm = LlamaRMSNorm(layer.head_dim, layer.rms_norm_eps) if normalizes else nn.Identity()
        self.k_norm = LlamaRMSNorm(layer.head_dim, layer.rms_norm_eps) if normalizes else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata) -> Tensor:
        """x: [R, input_size], cos, sin: [R, head_dim] -> [R, H]"""
        query = self.q_norm(self._heads(self.q_proj(x)))
        key = self.k_norm(self._heads(self.k_proj(x)))
        value = self._heads(self.v_proj(x))
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=0)
        attended = attend_spans(metadata, self.index, query, key, value, self.kind)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[R, heads * head_dim] -> [heads, R, head_dim]"""
        return x.view(x.shape[0], -1, self.head_dim).transpose(0, 1)


class EagleLayer(nn.Module):
    """A decoder layer. Each of the first num_fused_layers also reads the token's embedding."""

    def __init__(self, config: EagleConfig, index: int, window: int | None) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.layer.rms_norm_eps
        self.is_fused = index < config.num_fused_layers
        self.norm_before_residual = config.norm_before_residual
        has_input_norm = config.input_norm or index > 0
        self.input_layernorm = LlamaRMSNorm(hidden_size, eps) if has_input_norm else nn.Identity()
        if self.is_fused:
            self.hidden_norm = LlamaRMSNorm(hidden_size, eps)
        self.self_attn = EagleAttention(config, index, hidden_size * (1 + self.is_fused), window)
        self.post_attention_layernorm = LlamaRMSNorm(hidden_size, eps)
        self.mlp = Qwen3MLP(config.layer) if config.family == "qwen3" else LlamaMLP(config.layer)

    def forward(self, embeds: Tensor, x: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata) -> Tensor:
        """embeds, x: [R, H] -> [R, H]"""
        inputs, residual = self.inputs(embeds, x)
        x = residual + self.self_attn(inputs, cos, sin, metadata)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def inputs(self, embeds: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention, and the residual that its output is added to. embeds, x: [.., H]"""
        if not self.is_fused:
            return self.input_layernorm(x), x
        normalized = self.hidden_norm(x)
        inputs = torch.cat((self.input_layernorm(embeds), normalized), dim=-1)
        return inputs, normalized if self.norm_before_residual else x


class EagleHead(WindowedHead):
    """embed, lm_head: the target's, used if the head has none of its own. window: a cap on how many tokens a row sees, such as
    the head's training length; None: no cap. Its weights are on the meta device until they are loaded (`of`)."""

    config_class = EagleConfig

    def __init__(self, config: EagleConfig, embed: Embed, lm_head: LMHead, window: int | None = None) -> None:
        super().__init__(config, embed, lm_head, window)
        self.config = config
        hidden_size, eps = config.hidden_size, config.layer.rms_norm_eps
        with torch.device("meta"):
            if config.owns_embeddings:
                self.embed_tokens = nn.Embedding(config.layer.vocab_size, hidden_size)
            if config.norm_before_fc:
                self.input_norm = LlamaRMSNorm(config.feature_size, eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps) for _ in config.taps)
            if config.projects_features:
                self.feature_fc = nn.Linear(config.feature_size, hidden_size, bias=False)
            self.fc = nn.Linear(self._fc_width(), hidden_size, bias=config.fc_bias)
            if config.mask_token is not None:
                self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.feature_size))
            self.windows = [_narrower(config.window(index), self.window) for index in range(config.num_layers)]
            self.layers = nn.ModuleList(EagleLayer(config, index, each) for index, each in enumerate(self.windows))
            self.norm = LlamaRMSNorm(hidden_size, eps) if config.final_norm else nn.Identity()
            if config.owns_lm_head:
                self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config.layer)

    def fuse(self, features: Tensor) -> Tensor:
        """Reduce the target's features to the head's width. features: [R, feature_size] -> states [R, H]

        EAGLE-1 uses them unchanged unless it projects them: its fc reads them together with the embedding of each row's token.
        """
        if self.config.kind == "eagle1" and not self.config.projects_features:
            return features
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.projects_features:
            features = self.feature_fc(features)
        elif self.config.applies_fc:
            features = self.fc(features)
        return features

    @property
    def mask_state(self) -> Tensor:
        """[1, H], replaces the fused features in rows of the mask token"""
        return self.fuse(self.mask_hidden[0])

    def forward(self, batch: RaggedBatch, states: Tensor) -> HeadReading:
        """One pass. states: [R, H], for each row the fused features or the state of the row before."""
        device = states.device
        embeds = self.embed(torch.tensor(batch.ids, device=device)).to(states.dtype)
        x = self.fc(torch.cat((embeds, states), dim=-1)) if self.config.kind == "eagle1" else states
        cos, sin = self.rotary_emb(x, torch.tensor([batch.positions], device=device))
        metadata = AttentionMetadata.of(batch, None)
        for layer in self.layers:
            x = layer(embeds, x, cos[0], sin[0], metadata)
        x = x[torch.tensor(batch.wanted, device=device)]
        normalized = self.norm(x)
        return HeadReading(self.logits(normalized), normalized if self.config.norm_output else x)

    @torch.inference_mode()
    def read(self, reads: Sequence[Read], states: Tensor, cache: KVCache) -> HeadReading:
        """Run one pass over all reads; afterwards the cache holds their tokens too. Room must have been reserved.

        A sequence's tokens are its history without the first one. states: [R, H], one read after another.
        """
        batch = flatten(reads, cache)
        reading = self(batch, states)
        remember(reads, batch)
        return reading  # type: ignore[no-any-return]

    def _fc_width(self) -> int:
        return 2 * self.config.hidden_size if self.config.kind == "eagle1" else self.config.feature_size


def _narrower(window: int | None, cap: int | None) -> int | None:
    windows = [each for each in (window, cap) if each is not None]
    return min(windows, default=None)
