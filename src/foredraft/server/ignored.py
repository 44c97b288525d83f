"""What a request asks for that nothing here knows: said in the answer's headers and in the log, or refused."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any
from urllib.parse import quote

from foredraft.server.errors import ApiError
from foredraft.server.wire.base import Wire

HEADER = "X-Foredraft-Ignored"
_MOST_NAMES = 16
_MOST_CHARACTERS = 100
_MORE = "..."
_NAME = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)
"""Others may quote a prompt, which is not for the log."""


def ignored_headers(body: Wire, note: dict[str, Any], *, strict: bool) -> dict[str, str]:
    """For the answer; `note` is what the log tells. Raises ApiError where nothing may be ignored."""
    names = [name[:_MOST_CHARACTERS] for name in islice(body.unread(), _MOST_NAMES + 1)]
    if not names:
        return {}
    if strict:
        name = names[0]
        raise ApiError(400, f"{name}: there is no such field here, and none is ignored: leave it out", param=name)
    if len(names) > _MOST_NAMES:
        names[-1] = _MORE
    note["ignored"] = [name if _NAME.fullmatch(name) else "?" for name in names]
    # a header holds no line breaks, and does not end with a blank
    return {HEADER: ", ".join(quote(name, safe="[]") or '""' for name in names)}
