"""The clients' histories that a draft server keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.draft_server.histories import IDLE_SECONDS, Histories, History
from foredraft.errors import ForedraftError
from foredraft.remote.histories import Addition, SentHistories, packed
from foredraft.remote.messages import AskedRow, Sampling

CLIENT = b"client"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def row(seq_id: int, addition: Addition) -> AskedRow:
    return AskedRow(seq_id, *addition, 4, 1)


def send(sent: SentHistories, histories: Histories, seq_id: int, tokens: list[int]) -> History | None:
    addition = sent.addition(seq_id, tokens)
    sent.sent(seq_id, addition)
    found = histories.updated(CLIENT, row(seq_id, addition))
    if found is None:
        sent.forget(seq_id)
    return found


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["grow", "lost", "restart", "rewind", "forget"])), max_size=40
    )
)
def test_the_server_has_the_right_history_or_asks_for_it(events: list[tuple[int, str]]) -> None:
    """After growth, lost messages, a restarted server, shorter histories and forgetting, in any order."""
    sent, histories, dropped = SentHistories(), Histories(lambda history: None), list[int]()
    texts: dict[int, list[int]] = {}
    for number, (seq_id, event) in enumerate(events):
        text = texts.setdefault(seq_id, [seq_id])
        if event == "rewind" and len(text) > 1:
            del text[len(text) // 2 :]
            sent.forget(seq_id)
        text += [number, number + 1]
        if event == "lost":
            sent.sent(seq_id, sent.addition(seq_id, text))
            continue
        if event == "restart":
            histories = Histories(lambda history: dropped.append(history.seq_id))
        if event == "forget":
            sent.forget(seq_id)
            histories.forget(CLIENT, seq_id)
        found = send(sent, histories, seq_id, text) or send(sent, histories, seq_id, text)
        assert found is not None, "one more message puts it right"
        assert found.tokens == text
    assert histories.num_tokens >= 0


def test_a_shorter_history_is_sent_completely() -> None:
    sent = SentHistories()
    sent.sent(0, sent.addition(0, [1, 2, 3]))
    assert sent.addition(0, [1, 2, 3, 4]).tokens == packed([4])
    assert sent.addition(0, [7]) == Addition(0, 0, packed([7]))


def test_histories_of_clients_are_separate() -> None:
    histories = Histories(lambda history: None)
    a = histories.updated(b"a", AskedRow(0, 0, 0, packed([1]), 4, 1))
    b = histories.updated(b"b", AskedRow(0, 0, 0, packed([2]), 4, 1))
    assert a is not None
    assert b is not None
    assert (a.tokens, b.tokens) == ([1], [2])
    assert a.seq_id != b.seq_id
    histories.forget(b"a", 0)
    assert len(histories) == 1


def test_unused_histories_are_forgotten_oldest_first() -> None:
    clock, dropped = Clock(), list[int]()
    histories = Histories(
        lambda history: dropped.append(history.tokens[0]), most_sequences=2, most_tokens=10, clock=clock
    )
    for number in range(3):
        assert histories.updated(CLIENT, AskedRow(number, 0, 0, packed([number]), 4, 1)) is not None
    assert histories.updated(CLIENT, AskedRow(9, 0, 0, packed([9]), 4, 1)) is None, "it is full until it made room"
    histories.make_room()
    assert dropped == [0]
    assert histories.updated(CLIENT, AskedRow(1, 1, 5, packed([2]), 4, 1)) is None, "another checksum"
    histories.updated(CLIENT, AskedRow(3, 0, 0, packed([3] * 11), 4, 1))
    histories.make_room()
    assert (len(histories), histories.num_tokens) == (0, 0)
    histories.updated(CLIENT, AskedRow(4, 0, 0, packed([4]), 4, 1))
    clock.now += IDLE_SECONDS + 1
    histories.make_room()
    assert len(histories) == 0


def test_a_seeded_text_is_sampled_as_by_its_client() -> None:
    history = History(0)
    asked = AskedRow(0, 0, 0, packed([5, 6, 7]), 4, 2, False, Sampling(0.8, 40, 0.9, 0.1, 2**64 - 1, 3))
    history.read(asked)
    request = history.request(asked)
    spec = request.sampler.spec
    assert spec == (0.8, (40, 0.9, 0.1), 2**64 - 1, 3, spec.noise)
    assert spec.is_coupled
    assert request.sampler.prompt_len == 2
    assert not history.shares_prefix
    assert history.request(asked).sampler is request.sampler
    with pytest.raises(ForedraftError, match="temperature"):
        history.request(asked._replace(sampling=Sampling(-1.0, 0, 1.0, 0.0, 1, 0)))
