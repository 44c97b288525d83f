"""What the controller keeps from one process to the next: the measured costs, and how drafts continued at each level of acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.policy.cost_model import StoredCosts, not_negative
from foredraft.policy.decay import Numbers


@dataclass(frozen=True, slots=True)
class ControllerState:
    """costs: see CostModel. chains, trees: by drafter, the counts at each level of recent acceptance.

    The next process may write other texts, so rates over all texts are not kept: a drafter that was useless for some texts would hardly
    be tried for others. How a text with some recent acceptance continues depends much less on the texts.
    """

    costs: StoredCosts = field(default_factory=StoredCosts.empty)
    chains: Mapping[str, Sequence[Numbers]] = field(default_factory=dict)
    trees: Mapping[str, Sequence[Numbers]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {"costs": self.costs.as_dict(), "chains": dict(self.chains), "trees": dict(self.trees)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ControllerState:
        """Raises KeyError, TypeError or ValueError for anything that as_dict does not write."""
        counts = [
            {str(name): _levels(levels) for name, levels in dict(fields[key]).items()} for key in ("chains", "trees")
        ]
        return cls(StoredCosts.from_dict(fields["costs"]), *counts)


def _levels(levels: list[Any]) -> list[Numbers]:
    return [[[not_negative(number, "a count") for number in numbers] for numbers in lists] for lists in levels]
