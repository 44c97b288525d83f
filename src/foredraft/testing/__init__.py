"""Tests for third-party drafters and verification rules. It needs neither pytest nor the repository.

from foredraft.testing import DrafterContract, RuleContract     # to subclass, for pytest
from foredraft.testing import check_drafter, check_rule         # to call from anywhere
"""

from foredraft.testing.drafters import DrafterContract, check_drafter, check_proposal
from foredraft.testing.requests import request_for
from foredraft.testing.rules import RuleContract, check_rule

__all__ = ["DrafterContract", "RuleContract", "check_drafter", "check_proposal", "check_rule", "request_for"]
