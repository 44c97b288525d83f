"""A group of drafters, each of which drafts its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from foredraft.engine import drafter_group
from foredraft.engine.drafter_group import DrafterGroup
from foredraft.engine.proposal import CERTAIN, DraftRequest, Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import ScheduledSequence
from foredraft.errors import DrafterError
from tests.laws import sampler_for

VOCAB = 8


class Fixed:
    """Always drafts the same tokens, sampled from its own distributions or certain."""

    def __init__(self, ids: Sequence[int], *, sampled: bool = False, excess: int = 0) -> None:
        self.ids, self.sampled, self.excess = list(ids), sampled, excess
        self.asked: list[int] = []
        self.forgotten: list[int] = []

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.asked += [request.seq_id for request in requests]
        rows = [self.ids[: request.max_len + self.excess] for request in requests]
        certain = Proposal.certain(rows)
        if not self.sampled:
            return certain
        flat = [token for row in rows for token in row]
        prob_rows = torch.full_like(certain.ids, CERTAIN)
        prob_rows[certain.drafted] = torch.arange(len(flat))
        laws = torch.nn.functional.one_hot(torch.tensor(flat), VOCAB).float()
        return Proposal(certain.ids, certain.lens, prob_rows, laws)

    def forget(self, seq_ids: list[int]) -> None:
        self.forgotten += seq_ids


def item(seq_id: int, drafter: str, max_draft: int) -> ScheduledSequence:
    sequence = TokenSequence(seq_id, [1, 2], sampler_for({}), max_len=50, speculative_tokens=None)
    return ScheduledSequence(sequence, 1, True, max_draft, drafter)


class Reusing:
    """Overwrites the tensors of the same proposal in every step."""

    def __init__(self) -> None:
        self.proposal = Proposal(torch.zeros(1, 2).long(), torch.tensor([2]), torch.full((1, 2), CERTAIN))

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.proposal.ids.add_(1)
        self.proposal.lens[:] = int(self.proposal.ids[0, 0]) % 3
        return self.proposal

    def forget(self, seq_ids: list[int]) -> None: ...


def test_a_proposal_whose_tensors_are_overwritten_is_read_again() -> None:
    group = DrafterGroup({"a": Reusing()})
    drafts = [group.propose([item(0, "a", 2)], VOCAB).proposal.draft_ids for _ in range(2)]
    assert drafts == [[[1]], [[2, 2]]]


def test_each_row_is_drafted_by_the_drafter_it_names() -> None:
    a, b = Fixed([1, 2, 3], sampled=True), Fixed([4, 5])
    c = Fixed([6, 7], sampled=True)
    scheduled = [item(0, "a", 2), item(1, "b", 2), item(2, "a", 1), item(3, "", 3), item(4, "c", 2), item(5, "a", 0)]
    proposal, times, _, failures = DrafterGroup({"a": a, "b": b, "c": c}).propose(scheduled, VOCAB)
    assert not failures
    assert (a.asked, b.asked, c.asked) == ([0, 2], [1], [4])
    rows = [ids[:length] for ids, length in zip(proposal.ids.tolist(), proposal.lens.tolist(), strict=True)]
    assert rows == [[1, 2], [4, 5], [1], [], [6, 7], []]
    assert set(times) == {"a", "b", "c"}
    # every sampled id still refers to the distribution it was drawn from
    assert proposal.probs is not None
    for ids, laws, length in zip(rows, proposal.prob_rows.tolist(), proposal.lens.tolist(), strict=True):
        for token, law in zip(ids, laws[:length], strict=True):
            assert (law == CERTAIN) == (token in (4, 5))
            assert law == CERTAIN or float(proposal.probs[law, token]) == 1.0


def test_checks_of_probabilities_do_not_count_as_the_time_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def check(*_: object) -> None:
        nonlocal now
        now += 5.0

    monkeypatch.setattr(drafter_group, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(drafter_group, "check_probs", check)
    drafts = DrafterGroup({"a": Fixed([1, 2], sampled=True)}).propose([item(0, "a", 2)], VOCAB)
    assert drafts.times == {"a": 0.0}
    assert drafts.check_time == 5.0


def test_drafters_without_tokens_to_draft_are_not_called() -> None:
    a = Fixed([1])
    proposal, times, *_ = DrafterGroup({"a": a}).propose([item(0, "a", 0), item(1, "", 4)], VOCAB)
    assert a.asked == []
    assert times == {}
    assert proposal.lens.tolist() == [0, 0]


class Raises(Fixed):
    """Raises in every method."""

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        raise KeyError(requests[0].seq_id)

    def forget(self, seq_ids: list[int]) -> None:
        raise KeyError(seq_ids)

    @property
    def bytes_held(self) -> int:
        raise KeyError("held")


@pytest.mark.parametrize("bad", [Fixed([1, 2, 3], excess=1), Fixed([VOCAB]), Fixed([-1]), Raises([1])])
def test_a_failing_drafter_has_no_draft_and_the_others_have_theirs(bad: Fixed) -> None:
    scheduled = [item(0, "bad", 1), item(1, "good", 2)]
    proposal, times, _, failures = DrafterGroup({"bad": bad, "good": Fixed([4, 5])}).propose(scheduled, VOCAB)
    assert proposal.lens.tolist() == [0, 2]
    assert set(times) == {"bad", "good"}
    assert set(failures) == {"bad"}
    assert isinstance(failures["bad"], KeyError if isinstance(bad, Raises) else DrafterError)


def test_a_drafter_that_cannot_forget_does_not_keep_others_from_it(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Raises([1]), Fixed([2])
    panel = DrafterGroup({"bad": bad, "good": good})
    panel.forget([3])
    panel.retain(4, [1, 2])
    assert panel.give_up([5]) == []
    assert good.forgotten == [3, 4, 5]
    (record,) = caplog.records  # the first error only
    assert "Raises failed: KeyError at test_drafter_group.py" in record.getMessage()


def test_objects_that_are_no_drafters_are_refused() -> None:
    with pytest.raises(DrafterError, match="object has no propose"):
        DrafterGroup({"bad": object()})  # type: ignore[dict-item]


def test_drafters_that_tap_or_share_the_cache_follow_the_target() -> None:
    class Tapping(Fixed):
        taps = (1,)

    class Sharing(Fixed):
        shares_cache = True

    group = DrafterGroup({"own": Fixed([1]), "tapping": Tapping([1]), "sharing": Sharing([1])})
    assert [group.follows_target(name) for name in group.names] == [False, True, True]


def test_every_drafter_forgets() -> None:
    a, b = Fixed([1]), Fixed([2])
    DrafterGroup({"a": a, "b": b}).forget([3, 4])
    assert a.forgotten == b.forgotten == [3, 4]
