"""Medusa heads as plain PyTorch modules: the reference of whatever runs them faster.

They read the hidden state that the target's lm_head read last, of the newest token it has read. The target draws the token after
that one itself; head 0 drafts the one after the drawn one, head 1 the next. No head sees what another one drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foredraft.heads.config import HeadCheckpoint, MedusaConfig
from foredraft.heads.eagle import LMHead
from foredraft.heads.vocabulary import to_target_vocabulary


class MedusaHead(nn.Module):
    """lm_head: the target's, used where the file has none. Its weights are on the meta device until they are loaded (`of`)."""

    target_ids: Tensor | None

    def __init__(self, config: MedusaConfig, lm_head: LMHead) -> None:
        super().__init__()
        self.config = config
        self._target_modules = (lm_head,)  # a tuple: the target's weights are not this module's
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
        self.register_buffer("target_ids", config.target_ids, persistent=False)

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint, lm_head: LMHead, dtype: torch.dtype = torch.float32) -> MedusaHead:
        """The heads of a checkpoint, for inference."""
        assert isinstance(checkpoint.config, MedusaConfig)
        heads = cls(checkpoint.config, lm_head)
        heads.load_state_dict({name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}, assign=True)
        return heads.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.parameters()).dtype

    @property
    def bytes_per_token(self) -> int:
        """It keeps nothing of a text."""
        return 0

    def states(self, hidden: Tensor) -> Tensor:
        """What each head's lm_head reads. hidden: [R, H] -> [R, heads, H]"""
        return torch.stack([_through(blocks, hidden) for blocks in self.blocks], dim=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H], the target's after its final norm -> logits [R, heads, D]"""
        states = self.states(hidden)
        return torch.stack([self.logits(head, states[:, head]) for head in range(self.config.num_heads)], dim=1)

    def on_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: [n, D] -> [n, V]. What the heads cannot draft has -inf."""
        return to_target_vocabulary(logits, self.target_ids, self.config.vocab_size)

    def logits(self, head: int, states: Tensor) -> Tensor:
        """Of one head. states: [n, H] -> [n, D]"""
        if self.config.owns_lm_head:
            logits: Tensor = (self.lm_head if self.config.shares_lm_head else self.lm_heads[head])(states)
        else:
            logits = self._target_modules[0](states)
            logits = logits if self.target_ids is None else logits[:, self.target_ids]
        return logits * self.config.logit_scale


def _through(blocks: nn.Module, x: Tensor) -> Tensor:
    """Residual blocks, one after another. x: [R, H] -> [R, H]"""
    for linear in blocks.children():
        x = x + nn.functional.silu(linear(x))
    return x
