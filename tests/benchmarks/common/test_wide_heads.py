"""A widened head with a widened target drafts what the small one drafts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from benchmarks.common.paths import SHARED
from benchmarks.common.wide_heads import wide_taps, widen_head
from foredraft.heads import EagleHead, TargetEnds, TargetShape, load_head
from foredraft.heads.unrolled import unroll
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train.eagle1 import Eagle1Kind
from foredraft.train.eagle3 import Eagle3Kind
from foredraft.train.unrolled_drafts import TargetStates
from tests.train.conftest import make_toy

WIDENER = SHARED / "tools" / "widen.py"


def loaded(folder: Path) -> LanguageModel:
    return load_model(folder, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


def saved_head(kind: str, target: LanguageModel, folder: Path) -> EagleHead:
    """A new head as it is saved: EAGLE-3 without the target's lm_head, with states that matter."""
    ends, made = TargetEnds(target.hf), Eagle3Kind(shares_lm_head=True)
    if kind == "eagle1":
        made = Eagle1Kind(str(make_toy(folder / "draft", num_layers=1, width=32, seed=5)))  # type: ignore[assignment]
    head = made.new(target, [], seed=3)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    head.config.layer.rms_norm_eps = (
        1e-12  # its norms share one epsilon, and only those of the target's states would need another
    )
    made.save(head, target, "small", folder, torch.float32)
    return EagleHead.of(load_head(str(folder), TargetShape.of(target.hf.config)), ends.embed, ends.lm_head)


def logits_of(head: EagleHead, target: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """[steps, B, L, V], the logits of a head."""
    features, _ = TargetStates(target, head.config.taps)(ids[:, :-1])
    return torch.stack(list(unroll(head, features, ids[:, 1:], 3)))


@pytest.mark.skipif(not WIDENER.exists(), reason="the widener of targets is not there")
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_logits_of_a_widened_head_are_the_small_ones(kind: str, tmp_path: Path) -> None:
    make_toy(tmp_path / "small")
    runpy.run_path(str(WIDENER))["widen"](tmp_path / "small", tmp_path / "wide", 64, 5, 80, 8)
    small, wide = loaded(tmp_path / "small"), loaded(tmp_path / "wide")
    head = saved_head(kind, small, tmp_path / "head")
    wide_head = widen_head(head, 3, wide)
    ids = torch.randint(1, 4096, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = logits_of(head, small, ids), logits_of(wide_head, wide, ids)
    for step in range(3):
        rows = slice(0, ids.shape[1] - 1 - step)
        assert torch.allclose(found[step][:, rows], expected[step][:, rows], atol=1e-4)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (wide_head, head)]
    assert sizes[0] > sizes[1] if kind == "eagle1" else sizes[0] > 8 * sizes[1]


def test_taps_are_the_corresponding_layers_of_the_widened_target() -> None:
    assert wide_taps((2, 4, 7), 8, 24) == (7, 13, 23)
    assert wide_taps((0, 1), 2, 2) == (0, 1)
