"""Drafters that failed during a measurement. The texts are still correct, but fewer of their tokens were drafted."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.policy import FAILED


def failure_warnings(fallbacks: Mapping[tuple[str, str], int], configuration: str | None = None) -> list[str]:
    """One line for each drafter that failed. fallbacks: as LLM counts them, by drafter and reason."""
    where = "" if configuration is None else f"{configuration}: "
    return [
        f"{where}drafter {drafter} failed ({num}×) and was paused, so fewer tokens were drafted than configured"
        for (drafter, reason), num in fallbacks.items()
        if reason == FAILED and num
    ]
