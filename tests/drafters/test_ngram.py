from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters import NgramDrafter
from foredraft.engine.proposal import DraftRequest
from foredraft.engine.sources import NO_SOURCE, TokenSource
from foredraft.engine.token_tree import TreeShape, path_to
from foredraft.errors import ForedraftError
from foredraft.testing.requests import request_for

MakeRequest = Callable[..., DraftRequest]


def propose(drafter: NgramDrafter, request: DraftRequest) -> list[int]:
    proposal = drafter.propose([request])
    row: list[int] = proposal.ids[0, : proposal.lens[0]].tolist()
    return row


def brute_force(tokens: list[int], max_ngram: int, min_ngram: int, max_len: int) -> list[int]:
    """The draft found by scanning: the longest n first, its latest earlier occurrence; the copy may continue into itself."""
    for size in range(min(max_ngram, len(tokens)), min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for source in range(start + size, start + size + max_len):
                    text.append(text[source])
                return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda pair: (max(pair), min(pair))),
    max_len=st.integers(1, 8),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_drafts_are_those_of_a_scan_however_the_history_grows(
    make_request: MakeRequest, tokens: list[int], sizes: tuple[int, int], max_len: int, data: st.DataObject
) -> None:
    drafter = NgramDrafter(*sizes)
    known = 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        request = make_request(0, tokens[:known], max_len)
        assert propose(drafter, request) == brute_force(tokens[:known], *sizes, max_len)


def propose_tree(drafter: NgramDrafter, request: DraftRequest, shape: TreeShape) -> tuple[list[int], list[int]]:
    proposal = drafter.propose([replace(request, shape=shape)])
    (parents,) = proposal.draft_parents
    assert parents is not None
    return proposal.draft_ids[0], list(parents)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_a_tree_of_one_branch_is_the_chain(make_request: MakeRequest, tokens: list[int], max_len: int) -> None:
    request = make_request(0, tokens, max_len)
    ids, parents = propose_tree(NgramDrafter(), request, TreeShape.chain(max_len))
    assert ids == propose(NgramDrafter(), request)
    assert parents == list(range(-1, len(ids) - 1))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_siblings_are_the_first_tokens_of_the_drafts_of_each_ngram_size(
    make_request: MakeRequest, tokens: list[int]
) -> None:
    ids, parents = propose_tree(NgramDrafter(3, 1), make_request(0, tokens, 3), TreeShape((-1, -1, -1)))
    chains = [brute_force(tokens, size, size, 1) for size in (3, 2, 1)]
    assert ids == list(dict.fromkeys(token for chain in chains for token in chain))
    assert parents == [-1] * len(ids)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=60))
def test_a_sibling_continues_as_the_text_did_after_it(make_request: MakeRequest, tokens: list[int]) -> None:
    shape = TreeShape.of_paths([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])
    ids, parents = propose_tree(NgramDrafter(2, 1), make_request(0, tokens, 5), shape)
    for node, (token, parent) in enumerate(zip(ids, parents, strict=True)):
        text = tokens + [ids[i] for i in path_to(parents, parent)]
        before = [text[start - 1 : start + 1] for start in range(1, len(tokens))]
        assert [text[-1], token] in before or len(set(tokens)) == 1, (
            "it followed the same token somewhere in the history"
        )
        assert node > parent


def test_a_period_is_continued(make_request: MakeRequest) -> None:
    assert propose(NgramDrafter(), make_request(0, [9, 1, 2, 3, 1, 2, 3], 7)) == [1, 2, 3, 1, 2, 3, 1]
    assert propose(NgramDrafter(), make_request(0, [5, 5, 5], 4)) == [5, 5, 5, 5]


def test_the_longest_match_wins_over_a_later_shorter_one(make_request: MakeRequest) -> None:
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert propose(NgramDrafter(3, 1), make_request(0, tokens, 1)) == [7]
    assert propose(NgramDrafter(2, 1), make_request(0, tokens, 1)) == [8]


def test_min_ngram_is_the_shortest_match_that_is_drafted_from(make_request: MakeRequest) -> None:
    assert propose(NgramDrafter(min_ngram=2), make_request(0, [1, 2, 1], 3)) == []
    assert propose(NgramDrafter(min_ngram=1), make_request(0, [1, 2, 1], 3)) == [2, 1, 2]


def test_a_shorter_history_of_a_known_sequence_is_read_again(make_request: MakeRequest) -> None:
    drafter = NgramDrafter(2, 1)
    propose(drafter, make_request(0, [1, 2, 3, 1, 2, 3], 2))
    assert propose(drafter, make_request(0, [1, 4, 1], 2)) == [4, 1]


class Counting(Sequence[int]):
    """A history that counts how many of its tokens are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.num_read = tokens, 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> Any:
        got = self.tokens[index]
        self.num_read += len(got) if isinstance(got, list) else 1
        return got

    def __len__(self) -> int:
        return len(self.tokens)


def test_a_call_reads_only_new_tokens(make_request: MakeRequest) -> None:
    drafter, tokens = NgramDrafter(), [i % 7 for i in range(1000)]
    history = Counting(tokens)
    request = make_request(0, tokens, 4)
    request = DraftRequest(0, history, 4, request.sampler)
    propose(drafter, request)
    history.num_read = 0
    for _ in range(10):
        tokens.append(len(tokens) % 7)
        assert len(propose(drafter, request)) == 4
    assert history.num_read <= 10 * (3 + 3 + 4)


def test_forget_drops_everything(make_request: MakeRequest) -> None:
    drafter = NgramDrafter()
    drafter.propose([make_request(0, [1, 2, 1, 2], 2), make_request(1, [1, 2, 1, 2], 2)])
    drafter.forget([0, 1])
    assert not drafter._tables


@pytest.mark.parametrize("sizes", [(2, 3), (1, 0), (0, 0)])
def test_invalid_ngram_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ForedraftError, match="min_ngram"):
        NgramDrafter(*sizes)


def test_it_copies_from_the_source_of_an_encoder_decoder() -> None:
    drafter = NgramDrafter()
    source = (20, 21, 22, 23, 24, 25, 26)
    request = replace(request_for(0, [1, 50, 21, 22], 3), source=TokenSource(source))
    assert drafter.propose([request]).draft_ids == [[23, 24, 25]]
    grown = replace(request, tokens=[1, 50, 21, 22, 23, 51, 20, 21], max_len=2)
    assert drafter.propose([grown]).draft_ids == [[22, 23]]
    assert drafter.propose([replace(request, seq_id=1, source=NO_SOURCE)]).draft_ids == [[]]
