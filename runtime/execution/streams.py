"""Streams and events behind one interface: CUDA's own, and on the CPU a thread per communicator.

The host issues all ops of a program in order. On CUDA issuing returns at once; on the CPU kernels run in the issuing
thread itself, while a communicator's thread waits for what its op needs, carries it out and stamps its times.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from sim.schedule.ir.ops import COMPUTE

Work = Callable[[], list[dist.Work]]
"""Begins an op; returns what to wait for until it has ended (nothing for a kernel)."""


class Event(Protocol):
    """The end of an op."""

    def wait(self) -> None:
        """Block the host until the op has ended; raise what it raised."""
        ...

    def times(self) -> tuple[float, float]:
        """Return (posted, ended) of an op that has ended, in seconds on the clock of the streams."""
        ...


class Streams(Protocol):
    """Where a rank's ops are issued to."""

    inline: bool
    """Whether the issuing thread runs the kernels itself, and so must wait before it issues one."""

    def issue(self, stream: str, work: Work, after: list[Event]) -> Event:
        """Issue an op behind the earlier ones of its stream and behind ``after``."""
        ...

    def synchronize(self, after: list[Event], work: Work = list) -> Event:
        """Block the host until all of ``after`` have ended, and while it then does ``work`` itself; return that as an
        event, on the host's clock.
        """
        ...

    def start(self) -> float:
        """Return the time at which a step starts, on the clock of the events."""
        ...

    def outlast(self, tensor: torch.Tensor, streams: Iterable[str]) -> None:
        """Keep a tensor's memory from being reused before what was issued to some streams has ended."""
        ...

    def get_ahead(self, seconds: float) -> None:
        """Keep the device busy for about so long, so that the host gets ahead of it where it can."""
        ...

    def replay(self, work: Work, count: int) -> float:
        """Return the seconds that a kernel takes on average when the device gets it so many times at once, as the nodes
        of a CUDA graph, where it can.
        """
        ...

    def close(self) -> None:
        """End the streams."""
        ...


class _HostEvent:
    """The end of an op on the CPU. Where the host has only waited it is posted and ended at once, as rows have it:
    posted is when all that an op waits for has ended.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._times = (0.0, 0.0)

    def run(self, work: Work) -> None:
        posted = time.perf_counter()
        try:
            for part in work():
                part.wait()
        except BaseException as error:  # noqa: BLE001 - whatever it was, it belongs to the thread that waits
            self._error = error
        self._times = (posted, time.perf_counter())
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def times(self) -> tuple[float, float]:
        return self._times


class HostStreams:
    """Streams of a CPU rank: the issuing thread computes, each communicator has a thread of its own."""

    inline = True

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue[tuple[Work, list[Event], _HostEvent] | None]] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> float:
        """See Streams."""
        return time.perf_counter()

    def get_ahead(self, seconds: float) -> None:
        """See Streams: here the host is the device."""

    def outlast(self, tensor: torch.Tensor, streams: Iterable[str]) -> None:
        """See Streams: here whoever uses a tensor holds it."""

    def replay(self, work: Work, count: int) -> float:
        """See Streams: here one after the other."""
        begin_s = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - begin_s) / count

    def issue(self, stream: str, work: Work, after: list[Event]) -> Event:
        """See Streams."""
        event = _HostEvent()
        if stream == COMPUTE:
            assert not after, "whoever computes has waited before"
            event.run(work)
            event.wait()
        else:
            if stream not in self._queues:
                self._open(stream)
            self._queues[stream].put((work, after, event))
        return event

    def synchronize(self, after: list[Event], work: Work = list) -> Event:
        """See Streams."""
        for other in after:
            other.wait()
        return self.issue(COMPUTE, work, [])

    def close(self) -> None:
        """See Streams."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _open(self, stream: str) -> None:
        self._queues[stream] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(self._queues[stream],), name=stream, daemon=True)
        thread.start()
        self._threads.append(thread)

    @staticmethod
    def _serve(waiting: queue.SimpleQueue[tuple[Work, list[Event], _HostEvent] | None]) -> None:
        while (item := waiting.get()) is not None:
            work, after, event = item
            try:
                for other in after:
                    other.wait()
            except BaseException as error:  # noqa: BLE001 - passed on to whoever waits for this op
                event.fail(error)
            else:
                event.run(work)


