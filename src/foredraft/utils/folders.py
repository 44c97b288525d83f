"""Where to keep what is worth keeping from one process to the next."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from foredraft.errors import ForedraftError


def user_folders() -> list[Path]:
    """The user's cache, and one in the system's folder for temporary files where that cannot be had."""
    folders = [Path(tempfile.gettempdir()) / f"foredraft-{os.getuid()}"]
    root = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # a user without a home
        folders.insert(0, (Path(root) if root else Path.home() / ".cache") / "foredraft")
    return folders


def is_ours(file: Path) -> bool:
    """What another user left in a shared folder is not used."""
    return file.is_file() and file.stat().st_uid == os.getuid()


def can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid()


def make_directory(directory: Path) -> None:
    """Raises ForedraftError where it cannot be: better before a measurement than after it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForedraftError(f"{directory}: cannot be a report's directory: {error.strerror}") from None
