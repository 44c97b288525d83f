"""Checks of text."""

from __future__ import annotations

from foredraft.errors import ForedraftError


def check_unicode(name: str, text: str) -> None:
    """Raises ForedraftError for a text with a lone surrogate, which cannot be encoded. name: of the text, for the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ForedraftError(
            f"{name} must be valid Unicode: it contains the lone surrogate {text[error.start]!r} at character {error.start}"
        ) from None
