"""Garbage collection is off while it has to be, and then as it was before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from sim.base.garbage import garbage_collection_off
from sim.schedule.derive import matching
from sim.schedule.derive.matching import Matching
from sim.schedule.ir.program import Schedule
from sim.schedule.proof import check as proof
from sim.words.workload import Workload
from tests.helpers import make_checked, make_model


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_restored_after_nesting_and_exceptions(on: bool) -> None:
    (gc.enable if on else gc.disable)()

    @garbage_collection_off()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError

    for _ in range(2):
        with garbage_collection_off():
            with pytest.raises(ValueError):  # noqa: PT011 - any
                fail()
            assert not gc.isenabled()
        assert gc.isenabled() == on


def test_it_stays_off_until_the_last_thread_is_done() -> None:
    gc.enable()
    entered, may_leave = threading.Event(), threading.Event()

    def work() -> None:
        with garbage_collection_off():
            entered.set()
            may_leave.wait(10)

    thread = threading.Thread(target=work)
    with garbage_collection_off():
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    may_leave.set()
    thread.join(10)
    assert gc.isenabled()


def test_a_schedule_is_proved_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    seen = []

    def match(schedule: Schedule) -> Matching:
        seen.append(gc.isenabled())
        return matching.match(schedule)

    monkeypatch.setattr(proof, "match", match)
    make_checked("ring", Workload(model=make_model(), seq=64), 4)
    assert seen == [False]
    assert gc.isenabled()
