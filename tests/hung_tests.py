"""Stops a run of the tests when three of them hung: each costs minutes, and the next ones would hang as well.

A test hung if it failed after HUNG_SEC or more, which is how long the harness and pytest-timeout wait at least. Runs
with a --timeout of their own (slow and end-to-end tests) are left alone: there a minute is not long.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest

HUNG_SEC = float(os.environ.get("LLMTRAIN_TEST_HUNG_SEC", "60"))
AT_MOST = 3
_hung: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    is_quick = item.config.getoption("timeout", None) is None
    if report.failed and is_quick and call.duration >= HUNG_SEC:
        _hung.append(item.nodeid)
        if len(_hung) >= AT_MOST:
            # A worker of xdist passes this on, and the others stop too.
            item.session.shouldfail = f"{AT_MOST} tests hung: {', '.join(_hung)}"
    return report
