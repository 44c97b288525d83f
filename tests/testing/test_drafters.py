"""The contract of drafters detects broken ones, and each message says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.engine.proposal import CERTAIN, Drafter, DraftRequest, Proposal
from foredraft.errors import DrafterError
from foredraft.sampling import Row, adjusted, choose, pick, token_probs_of
from foredraft.testing import DrafterContract, check_drafter
from foredraft.testing.statistics import FALSE_ALARM


class Copies:
    """A correct drafter, which proposes the last token again; each broken drafter changes one of its methods."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return Proposal.certain([self.row(request) for request in requests])

    def row(self, request: DraftRequest) -> list[int]:
        self.held[request.seq_id] = len(request.tokens)
        return [request.tokens[-1]] * request.max_len

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.held.pop(seq_id, None)


class Samples(Copies):
    """Draws from a distribution that depends on the last token. Broken drafters change the drawn or the named distribution."""

    sharpness, share_kept, is_named = 1.0, 0.0, True

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.randn(vocab_size, vocab_size, generator=generator)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        rows: list[list[int]] = []
        named: list[list[int]] = []
        laws: list[torch.Tensor] = []
        for request in requests:
            ids: list[int] = []
            own: list[int] = []
            while len(ids) < request.max_len:
                row = Row(request.sampler, request.tokens, list(ids))
                logits = self.logits[ids[-1] if ids else request.tokens[-1]][None]
                if not request.sampler.draws:
                    ids.append(choose(logits, [row]).ids[0])
                    own.append(CERTAIN)
                    continue
                law = token_probs_of(adjusted(logits, [row]).logits, [row])
                token = int(pick(token_probs_of(self.sharpness * adjusted(logits, [row]).logits, [row]), [row])[0][0])
                dense = law.dense(logits.shape[1])[0]
                if float(dense[token]) < self.share_kept:
                    break
                ids.append(token)
                own.append(len(laws) if self.is_named else CERTAIN)
                if self.is_named:
                    laws.append(dense)
            rows.append(ids)
            named.append(own)
        found = Proposal.certain(rows)
        prob_rows = found.prob_rows.clone()
        for b, own in enumerate(named):
            prob_rows[b, : len(own)] = torch.tensor(own, dtype=torch.int64)
        return Proposal(found.ids, found.lens, prob_rows, torch.stack(laws) if laws else None)


def broken(base: type = Copies, **changes: Any) -> type:
    return type("Broken", (base,), changes)


def leaves_something(self: Any, seq_ids: list[int]) -> None:
    """Forgets nothing."""


def too_long(self: Any, request: DraftRequest) -> list[int]:
    return [request.tokens[-1]] * (request.max_len + 1)


def beyond_the_vocabulary(self: Any, request: DraftRequest) -> list[int]:
    return [16] * request.max_len


def writes_to_the_history(self: Any, request: DraftRequest) -> list[int]:
    row = [request.tokens[-1]] * request.max_len
    if isinstance(request.tokens, list):
        request.tokens.append(3)
    return row


def counts_calls(self: Any, request: DraftRequest) -> list[int]:
    self.calls = getattr(self, "calls", 0) + 1
    return [self.calls % 16] * request.max_len


def forgets_unknown(self: Any, seq_ids: list[int]) -> None:
    for seq_id in seq_ids:
        del self.held[seq_id]


def only_lists(self: Any, request: DraftRequest) -> list[int]:
    return request.tokens.copy()[-1:] * request.max_len  # type: ignore[attr-defined]


def remembers_the_first(self: Any, request: DraftRequest) -> list[int]:
    self.first = getattr(self, "first", {})
    return [self.first.setdefault(request.seq_id, request.tokens[-1])] * request.max_len


def shares_the_longest(self: Any, requests: list[DraftRequest]) -> Proposal:
    longest = max((request.max_len for request in requests), default=0)
    return Proposal.certain([[longest] * request.max_len for request in requests])


def drops_a_row(self: Any, requests: list[DraftRequest]) -> Proposal:
    return Proposal.certain([self.row(request) for request in requests[1:]])


def gives_lists(self: Any, requests: list[DraftRequest]) -> Any:
    return [self.row(request) for request in requests]


