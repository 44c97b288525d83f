"""The remote drafter: drafts from a server, failures, and malicious peers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from foredraft.drafters import DraftModelDrafter, NgramDrafter, RemoteDrafter, SuffixDrafter
from foredraft.engine.drafter_group import DrafterGroup
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.errors import ForedraftError, VocabularyError
from foredraft.model import LanguageModel
from foredraft.remote import Answer, Ask, Listener, Patience, VocabularyIdentity
from foredraft.sampling import Pending
from foredraft.testing.requests import request_for
from tests.draft_servers import KEY, connect, remote, serving
from tests.engine.test_drafter_group import Fixed, item

pytest.importorskip("zmq")

VOCAB = 16
TEXT = [1, 2, 3, 1, 2, 3, 1, 2]


def drafts(drafter: RemoteDrafter, *histories: Sequence[int], **params: Any) -> list[list[int]]:
    return drafter.propose([request_for(i, tokens, 4, **params) for i, tokens in enumerate(histories)]).draft_ids


class Recording(NgramDrafter):
    """Records the requests that it gets and the sequences that it forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[tuple[int, list[int]]]] = []
        self.forgotten: list[int] = []

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.batches.append([(request.seq_id, list(request.tokens)) for request in requests])
        return super().propose(requests)

    def forget(self, seq_ids: list[int]) -> None:
        self.forgotten += seq_ids
        super().forget(seq_ids)


def test_the_server_sees_the_histories_and_forgets_ended_sequences() -> None:
    held = Recording()
    with serving(held) as server:
        drafter = remote(server.address, VOCAB)
        assert drafts(drafter, TEXT, [5, 6]) == [[3, 1, 2, 3], []]
        assert drafts(drafter, [*TEXT, 3], [5, 6, 5]) == [[1, 2, 3, 1], [6, 5, 6, 5]]
        drafter.forget([0])
        assert drafts(drafter, [9, 9], [5, 6, 5]) == [[9, 9, 9, 9], [6, 5, 6, 5]]
    (first, second), (again, _), (new, _) = held.batches
    assert (first[1], again[1], new[1]) == (TEXT, [*TEXT, 3], [9, 9])
    assert first[0] == again[0] != new[0]
    assert held.forgotten == [first[0]]
    assert second[0] != first[0]


def test_a_restarted_server_gets_the_whole_histories() -> None:
    with serving(NgramDrafter()) as server:
        address = server.address
        drafter = remote(address, VOCAB)
        assert drafts(drafter, TEXT) == [[3, 1, 2, 3]]
    with serving(NgramDrafter(), address=address):
        end, found = time.monotonic() + 20, [[]]
        while found == [[]] and time.monotonic() < end:
            found = drafts(drafter, TEXT)
        assert found == [[3, 1, 2, 3]]


def test_targets_that_share_a_server_are_kept_apart() -> None:
    with serving(NgramDrafter()) as server:
        one, other = remote(server.address, VOCAB), remote(server.address, VOCAB)
        assert drafts(one, TEXT) == [[3, 1, 2, 3]]
        assert drafts(other, [7, 7]) == [[7, 7, 7, 7]]
        assert drafts(one, [*TEXT, 3]) == [[1, 2, 3, 1]]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}, {"temperature": 1.2, "seed": -5}]
)
def test_a_remote_model_drafts_what_a_local_one_does(draft: LanguageModel, params: dict[str, Any]) -> None:
    def make() -> DraftModelDrafter:
        return DraftModelDrafter(draft, draft.traits.vocab_size, MemoryPool(1 << 26))

    histories = ([0, 549, 300, 11], [0, 616, 635])
    requests = [request_for(i, list(tokens), 4, **params) for i, tokens in enumerate(histories)]
    here = make().propose(requests).draft_ids
    with serving(make()) as server:
        assert drafts(remote(server.address, draft.traits.vocab_size), *histories, **params) == here
    assert all(here)


def test_another_vocabulary_and_another_key_are_refused_at_the_start() -> None:
    with serving(NgramDrafter(), VocabularyIdentity(5000)) as server:
        with pytest.raises(
            VocabularyError, match=f"at {server.address} refuses to draft: its drafter's vocabulary is not"
        ):
            connect(server.address, VOCAB)
        stranger = connect_later(server.address, b"another key of good length")
        with pytest.raises(ForedraftError, match="no draft server answers"):
            stranger.greet(0.5)


