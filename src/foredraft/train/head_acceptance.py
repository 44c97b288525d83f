"""What a head would draft at every place of a text, however deep in a draft, without drawing: the tokens between are the text's own
(teacher forcing), and the head goes on from its own states as it does when it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.heads import EagleHead, MedusaHead, TargetEnds, TargetShape, load_head
from foredraft.heads.unrolled import unroll
from foredraft.llm import LLM


class HeadOnTexts:
    """A head as a plain module, with the settings that the LLM's own was attached with (a Draft of text_acceptance.py).

    Raises ForedraftError for a head whose drafts do not follow from the target's hidden states alone.
    """

    depends_on_place, drafts_first = True, False

    def __init__(self, llm: LLM) -> None:
        assert llm.head is not None
        assert llm.head_identity is not None
        name = llm.head_identity.name
        self._target, ends = llm.target, TargetEnds(llm.target.hf)
        checkpoint = load_head(name, TargetShape.of(llm.target.hf.config), llm.options.revision)
        config = replace(llm.head.config, owns_lm_head=checkpoint.config.owns_lm_head)
        checkpoint = ends.with_rows(replace(checkpoint, config=config))
        if config.kind not in ("eagle1", "eagle3", "medusa"):
            raise ForedraftError(f"{name}: a head of the kind {config.kind} cannot be evaluated on texts")
        if config.kind == "medusa":
            self._head: EagleHead | MedusaHead = MedusaHead.of(checkpoint, ends.lm_head, llm.target.hf.dtype)
        else:
            self._head = EagleHead.of(checkpoint, ends.embed, ends.lm_head, llm.target.hf.dtype)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], depth: int) -> Iterator[Tensor]:
        """ids: [N]. -> for the first, second, .. token of a draft, up to `depth` or what the head can draft: [N, V], row t for a draft
        in which the token at position t has that place. Where a text is too short for one, -inf."""
        (features,) = self._target.read_features([ids], self._head.config.taps)
        for place, rows in zip(range(depth), self._rows(features.to(self._head.dtype), ids, depth), strict=False):
            logits = self._head.on_target(rows)
            before = 2 + place  # the token at t follows from the features of t - 2 - place
            yield torch.nn.functional.pad(logits, (0, 0, before, 0), value=-torch.inf)[: len(ids)]

    def _rows(self, features: Tensor, ids: Sequence[int], depth: int) -> Iterator[Tensor]:
        """By place: logits [N - 1, D] of the token that is 2 + place behind each position."""
        if isinstance(self._head, MedusaHead):
            yield from self._head(features[:-1]).unbind(1)
            return
        next_ids = torch.tensor(ids[1:], device=features.device)[None]
        for logits in unroll(self._head, features[None, :-1], next_ids, depth):
            yield logits[0]
