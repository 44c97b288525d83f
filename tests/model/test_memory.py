"""Loading in another dtype gives the same numbers as transformers' own conversion."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from foredraft.model import LoadOptions
from foredraft.model.formats import open_checkpoint
from tests.model import zoo


def test_a_float16_checkpoint_becomes_bfloat16(tmp_path: Path) -> None:
    zoo.random_model(zoo.SPECIES["llama"].config()).half().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), LoadOptions(device="cpu"))
    ours = checkpoint.model(checkpoint.config(), torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert ours.dtype == ours.config.dtype == torch.bfloat16
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
