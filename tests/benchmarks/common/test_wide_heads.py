"""A widened head with a widened target drafts what the small one drafts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from benchmarks.common.paths import SHARED
from benchmarks.common.wide_heads import save_head, wide_taps, widen_head
from foredraft.heads import DFlashHead, EagleHead, MedusaHead, TargetEnds, TargetShape, load_head
from foredraft.heads.unrolled import unroll
from foredraft.heads.unrolled_blocks import unroll_blocks
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train.block_heads import DSparkKind
from foredraft.train.eagle1 import Eagle1Kind
from foredraft.train.eagle3 import Eagle3Kind
from foredraft.train.medusa import MedusaKind
from foredraft.train.unrolled_drafts import TargetStates
from tests.train.conftest import make_toy

WIDENER = SHARED / "tools" / "widen.py"


def loaded(folder: Path) -> LanguageModel:
    return load_model(folder, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


def small_and_wide(folder: Path) -> tuple[LanguageModel, LanguageModel]:
    make_toy(folder / "small")
    runpy.run_path(str(WIDENER))["widen"](folder / "small", folder / "wide", 64, 5, 80, 8)
    return loaded(folder / "small"), loaded(folder / "wide")


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


def saved_block_head(target: LanguageModel, folder: Path) -> DFlashHead:
    """A new DSpark head as it is saved: without the target's lm_head, with a correction that matters."""
    kind, ends = DSparkKind(block_size=4, mask_token=7, markov_rank=8), TargetEnds(target.hf)
    head = kind.new(target, [], seed=3)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    for weight in head.correction.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    kind.save(head, target, "small", folder, torch.float32)
    return DFlashHead.of(load_head(str(folder), TargetShape.of(target.hf.config)), ends.embed, ends.lm_head)


def block_logits_of(head: DFlashHead, target: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """[places, B * A, V]"""
    features, _ = TargetStates(target, head.config.taps)(ids)
    return torch.stack(list(unroll_blocks(head, features, ids, torch.tensor([[1, 5], [3, 7]]))))


@pytest.mark.skipif(not WIDENER.exists(), reason="the widener of targets is not there")
def test_the_logits_of_a_widened_block_head_are_the_small_ones(tmp_path: Path) -> None:
    small, wide = small_and_wide(tmp_path)
    head = saved_block_head(small, tmp_path / "head")
    wide_head = widen_head(head, 3, wide)
    save_head(wide_head, tmp_path, wide, "wide")
    ends = TargetEnds(wide.hf)
    loaded_again = DFlashHead.of(load_head(str(tmp_path), TargetShape.of(wide.hf.config)), ends.embed, ends.lm_head)
    ids = torch.randint(1, 4096, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = block_logits_of(head, small, ids)
        assert torch.allclose(block_logits_of(wide_head, wide, ids), expected, atol=1e-4)
        assert torch.allclose(block_logits_of(loaded_again, wide, ids), expected, atol=0.1 * float(expected.std()))


@pytest.mark.skipif(not WIDENER.exists(), reason="the widener of targets is not there")
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_logits_of_a_widened_head_are_the_small_ones(kind: str, tmp_path: Path) -> None:
    small, wide = small_and_wide(tmp_path)
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


@pytest.mark.skipif(not WIDENER.exists(), reason="the widener of targets is not there")
def test_the_logits_of_widened_medusa_heads_are_the_small_ones(tmp_path: Path) -> None:
    small, wide = small_and_wide(tmp_path)
    kind = MedusaKind(num_heads=3)
    made = kind.new(small, [], seed=3)
    for weight in made.blocks.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    kind.save(made, small, "small", tmp_path / "head", torch.float32)
    head = MedusaHead.of(
        load_head(str(tmp_path / "head"), TargetShape.of(small.hf.config)), TargetEnds(small.hf).lm_head
    )
    wide_head = widen_head(head, 3, wide)
    ids = torch.randint(1, 4096, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (
            each(TargetStates(target, each.config.taps)(ids)[0].flatten(0, 1))
            for each, target in ((head, small), (wide_head, wide))
        )
    assert torch.allclose(found, expected, atol=1e-4)


def test_taps_are_the_corresponding_layers_of_the_widened_target() -> None:
    assert wide_taps((2, 4, 7), 8, 24) == (7, 13, 23)
    assert wide_taps((0, 1), 2, 2) == (0, 1)
