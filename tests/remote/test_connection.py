"""The client's end of a connection, with a transport that the test controls."""

from __future__ import annotations

import logging

import pytest

from foredraft.errors import ForedraftError
from foredraft.remote.connection import Connection
from foredraft.remote.messages import PROTOCOL, Answer, Ask
from foredraft.remote.vocabulary import VocabularyIdentity

msgpack = pytest.importorskip("msgpack")


class Line:
    """A fake transport. sent: the questions. frames: what arrives next. Waiting advances the clock."""

    def __init__(self) -> None:
        self.sent: list[Ask] = []
        self.frames: list[bytes] = []
        self.is_up = True
        self.now = 0.0

    def receive(self, timeout: float) -> bytes | None:
        if self.frames:
            return self.frames.pop(0)
        self.now += max(timeout, 0.0)
        return None

    def send(self, frame: bytes) -> bool:
        if self.is_up:
            self.sent.append(Ask.unpack(frame))
        return self.is_up

    def close(self) -> None: ...

    def answer(self, step: int, **fields: object) -> None:
        self.frames.append(Answer(step, **fields).pack())  # type: ignore[arg-type]


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def connection(line: Line) -> Connection:
    return Connection(line, "tcp://there:1", VocabularyIdentity(16), lambda: line.now)


def test_only_the_answer_to_the_open_question_is_accepted(line: Line, connection: Connection) -> None:
    connection.ask((), ())
    step = line.sent[-1].step
    for other in (step - 1, step + 1, 0, 2**40):
        line.answer(other, drafts=[[1]])
    line.frames.append(b"\xc1 garbage")
    line.answer(step, drafts=[[2]])
    line.answer(step, drafts=[[3]])
    answer = connection.receive(0.1)
    assert answer is not None
    assert answer.drafts == [[2]]
    assert connection.receive(0.0) is None, "the same step answered twice"


def test_a_late_answer_is_discarded_and_frees_the_connection(line: Line, connection: Connection) -> None:
    connection.ask((), ())
    assert connection.receive(0.01) is None
    assert not connection.is_free()
    line.answer(line.sent[-1].step, drafts=[[1]])
    assert connection.is_free()
    connection.ask((), ())
    assert connection.receive(0.01) is None


def test_questions_to_a_slow_server_are_not_queued(line: Line, connection: Connection) -> None:
    connection.ask((), ())
    for _ in range(1000):
        line.now += 0.01
        assert not connection.is_free()
    assert len(line.sent) <= 10, "it is asked whether it is there, less and less often"
    assert all(not ask.rows for ask in line.sent[1:])


def test_a_server_that_comes_back_is_found_within_two_seconds(
    line: Line, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "foredraft"):
        connection.ask((), ())
        line.is_up = False
        for _ in range(500):
            line.now += 0.02
            assert not connection.is_free()
        line.is_up, came_back = True, line.now
        while len(line.sent) < 2:
            line.now += 0.02
            connection.is_free()
        assert line.now - came_back <= 2.1
        line.answer(line.sent[-1].step)
        assert connection.is_free()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the draft server at tcp",
        "the draft server at tcp",
    ]
    assert "does not answer" in caplog.messages[0]
    assert "answers again" in caplog.messages[1]


def test_a_flood_of_messages_does_not_delay_a_step(line: Line, connection: Connection) -> None:
    connection.ask((), ())
    line.frames = [b"noise"] * 10_000
    assert connection.receive(0.1) is None
    assert len(line.frames) > 9_000


def test_an_unreachable_server_is_reported_in_one_line(line: Line, connection: Connection) -> None:
    line.is_up = False
    with pytest.raises(ForedraftError, match=r"no draft server answers at tcp://there:1: start .* same key"):
        connection.greet(1.0)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (
            Answer(1, "its drafter has another vocabulary").pack(),
            "refuses to draft: its drafter has another vocabulary",
        ),
        (b"\x93\x09\x01\xa0", "it uses protocol 9, but this side uses protocol"),
    ],
)
def test_a_refusal_is_reported_in_one_line(line: Line, connection: Connection, frame: bytes, words: str) -> None:
    assert PROTOCOL != 9
    line.frames.append(frame)
    with pytest.raises(ForedraftError, match=words):
        connection.greet(1.0)
