"""Drafters that break the contract are refused in one line that names their class and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft import LLM, ForedraftError, Proposal
from foredraft.engine.contract import check_drafter, check_probs, check_proposal
from foredraft.engine.proposal import DraftRequest
from foredraft.errors import DrafterError
from foredraft.sampling import TokenProbs
from tests.laws import sampler_for

VOCAB = 6


class Good:
    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return Proposal.certain([[] for _ in requests])

    def forget(self, seq_ids: list[int]) -> None: ...


class NoForget:
    propose = Good.propose


class NoPropose:
    forget = Good.forget


class ForgetsNothing(Good):
    forget = None  # type: ignore[assignment]


class ProposesFromTwo(Good):
    def propose(self, requests: list[DraftRequest], model: Any) -> Proposal:  # type: ignore[override]
        raise NotImplementedError


class TapsHalfALayer(Good):
    taps = (1.5,)


class TapsANumber(Good):
    taps = 5


class ForgetsAll(Good):
    def forget(self) -> None:  # type: ignore[override]
        raise NotImplementedError


BAD_OBJECTS = [
    (NoForget(), "NoForget has no forget: a drafter needs propose(requests) and forget(seq_ids)"),
    (NoPropose(), "NoPropose has no propose: a drafter needs"),
    (ForgetsNothing(), "ForgetsNothing has no forget"),
    (ProposesFromTwo(), "ProposesFromTwo.propose must take one argument: propose(requests)"),
    (ForgetsAll(), "ForgetsAll.forget must take one argument: forget(seq_ids)"),
    (TapsHalfALayer(), "TapsHalfALayer.taps must be a tuple of the numbers of layers, not (1.5,)"),
    (TapsANumber(), "TapsANumber.taps must be a tuple of the numbers of layers, not 5"),
    (Good, "Good is a class, but a drafter must be an object: give Good(...)"),
    (7, "int has no propose"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_OBJECTS)
def test_objects_that_are_no_drafters_are_refused_before_anything_is_loaded(bad: Any, message: str) -> None:
    """Otherwise LLM would fail to find the model, which does not exist."""
    for refuse in (lambda: check_drafter(bad), lambda: LLM("/no/such/model", method=bad)):
        with pytest.raises(DrafterError) as caught:
            refuse()
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, ForedraftError)
        assert isinstance(caught.value, TypeError)


def test_a_drafter_may_have_optional_arguments() -> None:
    class Open(Good):
        def propose(self, requests: list[DraftRequest], *, depth: int = 3) -> Proposal:
            return super().propose(requests)

    check_drafter(Open())
    check_drafter(Good())


def requests() -> list[DraftRequest]:
    return [DraftRequest(seq_id, [1, 2], 2, sampler_for({})) for seq_id in range(2)]


def sampled() -> Proposal:
    """Two rows, [3, certain 4] and [5], drawn from the distributions in `probs`."""
    probs = torch.tensor([[0.0, 0, 0, 0.5, 0.5, 0], [0.0, 0, 0, 0, 0, 1]])
    return Proposal.of([[3, 4], [5]], [[0, -1], [1]], TokenProbs(probs))


def kept(first: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The ids of the columns of `sampled`, with another first one."""
    return torch.tensor([[first, 1, 2, 3, 4, 5]] * 2, dtype=dtype)


def with_(field: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Proposal]:
    def make() -> Proposal:
        return sampled().replaced(**{field: value(getattr(sampled(), field))})

    return make


