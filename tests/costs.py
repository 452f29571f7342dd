"""What tests cost: ``python -m pytest -p tests.costs [-n 2] ...`` prints the dearest tests and files.

CPU seconds of the process that runs a test and of those that it has ended, in all of a test's phases. What ranks that
tests share take is not among them. The first test that needs a library pays for importing it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

MOST = 30
BEGAN = pytest.StashKey[float]()
"""What the process had taken when a phase of a test began."""


def _cpu_s() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = _cpu_s()
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> None:
    """Count what each phase has added; the report carries it from a worker to whoever prints."""
    now = _cpu_s()
    item.user_properties = [("cpu_s", now - item.stash[BEGAN])]
    item.stash[BEGAN] = now


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [one for of_kind in terminalreporter.stats.values() for one in of_kind if hasattr(one, "user_properties")]
    by_test, by_file = Counter[str](), Counter[str]()
    for report in {id(one): one for one in reports}.values():
        cpu_s = dict(report.user_properties).get("cpu_s", 0.0)
        by_test[report.nodeid] += cpu_s
        by_file[report.nodeid.partition("::")[0]] += cpu_s
    for costs in (by_test, by_file):
        terminalreporter.write_sep("=", f"{costs.total():.0f} s of CPU, the dearest of {len(costs)}")
        for name, cpu_s in costs.most_common(MOST):
            terminalreporter.write_line(f"{cpu_s:8.2f} s  {name}")