def connect_later(address: str, key: bytes) -> Any:
    from foredraft.remote import Connection
    from foredraft.remote.sockets import Caller

    return Connection(Caller(address, key), address, VocabularyIdentity(VOCAB))


# --- a drafter that is late, broken or malicious ----------------------------------------------------------------------


@contextmanager
def pretending(reply: Callable[[Ask], Sequence[bytes]]) -> Iterator[str]:
    """Run a server that has the key and answers each request that has rows with arbitrary frames. Yields its address."""
    listener, stopped = Listener("tcp://127.0.0.1:0", KEY), threading.Event()

    def run() -> None:
        while not stopped.is_set():
            received = listener.receive(0.05)
            if received is not None:
                ask = Ask.unpack(received[1])
                for frame in reply(ask) if ask.rows else [Answer(ask.step).pack()]:
                    listener.send(received[0], frame)
        listener.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.address
    finally:
        stopped.set()
        thread.join(10)


def answered(**fields: Any) -> Callable[[Ask], list[bytes]]:
    return lambda ask: [Answer(ask.step, **fields).pack()]


BAD: dict[str, Callable[[Ask], Sequence[bytes]]] = {
    "garbage": lambda ask: [b"\x00" * 100, b"", b"\xc1"],
    "an id beyond the vocabulary": answered(drafts=[[1, VOCAB]]),
    "more than was wanted": answered(drafts=[[1] * 5]),
    "too many rows": answered(drafts=[[1], [1]]),
    "no row": answered(drafts=[]),
    "a refusal": answered(refusal="not today"),
    "another step": lambda ask: [Answer(ask.step + 1, drafts=[[1]]).pack(), Answer(ask.step - 1, drafts=[[1]]).pack()],
    "ten megabytes": lambda ask: [b"\x00" * 10_000_000],
    "nothing": lambda ask: [],
}


@pytest.mark.parametrize("kind", BAD)
def test_invalid_answers_give_no_draft(kind: str) -> None:
    with pretending(BAD[kind]) as address:
        drafter = RemoteDrafter(connect(address, VOCAB), Patience(0.2, 0.2), VOCAB)
        started = time.monotonic()
        for length in range(1, 4):
            assert drafts(drafter, TEXT[:length]) == [[]]
        assert time.monotonic() - started < 30


def test_a_replayed_answer_is_ignored() -> None:
    recorded: list[bytes] = []

    def reply(ask: Ask) -> Sequence[bytes]:
        recorded.append(Answer(ask.step, drafts=[[1]]).pack())
        return recorded[:1]

    with pretending(reply) as address:
        drafter = RemoteDrafter(connect(address, VOCAB), Patience(0.3, 0.3), VOCAB)
        assert drafts(drafter, TEXT) == [[1]]
        assert drafts(drafter, TEXT) == [[]]


def test_a_drafter_that_fails_on_the_server_gives_no_draft_and_the_server_goes_on() -> None:
    class Fails(NgramDrafter):
        def propose(self, requests: list[DraftRequest]) -> Proposal:
            if requests[0].tokens[-1] == 9:
                raise KeyError
            return super().propose(requests)

    with serving(Fails()) as server:
        drafter = remote(server.address, VOCAB)
        assert drafts(drafter, [9, 9, 9]) == [[]]
        assert drafts(drafter, [9, 9, 9, 8, 8]) == [[8, 8, 8, 8]]


# --- strangers --------------------------------------------------------------------------------------------------------


def test_a_draft_ends_before_an_id_that_the_target_does_not_have_and_the_server_goes_on() -> None:
    class Odd(NgramDrafter):
        def propose(self, requests: list[DraftRequest]) -> Proposal:
            return Proposal.certain([[3, -1, 4] if request.tokens[-1] else [VOCAB] for request in requests])

    with serving(Odd()) as server:
        drafter = remote(server.address, VOCAB)
        assert drafts(drafter, [1, 2], [1, 0]) == [[3], []]
        assert drafts(drafter, [1, 2, 3]) == [[3]]