BAD_ANSWERS: list[tuple[Callable[[], object], str]] = [
    (lambda: None, "Good.propose must return a foredraft.Proposal, not NoneType"),
    (lambda: [[1], [2]], "Good.propose must return a foredraft.Proposal, not list"),
    (lambda: Proposal.certain([[1]]), "Good proposed 1 rows for 2 requests"),
    (lambda: Proposal.certain([[1], [1, 2, 3]]), "Good proposed 3 tokens in row 1, but its max_len is 2"),
    (lambda: Proposal.certain([[1], [VOCAB]]), "Good proposed id 6 in row 1: valid ids are 0 to 5"),
    (lambda: Proposal.certain([[-1], []]), "Good proposed id -1 in row 0"),
    (
        with_("ids", lambda ids: ids.to(torch.int32)),
        "Good: ids of its proposal must be int64 on the CPU, not torch.int32",
    ),
    (with_("lens", lambda lens: lens.float()), "Good: lens of its proposal must be int64"),
    (with_("prob_rows", lambda rows: rows + 2), "Good named row 2 of probs in row 0, but probs has 2 rows"),
    (with_("prob_rows", lambda rows: rows - 2), "Good named row -2 of probs in row 0"),
    (with_("probs", lambda _: None), "Good named row 0 of probs in row 0, but probs has 0 rows"),  # type: ignore[arg-type, return-value]
    (with_("probs", lambda probs: probs[:, :4]), "Good: probs has 4 columns, but the vocabulary has 6 ids"),
    (with_("probs", lambda probs: probs[0]), "Good: probs must be [R, V] of a floating-point type"),
    (with_("probs", lambda probs: probs.long()), "Good: probs must be [R, V] of a floating-point type"),
    (with_("kept_ids", lambda _: torch.zeros(2, 1, dtype=torch.int64)), "Good: kept_ids (2, 1) must have the shape"),
    (with_("kept_ids", lambda _: kept(dtype=torch.int32)), "Good: kept_ids must be int64, not torch.int32"),
    (with_("kept_ids", lambda _: kept(1 << 40)), f"Good: kept_ids has the id {1 << 40}, but valid ids are 0 to 5"),
    (with_("kept_ids", lambda _: kept(-1)), "Good: kept_ids has the id -1, but valid ids are 0 to 5"),
    (with_("kept_ids", lambda _: kept(VOCAB)[:1].expand(2, -1)), "Good: kept_ids has the id 6"),
]


@pytest.mark.parametrize(("answer", "message"), BAD_ANSWERS)
def test_a_proposal_that_breaks_the_contract_is_refused(answer: Callable[[], object], message: str) -> None:
    with pytest.raises(DrafterError) as caught:
        check_proposal(Good(), answer(), requests(), VOCAB)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


BAD_LAWS: list[tuple[Callable[[], Proposal], str]] = [
    (with_("probs", lambda probs: probs * 2), "Good: row 0 of probs sums to 2, but must sum to 1"),
    (with_("probs", lambda probs: probs * torch.tensor([[1.0], [torch.nan]])), "Good: row 1 of probs sums to nan"),
    (
        with_("probs", lambda probs: probs + torch.tensor([0.5, -0.5, 0, 0, 0, 0])),
        "Good: probs contains a negative number",
    ),
    (with_("ids", lambda ids: ids - 1), "Good proposed an id whose probability is 0"),
]


@pytest.mark.parametrize(("answer", "message"), BAD_LAWS)
def test_probabilities_that_are_no_distribution_are_refused(answer: Callable[[], Proposal], message: str) -> None:
    check_proposal(Good(), answer(), requests(), VOCAB)
    with pytest.raises(DrafterError) as caught:
        check_probs(Good(), answer())
    assert str(caught.value).startswith(message)


def test_a_valid_proposal_is_accepted() -> None:
    kept = Proposal.of(
        [[3, 4], [5]], [[0, -1], [1]], TokenProbs(torch.tensor([[0.5, 0.5], [1.0, 0]]), torch.tensor([[3, 4], [5, 0]]))
    )
    unread = with_(
        "probs", lambda probs: torch.cat([probs, torch.full((1, VOCAB), 7.0)])
    )()  # a row that no id refers to
    for proposal in (sampled(), kept, unread, Proposal.certain([[1, 2], []])):
        check_proposal(Good(), proposal, requests(), VOCAB)
        check_probs(Good(), proposal)
