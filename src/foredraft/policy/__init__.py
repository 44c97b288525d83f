"""Whom to ask for draft tokens, and for how many."""

from foredraft.policy.base import FAILED, MEMORY_SHORT, DraftBudget, FixedPolicy, Policy
from foredraft.policy.controller import Controller, CostStore
from foredraft.policy.costs import Costs
from foredraft.policy.guard import Guard
from foredraft.policy.safe import SafePolicy
from foredraft.policy.store import CostFile

__all__ = [
    "FAILED",
    "MEMORY_SHORT",
    "Controller",
    "CostFile",
    "CostStore",
    "Costs",
    "DraftBudget",
    "FixedPolicy",
    "Guard",
    "Policy",
    "SafePolicy",
]
