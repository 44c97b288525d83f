"""Policies: decide which drafter to use for each sequence in a step, and how many tokens to draft."""

from foredraft.policy.base import FAILED, MEMORY_SHORT, NO_DRAFTING, DraftBudget, FixedPolicy, Hybrid, Policy
from foredraft.policy.controller import Controller
from foredraft.policy.cost_file import CostFile
from foredraft.policy.cost_model import CostModel
from foredraft.policy.guard import Guard
from foredraft.policy.safe import SafePolicy

__all__ = [
    "FAILED",
    "MEMORY_SHORT",
    "NO_DRAFTING",
    "Controller",
    "CostFile",
    "CostModel",
    "DraftBudget",
    "FixedPolicy",
    "Guard",
    "Hybrid",
    "Policy",
    "SafePolicy",
]
