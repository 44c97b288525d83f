"""Law 4: what every drafter owes the engine. A registered drafter is tested here by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters import REGISTRY
from foredraft.errors import ForedraftError
from foredraft.proposal import CERTAIN, Drafter, DraftRequest, Proposal

Make = Callable[[str], Drafter]
Ask = Callable[..., DraftRequest]

histories = st.lists(st.integers(0, 3), min_size=1, max_size=40)
Batch = list[tuple[list[int], int]]
batches = st.lists(st.tuples(histories, st.integers(0, 6)), max_size=4)


def check(proposal: Proposal, requests: list[DraftRequest], vocab_size: int) -> None:
    """The contract of one answer."""
    assert proposal.ids.dtype == proposal.lens.dtype == proposal.prob_rows.dtype == torch.int64
    assert proposal.ids.shape[0] == proposal.lens.shape[0] == len(requests)
    if proposal.probs is not None:
        assert proposal.probs.shape[1] == vocab_size
        assert bool((proposal.probs >= 0).all())
        sums = proposal.probs.sum(-1, dtype=torch.float64)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)
    for row, request in enumerate(requests):
        length = int(proposal.lens[row])
        assert 0 <= length <= request.max_len
        for token, prob_row in zip(proposal.ids[row, :length], proposal.prob_rows[row, :length], strict=True):
            assert 0 <= int(token) < vocab_size
            if int(prob_row) != CERTAIN:
                assert proposal.probs is not None
                assert float(proposal.probs[int(prob_row), int(token)]) > 0


def rows_of(proposal: Proposal) -> list[list[int]]:
    return [ids[:length] for ids, length in zip(proposal.ids.tolist(), proposal.lens.tolist(), strict=True)]


@given(batch=batches, temperature=st.sampled_from([0.0, 0.7]))
@settings(max_examples=50, deadline=None)
def test_an_answer_is_legal_and_the_history_stays_as_it_was(
    drafter_name: str,
    make_drafter: Make,
    ask: Ask,
    vocab_size: int,
    batch: Batch,
    temperature: float,
) -> None:
    requests = [
        ask(seq_id, list(tokens), max_len, temperature=temperature) for seq_id, (tokens, max_len) in enumerate(batch)
    ]
    check(make_drafter(drafter_name).propose(requests), requests, vocab_size)
    assert [list(request.tokens) for request in requests] == [tokens for tokens, _ in batch]


def test_a_history_need_not_be_a_list(drafter_name: str, make_drafter: Make, ask: Ask) -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    as_tuple, as_list = ask(0, tuple(tokens), 4), ask(0, tokens, 4)
    assert rows_of(make_drafter(drafter_name).propose([as_tuple])) == rows_of(
        make_drafter(drafter_name).propose([as_list])
    )


@given(batch=batches)
@settings(max_examples=30, deadline=None)
def test_asking_twice_gives_the_same_answer_twice(
    drafter_name: str, make_drafter: Make, ask: Ask, batch: Batch
) -> None:
    drafter = make_drafter(drafter_name)
    requests = [ask(seq_id, tokens, max_len) for seq_id, (tokens, max_len) in enumerate(batch)]
    first = rows_of(drafter.propose(requests))
    assert rows_of(drafter.propose(requests)) == first


@given(history=histories, cuts=st.lists(st.integers(1, 40), max_size=5), max_len=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_every_call_of_a_growing_history_is_legal(
    drafter_name: str, make_drafter: Make, ask: Ask, vocab_size: int, history: list[int], cuts: list[int], max_len: int
) -> None:
    drafter = make_drafter(drafter_name)
    tokens: list[int] = []  # one growing list, as the engine keeps it
    for cut in sorted(cuts):
        tokens.extend(history[len(tokens) : cut])
        request = ask(0, tokens, max_len)
        check(drafter.propose([request]), [request], vocab_size)


@given(first=histories, second=histories, max_len=st.integers(0, 6))
@settings(max_examples=50, deadline=None)
def test_a_forgotten_sequence_may_start_again_with_another_history(
    drafter_name: str, make_drafter: Make, ask: Ask, vocab_size: int, first: list[int], second: list[int], max_len: int
) -> None:
    drafter = make_drafter(drafter_name)
    drafter.propose([ask(7, first, max_len)])
    drafter.forget([7])
    request = ask(7, second, max_len)
    again = drafter.propose([request])
    check(again, [request], vocab_size)
    if "corpus" not in drafter_name:  # which is there to remember
        assert rows_of(again) == rows_of(make_drafter(drafter_name).propose([request]))


def test_sequences_join_and_leave_between_calls(
    drafter_name: str, make_drafter: Make, ask: Ask, vocab_size: int
) -> None:
    drafter = make_drafter(drafter_name)
    tokens = {seq_id: [seq_id, 1, 2, seq_id, 1] for seq_id in range(5)}
    for members in ([0, 1], [1, 2, 0], [3], [], [4, 0, 3], [2]):
        requests = [ask(seq_id, tokens[seq_id], 4) for seq_id in members]
        check(drafter.propose(requests), requests, vocab_size)
        for seq_id in members:
            tokens[seq_id] += [2, seq_id]
        drafter.forget([seq_id for seq_id in members if seq_id == 1])


def test_an_unknown_sequence_can_be_forgotten(drafter_name: str, make_drafter: Make) -> None:
    drafter = make_drafter(drafter_name)
    drafter.forget([3, 4])
    drafter.forget([])


@given(batch=batches)
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_batch_does_not_matter(drafter_name: str, make_drafter: Make, ask: Ask, batch: Batch) -> None:
    forward, backward = make_drafter(drafter_name), make_drafter(drafter_name)
    for share in (0.5, 1.0):  # a second call, for drafters that learn
        requests = [
            ask(seq_id, tokens[: max(1, int(share * len(tokens)))], max_len)
            for seq_id, (tokens, max_len) in enumerate(batch)
        ]
        assert rows_of(backward.propose(requests[::-1])) == rows_of(forward.propose(requests))[::-1]


def test_no_room_means_no_draft(drafter_name: str, make_drafter: Make, ask: Ask) -> None:
    proposal = make_drafter(drafter_name).propose([ask(0, [1, 1, 1, 1], 0), ask(1, [2], 0)])
    assert proposal.lens.tolist() == [0, 0]


def test_nobody_asks(drafter_name: str, make_drafter: Make) -> None:
    proposal = make_drafter(drafter_name).propose([])
    assert proposal.ids.shape[0] == proposal.lens.shape[0] == 0


def test_an_unknown_name_is_refused_with_the_known_ones(make_drafter: Make) -> None:
    with pytest.raises(ForedraftError, match=r"unknown drafter 'oracle'.*ngram.*suffix"):
        make_drafter("oracle")


def test_the_registry_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        REGISTRY["mine"] = REGISTRY["none"]  # type: ignore[index]


def test_build_makes_a_new_drafter_each_time(make_drafter: Make) -> None:
    assert make_drafter("ngram") is not make_drafter("ngram")
