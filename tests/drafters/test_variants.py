"""DraftVariants chooses the better of two variants of a drafter, by how many of their tokens are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from foredraft.drafters._variants import TRIAL_PERIOD, DraftVariants, _follow, _Pending
from foredraft.testing.requests import request_for

TEXT = [9, 1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "parents", "wanted"),
    [
        ([1, 2, 3], None, (3, False)),
        ([1, 2, 3, 4], None, (3, True)),
        ([1, 5, 3], None, (1, True)),
        ([7, 2], None, (0, True)),
        ([1, 7, 2], [-1, -1, 1], (1, False)),  # the text continues after 1, and the tree after 7
        ([7, 1, 5, 2], [-1, -1, 1, 1], (2, False)),
        ([7, 1, 5], [-1, -1, 1], (1, True)),
    ],
)
def test_a_draft_is_followed_through_the_text(
    ids: Sequence[int], parents: Sequence[int] | None, wanted: tuple[int, bool]
) -> None:
    assert _follow(_Pending(1, ids, parents, 0), TEXT) == wanted


def share_of_variant_1(chances: Sequence[tuple[float, float]], num_drafts: int = 600) -> list[float]:
    """The share of drafts by variant 1. chances: the acceptance rate of each variant, for consecutive stretches of drafts."""
    variants, random, found, text = DraftVariants(), Random(0), [], [0]
    for stretch in chances:
        chosen = []
        for _ in range(num_drafts):
            request = request_for(0, list(text), 4)
            variant = variants.choose([request])
            chosen.append(variant)
            variants.remember(request, [1, 1, 1, 1], None, variant)
            text += [1 if random.random() < stretch[variant] else 2, 2]
        found.append(sum(chosen) / len(chosen))
    return found


def test_the_better_variant_drafts_except_in_trials() -> None:
    first, second, third = share_of_variant_1([(0.5, 0.2), (0.1, 0.4), (0.5, 0.2)])
    assert max(first, third) < 0.2
    assert 0.8 < second <= 1 - 0.9 / TRIAL_PERIOD


def test_nothing_is_kept_of_ended_texts() -> None:
    variants = DraftVariants()
    variants.remember(request_for(3, TEXT, 4), [1], None, 0)
    variants.forget([3, 4])
    assert not variants._pending
