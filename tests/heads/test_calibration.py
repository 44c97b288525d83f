"""Ambiguous settings of a file are found by testing them on a text, with heads that are right with only one combination."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foredraft import LLM, SamplingParams
from foredraft.heads import TEXT, Ambiguity, HeadOptions, TargetEnds, TargetShape, attach_head, load_head
from foredraft.heads.calibration import MAX_TOKENS, Calibration, calibrate
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_tokenizer
from tests.heads.checkpoints import Golden
from tests.heads.fitted_heads import TAPS, fitted_head
from tests.heads.random_heads import embedded_head
from tests.heads.trained_heads import TAPS as TRAINED_TAPS
from tests.heads.trained_heads import train_small_head

IDS = "eagle_config"
PROMPTS = ["def add(a, b):", "import os\n", "class Stack:\n", "def main():\n    parser ="]


def shifted(by: int) -> dict[str, Any]:
    return {IDS: {"eagle_aux_hidden_state_layer_ids": [tap + by for tap in TAPS]}}


@pytest.fixture(scope="module")
def text() -> list[int]:
    ids: list[int] = load_tokenizer(EMBEDDED / "target", LoadOptions()).encode(TEXT)
    return ids[:MAX_TOKENS]


@pytest.fixture(scope="module")
def head(target: LanguageModel, text: list[int]) -> Golden:
    return fitted_head(target, text)


def calibrated(case: Golden, target: LanguageModel, text: list[int], folder: Path) -> Calibration:
    checkpoint = load_head(str(case.save(folder)), TargetShape.of(target.hf.config))
    ends = TargetEnds(target.hf)
    return calibrate(checkpoint, target, ends.embed, ends.lm_head, text)


@pytest.mark.parametrize("by", [0, 1, -1])
def test_shifted_layer_ids_are_corrected(
    by: int, target: LanguageModel, text: list[int], head: Golden, tmp_path: Path
) -> None:
    calibration = calibrated(head.having(shifted(by)), target, text, tmp_path)
    assert calibration.fields["taps"] == TAPS
    assert calibration.keeps_defaults == (by == 0)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_a_missing_norm_before_residual_is_found(
    is_normalized: bool, target: LanguageModel, text: list[int], tmp_path: Path
) -> None:
    case = fitted_head(target, text, norm_before_residual=is_normalized).having({"norm_before_residual": None})
    calibration = calibrated(case, target, text, tmp_path)
    assert calibration.fields["norm_before_residual"] is is_normalized
    assert calibration.fields["taps"] == TAPS


def test_several_wrong_settings_are_found_together(target: LanguageModel, text: list[int], tmp_path: Path) -> None:
    case = fitted_head(target, text, norm_before_residual=True).having({"norm_before_residual": None, **shifted(1)})
    calibration = calibrated(case, target, text, tmp_path)
    assert (calibration.fields["taps"], calibration.fields["norm_before_residual"]) == (TAPS, True)


@pytest.mark.parametrize("holds_ids", [False, True])
def test_ids_instead_of_offsets_are_found(
    holds_ids: bool, target: LanguageModel, text: list[int], tmp_path: Path
) -> None:
    """There is no t2d to decide it, and the numbers increase either way."""
    ids = torch.unique(torch.tensor([*text, *range(600)]))
    ids = ids[ids + torch.arange(len(ids)) < target.traits.vocab_size]
    table = ids if holds_ids else ids - torch.arange(len(ids))
    case = fitted_head(target, text, ids=ids).having(tensors={"d2t": table})
    if not holds_ids:
        assert not bool((table[1:] > table[:-1]).all())  # then the table is known to hold offsets
    calibration = calibrated(case, target, text, tmp_path)
    if holds_ids:
        assert torch.equal(calibration.fields["target_ids"], ids)
        assert '"d2t": "ids"' in str(calibration)
    else:
        assert "target_ids" not in calibration.fields


def test_normalized_feedback_of_states_is_found(target: LanguageModel, tmp_path: Path) -> None:
    """On a text of one repeated token the target's expectation does not change. So a state that is fed back unchanged is right, and one
    that is normalized twice is not."""
    text = [300] * 64
    case = fitted_head(target, text)
    for norm_output in (False, True):
        calibration = calibrated(case.having({"norm_output": norm_output}), target, text, tmp_path)
        assert calibration.fields["norm_output"] is False


def test_the_first_draft_token_of_a_right_head_is_always_accepted(
    target: LanguageModel, text: list[int], head: Golden, tmp_path: Path
) -> None:
    """Σ min(p, q) is 1 if p = q, up to rounding to bfloat16."""
    calibration = calibrated(head, target, text, tmp_path)
    accepted = calibration.accepted[calibration.chosen]
    assert accepted.shape == (len(text) - 2,)
    assert float(accepted.min()) > 0.8
    assert float(accepted.max()) < 2


def test_settings_of_the_files_are_kept_unless_others_are_clearly_better(
    target: LanguageModel, text: list[int]
) -> None:
    """A random head drafts equally badly with all settings."""
    checkpoint, ends = load_head(str(embedded_head("eagle")), TargetShape.of(target.hf.config)), TargetEnds(target.hf)
    calibration = calibrate(checkpoint, target, ends.embed, ends.lm_head, text)
    assert len(calibration.accepted) == 12
    assert calibration.keeps_defaults


def test_the_log_line_has_the_result_of_each_candidate() -> None:
    ambiguities = (Ambiguity("taps", ((2, 4), (3, 5))), Ambiguity("norm_output", (False, True)))
    accepted = {
        choice: torch.full((3,), value)
        for choice, value in {(0, 0): 0.1, (1, 0): 0.5, (0, 1): 0.2, (1, 1): 0.4}.items()
    }
    assert str(Calibration(ambiguities, 9, accepted, (1, 0))) == (
        'uses {"taps": [3, 5], "norm_output": false}: 0.500 of 2 draft tokens accepted on 9 tokens of text (with the settings in its files: 0.100); '
        'others: {"taps": [2, 4]} 0.100, {"norm_output": true} 0.400'
    )
    assert "(as in its files); others" in str(Calibration(ambiguities, 9, accepted, (0, 0)))


def test_the_settings_found_are_used_and_logged_once(
    target: LanguageModel, text: list[int], head: Golden, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(head.having(shifted(-1)).save(tmp_path))
    with caplog.at_level(logging.INFO, "foredraft"):
        attached = attach_head(folder, target, text=text)
    assert attached.config.taps == TAPS
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f'{folder}: uses {{"taps": [3, 5, 7], ')
    caplog.clear()
    with caplog.at_level(logging.INFO, "foredraft"):
        attach_head(str(head.save(tmp_path)), target, text=text)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_options_settle_ambiguous_settings_without_a_test(
    target: LanguageModel, text: list[int], head: Golden, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(head.having(shifted(1)).save(tmp_path))
    settings = {"taps": [4, 6, 8], "norm_output": False}
    with caplog.at_level(logging.INFO, "foredraft"):
        attached = attach_head(folder, target, options=HeadOptions(settings=settings), text=text)
    assert attached.config.taps == (4, 6, 8)
    assert not caplog.records


def test_without_a_text_the_forms_defaults_are_used(target: LanguageModel, head: Golden, tmp_path: Path) -> None:
    attached = attach_head(str(head.having(shifted(1)).save(tmp_path)), target)
    assert attached.config.taps == (4, 6, 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder = train_small_head(tmp_path_factory.mktemp("trained"))
    return Golden(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


SHIFTED_UP = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TRAINED_TAPS]}
SHIFTED_DOWN = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TRAINED_TAPS]}


def acceptance(folder: Path, **settings: Any) -> float:
    """The share of accepted draft tokens, greedy and sampled."""
    llm = LLM(EMBEDDED / "target", folder, speculative_tokens=3, **settings)
    drafted = accepted = 0
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=80, temperature=temperature, seed=0, ignore_eos=True)
        for output in llm.generate(PROMPTS, params):
            drafted += output.metrics.stats.num_draft_tokens
            accepted += output.metrics.stats.num_accepted_tokens
    return accepted / drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "line"),
    [
        (SHIFTED_UP, '"taps": [2, 4, 7]'),
        (SHIFTED_DOWN, '"taps": [2, 4, 7]'),
        ({"norm_before_residual": None}, '"norm_before_residual": true'),
        ({}, '"d2t": "ids"'),
    ],
    ids=["shifted up", "shifted down", "no norm_before_residual", "ids in d2t"],
)
def test_a_trained_head_with_wrong_files_drafts_equally_well(
    config: dict[str, Any], line: str, trained: Golden, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = acceptance(trained.save(tmp_path / "right"))
    assert right > 0.1  # that of a random head is below .01
    spoiled = trained.having(config)
    if not config:
        offsets = spoiled.tensors["d2t"]
        spoiled = spoiled.having(tensors={"d2t": offsets + torch.arange(len(offsets))}).without(["t2d"])
    with caplog.at_level(logging.INFO, "foredraft"):
        found = acceptance(spoiled.save(tmp_path / "spoiled"))
    assert found >= 0.98 * right
    assert sum(line in record.getMessage() for record in caplog.records) == 1
