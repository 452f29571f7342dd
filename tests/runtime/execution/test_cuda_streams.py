"""CUDA's streams and events as ``runtime.execution.streams`` uses them, on a device of our own that
runs what is ready in any order: streams are queues, an event is over when its latest record has been reached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.execution import streams as module
from runtime.execution.streams import CudaStreams, Event
from sim.schedule.ir.ops import COMPUTE, HostAdamW, HostSync, Kernel
from sim.schedule.proof.check import Checked
from sim.words.workload import Workload
from tests.helpers import make_checked, make_model, slow_but
from tests.schedule.model.test_step import make_step, step


class Device:
    """Streams of work; ``run`` takes the head of any stream that does not wait."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.current = FakeStream(self)
        self.clock = 0

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until():
            ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
            if not ready:
                assert not any(stream.queue for stream in self.streams), "the device has come to a standstill"
                return
            self.clock += 1
            self.random.choice(ready).queue.pop(0)[1]()


class FakeStream:
    """A queue of (whether it may begin, what it does)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        device.streams.append(self)

    def put(self, work: Callable[[], None]) -> None:
        self.queue.append((lambda: True, work))

    def wait_event(self, event: FakeEvent) -> None:
        wanted = event.recorded  # a later record does not matter
        self.queue.append((lambda: event.reached >= wanted, lambda: None))

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self.device)
        event.record(other)
        self.wait_event(event)


class FakeEvent:
    """Counts its records, and those that were reached."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded = self.reached = self.at = 0

    def record(self, stream: FakeStream) -> None:
        self.recorded += 1
        number = self.recorded

        def reach() -> None:
            self.reached, self.at = number, self.device.clock

        stream.put(reach)

    def synchronize(self) -> None:
        self.device.run(lambda: self.reached == self.recorded)

    def elapsed_time(self, later: FakeEvent) -> float:
        return float(np.float32(later.at - self.at))  # as CUDA, in milliseconds


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device(request.param)

    @contextmanager
    def stream(on: FakeStream) -> Iterator[None]:
        before, fake.current = fake.current, on
        yield
        fake.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(fake))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: fake.run())
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 1e-3 * fake.clock))
    return fake


def play(checked: Checked, device: Device) -> list[tuple[int, int]]:
    """Issue rank 0's ops as ``execute`` does; return when each began and ended, by the device's clock."""
    streams = CudaStreams(torch.device("cuda"))
    start_s = streams.start()
    program, waits = checked.schedule.program(0), checked.dependencies[0].waits
    events: list[Event] = []
    begun: dict[int, int] = {}

    def work(index: int) -> list[torch.distributed.Work]:
        device.current.put(lambda: begun.__setitem__(index, device.clock))
        device.current.put(lambda: None)
        return []

    def host_work(index: int) -> list[torch.distributed.Work]:
        begun[index] = device.clock
        device.clock += 1
        return []

    for index, op in enumerate(program.ops):
        after = [events[other] for other in waits[index]]
        if isinstance(op, HostAdamW):
            events.append(streams.synchronize(after, partial(host_work, index)))
        elif isinstance(op, HostSync):
            events.append(streams.synchronize(after))
            assert all(events[other].ended.reached for other in waits[index])  # type: ignore[attr-defined]
        else:
            events.append(streams.issue(op.stream, lambda index=index: work(index), after))  # type: ignore[misc]
    for event in events:
        event.wait()
    streams.close()
    times = [(posted_s - start_s, ended_s - start_s) for posted_s, ended_s in (event.times() for event in events)]
    assert all(posted_s <= ended_s for posted_s, ended_s in times)
    return [(begun.get(index, round(1e3 * posted)), round(1e3 * end)) for index, (posted, end) in enumerate(times)]


@cache
def three_layers(name: str) -> Checked:
    if name == "optimiser on the host":
        return make_step("zigzag", 2, step(), optimiser="host")
    return make_checked(name, Workload(model=make_model(8, 4), seq=32, scope="layer", layers=3), 4)


@pytest.mark.sweep
@pytest.mark.parametrize("device", slow_but({0, 1, 2}, range(8)), indirect=True)
@pytest.mark.parametrize(
    "name",
    ["ring", "zigzag", "ring, no overlap", "ulysses", "upipe over rings", "zigzag, offloaded", "optimiser on the host"],
)
def test_whatever_order_the_device_takes_nothing_begins_before_what_it_needs(name: str, device: Device) -> None:
    """Data that it reads or overwrites, ops of its own stream, and of communication the kernels issued before it."""
    checked = three_layers(name)
    program, times = checked.schedule.program(0), play(checked, device)
    last: dict[str, int] = {}
    overlapped = 0
    for index, op in enumerate(program.ops):
        needed = set(checked.dependencies[0].data[index]) | ({last[op.stream]} if op.stream in last else set())
        if not isinstance(op, Kernel | HostAdamW | HostSync) and COMPUTE in last:
            needed.add(last[COMPUTE])
        assert all(times[other][1] <= times[index][0] for other in needed), op.label
        overlapped += any(times[index][0] < times[other][1] and times[other][0] < times[index][1]
                          for other in range(index) if program.ops[other].stream != op.stream)  # fmt: skip
        last[op.stream] = index
    assert overlapped or name == "ring, no overlap"


@pytest.mark.parametrize("device", range(8), indirect=True)
def test_a_wait_of_the_host_ends_when_the_host_goes_on(device: Device) -> None:
    """Not after what else is queued: one copy is waited for while many kernels lie on the compute stream."""
    streams = CudaStreams(torch.device("cuda"))
    streams.start()
    done: list[str] = []

    def work(name: str) -> Callable[[], list[torch.distributed.Work]]:
        def begin() -> list[torch.distributed.Work]:
            device.current.put(lambda: done.append(name))
            return []

        return begin

    copy = streams.issue("to host", work("copy"), [])
    kernels = [streams.issue(COMPUTE, work("kernel"), []) for _ in range(100)]
    moment = streams.synchronize([copy])
    assert "copy" in done
    went_on_s, queued = 1e-3 * device.clock, len(done)
    later = streams.issue(COMPUTE, work("later"), [moment])
    for event in (*kernels, later):
        event.wait()
    assert queued < len(done)
    assert moment.times() == (went_on_s, went_on_s)
    assert copy.times()[1] <= went_on_s < later.times()[1]
    streams.close()


@pytest.mark.parametrize("device", [0], indirect=True)
def test_what_an_op_took_is_as_exact_late_as_early(device: Device) -> None:
    """Milliseconds since the start of a run are in fp32: after five hours they are one apart, and a clock ticks two."""

    def work() -> list[torch.distributed.Work]:
        device.current.put(lambda: None)
        return []

    streams = CudaStreams(torch.device("cuda"))
    streams.start()
    times = []
    for late in (0, 2**26 + 1):
        device.clock += late
        event = streams.issue(COMPUTE, work, [])
        event.wait()
        posted_s, ended_s = event.times()
        times.append(ended_s - posted_s)
    assert times == pytest.approx([2e-3, 2e-3])
