from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.drafters import ScriptedDrafter
from foredraft.engine.proposal import CERTAIN, DraftRequest
from foredraft.errors import ForedraftError
from tests.scripts import continuations_of

DraftBudget = Callable[..., DraftRequest]


def test_the_script_is_cut_to_max_len(ask: DraftBudget) -> None:
    proposal = ScriptedDrafter(lambda request: [request.tokens[-1]] * 5).propose([ask(0, [1, 4], 3), ask(1, [7], 1)])
    assert proposal.ids.tolist() == [[4, 4, 4], [7, 0, 0]]
    assert proposal.lens.tolist() == [3, 1]
    assert set(proposal.prob_rows.flatten().tolist()) == {CERTAIN}


def test_a_known_text_is_proposed_by_position(ask: DraftBudget) -> None:
    drafter = ScriptedDrafter(continuations_of({0: [1, 2, 3, 4, 5], 1: [1, 2]}))
    proposal = drafter.propose([ask(0, [1, 2], 2), ask(0, [9, 9, 9, 9], 2), ask(1, [1, 2], 2), ask(2, [1], 2)])
    assert proposal.lens.tolist() == [2, 1, 0, 0]
    assert proposal.ids[0].tolist() == [3, 4]
    assert proposal.ids[1, 0].item() == 5


@pytest.mark.parametrize("num_known", [1, 2, 3, 4])
def test_corruption_goes_by_position_whoever_asks_when(ask: DraftBudget, num_known: int) -> None:
    text = [0, 1, 2, 3, 0, 0, 0, 7]
    drafter = ScriptedDrafter(continuations_of({0: text}), corrupt_every=3)
    row = drafter.propose([ask(0, text[:num_known], 8)]).ids[0].tolist()
    wrong = [num_known + j for j, token in enumerate(row) if token != text[num_known + j]]
    assert wrong == [position for position in (2, 5) if position >= num_known]


def test_corrupting_everything_leaves_nothing_right(ask: DraftBudget) -> None:
    drafter = ScriptedDrafter(lambda request: [0, 1, 2, 3], corrupt_every=1)
    assert drafter.propose([ask(0, [0], 4)]).ids.tolist() == [[1, 0, 1, 2]]


def test_a_meaningless_corruption_is_refused() -> None:
    with pytest.raises(ForedraftError, match="corrupt_every"):
        ScriptedDrafter(lambda request: [], corrupt_every=0)
