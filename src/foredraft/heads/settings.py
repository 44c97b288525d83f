"""A configuration that tracks which of its keys were not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foredraft.errors import ModelError, shown


class Settings:
    """The keys of a head's configuration. `refuse_unread` rejects keys that were not read, since their effect would otherwise be
    ignored silently. Keys whose value is null count as absent.

    where: the name of a nested object, for error messages.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "") -> None:
        self._config = {key: value for key, value in config.items() if value is not None}
        self._unread = set(self._config)
        self._where = f"{where}." if where else ""

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def get(self, key: str, default: Any = None) -> Any:
        self._unread.discard(key)
        return self._config.get(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """Raises ModelError for a value other than true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {self._where}{key} must be true or false, not {shown(value)}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises ModelError for a value that is not a whole number, and for a key that is missing and has no default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"config.json: {self._where}{key} must be a whole number, not {shown(value)}")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None if it is missing or empty. Raises ModelError for anything else."""
        value = self.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ModelError(f"config.json: {self._where}{key} must be a list of whole numbers, not {shown(value)}")
        return tuple(value)

    def nested(self, key: str) -> Settings:
        """A nested object; empty if it is missing. Raises ModelError for anything but an object."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {self._where}{key} must be an object, not {shown(value)}")
        return Settings(value, f"{self._where}{key}")

    def expect(self, **values: Any) -> None:
        """Check settings for which only one value is supported. Raises ModelError for another value."""
        for key, value in values.items():
            actual = self.get(key, value)
            if actual != value:
                raise ModelError(
                    f"config.json: {self._where}{key} is {shown(actual)}: only {shown(value)} is supported"
                )

    def take(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of these keys, for those that are present. All of them count as read."""
        keys = set(keys)
        self._unread -= keys
        return {key: value for key, value in self._config.items() if key in keys}

    def refuse_unread(self) -> None:
        """Raises ModelError, with their names, if keys were not read."""
        if self._unread:
            names = ", ".join(f"{self._where}{key}" for key in sorted(self._unread))
            raise ModelError(
                f"config.json has keys that foredraft does not recognize: {names}; they may change what the head computes"
            )
