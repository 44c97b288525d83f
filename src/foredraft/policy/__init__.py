"""Policies: decide which drafter to use for each sequence in a step, and how many tokens to draft."""

from foredraft.policy.base import FAILED, MEMORY_SHORT, NO_DRAFTING, DraftBudget, FixedPolicy, Hybrid, Policy
from foredraft.policy.controller import Controller
from foredraft.policy.controller_state import ControllerState
from foredraft.policy.cost_model import CostModel
from foredraft.policy.guard import Guard
from foredraft.policy.safe import SafePolicy
from foredraft.policy.state_file import StateFile

__all__ = [
    "FAILED",
    "MEMORY_SHORT",
    "NO_DRAFTING",
    "Controller",
    "ControllerState",
    "CostModel",
    "DraftBudget",
    "FixedPolicy",
    "Guard",
    "Hybrid",
    "Policy",
    "SafePolicy",
    "StateFile",
]
