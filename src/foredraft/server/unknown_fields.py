"""Fields of a request that have no effect: named in the response's headers and in the log, or rejected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any
from urllib.parse import quote

from foredraft.server.api_errors import ApiError
from foredraft.server.wire.models import RequestModel

HEADER = "X-Foredraft-Ignored"
_MAX_NAMES = 16
_MAX_NAME_CHARACTERS = 100
_MORE = "..."
_LOGGABLE_NAME = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)
"""Names that may be logged; any other might quote a prompt."""


def unknown_field_headers(
    body: RequestModel, log_fields: dict[str, Any], *, strict: bool, unused: Sequence[str] = ()
) -> dict[str, str]:
    """Response headers that name the unknown fields, which are also added to log_fields. unused: names of known fields that the served
    model has no use for. strict: raises ApiError 400 instead."""
    found = islice(chain(unused, body.unknown_fields()), _MAX_NAMES + 1)
    names = [name[:_MAX_NAME_CHARACTERS] for name in found]
    if not names:
        return {}
    if strict:
        name = names[0]
        reason = "this model has no use for it" if name in unused else "there is no such field"
        raise ApiError(400, f"{name}: {reason}, and this server rejects unknown fields: leave it out", param=name)
    if len(names) > _MAX_NAMES:
        names[-1] = _MORE
    log_fields["ignored"] = [name if _LOGGABLE_NAME.fullmatch(name) else "?" for name in names]
    # a header must not have line breaks or end with a blank
    return {HEADER: ", ".join(quote(name, safe="[]") or '""' for name in names)}
