"""Buckets fit the passes that they are chosen for, are few, and are all warmed up before the first request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foredraft.gpu import Noise, bucket_for, drafting_buckets, verification_buckets

SPANS, WIDTH = st.integers(1, 64), st.integers(1, 16)


@given(
    num_spans=SPANS,
    extra=st.integers(0, 500),
    share=st.floats(0, 1),
    depth=st.integers(0, 9),
    noise=st.sampled_from(Noise),
)
def test_a_bucket_fits_its_pass(num_spans: int, extra: int, share: float, depth: int, noise: Noise) -> None:
    num_rows = num_spans + extra
    num_wanted = round(share * num_rows)
    bucket = bucket_for(num_rows, num_spans, num_wanted, depth, noise)
    assert num_rows <= bucket.num_rows < 2 * num_rows
    assert num_spans <= bucket.num_spans < 2 * num_spans
    assert num_wanted <= bucket.num_wanted <= bucket.num_rows
    assert (bucket.depth, bucket.noise) == (depth, noise)


@given(num_spans=SPANS, width=WIDTH, data=st.data())
def test_buckets_of_every_verification_are_warmed_up(num_spans: int, width: int, data: st.DataObject) -> None:
    met = set(verification_buckets(num_spans, width))
    lens = data.draw(st.lists(st.integers(1, width), min_size=1, max_size=num_spans))
    bucket = bucket_for(sum(lens), len(lens), sum(lens))
    assert bucket in met or not bucket.is_graph


@given(num_spans=SPANS, depth=st.integers(1, 9), data=st.data())
def test_buckets_of_every_draft_are_warmed_up(num_spans: int, depth: int, data: st.DataObject) -> None:
    met = set(drafting_buckets(num_spans, depth))
    unread = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=num_spans))
    noise = data.draw(st.sampled_from([Noise.NONE, Noise.OWN]))
    bucket = bucket_for(sum(unread), len(unread), len(unread), data.draw(st.integers(0, depth)), noise)
    bucket = bucket if bucket.depth else bucket_for(len(unread), len(unread), len(unread))  # one pass for each token
    assert bucket in met or not bucket.is_graph


@given(num_spans=SPANS, extra=st.integers(1, 500), depth=st.integers(0, 9))
def test_prefill_uses_no_graphs(num_spans: int, extra: int, depth: int) -> None:
    assert not bucket_for(4 * num_spans + extra, num_spans, num_spans, depth).is_graph


@given(num_spans=SPANS, width=WIDTH, prompt=st.integers(20, 500))
def test_the_end_of_a_prompt_with_its_first_draft_uses_no_graph(num_spans: int, width: int, prompt: int) -> None:
    assert not bucket_for(num_spans * (prompt + width), num_spans, num_spans * width).is_graph


def test_buckets_are_few() -> None:
    assert len(list(verification_buckets(64, 9))) <= 40
    assert len(list(drafting_buckets(16, 8))) <= 170
