from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.drafters import ScriptedDrafter
from foredraft.engine.proposal import CERTAIN, DraftRequest
from foredraft.errors import ForedraftError
from tests.scripts import continuations_of

MakeRequest = Callable[..., DraftRequest]


def test_the_script_is_cut_to_max_len(make_request: MakeRequest) -> None:
    proposal = ScriptedDrafter(lambda request: [request.tokens[-1]] * 5).propose(
        [make_request(0, [1, 4], 3), make_request(1, [7], 1)]
    )
    assert proposal.ids.tolist() == [[4, 4, 4], [7, 0, 0]]
    assert proposal.lens.tolist() == [3, 1]
    assert set(proposal.prob_rows.flatten().tolist()) == {CERTAIN}


def test_a_known_text_is_proposed_by_position(make_request: MakeRequest) -> None:
    drafter = ScriptedDrafter(continuations_of({0: [1, 2, 3, 4, 5], 1: [1, 2]}))
    proposal = drafter.propose(
        [
            make_request(0, [1, 2], 2),
            make_request(0, [9, 9, 9, 9], 2),
            make_request(1, [1, 2], 2),
            make_request(2, [1], 2),
        ]
    )
    assert proposal.lens.tolist() == [2, 1, 0, 0]
    assert proposal.ids[0].tolist() == [3, 4]
    assert proposal.ids[1, 0].item() == 5


@pytest.mark.parametrize("num_known", [1, 2, 3, 4])
def test_corruption_depends_only_on_the_position(make_request: MakeRequest, num_known: int) -> None:
    text = [0, 1, 2, 3, 0, 0, 0, 7]
    drafter = ScriptedDrafter(continuations_of({0: text}), corrupt_every=3)
    row = drafter.propose([make_request(0, text[:num_known], 8)]).ids[0].tolist()
    wrong = [num_known + j for j, token in enumerate(row) if token != text[num_known + j]]
    assert wrong == [position for position in (2, 5) if position >= num_known]


def test_corrupting_everything_leaves_nothing_right(make_request: MakeRequest) -> None:
    drafter = ScriptedDrafter(lambda request: [0, 1, 2, 3], corrupt_every=1)
    assert drafter.propose([make_request(0, [0], 4)]).ids.tolist() == [[1, 0, 1, 2]]


def test_an_invalid_corruption_interval_is_refused() -> None:
    with pytest.raises(ForedraftError, match="corrupt_every"):
        ScriptedDrafter(lambda request: [], corrupt_every=0)
