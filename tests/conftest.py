"""Settings that hold for all tests."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from sim.engine.play import native
from sim.engine.results import worlds
from sim.native.library import UnavailableError, load
from sim.schedule.proof import remembered

if TYPE_CHECKING:
    from runtime.processes.launch import Session

# Small tensors in several threads are no faster, and many times slower where something else runs on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a session proves it proves by the code that it tests, and leaves nothing to others. So does a process it starts.
os.environ["LONGSTEP_PROOFS"] = "off"

SERVED = ("serving", "test_serve_browser", "test_serve_guard", "test_serve_server")
"""What tests a server, and what they share."""

# Examples are run by test_golden, not imported for their doctests.
collect_ignore = [str(path.with_suffix(".py")) for path in (Path(__file__).parent / "golden").glob("*.out")]

# A GPU machine may have none of what a page is served, and asked, with.
if any(find_spec(package) is None for package in ("starlette", "uvicorn", "httpx")):
    collect_ignore += [str(Path(__file__).parent / "experiments" / "serve" / f"{one}.py") for one in SERVED]

hypothesis.settings.register_profile("longstep", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("longstep")


# What is collected lives to the end: nobody looks for garbage while it grows, or among it later.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


EXECUTING = {"experiments.evidence.executed.execution.execute"}
"""Doctests that start processes: they cannot say so themselves."""

SEARCHING = {
    "sim.balance.micro_batches.balance_micro_batches",
    "sim.compare.explore.explore",
    "sim.compare.winners.winners",
    "sim.diagnose.doctor.doctor",
    "sim.plan.fit.ladder",
    "sim.plan.neighbours.neighbours",
    "sim.plan.reverse.fewest_gpus",
    "sim.setup.played.PlayedStep.over",
}
"""Doctests of what plays many configurations."""

AGAIN = {
    "sim.compare.crossover.crossover",
    "sim.explain.explain.explain",
    "sim.explain.screen.Explanation",
    "sim.plan.answer.Answer",
    "sim.plan.plan.plan",
    "sim.plan.reverse.cheapest",
    "sim.plan.reverse.longest_context",
}
"""Doctests of what others search by, or show."""


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in EXECUTING:
            item.add_marker(pytest.mark.gloo)
        if item.name in SEARCHING | AGAIN:
            item.add_marker(pytest.mark.sweep)
        if item.name in AGAIN:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the profiles of whoever runs the tests out of them."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "longstep" / "profiles"


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile what every schedule is checked with and what plays it, before processes are refused."""
    with contextlib.suppress(UnavailableError):
        load("derive")
        native.library()
        for most in worlds.SIZES:
            worlds.library(most)


@pytest.fixture(scope="session", autouse=True)
def proved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prove what is predicted or played once in a session, whose workers share what they have proved.

    A schedule is known by all that its proof depends on, so one that differs in anything is proved. ``check`` itself
    always proves.
    """
    own = tmp_path_factory.getbasetemp()
    file = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "proved"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "_path", lambda: file)
        yield


@pytest.fixture(autouse=True)
def no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the inner loop quick: what starts processes says so by its mark."""
    if request.node.get_closest_marker("gloo") or request.node.get_closest_marker("gpu"):
        return

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this test starts a process: mark it with pytest.mark.gloo")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", refuse)


@pytest.fixture
def hearing() -> Iterator[None]:
    """Let this process, and those that it starts, hear Ctrl-C, to which shells make jobs in the background deaf."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Session]]:
    """Give the session of so many ranks that all tests share; after a test that ends it, a new one.

    What a test leaves in them (heaps, kernels that it has loaded) is there in the next one too: tests that must find
    fresh processes start their own.
    """
    from runtime.processes.launch import Session  # here, so that tests of words alone do not wait for torch

    shared: dict[int, Session] = {}

    def of(number: int) -> Session:
        if number not in shared or not all(process.is_alive() for process in shared[number].processes):
            if number in shared:
                with contextlib.suppress(ValueError, OSError):  # of processes that are closed, or pipes that are broken
                    shared.pop(number).close()
            shared[number] = Session(number, timeout_s=60)
        return shared[number]

    yield of
    for session in shared.values():
        session.close()
        assert not any(process.is_alive() for process in session.processes)
