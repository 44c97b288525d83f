"""The numbering of hidden states."""

from __future__ import annotations

from foredraft.model.taps import FINAL_NORM, is_tap


def test_models_have_taps_for_each_layer_the_raw_output_and_the_final_state() -> None:
    assert [tap for tap in range(-3, 8) if is_tap(tap, 4)] == [FINAL_NORM, 0, 1, 2, 3, 4]
