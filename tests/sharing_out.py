"""Distributes the tests over pytest-xdist's processes: file by file, so that a file's fixtures are made once, but test by test in a
few files."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

TEST_BY_TEST = ("tests/certificate/test_certify.py", "tests/model/test_device_stack.py", "tests/test_docs.py")
"""Files whose tests take minutes in all and share little."""


class Scheduler(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(TEST_BY_TEST) else super()._split_scope(nodeid)
