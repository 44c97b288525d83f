"""How pytest-xdist shares the tests out among processes: a file at a time, so that its fixtures are made once; but in a few
files test by test."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

TEST_BY_TEST = ("tests/certificate/test_certify.py", "tests/model/test_device_stack.py", "tests/test_docs.py")
"""Long files whose tests take minutes together and share little."""


class Scheduler(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(TEST_BY_TEST) else super()._split_scope(nodeid)
