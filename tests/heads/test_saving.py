"""Saved heads can be loaded again, and have the form that speculators itself writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.heads import HeadCheckpoint, MedusaConfig, MedusaHead, load_head
from foredraft.heads.saving import save_eagle3, save_medusa
from tests.heads.checkpoints import TARGET, golden
from tests.heads.formats.medusa_forms import as_vllm
from tests.heads.test_eagle import FORMS, head_of

SPECULATORS = [name for name in FORMS if name.startswith("speculators")]
EAGLE3 = [name for name in FORMS if "eagle1" not in name]


@pytest.mark.parametrize("name", EAGLE3)
def test_a_saved_head_is_loaded_again(name: str, tmp_path: Path) -> None:
    head = head_of(name, tmp_path / "given")
    save_eagle3(head, tmp_path / "saved", "target", ["LlamaForCausalLM"], torch.float32)
    target = TARGET._replace(hidden_size=head.config.target_hidden_size)
    loaded = load_head(str(tmp_path / "saved"), target)
    assert loaded.config == head.config
    assert loaded.tensors.keys() == head.state_dict().keys()
    assert all(torch.equal(loaded.tensors[key], weight) for key, weight in head.state_dict().items())
    ids = (loaded.config.target_ids, head.config.target_ids)
    assert ids == (None, None) or torch.equal(*ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SPECULATORS)
def test_files_have_the_keys_of_speculators(name: str, tmp_path: Path) -> None:
    head = head_of(name, tmp_path / "given")
    save_eagle3(head, tmp_path / "saved", "target", ["LlamaForCausalLM"], torch.float32)
    written, theirs = json.loads((tmp_path / "saved" / "config.json").read_text()), golden(name).config
    left_out = {"auto_map", "transformers_version"}
    assert theirs.keys() - written.keys() <= left_out
    same = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm")
    assert {key: written[key] for key in same} == {key: theirs[key] for key in same}


@pytest.mark.parametrize("name", ["medusa", "medusa_two_blocks"])
def test_saved_medusa_heads_are_loaded_again(name: str, tmp_path: Path) -> None:
    """In vLLM's form, with its keys."""
    given = load_head(str(golden(name).save(tmp_path / "given", "medusa_lm_head.pt")), TARGET)
    save_medusa(MedusaHead.of(given, _none), tmp_path / "saved", "target", torch.float32)
    loaded = load_head(str(tmp_path / "saved"), TARGET)
    assert loaded.config == given.config
    assert loaded.tensors.keys() == given.tensors.keys()
    assert all(torch.equal(loaded.tensors[key], weight) for key, weight in given.tensors.items())
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == as_vllm(golden(name)).tensors.keys()


def test_a_shared_lm_head_and_a_reduced_vocabulary_are_saved(tmp_path: Path) -> None:
    ids = torch.tensor([1, 4, 9])
    config = MedusaConfig(
        num_heads=2, shares_lm_head=True, target_hidden_size=16, vocab_size=32, draft_vocab_size=3, target_ids=ids
    )
    tensors = {"lm_head.weight": torch.randn(3, 16)}
    for head in range(2):
        tensors |= {f"blocks.{head}.0.weight": torch.randn(16, 16), f"blocks.{head}.0.bias": torch.randn(16)}
    heads = MedusaHead.of(HeadCheckpoint(config, tensors), _none)
    save_medusa(heads, tmp_path, "target", torch.float32)
    loaded = load_head(str(tmp_path), TARGET)
    assert loaded.config == config
    assert loaded.config.target_ids is not None
    assert torch.equal(loaded.config.target_ids, ids)
    assert all(torch.equal(loaded.tensors[key], weight) for key, weight in tensors.items())


def _none(_: Tensor) -> Tensor:
    raise AssertionError("these heads have an lm_head of their own")


def test_heads_that_the_form_cannot_represent_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="EAGLE-3 heads that read layer inputs, not eagle1"):
        save_eagle3(head_of("safeailab_eagle1", tmp_path), tmp_path / "saved", "target", [])
