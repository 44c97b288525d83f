"""Tables of reduced vocabularies: how they are read, and which are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import ModelError
from foredraft.heads.vocabulary import check_ids, read_table, to_target_vocabulary

V = 12
IDS = torch.tensor([0, 1, 4, 9])
OFFSETS = IDS - torch.arange(4)
MARKS = torch.zeros(V, dtype=torch.bool)
MARKS[IDS] = True


def refusal(d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int = 4) -> str:
    with pytest.raises(ModelError) as caught:
        read_table(d2t, t2d, draft_vocab_size, V)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("t2d", [MARKS, None])
def test_offsets_become_ids(t2d: Tensor | None) -> None:
    table = read_table(OFFSETS, t2d, 4, V)
    assert table.target_ids is not None
    assert table.target_ids.tolist() == IDS.tolist()
    assert not table.notes


def test_a_table_of_ids_is_read_as_ids_with_a_note() -> None:
    table = read_table(IDS, MARKS, 4, V)
    assert table.target_ids is not None
    assert table.target_ids.tolist() == IDS.tolist()
    assert table.notes == ("d2t holds ids of the target, not offsets",)
    assert not table.candidates


def test_without_t2d_a_table_that_cannot_be_offsets_is_read_as_ids() -> None:
    table = read_table(torch.tensor([0, 3, 5, 11]), None, 4, V)  # as an offset, 11 + 3 would be no id
    assert table.target_ids is not None
    assert table.target_ids.tolist() == [0, 3, 5, 11]


def test_an_ambiguous_table_has_two_candidates() -> None:
    table = read_table(torch.tensor([1, 2, 3, 5]), None, 4, V)
    assert [candidate.tolist() for candidate in table.candidates] == [[1, 3, 5, 8], [1, 2, 3, 5]]


@given(st.sets(st.integers(0, V - 1), min_size=1, max_size=V - 1))
def test_any_set_of_ids_can_be_read_from_offsets_and_from_ids(ids: set[int]) -> None:
    columns = torch.tensor(sorted(ids))
    marks = torch.zeros(V, dtype=torch.bool)
    marks[columns] = True
    for d2t in (columns - torch.arange(len(ids)), columns):
        table = read_table(d2t, marks, len(ids), V)
        assert table.target_ids is not None
        assert table.target_ids.tolist() == sorted(ids)


def test_a_whole_vocabulary_needs_no_table() -> None:
    for d2t, t2d in ((None, None), (torch.zeros(V, dtype=torch.int64), torch.ones(V, dtype=torch.bool))):
        assert read_table(d2t, t2d, V, V).target_ids is None


def test_t2d_alone_is_enough() -> None:
    table = read_table(None, MARKS, 4, V)
    assert table.target_ids is not None
    assert table.target_ids.tolist() == IDS.tolist()
    assert len(table.notes) == 1


def test_a_reduced_vocabulary_without_a_table_is_refused() -> None:
    assert "4 of 12 ids" in refusal(None, None)


def test_a_table_that_was_never_filled_in_is_refused() -> None:
    blank = torch.zeros(4, dtype=torch.int64)
    assert "never filled in" in refusal(blank, torch.ones(V, dtype=torch.bool))
    assert "never filled in" in refusal(blank, None)


def test_a_table_of_another_vocabulary_is_refused() -> None:
    other = torch.roll(MARKS, 1)
    assert "t2d marks" in refusal(OFFSETS, other)
    assert "neither offsets nor ids" in refusal(torch.tensor([0, 20, 20, 20]), None)
    assert "neither offsets nor ids" in refusal(torch.tensor([3, 0, -2, 5]), None)
    assert "does not mark" in refusal(None, torch.roll(MARKS, 1) | MARKS)


def test_a_table_of_a_wrong_size_is_refused() -> None:
    assert "[4]" in refusal(OFFSETS[:3], MARKS)
    assert "[12]" in refusal(OFFSETS, MARKS[:8])


@pytest.mark.parametrize("ids", [[0, 1, 1, 3], [0, 1, 2, 12], [-1, 1, 2, 3]])
def test_a_map_of_ids_must_have_distinct_ids(ids: list[int]) -> None:
    with pytest.raises(ModelError, match="4 different ids below 12"):
        check_ids(torch.tensor(ids), "token_map", 4, V)


def test_logits_without_a_table_are_cut_or_filled_up() -> None:
    logits = torch.arange(6.0).view(2, 3)
    assert torch.equal(to_target_vocabulary(logits, None, 2), logits[:, :2])
    filled = to_target_vocabulary(logits, None, 5)
    assert torch.equal(filled[:, :3], logits)
    assert bool((filled[:, 3:] == -torch.inf).all())
