"""What the hub's library raises, in one line. Nothing slow is imported here, because commands check their options first."""

from __future__ import annotations

import os
from collections.abc import Iterator

from huggingface_hub import errors as hub

from foredraft.errors import one_line

NO_CONFIG = (
    "this repository on the hub has no config.json that names an architecture: if it holds an adapter or GGUF files, give "
    "the original model"
)
_OFFLINE = (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, TimeoutError)
_Kinds = type[BaseException] | tuple[type[BaseException], ...]


def why_not_on_hub(error: BaseException, revision: str | None) -> str:
    """Explain what the library raised while it looked for a model on the hub."""
    causes = list(_chain(error))
    if _has(causes, hub.GatedRepoError):
        return 'its terms must be accepted first: do so on its page on the hub, and log in with "hf auth login"'
    if _has(causes, hub.RepositoryNotFoundError):
        return 'no directory here and no model on the hub has that name (or it is private: "hf auth login")'
    if _has(causes, hub.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it: give one of its branches, tags or commits"
    if is_unreachable(error):
        return f"no directory here has that name, the cache does not hold it, and the hub cannot be reached{_offline()}"
    if _has(causes, hub.EntryNotFoundError):
        return NO_CONFIG
    return f"no model found: {one_line(error)}"


def is_unreachable(error: BaseException) -> bool:
    """Whether the hub could not be reached, or must not be, and the cache does not hold the file."""
    causes = list(_chain(error))
    return _has(causes, _OFFLINE) or any(type(one).__name__.startswith(("Connect", "ProxyError")) for one in causes)


def _offline() -> str:
    asked = next((one for one in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(one, "0") != "0"), None)
    if asked is not None:
        return f" ({asked} is set); unset it, or give a directory"
    return "; check the network, or give a directory"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _has(causes: list[BaseException], kinds: _Kinds) -> bool:
    return any(isinstance(one, kinds) for one in causes)
