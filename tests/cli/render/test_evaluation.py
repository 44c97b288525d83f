"""The output of `foredraft train evaluate` for a draft that is never right."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foredraft.cli.render.evaluation import evaluation_as_dict, print_evaluation
from foredraft.train import Expectation, KindReport
from foredraft.train.evaluate import TextCounts
from foredraft.train.text_acceptance import TextAcceptance

NEVER = Expectation(8, 8.0, np.array([8.0, 0.0, 0.0]), np.array([0.0, 0.0, 0.0]))
REPORT = KindReport("code", 0.0, TextCounts(2, 1, 1, 0), TextAcceptance(0.0, 8), {3: NEVER}, {3: None}, {})


def test_positions_that_no_draft_reaches_have_no_acceptance_rate(capsys: pytest.CaptureFixture[str]) -> None:
    (kind,) = json.loads(json.dumps(evaluation_as_dict([REPORT], []), allow_nan=False))["kinds"]
    assert kind["of"][0]["acceptance_by_position"] == [0.0, None, None]
    print_evaluation([REPORT], [])
    shown = capsys.readouterr().out
    assert "0.00 - -" in shown
    assert "nan" not in shown
    assert "1 of 2 texts were measured: there is 1 document" in shown