def test_arbitrary_data_from_strangers_changes_nothing() -> None:
    """Bytes that are no handshake, a handshake with another key, and garbage and ten megabytes with the right key."""
    from foredraft.remote.sockets import Caller

    with serving(NgramDrafter()) as server:
        drafter = remote(server.address, VOCAB)
        assert drafts(drafter, TEXT) == [[3, 1, 2, 3]]
        port = int(server.address.rpartition(":")[2])
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b""):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(data)
        wrong = Caller(server.address, b"another key of good length")
        right = Caller(server.address, KEY)
        end = time.monotonic() + 10
        while not right.send(b"\xc1 garbage") and time.monotonic() < end:
            time.sleep(0.01)
        assert not wrong.send(b"garbage"), "there is no connection without the key"
        right.send(b"\x00" * 10_000_000)
        assert drafts(drafter, [*TEXT, 3]) == [[1, 2, 3, 1]]
        for caller in (wrong, right):
            caller.close()


def test_replayed_traffic_is_ignored() -> None:
    """A proxy records what a client sends, and sends it again on the same connection and on a new one."""
    held = Recording()
    with serving(held) as server:
        port = int(server.address.rpartition(":")[2])
        with Proxy(port) as proxy:
            drafter = remote(f"tcp://127.0.0.1:{proxy.port}", VOCAB)
            assert drafts(drafter, TEXT) == [[3, 1, 2, 3]]
            assert bytes(str(TEXT), "ascii") not in proxy.recorded
            num_asked = len(held.batches)
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(bytes(proxy.recorded))
                proxy.send_again()
                time.sleep(0.3)
            assert len(held.batches) == num_asked
            drafter.close()
        assert drafts(remote(server.address, VOCAB), TEXT) == [[3, 1, 2, 3]]


class Proxy:
    """A proxy between one client and a server."""

    def __init__(self, to: int) -> None:
        self.recorded = bytearray()
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._outward: socket.socket | None = None

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._outward is not None:
            self._outward.close()

    def send_again(self) -> None:
        assert self._outward is not None
        self._outward.sendall(bytes(self.recorded[-200:]))

    def _run(self) -> None:
        inward, _ = self._listener.accept()
        outward = self._outward = socket.create_connection(("127.0.0.1", self._to))
        threading.Thread(target=self._copy, args=(outward, inward), daemon=True).start()
        self._copy(inward, outward, self.recorded)

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket, record: bytearray | None = None) -> None:
        try:
            while data := source.recv(65536):
                if record is not None:
                    record.extend(data)
                sink.sendall(data)
        except OSError:
            return


# --- all drafters begin before any is waited for ----------------------------------------------------------------------


class Elsewhere(Fixed):
    """Logs when it begins and when it is waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__([1, 2])
        self.name, self.log = name, log

    def begin(self, requests: list[DraftRequest]) -> Pending[Proposal]:
        self.log.append(f"{self.name} begins")

        def finish(_: object) -> Proposal:
            self.log.append(f"{self.name} is waited for")
            return self.propose(requests)

        return Pending([], finish)


class Here(Fixed):
    def __init__(self, log: list[str]) -> None:
        super().__init__([3])
        self.log = log

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        self.log.append("here proposes")
        return super().propose(requests)


def test_all_drafters_begin_before_one_is_waited_for() -> None:
    log: list[str] = []
    group = DrafterGroup({"here": Here(log), "a": Elsewhere("a", log), "b": Elsewhere("b", log)})
    found = group.propose([item(0, "here", 2), item(1, "a", 2), item(2, "b", 1)], 8)
    assert log == ["a begins", "b begins", "here proposes", "a is waited for", "b is waited for"]
    assert found.proposal.draft_ids == [[3], [1, 2], [1]]
    assert set(found.times) == {"here", "a", "b"}


def test_a_drafter_that_cannot_begin_does_not_affect_others() -> None:
    class Broken(Fixed):
        def begin(self, requests: list[DraftRequest]) -> Pending[Proposal]:
            raise OSError("gone")

    found = DrafterGroup({"bad": Broken([1]), "good": Fixed([4])}).propose([item(0, "bad", 1), item(1, "good", 1)], 8)
    assert found.proposal.draft_ids == [[], [4]]
    assert isinstance(found.failures["bad"], OSError)


def test_a_suffix_server_drafts_from_the_history() -> None:
    with serving(SuffixDrafter(min_probability=1e-6)) as server:
        assert drafts(remote(server.address, VOCAB), TEXT) == [[3, 1, 2, 3]]
