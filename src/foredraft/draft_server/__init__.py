"""A drafter in a process of its own, for targets in others: `foredraft draft-server`.

`loading` makes the drafter, `server` answers for it, `histories` keeps what clients sent. `supervised` lets Ray place the server and
start it again. The other end is `drafters/remote.py`.
"""

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.draft_server.loading import DraftServerSettings, load_drafter
    from foredraft.draft_server.method import check_method
    from foredraft.draft_server.server import DraftServer

__all__ = ["DraftServer", "DraftServerSettings", "check_method", "load_drafter"]

__getattr__ = attributes(
    __name__,
    {
        "loading": ("DraftServerSettings", "load_drafter"),
        "method": ("check_method",),
        "server": ("DraftServer",),
    },
)
