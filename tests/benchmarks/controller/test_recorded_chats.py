"""Replayed chats have the tokens of the record, and the stated times."""

from __future__ import annotations

from random import Random

import pytest
import torch

from benchmarks.controller.recorded_chats import (
    BOTH,
    LONGEST,
    LOOKUP,
    MODEL,
    WRONG,
    Chat,
    System,
    Times,
    drawn_drafts,
    noise_behind,
)
from foredraft.engine.token_tree import TreeShape

TIMES = Times([1.0, 1.1, 1.2], [0.3, 0.5] + [1.0] * 6)
STILL = (0.0, 0.0)


def chat(*, right: int, num_new: int = 31) -> Chat:
    """A chat in which the head has the first `right` of its two tokens right, and the lookup finds nothing. In trees the text's tokens are
    second children."""
    tokens = [1, 2, *range(10, 10 + num_new)]
    drafts = {start: {LOOKUP: [], MODEL: [*tokens[start : start + right], 0, 0][:2]} for start in range(3, len(tokens))}
    return Chat(tokens, 2, 0.0, drafts, [[1] * LONGEST for _ in range(num_new)])


def test_the_path_ends_before_the_first_wrong_token() -> None:
    one = chat(right=2)
    assert [one.path(2, ids, None) for ids in ([], [10, 11], [10, 0, 12], [0, 11])] == [[], [0, 1], [0], []]
    assert one.path(len(one.tokens) - 1, [40, 41], None) == [0], "the text ends there"


def test_a_tree_has_the_texts_tokens_at_their_ranks() -> None:
    one = chat(right=0)
    shape = TreeShape.of_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])
    ids = one.tree(5, shape)
    assert ids == [WRONG, 13, WRONG, WRONG, 14, WRONG]
    assert one.path(5, ids, shape.parents) == [1, 4]
    assert one.tree(len(one.tokens) - 1, shape) == [WRONG, 40, *[WRONG] * 4]


def test_noise_behind_a_text_would_have_drawn_it_and_is_exponential() -> None:
    """Over draws from p, noise given what was drawn has the distribution of any noise."""
    generator = torch.Generator().manual_seed(3)
    p = torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64).expand(20_000, 4)
    drawn = p.multinomial(1, generator=generator)[:, 0]
    noise = noise_behind(drawn, p, generator)
    assert torch.equal((p / noise).argmax(1), drawn)
    for moment, wanted in ((noise.mean(0), 1.0), (noise.square().mean(0), 2.0)):
        torch.testing.assert_close(moment, torch.full_like(moment, wanted), atol=0.08, rtol=0)


def test_a_drawn_draft_ends_with_the_first_token_that_is_not_accepted() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    right, wrong = torch.tensor([9.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 99.0])
    answer, chance = torch.tensor([0, 0, 0]), Random(1)
    drafts = drawn_drafts(
        answer, p, [torch.stack([right, right, wrong]), torch.stack([right, wrong, right])], 1.0, chance
    )
    assert drafts == [[0, WRONG], [0, 0], [WRONG, WRONG]]


@pytest.mark.parametrize(
    ("drafter", "right", "num_steps"), [(MODEL, 0, 30), (MODEL, 1, 15), (MODEL, 2, 10), (BOTH, 2, 10)]
)
def test_the_rate_is_that_of_the_record_and_the_times(drafter: str, right: int, num_steps: int) -> None:
    """The step that reads the prompt writes one token, and only a head's first draft is slower."""
    seconds = 1.1 + num_steps * (1.2 + 0.5) + 0.5
    rate = System.fixed(drafter, 2).rate([chat(right=right)], TIMES, 0, STILL)
    assert rate == pytest.approx(31 / seconds, rel=0.03)


def test_passes_beyond_the_stated_ones_go_on_like_the_last() -> None:
    assert [TIMES.of_pass(rows) for rows in (1, 3, 5)] == pytest.approx([1.0, 1.2, 1.4])


def test_auto_drafts_where_the_head_is_right_and_not_where_it_is_wrong() -> None:
    plain, auto = System.fixed(LOOKUP, 0), System.auto(MODEL)
    rates = [
        [system.rate([chat(right=right, num_new=2000)], TIMES, 0, STILL) for system in (plain, auto)]
        for right in (0, 2)
    ]
    assert rates[0][1] >= 0.97 * rates[0][0]
    assert rates[1][1] >= 1.5 * rates[1][0]
