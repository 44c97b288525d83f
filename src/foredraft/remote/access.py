"""Where a draft server is, and how long to wait for its drafts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from foredraft.errors import ForedraftError, shown

DEFAULT_MAX_WAIT = 0.1
_ADDRESS = re.compile(r"(tcp://[^/\s]+:\d{1,5}|ipc://\S+)")


@dataclass(frozen=True, slots=True)
class DraftServerAccess:
    """address: such as tcp://10.0.0.2:5757. key_file: the file that holds the key; None: the key is in the environment. max_wait: the
    most seconds that a step waits for its drafts.

    Raises ForedraftError for an invalid address, and for a wait that is not a positive, finite number.
    """

    address: str
    key_file: str | os.PathLike[str] | None = None
    max_wait: float = DEFAULT_MAX_WAIT

    def __post_init__(self) -> None:
        if not (isinstance(self.address, str) and _ADDRESS.fullmatch(self.address)):
            raise ForedraftError(f"draft_server needs an address like tcp://127.0.0.1:5757, not {shown(self.address)}")
        wait = self.max_wait
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 < wait < math.inf:
            raise ForedraftError(f"draft_server_max_wait must be a number of seconds above 0, not {shown(wait)}")

    @classmethod
    def of(cls, given: object) -> DraftServerAccess | None:
        """given: LLM's argument draft_server. Raises ForedraftError unless it is None, an address or a mapping with an address."""
        if given is None:
            return None
        values: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"address": given}
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown or "address" not in values:
            raise ForedraftError(
                f"draft_server must be an address, or a mapping with address, key_file and max_wait, not {shown(given)}"
            )
        return cls(**values)
