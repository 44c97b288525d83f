"""A drafter in its own process, for targets in other processes: `foredraft draft-server`.

`loading` builds the drafter, `server` answers clients with it, `histories` keeps what clients sent. `kept` restarts the server when it
ends, and `supervised` lets Ray place and restart it. The client's end is `drafters/remote.py`.
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
