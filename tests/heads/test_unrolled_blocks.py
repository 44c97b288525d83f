"""Training of block drafters computes the same numbers as the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.heads import DFlashHead
from foredraft.heads.unrolled_blocks import unroll_blocks
from tests.heads.checkpoints import golden
from tests.heads.test_dflash import NAMES, cache_for, head_of

ANCHORS = (1, 3, 6)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_after_each_anchor_equals_the_engines(name: str, tmp_path: Path) -> None:
    """For two texts at once, with each draft given the text's own tokens."""
    case, head = golden(name), head_of(golden(name), tmp_path)
    features, ids = case.inputs["features"], case.inputs["ids"][:-1]
    both = torch.stack([ids, ids.flip(0)]), torch.stack([features, features.flip(0)])
    anchors = torch.tensor([ANCHORS, ANCHORS])
    with torch.no_grad():
        places = [logits.view(2, len(ANCHORS), -1) for logits in unroll_blocks(head, both[1], both[0], anchors)]
    assert len(places) == head.config.num_places
    for text in range(2):
        for number, anchor in enumerate(ANCHORS):
            expected = engine_logits(head_of(case, tmp_path), both[1][text], both[0][text].tolist(), anchor)
            for place, logits in enumerate(expected):
                torch.testing.assert_close(places[place][text, number], logits, atol=1e-4, rtol=0)


def engine_logits(head: DFlashHead, features: torch.Tensor, ids: list[int], anchor: int) -> list[torch.Tensor]:
    """[D], the logits at each position that is inside the text."""
    cache, first = cache_for(head), head.config.first_row
    head.inject(cache.region(0), ids[:anchor], features[:anchor])
    reading = head.read([0], [ids[anchor]], cache)
    inside = min(head.config.num_places, len(ids) - anchor)
    if head.correction is None:
        return list(reading.logits[0, first : first + inside])
    block, memory, found = head.correction.prepare(reading), head.correction.empty_memory(1), []
    previous = [ids[anchor - head.correction.begins_earlier]] * first + ids[anchor : anchor + inside]
    with torch.inference_mode():
        for row, token in enumerate(previous):
            logits, memory = head.correction(block, torch.tensor([row]), torch.tensor([token]), memory)
            found.append(logits[0])
    return found[first:]
