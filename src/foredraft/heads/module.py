"""The common part of the heads' PyTorch modules: the parts that they may borrow from the target, and reduced vocabularies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from foredraft.heads.config import HeadCheckpoint, HeadConfig, LayeredConfig
from foredraft.heads.packing import pack
from foredraft.heads.vocabulary import to_target_vocabulary
from foredraft.kernels import Kernels, WeightFormat

Embed = Callable[[Tensor], Tensor]
"""ids [R] -> rows [R, H], as the table holds them: unscaled, even if the target scales its embeddings."""

LMHead = Callable[[Tensor], Tensor]
"""[R, H] -> logits [R, V]"""


class HeadModule(nn.Module):
    """lm_head: the target's, used if the head has none of its own.

    weight_format: of the packed matrices; None: they are not packed.
    """

    target_ids: Tensor | None
    weight_format: WeightFormat | None = None

    def __init__(self, config: HeadConfig, lm_head: LMHead) -> None:
        super().__init__()
        self._config = config
        self._target_lm_head = (lm_head,)  # a tuple: the target's weights are not this module's
        self.register_buffer("target_ids", config.target_ids, persistent=False)

    def loaded(self, checkpoint: HeadCheckpoint, dtype: torch.dtype) -> Self:
        """Load a checkpoint's weights, for inference -> self"""
        tensors = {name: tensor.to(self._dtype_of(name, dtype)) for name, tensor in checkpoint.tensors.items()}
        self.load_state_dict(tensors, assign=True)
        return self.requires_grad_(False).eval()

    def pack(self, kernels: Kernels, weight_format: WeightFormat) -> None:
        """Let these kernels multiply by its matrices, in this format. For inference on a CPU."""
        pack(self, kernels, weight_format)
        self.weight_format = weight_format

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights other than packed ones, bfloat16 if there are no others."""
        return next((each.dtype for each in self.parameters()), torch.bfloat16)

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next((each.device for each in self.parameters()), torch.device("cpu"))

    def on_target(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: [n, D] -> [n, V]. Ids that the head cannot draft get -inf."""
        return to_target_vocabulary(logits, self.target_ids, self._config.vocab_size)

    def _dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a weight is kept if the head is in `dtype`."""
        return dtype

    def _logits(self, x: Tensor, own: LMHead | None) -> Tensor:
        """Logits from the head's own lm_head, or from the target's. [n, H] -> [n, D]"""
        if own is not None:
            logits = own(x)
        else:
            logits = self._target_lm_head[0](x)
            logits = logits if self.target_ids is None else logits[:, self.target_ids]
        return logits * self._config.logit_scale


class LayeredHead(HeadModule):
    """A head of decoder layers. embed: the target's embeddings, used if the head has none of its own."""

    embed_tokens: nn.Embedding
    lm_head: nn.Linear

    def __init__(self, config: LayeredConfig, embed: Embed, lm_head: LMHead) -> None:
        super().__init__(config, lm_head)
        self._layered = config
        self._target_embed = (embed,)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of its own keys and values per token."""
        return self._layered.bytes_per_token(self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [R] -> rows [R, H]"""
        embed: Embed = self.embed_tokens if self._layered.owns_embeddings else self._target_embed[0]
        return embed(ids)

    def with_embeddings(self, embed: Embed) -> Self:
        """A copy with the same weights that uses these embeddings in place of the target's, if it has none of its own."""
        other = copy.copy(self)
        other._target_embed = (embed,)
        return other

    def logits(self, x: Tensor) -> Tensor:
        """[n, H] -> [n, D]"""
        return self._logits(x, self.lm_head if self._layered.owns_lm_head else None)


class WindowedHead(LayeredHead):
    """A head whose rows see the last `window` tokens of a text; None: all of them."""

    config_class: ClassVar[type[LayeredConfig]]

    def __init__(self, config: LayeredConfig, embed: Embed, lm_head: LMHead, window: int | None = None) -> None:
        super().__init__(config, embed, lm_head)
        self.window = window

    @classmethod
    def of(
        cls,
        checkpoint: HeadCheckpoint,
        embed: Embed,
        lm_head: LMHead,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
    ) -> Self:
        """The head of a checkpoint, for inference."""
        assert isinstance(checkpoint.config, cls.config_class)
        return cls(checkpoint.config, embed, lm_head, window).loaded(checkpoint, dtype)

    def of_form(self, config: LayeredConfig) -> Self:
        """An empty head of another form, on the meta device, which borrows from the target what this one borrows."""
        return type(self)(config, self._target_embed[0], self._target_lm_head[0], self.window)
