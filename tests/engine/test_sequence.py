"""Where a text ends: inside a block of verified tokens or at its edge, and always where plain decoding would end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.sequence import Origin, TokenSequence
from tests.laws import growth_violations, sampler_for

END, STOP_ID = 0, 1


def make(
    prompt: Sequence[int] = (7, 8),
    max_tokens: int = 20,
    end_ids: Sequence[int] = (END, STOP_ID),
    include_stop: bool = False,
    **settings: Any,
) -> TokenSequence:
    params = {"stop_token_ids": [STOP_ID], "include_stop_str_in_output": include_stop}
    sampler = sampler_for(params, prompt=prompt)
    return TokenSequence(
        0,
        list(prompt),
        sampler,
        max_len=len(prompt) + max_tokens,
        speculative_tokens=4,
        end_ids=frozenset(end_ids),
        **settings,
    )


def test_a_block_is_appended_whole() -> None:
    assert growth_violations() == 0


@pytest.mark.parametrize("end", [END, STOP_ID])
@pytest.mark.parametrize(
    ("num_drafted", "place"),
    [(0, 0), (3, 0), (3, 1), (3, 2), (3, 3)],
    ids=["plain", "first draft", "mid draft", "last draft", "bonus"],
)
def test_any_end_id_ends_the_text_anywhere_in_a_block(end: int, num_drafted: int, place: int) -> None:
    """The end id is kept; tokens that were accepted after it and the bonus token are dropped."""
    block = [10, 11, 12, 13][: num_drafted + 1]
    block[place] = end
    sequence = make()
    assert sequence.commit(block, num_drafted) == place + 1
    assert sequence.output_ids == block[: place + 1]
    assert sequence.is_finished
    assert sequence.finish_reason == "stop"
    assert sequence.stop_reason == (STOP_ID if end == STOP_ID else None)
    assert len(sequence.origins) == place + 1


def test_the_first_of_several_end_ids_ends_the_text() -> None:
    sequence = make()
    assert sequence.commit([5, STOP_ID, END, 6], 3) == 2
    assert (sequence.output_ids, sequence.stop_reason) == ([5, STOP_ID], STOP_ID)


def test_an_end_id_in_the_prompt_does_not_end_the_text() -> None:
    sequence = make(prompt=[END, 7, STOP_ID])
    sequence.commit([5], 0)
    assert not sequence.is_finished


def test_ignored_end_ids_are_ordinary_tokens() -> None:
    """With ignore_eos the engine passes only the request's own end ids."""
    sequence = make(end_ids=[STOP_ID])
    sequence.commit([END, 5, END], 2)
    assert not sequence.is_finished
    sequence.commit([END, STOP_ID], 1)
    assert sequence.output_ids == [END, 5, END, END, STOP_ID]
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_the_token_budget_ends_the_text_inside_a_block(max_tokens: int) -> None:
    sequence = make(max_tokens=max_tokens)
    assert sequence.commit([10, 11, 12, 13], 3) == max_tokens
    assert sequence.output_ids == [10, 11, 12, 13][:max_tokens]
    assert sequence.finish_reason == "length"
    assert sequence.room == 0


def test_a_budget_that_is_met_exactly_is_spent() -> None:
    sequence = make(max_tokens=3)
    sequence.commit([10], 0)
    assert not sequence.is_finished
    sequence.commit([11, 12], 1)
    assert (sequence.finish_reason, sequence.output_ids) == ("length", [10, 11, 12])


def test_an_end_beyond_the_budget_is_never_seen() -> None:
    sequence = make(max_tokens=2)
    sequence.commit([10, 11, END], 2)
    assert (sequence.finish_reason, sequence.output_ids, sequence.stop_reason) == ("length", [10, 11], None)


def test_an_end_on_the_last_token_of_the_budget_is_a_stop() -> None:
    sequence = make(max_tokens=2)
    sequence.commit([10, END, 11], 2)
    assert (sequence.finish_reason, sequence.output_ids) == ("stop", [10, END])


