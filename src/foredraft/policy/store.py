"""Costs, kept in the user's cache folder: a machine and a pair of models need to be measured once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from foredraft.policy.costs import Costs
from foredraft.utils.folders import can_write, is_ours, user_folders

logger = logging.getLogger("foredraft")

_VERSION = 1


class CostFile:
    """path: of a JSON file; None where nothing can be written, and then nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def of(cls, subject: Mapping[str, object]) -> CostFile:
        """subject: what the costs are of; other machines, models or settings have files of their own."""
        described = json.dumps([_VERSION, dict(subject)], sort_keys=True, default=str)
        name = f"costs-{hashlib.sha256(described.encode()).hexdigest()[:16]}.json"
        for folder in user_folders():
            if is_ours(folder / name) or can_write(folder):
                return cls(folder / name)
        return cls(None)

    def load(self) -> Costs:
        """What is kept, or nothing: a file that cannot be read is measured anew."""
        if self.path is not None and is_ours(self.path):
            try:
                return Costs.from_dict(json.loads(self.path.read_text()))
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("%s: what steps cost cannot be read (%s) and is measured again", self.path, error)
        return Costs()

    def save(self, costs: Costs) -> None:
        """Written beside and moved into place, so that no process reads half of it."""
        if self.path is None:
            return
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent) as beside:
                whole = Path(beside) / self.path.name
                whole.write_text(json.dumps(costs.as_dict()))
                os.replace(whole, self.path)
        except OSError as error:
            logger.warning("%s: what steps cost cannot be kept: %s", self.path, error.strerror)
            self.path = None
