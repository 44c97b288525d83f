"""MTP layers: further decoder layers of the target's own family, after its last one, with which it drafts for itself (multi-token
prediction, DeepSeek-V3, arXiv:2412.19437).

A layer's row P pairs the token at position P + 1 with the target's last hidden state of P, after the final norm. A single layer drafts
token by token: the row of a draft token reads the layer's own normalised output of the row before. With several layers, each drafts
one place: layer k reads the output of layer k - 1 in the same row, and the token at P + 1 + k.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.errors import ModelError, one_line
from foredraft.heads.config import MtpConfig
from foredraft.heads.eagle import HeadReading
from foredraft.heads.module import Embed, LMHead, WindowedHead
from foredraft.kernels import Kernels, WeightMemory
from foredraft.model.attention import AttentionMetadata, MaskRule, rule_of_mask
from foredraft.model.batch import RaggedBatch, Read, flatten, remember
from foredraft.model.packed import NativeLinear, pack_linears
from foredraft.model.routing import route_config


class MtpLayer(nn.Module):
    """One MTP layer, which uses our functions after `MtpHead.route`."""

    def __init__(self, config: MtpConfig, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.hidden_first = config.hidden_first
        self.enorm = _copy_of(config.parts.norm)
        self.hnorm = _copy_of(config.parts.norm)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = config.parts.layer(config.layer, index)
        self.norm = _copy_of(config.parts.norm)

    def forward(self, embeds: Tensor, states: Tensor, **arguments: Any) -> Tensor:
        """embeds, states: [R, H] -> [R, H]. arguments: for the decoder layer."""
        parts = [self.enorm(embeds), self.hnorm(states)]
        x = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        out = self.block(x[None], **arguments)
        normalized: Tensor = self.norm((out if isinstance(out, Tensor) else out[0])[0])
        return normalized


class MtpHead(WindowedHead):
    """embed, lm_head: the target's. window: how many tokens a row sees; None: all. Its weights are on the meta device until they are
    loaded (`of`)."""

    config_class = MtpConfig

    def __init__(self, config: MtpConfig, embed: Embed, lm_head: LMHead, window: int | None = None) -> None:
        super().__init__(config, embed, lm_head, window)
        self.config = config
        self._kernels: Kernels | None = None
        self._mask = None if window is None else MaskRule(rule_of_mask(None, window))
        with torch.device("meta"):
            self.layers = nn.ModuleList(MtpLayer(config, index) for index in range(config.num_layers))
        self.rotary_emb = copy.deepcopy(config.parts.rotary_emb)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def _dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Some families keep parts of a layer in float32."""
        return torch.float32 if any(part in name for part in self.config.parts.float32) else dtype

    def route(self, device: torch.device, kernels: Kernels | None) -> None:
        """Make its layers use our attention and our experts. kernels: for attention and linear layers; None: PyTorch's."""
        route_config(self.config.layer, device)
        self._kernels = kernels
        if kernels is not None:
            memory = WeightMemory()
            pack_linears(self, lambda source, bias: NativeLinear(kernels.pack(source, bias, memory), kernels))

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features are states already. [R, H] -> [R, H]"""
        return features

    def run(self, layer: int, batch: RaggedBatch, states: Tensor) -> Tensor:
        """Run one layer over all rows of a pass. states: [R, H], the target's, or those of the previous layer or row -> [R, H]"""
        positions = torch.tensor([batch.positions], device=states.device)
        embeds = self.embed(torch.tensor(batch.ids, device=states.device)).to(states.dtype)
        out: Tensor = self.layers[layer](
            embeds,
            states,
            attention_mask=self._mask,
            position_ids=positions,
            position_embeddings=self.rotary_emb(states[None], positions),
            past_key_values=None,
            use_cache=False,
            attention_metadata=AttentionMetadata.of(batch, self._kernels),
        )
        return out

    @torch.inference_mode()
    def read(self, reads: Sequence[Read], states: Tensor, cache: KVCache) -> HeadReading:
        """Run one pass of the first layer over all reads, see EagleHead.read."""
        batch = flatten(reads, cache)
        states = self.run(0, batch, states)[batch.wanted]
        remember(reads, batch)
        return HeadReading(self.logits(states), states)

    @torch.inference_mode()
    def try_out(self, name: str, device: torch.device) -> None:
        """Run every layer on two tokens. name: the target's. Raises ModelError, one line, for layers that cannot run here."""
        cache = KVCache(MemoryPool(1 << 30), self.bytes_per_token, max_len=2)
        cache.reserve(0, 2)
        reads = [Read(0, [0, 0], 2)]
        states = torch.zeros(2, self.config.hidden_size, dtype=self.dtype, device=device)
        kind = self.config.parts.layer.__name__
        try:
            for layer in range(self.num_layers):
                states = self.run(layer, flatten(reads, cache), states)
        except Exception as error:  # the model's own code may raise anything
            raise ModelError(f"{name}: its MTP layers ({kind}) cannot be run: {one_line(error)}") from error
        if cache.region(0).bytes_per_token != self.bytes_per_token:
            raise ModelError(
                f"{name}: its MTP layers ({kind}) keep {cache.region(0).bytes_per_token} bytes per token instead of the "
                f"{self.bytes_per_token} of keys and values: their kind of attention is not supported"
            )


def _copy_of(norm: nn.Module) -> nn.Module:
    """A copy of the norm, without its weights."""
    return copy.deepcopy(norm).to("meta")
