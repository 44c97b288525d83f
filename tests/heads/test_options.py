"""A user's options for a head: they are checked, and replace the settings of its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, ForedraftError, ModelError
from foredraft.heads import Ambiguity, CompiledEagle, EagleConfig, EagleHead, HeadCheckpoint, HeadOptions, load_head
from foredraft.heads.attaching import attach_head
from foredraft.heads.options import overridden, setting_of, window_of
from foredraft.model import EMBEDDED, LanguageModel
from foredraft.model.taps import FINAL_NORM
from tests.heads.checkpoints import TARGET, golden
from tests.heads.random_heads import embedded_head


@pytest.fixture
def checkpoint(tmp_path: Path) -> HeadCheckpoint:
    return load_head(str(golden("safeailab_eagle3").save(tmp_path)), TARGET)


def test_options_replace_settings_and_resolve_ambiguities(checkpoint: HeadCheckpoint) -> None:
    assert {each.field for each in checkpoint.config.ambiguities} >= {"taps", "norm_output"}
    config = overridden(checkpoint, {"taps": [0, 1, 8], "norm_output": True}, TARGET).config
    assert isinstance(config, EagleConfig)
    assert (config.taps, config.norm_output) == ((0, 1, 8), True)
    assert not {each.field for each in config.ambiguities} & {"taps", "norm_output"}


def test_an_option_says_how_a_table_is_read(checkpoint: HeadCheckpoint) -> None:
    readings = (torch.tensor([1, 3, 5]), torch.tensor([1, 2, 3]))
    unclear = checkpoint.with_settings(ambiguities=(Ambiguity("target_ids", readings),))
    for index, name in enumerate(("offsets", "ids")):
        config = overridden(unclear, {"d2t": name}, TARGET).config
        assert config.target_ids is readings[index]
        assert config.ambiguities == ()
        assert setting_of("target_ids", readings, index) == ("d2t", name)


def test_the_final_state_may_be_a_tap(checkpoint: HeadCheckpoint) -> None:
    assert overridden(checkpoint, {"taps": [1, 2, FINAL_NORM]}, TARGET).config.taps == (1, 2, FINAL_NORM)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hidden_size": 3},
            "'hidden_size' cannot be set for this head; supported: taps, norm_before_residual, norm_output",
        ),
        ({"applies_fc": True}, "'applies_fc' cannot be set"),
        ({"d2t": "ids"}, "'d2t' cannot be set"),
        ({"taps": [1, 2]}, r"taps must be a list of 3 hidden states of the target, 0 to 8, not \[1, 2\]"),
        ({"taps": [1, 2, 9]}, "taps must be"),
        ({"taps": "1 2 3"}, "taps must be"),
        ({"taps": [1, 2, True]}, "taps must be"),
        ({"norm_output": 1}, "norm_output must be true or false, not 1"),
    ],
)
def test_invalid_options_are_refused(checkpoint: HeadCheckpoint, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        overridden(checkpoint, settings, TARGET)


def test_tables_contain_either_ids_or_offsets(checkpoint: HeadCheckpoint) -> None:
    readings = (torch.tensor([1, 3, 5]), torch.tensor([1, 2, 3]))
    unclear = checkpoint.with_settings(ambiguities=(Ambiguity("target_ids", readings),))
    with pytest.raises(ModelError, match='d2t must be "offsets" or "ids"'):
        overridden(unclear, {"d2t": "both"}, TARGET)


def test_other_kinds_of_heads_only_have_the_option_taps(tmp_path: Path) -> None:
    medusa = load_head(str(golden("medusa").save(tmp_path)), TARGET)
    assert overridden(medusa, {"taps": [8]}, TARGET).config.taps == (8,)
    with pytest.raises(ModelError, match=r"supported: taps$"):
        overridden(medusa, {"norm_output": True}, TARGET)


@pytest.mark.parametrize(
    ("training_len", "requested", "target_len", "window"),
    [
        (2048, None, 131072, 2048),
        (2048, None, 2048, None),  # copied from the target
        (4096, None, 2048, None),
        (None, None, 2048, None),
        (2048, None, None, None),
        (2048, 0, 131072, None),
        (2048, 512, 131072, 512),
        (None, 512, 2048, 512),
    ],
)
def test_the_window_is_the_training_length_by_default(
    checkpoint: HeadCheckpoint,
    training_len: int | None,
    requested: int | None,
    target_len: int | None,
    window: int | None,
) -> None:
    assert isinstance(checkpoint.config, EagleConfig)
    config = replace(checkpoint.config, training_len=training_len)
    assert window_of(config, requested, target_len) == window


@pytest.mark.parametrize(("requested", "windows"), [(None, [None]), (7, [7]), (0, [None])])
def test_a_head_is_attached_with_its_window(target: LanguageModel, requested: int | None, windows: list[Any]) -> None:
    head = attach_head(str(embedded_head("eagle")), target, options=HeadOptions(requested))
    assert isinstance(head, EagleHead | CompiledEagle)
    assert head.windows == windows


def test_options_without_a_head_are_refused() -> None:
    for settings in ({"head_window": 64}, {"head_settings": {"norm_output": True}}):
        with pytest.raises(ForedraftError, match="head_window and head_settings are for heads: set draft_model="):
            LLM(EMBEDDED / "target", method="suffix", **settings)  # type: ignore[arg-type]
    with pytest.raises(ForedraftError, match="head_window must be an integer of at least 0, not -1"):
        LLM(head_window=-1)
    with pytest.raises(ForedraftError, match="head_settings must be a mapping from names to values, not 'norm_output'"):
        LLM(head_settings="norm_output")  # type: ignore[arg-type]
