"""A head's logits for drafts after positions of a text, with the text's own tokens before each draft token (teacher forcing)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from foredraft.heads.config import DFlashConfig, EagleConfig, HeadCheckpoint
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle import EagleHead
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.module import Embed, LMHead
from foredraft.heads.unrolled import unroll
from foredraft.heads.unrolled_blocks import unroll_blocks

PlainHead = EagleHead | DFlashHead | MedusaHead


def plain_head(checkpoint: HeadCheckpoint, embed: Embed, lm_head: LMHead, dtype: torch.dtype) -> PlainHead:
    """A head's PyTorch module, for inference. embed, lm_head: the target's. Not for early exits and MTP layers."""
    if isinstance(checkpoint.config, EagleConfig):
        return EagleHead.of(checkpoint, embed, lm_head, dtype)
    if isinstance(checkpoint.config, DFlashConfig):
        return DFlashHead.of(checkpoint, embed, lm_head, dtype)
    return MedusaHead.of(checkpoint, lm_head, dtype)


def drafts_on_text(head: PlainHead, features: Tensor, ids: Tensor, rows: Tensor, depth: int) -> Iterator[Tensor]:
    """features: [N, F], ids: [N], of a text. rows: [R], positions, at most N - 2. -> for the first, second, .. token of a draft, up to
    `depth` or the head's maximum: logits [R, D] for the token 2, 3, .. places after each position, since the target itself draws the
    next one. Past the end of the text they are meaningless."""
    yield from islice(_places(head, features, ids, rows, depth), depth)


def _places(head: PlainHead, features: Tensor, ids: Tensor, rows: Tensor, depth: int) -> Iterator[Tensor]:
    if isinstance(head, MedusaHead):
        yield from head(features[rows]).unbind(1)
    elif isinstance(head, DFlashHead):
        yield from unroll_blocks(head, features[None], ids[None], (rows + 1)[None])
    else:
        for logits in unroll(head, features[None, :-1], ids[None, 1:], depth):
            yield logits[0, rows]
