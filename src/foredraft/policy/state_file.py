"""Stores the controller's state in the user's cache folder, so that each combination of machine and models is measured only once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from foredraft.policy.controller_state import ControllerState
from foredraft.utils.folders import can_write, is_ours, user_folders

logger = logging.getLogger("foredraft")

_VERSION = 5


class StateFile:
    """path: of a JSON file, or None if no folder is writable; then nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def of(cls, subject: Mapping[str, object]) -> StateFile:
        """The file for a subject, which describes what the state belongs to. Other machines, models or settings have other files."""
        description = json.dumps([_VERSION, dict(subject)], sort_keys=True, default=str)
        name = f"controller-{hashlib.sha256(description.encode()).hexdigest()[:16]}.json"
        for folder in user_folders():
            if is_ours(folder / name) or can_write(folder):
                return cls(folder / name)
        return cls(None)

    def load(self) -> ControllerState:
        """The stored state. Empty if there is none, or if the file cannot be read."""
        if self.path is not None and is_ours(self.path):
            try:
                return ControllerState.from_dict(json.loads(self.path.read_text()))
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                logger.warning(
                    "%s: the stored costs of steps and drafts cannot be read (%s); they are measured again",
                    self.path,
                    error,
                )
        return ControllerState()

    def save(self, state: ControllerState) -> None:
        """Write a temporary file and rename it, so that no process reads an incomplete file."""
        if self.path is None:
            return
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                temporary = Path(folder) / self.path.name
                temporary.write_text(json.dumps(state.as_dict()))
                os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("%s: the costs of steps and drafts cannot be stored: %s", self.path, error.strerror)
            self.path = None
