"""Training computes what the engine computes, at every position of a text and for several draft tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.heads import EagleHead
from foredraft.heads.unrolled import unroll
from foredraft.model import Read
from tests.heads.checkpoints import golden
from tests.heads.running import cache_for
from tests.heads.test_eagle import FORMS, head_of

NUM_STEPS = 3


@torch.inference_mode()
def drafted_behind(head: EagleHead, ids: list[int], features: Tensor, position: int) -> list[Tensor]:
    """The logits of a drafter that reads the first tokens with features and the following ones with its own states."""
    cache = cache_for(head, [64])
    count = position + 1
    reading = head.read([Read(0, ids[:count], 1)], head.fuse(features[:count]), cache)
    logits = [reading.logits[0]]
    for step in range(1, NUM_STEPS):
        reading = head.read([Read(0, [ids[position + step]], 1)], reading.states, cache)
        logits.append(reading.logits[0])
    return logits


@pytest.mark.parametrize("name", FORMS)
@torch.inference_mode()
def test_every_row_of_every_step_equals_the_engines(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(name, tmp_path)
    features = case.inputs["features"]
    ids = case.inputs["ids"].tolist()[: len(features)]
    texts = torch.tensor([ids, ids[::-1]])
    both = torch.stack([features, features.flip(0)])
    steps = list(unroll(head, both, texts, NUM_STEPS))
    assert len(steps) == NUM_STEPS
    for text in (0, 1):
        for position in range(len(ids) - NUM_STEPS + 1):
            expected = drafted_behind(head, texts[text].tolist(), both[text], position)
            for step, logits in enumerate(expected):
                torch.testing.assert_close(steps[step][text, position], logits, atol=1e-4, rtol=1e-4)
