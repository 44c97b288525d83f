"""The server's log: JSON lines on standard error."""

from __future__ import annotations

import logging
import sys

from foredraft.errors import ForedraftError

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def parse_level(name: str) -> int:
    if name not in _LEVELS:
        raise ForedraftError(f"--log-level must be one of {', '.join(_LEVELS)}, not {name!r}")
    return _LEVELS[name]


def log_to_standard_error(level: int) -> None:
    """From now on write every line as JSON, including the warnings of the engine and of uvicorn."""
    from foredraft.server.request_log import JsonLinesHandler

    handler = JsonLinesHandler(sys.stderr)
    for name, least in (("foredraft", level), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False
