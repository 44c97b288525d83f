"""Every answer to a generated request is in the OpenAPI document. Collected with the slow tests only (conftest.py)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.conftest import Running
from tests.server.test_openapi import brief, schema

__all__ = ["brief"]


# Not every body that fits the document is accepted: what it cannot express (such as a seed with certain verification rules) is refused
# with a 400, which it contains.
@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_documented(case: Any, brief: Running) -> None:
    case.call_and_validate(base_url=brief.url, excluded_checks=[positive_data_acceptance])


@pytest.mark.slow
def test_the_server_still_works_afterwards(brief: Running) -> None:
    brief.wait_until_idle()
    assert brief.get("/health").status_code == 200
