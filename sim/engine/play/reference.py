"""The reference engine: plays a checked schedule on a cluster by SimPy. It is what a simulation means.

Every stream of every rank takes its ops in order: a generator that yields where it has to wait, and is resumed by what
it waits for. An op is issued when the host gets to it:

    issue = max(previous issue, last synchronisation) + launch

where a HostSync synchronises, a kernel of the host does, and on a CPU, whose thread runs all kernels itself, every
kernel. It is posted at
the head of its stream once everything that it waits for has ended; an Exchange then moves each message as soon as the
other side has posted too, a collective begins when its last member has posted. On a GPU with one queue of launches a
kernel is posted no earlier than all communication that was issued before it has the compute units that it holds.

``sim/native/player.c`` plays the same from arrays; tests hold both equal to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import assert_never

import numpy as np

from sim.engine.costs.cost import CostModel
from sim.engine.costs.phases import Activity, Flow, Latency, located
from sim.engine.play.clock import Clock, Then
from sim.engine.play.facts import largest_message, part_bytes
from sim.engine.play.jitter import Stretch
from sim.engine.play.lowered import Times
from sim.engine.play.network import Network
from sim.schedule.derive.matching import Key
from sim.schedule.derive.replicas import among, whole_group
from sim.schedule.ir import ops
from sim.schedule.ir.program import Program
from sim.schedule.proof.check import Checked
from topology.cluster import Cluster

_NOT_YET = -1.0
"""The time of what has not happened."""


def play(checked: Checked, cluster: Cluster, cost: CostModel, stretch: Stretch) -> Times:
    """Return the times of every op; -1 where it never came to that."""
    return _Player(checked, cluster, cost, stretch).play()


class _Rank:
    """What the streams of one rank share: its ops with all that can be known of them before, and their times."""

    def __init__(
        self, program: Program, checked: Checked, cluster: Cluster, cost: CostModel, stretch: Sequence[float]
    ) -> None:
        gpu, rank, count = cluster.spec.gpu, program.rank, len(program.ops)
        device = cluster.devices[rank]
        self.number = rank
        self.ops = program.ops
        self.activities = [
            None if use is None else _stretched(cost.kernel(rank, use), factor)
            for use, factor in zip(checked.kernels[rank], stretch, strict=True)
        ]
        for index, op in enumerate(program.ops):
            if isinstance(op, ops.HostCopy | ops.HostAdamW):
                self.activities[index] = cost.on_host(rank, program, op)
        meets = cache(partial(among, checked.schedule))
        issue_s = map(cost.issue_s, program.ops, checked.kernels[rank], map(meets, program.ops))
        self.issues = list(_issues(program, issue_s, inline=gpu.kind == "cpu"))
        behind = _behind(program, cuda=gpu.kind == "cuda")
        self.waits = [(*data, *kernel) for data, kernel in zip(checked.dependencies[rank].waits, behind, strict=True)]
        handoff = located(cost.handoff, device)
        self.handoffs = [
            handoff if isinstance(op, ops.Kernel) else _delayed(handoff, factor)
            for op, factor in zip(program.ops, stretch, strict=True)
        ]
        self.compute = device.compute
        self.posted, self.begun, self.ended, self.granted = ([_NOT_YET] * count for _ in range(4))
        self.ahead = list(_ahead(program)) if cost.one_queue else [()] * count
        """Per op the communication that it begins behind."""
        self.launching: dict[int, Then] = {}
        """Per op the stream whose kernel begins behind it."""
        self.waiting: dict[int, list[Then]] = {}
        """Per op the streams that go on at its end."""

    def launches_ahead(self, index: int, resume: Then) -> Generator[None, Then, None]:
        """Wait until all communication that a kernel begins behind has the compute units that it holds."""
        while (other := next((one for one in self.ahead[index] if self.granted[one] < 0), None)) is not None:
            self.launching[other] = resume
            yield

    def end(self, index: int, clock: Clock) -> None:
        """End an op, and let those that wait for it go on."""
        self.ended[index] = clock.now
        for resume in self.waiting.pop(index, ()):
            clock.soon(resume)


class _Player:
    """One run of a schedule."""

    def __init__(self, checked: Checked, cluster: Cluster, cost: CostModel, stretch: Stretch) -> None:
        self._cost = cost
        self._clock = Clock()
        self._network = Network(self._clock, list(cluster.resources))
        self._programs = checked.schedule.programs
        factors = iter(() if stretch is None else stretch.tolist())
        self._ranks = [
            _Rank(program, checked, cluster, cost, [next(factors, 1.0) for _ in program.ops])
            for program in self._programs
        ]
        self._matching = checked.matching
        self._resume: dict[Key, Then] = {}
        self._offered = bytearray(len(self._matching.transfers))
        self._missing = {key: len(found) for key, found in self._matching.transfers_of.items()}
        self._absent = [len(group.members) for group in self._matching.groups]
        schedule = self._schedule = checked.schedule
        self._group = cache(lambda name, rank: schedule.communicator(name).group_of(rank))
        self._calls = cache(self._find_call)
        self._cuda = cluster.spec.gpu.kind == "cuda"
        self._moving: Counter[tuple[int, str]] = Counter()
        """By rank and way, out or in: what moves of its bytes."""
        self._threads: dict[tuple[int, str], float] = {}
        """By rank and way: the cores that its threads have taken."""

    def play(self) -> Times:
        """Run to the end and return the times of all ranks."""
        for rank in self._ranks:
            streams: dict[str, list[int]] = {}
            for index, op in enumerate(rank.ops):
                streams.setdefault(op.stream, []).append(index)
            for indices in streams.values():
                stream = self._stream(rank, indices)
                next(stream)  # it is given what resumes it where it first yields
                self._clock.soon(partial(stream.send, partial(next, stream)))
        self._clock.run()
        return Times(
            *(np.array([at for rank in self._ranks for at in getattr(rank, name)], float) for name in Times._fields)
        )

    def _stream(self, rank: _Rank, indices: list[int]) -> Generator[None, Then, None]:
        """Take the ops of one stream in order, each from its issue to its end."""
        clock, network = self._clock, self._network
        number, program, activities, handoffs = rank.number, rank.ops, rank.activities, rank.handoffs
        posted, begun, ended, granted, waiting = rank.posted, rank.begun, rank.ended, rank.granted, rank.waiting
        own = program[indices[0]].stream in {ops.COMPUTE, ops.HOST}
        resume = yield
        wake = partial(clock.soon, resume)
        for index in indices:
            asleep_since_s = clock.now
            after, issued_s = rank.issues[index]
            if after >= 0:
                if ended[after] < 0:
                    waiting.setdefault(after, []).append(resume)
                    yield
                issued_s += ended[after]
            if issued_s > clock.now:
                clock.after(issued_s - clock.now, resume)
                yield
            for other in rank.waits[index]:
                if ended[other] < 0:
                    waiting.setdefault(other, []).append(resume)
                    yield
            if handoffs[index] and self._hands_over(own, asleep_since_s, issued_s):
                network.run(handoffs[index], wake)
                yield
            yield from rank.launches_ahead(index, resume)
            posted[index] = begun[index] = clock.now
            activity = activities[index]
            if activity is not None:
                granted[index] = clock.now
                network.run(activity, wake)
                yield
            elif isinstance(program[index], ops.HostSync):  # whose waits are the ends of the streams
                granted[index] = clock.now
            else:
                held = self._held((number, index), program[index])
                if held and not network.hold(rank.compute, held, wake):
                    yield
                granted[index] = clock.now
                if index in rank.launching:
                    clock.soon(rank.launching.pop(index))
                if self._communicate((number, index), program[index], resume):
                    yield
                if held:
                    network.release(rank.compute, held)
            rank.end(index, clock)
        yield  # what resumes a stream does not ask whether it is at its end

    def _hands_over(self, own: bool, asleep_since_s: float, issued_s: float) -> bool:
        """Return whether something else has to wake a stream for its next op: on a GPU an event of the compute stream,
        which all communication waits for; on a CPU another thread, if it has waited at all.
        """
        if self._cuda:
            return not own
        return self._clock.now > max(asleep_since_s, issued_s if own else 0.0)

    def _held(self, key: Key, op: ops.Op) -> float:
        """Return the compute units that a communication op holds from its launch to its end."""
        if isinstance(op, ops.Exchange):
            nbytes = [self._programs[key[0]].nbytes(view) for _, view in (*op.sends, *op.recvs)]
            return self._cost.held_by_messages(self._group(op.communicator, key[0]), *largest_message(op, nbytes))
        assert isinstance(op, ops.Collective)
        return self._cost.held_by_collective(op.name, *self._calls(self._matching.group_of[key]))

    def _communicate(self, key: Key, op: ops.Op, resume: Then) -> bool:
        """Post a communication op; return whether it takes time, at the end of which its stream goes on."""
        if isinstance(op, ops.Exchange):
            return self._exchange(key, op, resume)
        if isinstance(op, ops.Collective):
            return self._collective(key, op, resume)
        if isinstance(op, ops.Kernel | ops.HostAdamW | ops.HostCopy | ops.HostSync):
            raise AssertionError(f"no communication: {op}")
        assert_never(op)

    def _exchange(self, key: Key, op: ops.Exchange, resume: Then) -> bool:
        """Start the transfers whose other side is there; the end of an Exchange is that of its last one."""
        now = self._clock.now
        for number in self._matching.transfers_of.get(key, ()):
            if not self._offered[number]:
                self._offered[number] = True
                continue
            source, target, _, nbytes = self._matching.transfers[number]
            for rank, index in (source, target):
                self._ranks[rank].begun[index] = now
            group = self._group(op.communicator, key[0])
            move = self._cost.copied if op.by_copies else self._cost.transfer
            activity = move(source[0], target[0], nbytes, group)
            cores = self._cost.threads((source[0], target[0]))
            self._begin_moving(source[0], "out", cores)
            self._begin_moving(target[0], "in", cores)
            self._network.run(activity, partial(self._arrived, source, target, cores))
        if not self._missing.get(key):
            return False
        self._resume[key] = resume
        return True

    def _arrived(self, source: Key, target: Key, cores: float) -> None:
        """Count a finished transfer; the last one of an Exchange ends it."""
        self._end_moving(source[0], "out", cores)
        self._end_moving(target[0], "in", cores)
        for key in (source, target):
            self._missing[key] -= 1
            if self._missing[key] == 0 and key in self._resume:
                self._clock.soon(self._resume.pop(key))

    def _collective(self, key: Key, op: ops.Collective, resume: Then) -> bool:
        """Begin a collective if this is the last of its members to post."""
        number = self._matching.group_of[key]
        members = self._matching.groups[number].members
        self._resume[key] = resume
        self._absent[number] -= 1
        if not self._absent[number]:
            for rank, index in members:
                self._ranks[rank].begun[index] = self._clock.now
            ranks, nbytes = self._calls(number)
            cores = self._cost.threads(ranks)
            for rank, _ in members:
                self._begin_moving(rank, "out", cores)
                self._begin_moving(rank, "in", cores)
            activity = self._cost.collective(op, ranks, nbytes, len(self._ranks))
            self._network.run(activity, partial(self._clock.soon, partial(self._parted, key, members, cores)))
        return True

    def _begin_moving(self, rank: int, way: str, cores: float) -> None:
        """Let threads of TCP take cores off the top while bytes of a rank move that way, once for all of them."""
        if cores <= 0:
            return
        self._moving[rank, way] += 1
        if self._moving[rank, way] == 1:
            self._threads[rank, way] = cores
            there = self._network.hold(self._ranks[rank].compute, cores, lambda: None)
            assert there, "what all threads take leaves something of the cores, and no kernel of a CPU fills them"

    def _end_moving(self, rank: int, way: str, cores: float) -> None:
        if cores <= 0:
            return
        self._moving[rank, way] -= 1
        if not self._moving[rank, way]:
            self._network.release(self._ranks[rank].compute, self._threads[rank, way])

    def _find_call(self, number: int) -> tuple[tuple[int, ...], int]:
        """Return the ranks of a collective, also those that are not played, and the bytes of one part."""
        members = self._matching.groups[number].members
        (first, index), *_ = members
        op = self._ranks[first].ops[index]
        assert isinstance(op, ops.Collective)
        ranks = whole_group(self._schedule, op.communicator, tuple(rank for rank, _ in members))
        return ranks, part_bytes(self._programs, members)

    def _parted(self, last: Key, members: tuple[Key, ...], cores: float) -> None:
        """End a collective on all members; the one that began it goes on first."""
        for rank, _ in members:
            self._end_moving(rank, "out", cores)
            self._end_moving(rank, "in", cores)
        resume = self._resume.pop(last)
        for member in members:
            if member != last:
                self._clock.soon(self._resume.pop(member))
        resume()


def _stretched(activity: Activity, factor: float) -> Activity:
    """Return a kernel that takes ``factor`` times as long, and moves its bytes more slowly."""
    if factor == 1.0:
        return activity
    return tuple(
        phase._replace(seconds=phase.seconds * factor) if isinstance(phase, Flow) else phase for phase in activity
    )


def _delayed(handoff: Activity, factor: float) -> Activity:
    """Return a handoff whose latency is ``factor`` times as long."""
    if factor == 1.0:
        return handoff
    return tuple(
        [phase._replace(seconds=phase.seconds * factor) if isinstance(phase, Latency) else phase for phase in handoff]
    )


def _issues(program: Program, issue_s: Iterable[float], *, inline: bool) -> Iterator[tuple[int, float]]:
    """Yield per op the last one that the host waited for before it (-1: none), and the time for issuing since then."""
    after, since_s = -1, 0.0
    for index, (op, own_s) in enumerate(zip(program.ops, issue_s, strict=True)):
        since_s += own_s
        yield after, since_s
        if isinstance(op, ops.HostSync | ops.HostAdamW) or (inline and op.stream == ops.COMPUTE):
            after, since_s = index, 0.0


def _ahead(program: Program) -> Iterator[tuple[int, ...]]:
    """Yield per kernel the communication that was issued since the one before it, the last one first; nothing of
    others, which begin behind that kernel in any case.
    """
    since: tuple[int, ...] = ()
    for index, op in enumerate(program.ops):
        yield since if isinstance(op, ops.Kernel) else ()
        if isinstance(op, ops.Kernel):
            since = ()
        elif isinstance(op, ops.Communication):
            since = (index, *since)


def _behind(program: Program, *, cuda: bool) -> Iterator[tuple[int, ...]]:
    """Yield per op the kernel that it waits for beyond its data: on CUDA communication and copies wait for the last
    kernel issued before them.

    torch's process groups do so, since a receive buffer may take memory that such a kernel still reads under another
    name (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, syncStream); the memory walk relies on it.
    """
    last: tuple[int, ...] = ()
    for index, op in enumerate(program.ops):
        yield last if cuda and isinstance(op, ops.Exchange | ops.Collective | ops.HostCopy) else ()
        if op.stream == ops.COMPUTE:
            last = (index,)
