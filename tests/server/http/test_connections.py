"""Which connection is closed if there are too many."""

from __future__ import annotations

from foredraft.server.http.connections import Connections


class Peer:
    def __init__(self, *, is_answering: bool = False) -> None:
        self.is_answering = is_answering
        self.was_evicted = False

    def evict(self) -> None:
        self.was_evicted = True


def test_the_longest_idle_connection_is_closed() -> None:
    connections = Connections(3)
    busy, first, second = Peer(is_answering=True), Peer(), Peer()
    for peer in (busy, first, second):
        assert connections.admit(peer)
    connections.mark_used(first)  # so that second is idle longest
    assert connections.admit(third := Peer())
    assert [peer.was_evicted for peer in (busy, first, second, third)] == [False, False, True, False]
    assert connections.admit(Peer())
    assert first.was_evicted


def test_connections_that_are_being_answered_are_not_closed() -> None:
    connections = Connections(2)
    peers = [Peer(is_answering=True), Peer(is_answering=True)]
    assert all(connections.admit(peer) for peer in peers)
    late = Peer()
    assert not connections.admit(late)
    connections.mark_used(late)  # it was not admitted, so this does not admit it
    connections.remove(late)
    connections.remove(peers[0])
    assert connections.admit(Peer())
    assert not any(peer.was_evicted for peer in peers)
