"""P-EAGLE heads compared with speculators' own, and what their files must contain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.errors import ModelError
from foredraft.heads import EagleConfig, EagleHead, head_method_of, load_head
from foredraft.heads.saving import save_eagle3
from foredraft.heads.unrolled import unroll
from foredraft.model import Read
from tests.heads.checkpoints import TARGET, Golden, golden
from tests.heads.running import cache_for

NAMES = ["peagle", "peagle_3_1"]
MASK_TOKEN = 31


def head_of(case: Golden, folder: Path) -> EagleHead:
    return EagleHead.of(load_head(str(case.save(folder)), TARGET), None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_read_before", [0, 3, 6])
def test_logits_of_all_positions_are_those_of_the_original_program(
    name: str, num_read_before: int, tmp_path: Path
) -> None:
    """In one pass with all rows of the text, or with the unread ones."""
    case, head = golden(name), head_of(golden(name), tmp_path)
    ids, features = case.inputs["ids"].tolist(), case.inputs["features"]
    cache, num_masks = cache_for(head, [16]), len(case.expected["drafted"]) - 1
    with torch.inference_mode():
        states = torch.cat([head.fuse(features), head.mask_state.expand(num_masks, -1)])
    ids = [*ids, *[MASK_TOKEN] * num_masks]
    parts = [slice(0, num_read_before), slice(num_read_before, len(ids))]
    logits = torch.cat(
        [head.read([Read(0, ids[part], len(ids[part]))], states[part], cache).logits for part in parts if ids[part]]
    )
    torch.testing.assert_close(logits, case.expected["logits"], atol=1e-4, rtol=0)
    drafted = head.on_target(logits[-num_masks - 1 :]).argmax(-1)
    assert drafted.tolist() == case.expected["drafted"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_over_whole_texts_every_position_has_the_logits_of_its_draft(name: str, tmp_path: Path) -> None:
    case, head = golden(name), head_of(golden(name), tmp_path)
    ids, features = case.inputs["ids"], case.inputs["features"]
    with torch.inference_mode():
        places = list(unroll(head, features[None], ids[None], 3))
        for last in range(len(ids)):
            states = torch.cat([head.fuse(features[: last + 1]), head.mask_state.expand(2, -1)])
            read = Read(0, [*ids[: last + 1].tolist(), MASK_TOKEN, MASK_TOKEN], 3)
            expected = head.read([read], states, cache_for(head, [16])).logits
            for place, logits in enumerate(places):
                torch.testing.assert_close(logits[0, last], expected[place], atol=1e-5, rtol=0)


def test_its_files_distinguish_it_from_eagle_3(tmp_path: Path) -> None:
    folder = golden("peagle").save(tmp_path / "peagle")
    checkpoint = load_head(str(folder), TARGET)
    assert isinstance(checkpoint.config, EagleConfig)
    assert (checkpoint.form, checkpoint.config.mask_token, checkpoint.config.num_layers) == (
        "speculators' P-EAGLE",
        MASK_TOKEN,
        2,
    )
    assert head_method_of(str(folder)) == "peagle"
    assert head_method_of(str(golden("speculators_qwen3").save(tmp_path / "eagle"))) == "eagle"
    with pytest.raises(ValueError, match="holds EAGLE-3 heads that read layer inputs, not P-EAGLE"):
        save_eagle3(head_of(golden("peagle"), tmp_path / "again"), tmp_path / "out", "target", ["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (golden("peagle").having({"mask_token_id": None}), "mask_token_id must be a whole number"),
        (
            golden("peagle").having({"mask_token_id": 32}),
            "its mask token is 32, but there are embeddings for only 32 ids",
        ),
        (golden("peagle").without(["mask_hidden"]), "tensors are missing: mask_hidden"),
        (golden("peagle").having({"speculators_model_type": "eagle3"}), "mask_token_id"),
        (
            golden("peagle").having({"speculators_model_type": "eagle9"}),
            "'eagle9': only .*, peagle, eagle3 are supported",
        ),
    ],
    ids=["no id", "unknown id", "no state", "another kind", "no kind"],
)
def test_unsuitable_files_are_refused(case: Golden, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load_head(str(case.save(tmp_path)), TARGET)
