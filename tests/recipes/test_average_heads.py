"""The recipe that averages heads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from foredraft.heads import TargetShape, load_head
from foredraft.model import EMBEDDED, LoadOptions, load_model
from foredraft.train import Eagle1Kind, Eagle3Kind

TARGET = str(EMBEDDED / "target")
RECIPE = Path(__file__).parents[2] / "recipes" / "average_heads.py"


def test_each_weight_is_the_mean_in_eight_bits_and_other_forms_are_refused(tmp_path: Path) -> None:
    target = load_model(TARGET, LoadOptions(device="cpu"))
    for name, width, seed in (("a", 96, 0), ("b", 96, 1), ("wider", 112, 2)):
        kind = Eagle3Kind(taps=(1, 4, 7), intermediate_size=width, shares_lm_head=True)
        kind.save(kind.new(target, [], seed), target, TARGET, tmp_path / name, torch.float32)
    command = [sys.executable, str(RECIPE), TARGET, tmp_path / "out", tmp_path / "a", tmp_path / "b"]
    subprocess.run(command, check=True)
    shape = TargetShape.of(target.hf.config)
    first, second, mean = (load_head(str(tmp_path / name), shape) for name in ("a", "b", "out"))
    assert mean.is_quantized
    assert mean.config == first.config
    assert mean.tensors.keys() == first.tensors.keys()
    assert any(not torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    for name, weight in mean.tensors.items():
        expected = (first.tensors[name].float() + second.tensors[name].float()) / 2
        assert (weight.float() - expected).abs().max() <= 0.01 * expected.abs().max()  # half a step is 1/254
    kind = Eagle3Kind(taps=(0, 4, 7), intermediate_size=96, shares_lm_head=True)
    kind.save(kind.new(target, [], 3), target, TARGET, tmp_path / "other taps", torch.float32)
    refused = subprocess.run([*command[:-1], tmp_path / "other taps"], capture_output=True, text=True, check=False)
    assert "the heads read different layers or draft different ids" in refused.stderr
    refused = subprocess.run([*command[:-1], tmp_path / "wider"], capture_output=True, text=True, check=False)
    assert "only heads of one form can be averaged" in refused.stderr


def test_eagle1_heads_stay_in_bfloat16(tmp_path: Path) -> None:
    target, head = load_model(TARGET, LoadOptions(device="cpu")), str(EMBEDDED / "head")
    kind = Eagle1Kind(init=head)
    other = kind.load(head, target)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    kind.save(other, target, TARGET, tmp_path / "other", torch.bfloat16)
    subprocess.run([sys.executable, str(RECIPE), TARGET, tmp_path / "out", head, tmp_path / "other"], check=True)
    shape = TargetShape.of(target.hf.config)
    first, mean = load_head(head, shape), load_head(str(tmp_path / "out"), shape)
    assert not mean.is_quantized
    assert mean.config == first.config
    for name, weight in mean.tensors.items():
        torch.testing.assert_close(weight.float(), 1.25 * first.tensors[name].float(), rtol=0.01, atol=0)
