"""The recipe that adds induction heads: its result is a head that can be trained further."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from foredraft.heads import TargetShape, load_head
from foredraft.model import EMBEDDED, LoadOptions, load_model, load_tokenizer
from foredraft.train import Eagle3Kind

TARGET = str(EMBEDDED / "target")
RECIPE = Path(__file__).parents[2] / "recipes" / "add_induction_heads.py"


def test_the_result_is_a_head_to_train_further(tmp_path: Path) -> None:
    target = load_model(TARGET, LoadOptions(device="cpu"))
    kind = Eagle3Kind(taps=(1, 4, 7), intermediate_size=96, shares_lm_head=True)
    kind.save(kind.new(target, [], 0), target, TARGET, tmp_path / "head", torch.float32)
    code = "".join(f"def add_{i}(a, b):\n    return a + b * {i}\n\n" for i in range(600))
    (tmp_path / "chats.jsonl").write_text(json.dumps(load_tokenizer(TARGET, LoadOptions()).encode(code)) + "\n")
    command = [sys.executable, str(RECIPE), tmp_path / "head", TARGET, tmp_path / "chats.jsonl", tmp_path / "out", "16"]
    subprocess.run(command, check=True)
    config = load_head(str(tmp_path / "out"), TargetShape.of(target.hf.config)).config
    assert (config.layer.num_attention_heads, config.layer.intermediate_size) == (8, 80)
    assert not config.owns_lm_head
    further = Eagle3Kind(shares_lm_head=True, init=str(tmp_path / "out")).load(str(tmp_path / "out"), target)
    assert any(parameter.requires_grad for parameter in further.parameters())