BROKEN: dict[str, tuple[Callable[[int], Any], str]] = {
    "no forget": (lambda v: broken(forget=None)(), "has no method 'forget'"),
    "too long": (lambda v: broken(row=too_long)(), "draft tokens, but max_len is"),
    "unknown id": (lambda v: broken(row=beyond_the_vocabulary)(), "id 16 is not in the vocabulary"),
    "history": (lambda v: broken(row=writes_to_the_history)(), "was changed to"),
    "calls": (lambda v: broken(row=counts_calls)(), "when asked again"),
    "leak": (lambda v: broken(forget=leaves_something)(), "every forgotten sequence leaves about"),
    "unknown sequence": (lambda v: broken(forget=forgets_unknown)(), "an unknown sequence can be forgotten: KeyError"),
    "lists": (lambda v: broken(row=only_lists)(), "a history need not be a list: AttributeError"),
    "stale": (lambda v: broken(row=remembers_the_first)(), "after forget"),
    "company": (lambda v: broken(propose=shares_the_longest)(), "one by one"),
    "rows": (lambda v: broken(propose=drops_a_row)(), "requests are answered with"),
    "no proposal": (lambda v: broken(propose=gives_lists)(), "propose returned list, not a Proposal"),
    "another law": (lambda v: broken(Samples, sharpness=1.6)(v), "is not drawn from the distribution it names"),
    "dropped": (lambda v: broken(Samples, share_kept=0.05)(v), "is not drawn from the distribution it names"),
    "not certain": (lambda v: broken(Samples, is_named=False)(v), "different tokens certain"),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda v: Copies(), Samples], ids=["certain", "sampled"])
def test_a_correct_drafter_passes(make: Callable[[int], Drafter]) -> None:
    check_drafter(make)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_is_named_with_what_is_wrong(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message) as caught:
        check_drafter(make, invisible=False)
    assert str(caught.value).startswith(("Broken breaks its contract in",))


def test_an_error_in_a_drafter_is_one_line_with_its_place() -> None:
    def fails(self: Any, request: DraftRequest) -> list[int]:
        result = torch.zeros(2) + torch.zeros(3)
        return [int(result.sum())]

    def asserts(self: Any, request: DraftRequest) -> list[int]:
        assert not request.tokens, "two\nlines"
        return []

    for row, reason in ((fails, "RuntimeError: The size of tensor a"), (asserts, "AssertionError: two")):
        with pytest.raises(AssertionError) as caught:
            check_drafter(lambda v: broken(row=row)(), invisible=False)  # noqa: B023
        _, *clauses = str(caught.value).splitlines()
        assert all(clause.startswith("- ") for clause in clauses)
        place = f"(at {Path(__file__).name}:{row.__code__.co_firstlineno + 1})"
        assert all(reason in clause and clause.endswith(place) for clause in clauses)


@pytest.mark.parametrize("given", [Copies, Copies()], ids=["class", "object"])
def test_a_drafter_in_the_place_of_a_function_that_makes_one_is_refused(given: Any) -> None:
    with pytest.raises(DrafterError, match=r"take a vocab_size .*: give lambda vocab_size: Copies\(\.\.\.\)$"):
        check_drafter(given)


def test_probabilities_that_do_not_sum_to_1_are_named() -> None:
    def halved(self: Any, requests: list[DraftRequest]) -> Proposal:
        found = Samples.propose(self, requests)
        return Proposal(found.ids, found.lens, found.prob_rows, None if found.probs is None else found.probs / 2)

    with pytest.raises(AssertionError, match=r"a row of probs sums to 0\.5"):
        check_drafter(lambda v: broken(Samples, propose=halved)(v), invisible=False)


def test_a_drafter_that_changes_the_text_is_detected() -> None:
    """It changes the sampler in place, but not in the small requests of other checks: only a text reveals it."""

    def meddles(self: Any, request: DraftRequest) -> list[int]:
        if len(request.tokens) > 60 or request.sampler.prompt_len > 3:
            request.sampler.spec = request.sampler.spec._replace(temperature=5.0)
        return [1] * request.max_len

    with pytest.raises(AssertionError, match="but without drafts by"):
        check_drafter(lambda v: broken(row=meddles)())


def test_a_contract_without_a_drafter_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="return a new drafter"):
        DrafterContract().test_nobody_asks()
    assert FALSE_ALARM < 1e-5
