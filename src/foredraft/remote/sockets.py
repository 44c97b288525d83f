"""The two ends of a connection, over zmq.

CurveZMQ (https://rfc.zeromq.org/spec/26/) encrypts and authenticates every frame with keys of the connection and a counter that only
increases: frames that were altered, replayed or sent without the key never arrive here. Tags are compared in constant time. A frame
that is too large closes its connection.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from foredraft.errors import ForedraftError
from foredraft.remote.keys import KeyPairs

if TYPE_CHECKING:
    import zmq

MOST_ASKED_BYTES = 8 << 20
"""The largest frame from a target's process: histories of two million tokens."""
MOST_ANSWERED_BYTES = 1 << 20
_MOST_WAITING = 64
"""Frames that are queued for an end that does not read them."""
_HANDSHAKE_MS, _HEARTBEAT_MS, _SILENT_MS = 5000, 2000, 6000
_RECONNECT_MS, _MOST_RECONNECT_MS = 100, 500


def check_installed() -> None:
    """Raises ForedraftError if zmq or msgpack is missing, or zmq cannot encrypt."""
    try:
        import msgpack  # noqa: F401
        import zmq
    except ImportError:
        raise ForedraftError("remote drafts need zmq and msgpack: pip install 'foredraft[remote]'") from None
    if not zmq.has("curve"):
        raise ForedraftError("this zmq was built without CURVE, but connections must be encrypted: pip install pyzmq")


class Listener:
    """The draft server's end. address: such as tcp://127.0.0.1:5757; port 0 takes any free port.

    Raises ForedraftError if it cannot listen at the address.
    """

    def __init__(self, address: str, key: bytes) -> None:
        check_installed()
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        pairs = KeyPairs.of(key)
        self._context = zmq.Context()  # not shared: a context has only one authenticator
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _OnlyThis(pairs.client.public))
        self._socket = _bounded(self._context.socket(zmq.ROUTER), MOST_ASKED_BYTES)
        self._socket.curve_server = True
        self._socket.curve_secretkey = pairs.server.secret
        self._socket.curve_publickey = pairs.server.public
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ForedraftError(f"cannot listen at {address}: {error.strerror}") from None
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """(client, frame); None if nothing arrives within `timeout` seconds. Messages of several frames are skipped."""
        while (parts := _received(self._socket, timeout)) is not None:
            if len(parts) == 2:
                return parts[0], parts[1]
        return None

    def send(self, client: bytes, frame: bytes) -> None:
        """A frame to a client that is gone, or does not read, is dropped."""
        import zmq

        try:
            self._socket.send_multipart([client, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def close(self) -> None:
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()


class Caller:
    """The target's end. It connects in the background, and reconnects if the connection is lost.

    Raises ForedraftError for an invalid address.
    """

    def __init__(self, address: str, key: bytes) -> None:
        check_installed()
        import zmq

        pairs = KeyPairs.of(key)
        self._socket = _bounded(zmq.Context.instance().socket(zmq.DEALER), MOST_ANSWERED_BYTES)
        self._socket.curve_serverkey = pairs.server.public
        self._socket.curve_secretkey = pairs.client.secret
        self._socket.curve_publickey = pairs.client.public
        self._socket.immediate = True  # do not queue frames while no server is connected
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = _RECONNECT_MS, _MOST_RECONNECT_MS
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ForedraftError(
                f"{address} is not a valid draft server address ({error.strerror}): give tcp://HOST:PORT"
            ) from None

    def receive(self, timeout: float) -> bytes | None:
        """One frame, the last if a message has several; None if nothing arrives within `timeout` seconds."""
        parts = _received(self._socket, timeout)
        return None if parts is None else parts[-1]

    def send(self, frame: bytes) -> bool:
        """-> False if no server is connected"""
        import zmq

        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=0)


def _received(socket: zmq.Socket[Any], timeout: float) -> list[bytes] | None:
    """A message; None if none arrives within `timeout` seconds."""
    import zmq

    milliseconds = round(timeout * 1000)
    if milliseconds <= 0 and not int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
        return None  # much faster than by an exception
    socket.set(zmq.RCVTIMEO, max(0, milliseconds))
    try:
        return socket.recv_multipart()
    except zmq.Again:
        return None


class _OnlyThis:
    """The callback of zmq's authenticator. public: the only client key that is accepted, in Z85."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def _bounded(socket: zmq.Socket[Any], most_bytes: int) -> zmq.Socket[Any]:
    socket.linger = 0
    socket.maxmsgsize = most_bytes
    socket.rcvhwm = socket.sndhwm = _MOST_WAITING
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENT_MS
    return socket
