"""Whom to ask for draft tokens, and for how many."""

from foredraft.policy.base import Ask, FixedPolicy, Policy

__all__ = ["Ask", "FixedPolicy", "Policy"]
