"""What is saved is what is loaded, and what speculators itself writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foredraft.heads import load_head
from foredraft.heads.saving import save_eagle3
from tests.heads.checkpoints import TARGET, golden
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
def test_files_have_the_keys_that_speculators_writes(name: str, tmp_path: Path) -> None:
    head = head_of(name, tmp_path / "given")
    save_eagle3(head, tmp_path / "saved", "target", ["LlamaForCausalLM"], torch.float32)
    written, theirs = json.loads((tmp_path / "saved" / "config.json").read_text()), golden(name).config
    left_out = {"auto_map", "transformers_version"}
    assert theirs.keys() - written.keys() <= left_out
    same = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm")
    assert {key: written[key] for key in same} == {key: theirs[key] for key in same}


def test_what_the_form_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="EAGLE-3 over inputs of layers, not eagle1"):
        save_eagle3(head_of("safeailab_eagle1", tmp_path), tmp_path / "saved", "target", [])
