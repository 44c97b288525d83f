"""Medusa heads as plain PyTorch modules: the reference for faster implementations.

They read the last hidden state that the target's lm_head has read, that of the newest token. The target itself draws the token
after it; head 0 drafts the one after the drawn token, head 1 the next. No head sees what another one drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foredraft.heads.config import HeadCheckpoint, MedusaConfig
from foredraft.heads.module import Embed, HeadModule, LMHead


class MedusaHead(HeadModule):
    """lm_head: the target's, used if the file has none. embed: the target's embeddings, for an adaptive drafter; the heads read
    none. Its weights are on the meta device until they are loaded (`of`)."""

    def __init__(self, config: MedusaConfig, lm_head: LMHead, embed: Embed | None = None) -> None:
        super().__init__(config, lm_head)
        self.config = config
        self._target_embed = embed
        width = config.target_hidden_size
        with torch.device("meta"):
            self.blocks = nn.ModuleList(
                nn.ModuleList(nn.Linear(width, width, bias=config.block_bias) for _ in range(config.num_blocks))
                for _ in range(config.num_heads)
            )
            if config.owns_lm_head and config.shares_lm_head:
                self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
            elif config.owns_lm_head:
                heads = (nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(config.num_heads))
                self.lm_heads = nn.ModuleList(heads)

    @classmethod
    def of(
        cls,
        checkpoint: HeadCheckpoint,
        lm_head: LMHead,
        dtype: torch.dtype = torch.float32,
        embed: Embed | None = None,
    ) -> MedusaHead:
        """The heads of a checkpoint, for inference."""
        assert isinstance(checkpoint.config, MedusaConfig)
        return cls(checkpoint.config, lm_head, embed).loaded(checkpoint, dtype)

    @property
    def bytes_per_token(self) -> int:
        """0: nothing of a text is cached."""
        return 0

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings. ids [R] -> rows [R, E]"""
        assert self._target_embed is not None
        return self._target_embed(ids)

    def states(self, hidden: Tensor) -> Tensor:
        """The input of each head's lm_head. hidden: [R, H] -> [R, heads, H], in the precision of hidden"""
        return torch.stack([_through(blocks, hidden) for blocks in self.blocks], dim=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H], the target's after its final norm -> logits [R, heads, D]"""
        return self.logits_of(self.states(hidden))

    def logits_of(self, states: Tensor) -> Tensor:
        """The logits of all heads. states: [R, heads, H] -> [R, heads, D]"""
        if self.config.owns_lm_head and not self.config.shares_lm_head:
            return torch.stack([self.logits(head, states[:, head]) for head in range(self.config.num_heads)], dim=1)
        logits = self.logits(0, states.flatten(0, 1))  # their common lm_head is read once
        return logits.view(*states.shape[:2], -1)

    def logits(self, head: int, states: Tensor) -> Tensor:
        """The logits of one head. states: [n, H] -> [n, D]"""
        own = None
        if self.config.owns_lm_head:
            own = self.lm_head if self.config.shares_lm_head else self.lm_heads[head]
        return self._logits(states, own)


def _through(blocks: nn.Module, x: Tensor) -> Tensor:
    """Residual blocks, one after another. x: [R, H] -> [R, H]"""
    for linear in blocks.children():
        x = x + nn.functional.silu(_product(linear, x))
    return x


def _product(linear: nn.Module, x: Tensor) -> Tensor:
    """[R, H] -> [R, H], in the precision of x"""
    if not isinstance(linear, nn.Linear):  # packed
        return linear(x)  # type: ignore[no-any-return]
    bias = None if linear.bias is None else linear.bias.to(x.dtype)
    return nn.functional.linear(x, linear.weight.to(x.dtype), bias)
