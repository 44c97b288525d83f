"""Stores costs in the user's cache folder, so that each combination of machine and models is measured only once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from foredraft.policy.cost_model import CostModel
from foredraft.utils.folders import can_write, is_ours, user_folders

logger = logging.getLogger("foredraft")

_VERSION = 4


class CostFile:
    """path: of a JSON file, or None if no folder is writable; then nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def of(cls, subject: Mapping[str, object]) -> CostFile:
        """The file for a subject, which describes what the costs belong to. Other machines, models or settings have other files."""
        description = json.dumps([_VERSION, dict(subject)], sort_keys=True, default=str)
        name = f"costs-{hashlib.sha256(description.encode()).hexdigest()[:16]}.json"
        for folder in user_folders():
            if is_ours(folder / name) or can_write(folder):
                return cls(folder / name)
        return cls(None)

    def load(self) -> CostModel:
        """The stored costs. Empty if there are none, or if the file cannot be read."""
        if self.path is not None and is_ours(self.path):
            try:
                return CostModel.from_dict(json.loads(self.path.read_text()))
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning(
                    "%s: the stored step costs cannot be read (%s); they are measured again", self.path, error
                )
        return CostModel()

    def save(self, costs: CostModel) -> None:
        """Write a temporary file and rename it, so that no process reads an incomplete file."""
        if self.path is None:
            return
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                temporary = Path(folder) / self.path.name
                temporary.write_text(json.dumps(costs.as_dict()))
                os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("%s: step costs cannot be stored: %s", self.path, error.strerror)
            self.path = None
