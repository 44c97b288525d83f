"""What a head would draft at every position of a text and every depth of a draft, without drawing: the draft tokens before are the
text's own (teacher forcing), and the head continues from its own states, as when it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.errors import ForedraftError
from foredraft.heads import EarlyExit, TargetEnds, TargetShape, load_head
from foredraft.heads.on_texts import drafts_on_text, plain_head
from foredraft.llm import LLM


class HeadOnTexts:
    """A head as a plain module, with the settings that the LLM's head was attached with (a Draft of text_acceptance.py).

    Raises ForedraftError for a head whose drafts do not depend on the target's hidden states alone.
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
        if isinstance(llm.head, EarlyExit):
            raise ForedraftError(f"{name}: a head of kind {config.kind} cannot be evaluated on texts")
        self._head = plain_head(checkpoint, ends.embed, ends.lm_head, llm.head.dtype)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], depth: int, source: Source = NO_SOURCE) -> Iterator[Tensor]:
        """ids: [N]. source: unused, because the target is a decoder-only model. -> for the first, second, ... token of a draft, up to
        `depth` or what the head can draft: [N, V], where row t is for the token at position t as that token of a draft. Rows before
        the first such draft are -inf."""
        (features,) = self._target.read_features([ids], self._head.config.taps)
        tokens = torch.tensor(ids, device=features.device)
        rows = torch.arange(len(ids) - 1, device=features.device)
        drafts = drafts_on_text(self._head, features.to(self._head.dtype), tokens, rows, depth)
        for place, logits in enumerate(drafts):
            before = 2 + place  # the token at t follows from the features of t - 2 - place
            padded = torch.nn.functional.pad(self._head.on_target(logits), (0, 0, before, 0), value=-torch.inf)
            yield padded[: len(ids)]