def test_a_stop_rule_cuts_inside_a_block() -> None:
    calls: list[tuple[list[int], int]] = []

    def rule(new_ids: Sequence[int], num_output: int) -> int | None:
        calls.append((list(new_ids), num_output))
        return new_ids.index(12) if 12 in new_ids else None

    sequence = make(stop_rule=rule)
    assert sequence.commit([10, 11], 1) == 2
    assert sequence.commit([11, 11, 12, 13], 3) == 2
    assert calls == [([10, 11], 0), ([11, 11, 12, 13], 2)]
    assert sequence.output_ids == [10, 11, 11, 11]
    assert sequence.finish_reason == "stop"


def test_a_stop_rule_sees_the_text_and_not_the_token_that_ends_it() -> None:
    seen: list[list[int]] = []

    def rule(new_ids: Sequence[int], num_output: int) -> int | None:
        seen.append(list(new_ids))
        return None

    sequence = make(stop_rule=rule)
    sequence.commit([10, END, 12], 2)
    assert seen == [[10]]
    assert (sequence.output_ids, sequence.finish_reason) == ([10, END], "stop")


@pytest.mark.parametrize(("end", "shown"), [(END, []), (STOP_ID, [STOP_ID])])
def test_a_stop_rule_sees_a_stop_token_that_is_to_be_in_the_text(end: int, shown: list[int]) -> None:
    seen: list[list[int]] = []

    def rule(new_ids: Sequence[int], num_output: int) -> int | None:
        seen.append(list(new_ids))
        return None

    sequence = make(include_stop=True, stop_rule=rule)
    assert sequence.commit([10, end, 12], 2) == 2
    assert seen == [[10, *shown]]
    assert sequence.stop_reason == (STOP_ID if shown else None)


def test_a_stop_rule_that_ends_before_an_end_id_wins() -> None:
    sequence = make(stop_rule=lambda new_ids, num_output: 1)
    assert sequence.commit([10, 11, STOP_ID], 2) == 1
    assert (sequence.output_ids, sequence.stop_reason) == ([10], None)


def test_a_stop_rule_sees_nothing_beyond_the_budget() -> None:
    seen: list[list[int]] = []

    def rule(new_ids: Sequence[int], num_output: int) -> int | None:
        seen.append(list(new_ids))
        return None

    make(max_tokens=2, stop_rule=rule).commit([10, 11, 12], 2)
    assert seen == [[10, 11]]


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "expected"),
    [
        (0, 0, [Origin.PLAIN]),
        (2, 0, [Origin.RECOVERED]),
        (2, 1, [Origin.ACCEPTED, Origin.RECOVERED]),
        (2, 2, [Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS]),
    ],
)
def test_every_token_records_its_origin(num_drafted: int, num_accepted: int, expected: list[Origin]) -> None:
    sequence = make()
    sequence.commit(list(range(10, 11 + num_accepted)), num_drafted)
    assert sequence.origins == expected


blocks = st.lists(
    st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 3)), min_size=1, max_size=8
)


@given(rounds=blocks, max_tokens=st.integers(1, 12), stop_token=st.none() | st.integers(2, 6))
def test_a_text_ends_where_token_by_token_decoding_would_end_it(
    rounds: list[tuple[list[int], int]], max_tokens: int, stop_token: int | None
) -> None:
    """The same tokens, in blocks or one at a time, give the same text and finish reason, and one origin for each token."""

    def rule(new_ids: Sequence[int], num_output: int) -> int | None:
        return new_ids.index(stop_token) if stop_token in new_ids else None

    def run(pieces: list[tuple[list[int], int]]) -> TokenSequence:
        sequence = make(max_tokens=max_tokens, stop_rule=rule)
        for ids, num_rejected in pieces:
            if not sequence.is_finished:
                before = sequence.num_output
                kept = sequence.commit(ids, len(ids) - 1 + num_rejected)
                assert sequence.num_output == before + kept
                assert len(sequence.origins) == sequence.num_output
                assert sequence.num_output <= max_tokens
        return sequence

    in_blocks = run(rounds)
    one_by_one = run([([token], 0) for ids, _ in rounds for token in ids])
    assert in_blocks.tokens == one_by_one.tokens
    assert (in_blocks.finish_reason, in_blocks.stop_reason) == (one_by_one.finish_reason, one_by_one.stop_reason)


def test_the_first_finish_reason_is_kept() -> None:
    sequence = make()
    sequence.finish("error", "it broke")
    sequence.finish("abort")
    assert (sequence.finish_reason, sequence.error) == ("error", "it broke")


def test_a_sequence_equals_only_itself() -> None:
    assert make() != make()