_GRAPH_S = 1e-3
"""What issuing a graph takes the host at most."""
_CYCLES_PER_S = 2e9
"""About the clock of a GPU."""


class _CudaEvent:
    """The end of an op on a CUDA stream."""

    def __init__(self, base: torch.cuda.Event, base_s: float) -> None:
        self._base = base
        self._base_s = base_s
        self.posted = torch.cuda.Event(enable_timing=True)
        self.ended = torch.cuda.Event(enable_timing=True)

    def wait(self) -> None:
        self.ended.synchronize()

    def times(self) -> tuple[float, float]:
        posted_s = self._base_s + self._base.elapsed_time(self.posted) * 1e-3
        return posted_s, posted_s + self.posted.elapsed_time(self.ended) * 1e-3  # fp32: the base may be seconds ago


class CudaStreams:
    """Streams of a CUDA rank; the host never blocks but for HostSync and its own kernels (and NCCL's barriers).
    Reviewed, but not run yet: see README.
    """

    inline = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {COMPUTE: torch.cuda.current_stream(device)}
        self._base = torch.cuda.Event(enable_timing=True)
        self._base_s = 0.0

    def start(self) -> float:
        """See Streams: on the host's clock, which the ranks of a host share, but for what an event takes to be seen."""
        torch.cuda.synchronize(self._device)
        self._base.record(self._streams[COMPUTE])
        self._base.synchronize()
        self._base_s = time.perf_counter()
        return self._base_s

    def outlast(self, tensor: torch.Tensor, streams: Iterable[str]) -> None:
        """See Streams."""
        for stream in streams if tensor.is_cuda else ():  # the allocator of pinned memory knows its copies itself
            tensor.record_stream(self._streams[stream])

    def get_ahead(self, seconds: float) -> None:
        """See Streams."""
        torch.cuda._sleep(round(seconds * _CYCLES_PER_S))

    def replay(self, work: Work, count: int) -> float:
        """See Streams."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                work()
        graph.replay()  # the first one uploads it
        self.get_ahead(_GRAPH_S)

        def again() -> list[dist.Work]:
            graph.replay()
            return []

        event = self.issue(COMPUTE, again, [])
        event.wait()
        posted_s, ended_s = event.times()
        return (ended_s - posted_s) / count

    def issue(self, stream: str, work: Work, after: list[Event]) -> Event:
        """See Streams."""
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(self._device)
        on = self._streams[stream]
        event = _CudaEvent(self._base, self._base_s)
        if stream != COMPUTE:
            # A receive buffer may take memory that a kernel issued before still reads, under another name. Waiting for
            # the kernels issued so far is what torch's own process groups do, for the same reason.
            on.wait_stream(self._streams[COMPUTE])
        with torch.cuda.stream(on):
            for other in after:
                if isinstance(other, _CudaEvent):  # the host has waited for all others
                    on.wait_event(other.ended)
            event.posted.record(on)
            for part in work():
                part.wait()  # NCCL: lets this stream wait, not the host
            event.ended.record(on)
        return event

    def synchronize(self, after: list[Event], work: Work = list) -> Event:
        """See Streams. An event of a stream would come after the kernels queued there."""
        for other in after:
            other.wait()
        event = _HostEvent()
        event.run(work)
        event.wait()
        return event

    def close(self) -> None:
        """See Streams."""
        torch.cuda.synchronize(self._device)


def open_streams(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return HostStreams() if device.type == "cpu" else CudaStreams(device)
