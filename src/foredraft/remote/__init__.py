"""What connects a target to a drafter in another process: keys, sockets, messages, and how long a step waits.

`connection` is the client's end, and `drafters/remote.py` is the drafter that uses it. The server's end is `draft_server/`. zmq and
msgpack are optional dependencies: only `keys` and `sockets` import zmq, and only `sockets` and `messages` import msgpack.
"""

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.remote.access import DEFAULT_MAX_WAIT, DraftServerAccess
    from foredraft.remote.connection import Connection
    from foredraft.remote.histories import SentHistories
    from foredraft.remote.keys import VARIABLE, read_key
    from foredraft.remote.messages import Answer, Ask, AskedRow, MalformedMessage, Sampling
    from foredraft.remote.patience import Patience
    from foredraft.remote.sockets import Listener
    from foredraft.remote.vocabulary import VocabularyIdentity

__all__ = [
    "DEFAULT_MAX_WAIT",
    "VARIABLE",
    "Answer",
    "Ask",
    "AskedRow",
    "Connection",
    "DraftServerAccess",
    "Listener",
    "MalformedMessage",
    "Patience",
    "Sampling",
    "SentHistories",
    "VocabularyIdentity",
    "read_key",
]

__getattr__ = attributes(
    __name__,
    {
        "access": ("DEFAULT_MAX_WAIT", "DraftServerAccess"),
        "connection": ("Connection",),
        "histories": ("SentHistories",),
        "keys": ("VARIABLE", "read_key"),
        "messages": ("Answer", "Ask", "AskedRow", "MalformedMessage", "Sampling"),
        "patience": ("Patience",),
        "sockets": ("Listener",),
        "vocabulary": ("VocabularyIdentity",),
    },
)
