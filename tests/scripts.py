"""Scripts for `ScriptedDrafter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.drafters.scripted import Script
from foredraft.engine.proposal import DraftRequest


def continuations_of(texts: Mapping[int, Sequence[int]]) -> Script:
    """A script that drafts what follows the history in the seq_id's full text (prompt and output). It drafts nothing for a seq_id
    without a text, or for a history as long as its text."""

    def script(request: DraftRequest) -> Sequence[int]:
        start = len(request.tokens)
        return texts.get(request.seq_id, ())[start : start + request.max_len]

    return script
