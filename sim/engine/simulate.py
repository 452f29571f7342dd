"""The simulator: plays a checked schedule on a cluster and writes a trace.

Every stream of every rank takes its ops in order: a generator that yields where it has to wait, and is resumed by what
it waits for. An op is issued when the host gets to it:

    issue = max(previous issue, last synchronisation) + launch

where a HostSync synchronises, and on a CPU, whose thread runs the kernels itself, every kernel does. It is posted at
the head of its stream once everything that it waits for has ended; an Exchange then moves each message as soon as the
other side has posted too, a collective begins when its last member has posted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import cache, partial
from random import Random
from typing import NamedTuple, assert_never

from sim.engine.clock import Clock, Then
from sim.engine.cost import CostModel
from sim.engine.network import Activity, Flow, Network
from sim.errors import InputError, ScheduleError
from sim.profile import Profile
from sim.schedule.derive.matching import Key
from sim.schedule.ir import ops
from sim.schedule.ir.program import Program, require_checked
from sim.schedule.ir.views import Split, part_of
from sim.schedule.proof.check import Checked
from sim.trace import Row, Trace
from topology.cluster import Cluster

_NOT_YET = -1.0
"""The time of what has not happened."""


class Jitter(NamedTuple):
    """Kernels that take longer at random: 1 + ``share`` * |z| times their time, z standard normal, never shorter."""

    share: float = 0.0
    seed: int = 0

    def factor(self, rank: int, index: int) -> float:
        """Return by how much one kernel is stretched; the same for the same seed, rank and op."""
        return 1.0 if not self.share else 1.0 + self.share * abs(Random(f"{self.seed} {rank} {index}").gauss(0.0, 1.0))


STEADY = Jitter()


class Simulation(NamedTuple):
    """A trace, and all that it was made from."""

    checked: Checked
    cluster: Cluster
    profile: Profile | None
    jitter: Jitter
    cost: CostModel
    trace: Trace


def simulate(
    checked: Checked,
    cluster: Cluster,
    profile: Profile | None,
    jitter: Jitter = STEADY,
    placement: Sequence[int] | None = None,
) -> Simulation:
    """Return what happens when rank i of a schedule runs on device ``placement[i]``, by default i; deterministic to the
    bit.

    Without a profile kernels and links run at the datasheet's rates. Raises InputError if the schedule was not checked,
    the cluster has too few devices, or the profile is of another machine.
    """
    require_checked(checked)
    ranks = checked.schedule.num_ranks
    if placement is not None:
        cluster = Cluster(cluster.spec, placement)
    if ranks > len(cluster.devices):
        raise InputError(
            f"schedule {checked.schedule.header.name!r} needs {ranks} GPUs, cluster {cluster.spec.name!r} has "
            f"{len(cluster.devices)}: set `gpus` to at most that, or `nodes`"
        )
    cost = CostModel(cluster, profile)
    if jitter.share:
        cost.notes.add(f"kernels scatter by a share of {jitter.share:.2g}, seed {jitter.seed}: see `jitter`")
    rows = _Player(checked, cluster, cost, jitter).play()
    trace = Trace(player="simulated", schedule_hash=checked.schedule.hash, num_ranks=ranks, rows=rows)
    return Simulation(checked, cluster, profile, jitter, cost, trace)


class _Rank:
    """What the streams of one rank share: its ops with all that can be known of them before, and their times."""

    def __init__(self, program: Program, checked: Checked, cluster: Cluster, cost: CostModel, jitter: Jitter) -> None:
        gpu, rank, count = cluster.spec.gpu, program.rank, len(program.ops)
        self.number = rank
        self.ops, self.nbytes = program.ops, program.nbytes
        self.activities = [
            None if use is None else _stretched(cost.kernel(rank, use), jitter.factor(rank, index))
            for index, use in enumerate(checked.kernels[rank])
        ]
        for index, op in enumerate(program.ops):
            if isinstance(op, ops.HostCopy):
                self.activities[index] = cost.host_copy(rank, program, op)
        issue_s = map(cost.issue_s, program.ops, checked.kernels[rank])
        self.issues = list(_issues(program, issue_s, inline=gpu.kind == "cpu"))
        behind = _behind(program, cuda=gpu.kind == "cuda")
        self.waits = [(*data, *kernel) for data, kernel in zip(checked.dependencies[rank].waits, behind, strict=True)]
        self.handoff = cost.handoff(rank)
        self.holds = cost.communication_holds(rank)
        self.posted, self.begun, self.ended = ([_NOT_YET] * count for _ in range(3))
        self.waiting: dict[int, list[Then]] = {}
        """Per op the streams that go on at its end."""

    def end(self, index: int, clock: Clock) -> None:
        """End an op, and let those that wait for it go on."""
        self.ended[index] = clock.now
        for resume in self.waiting.pop(index, ()):
            clock.soon(resume)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all ops."""
        times = zip(self.posted, self.begun, self.ended, strict=True)
        for index, (op, of_op) in enumerate(zip(self.ops, times, strict=True)):
            sent = sum(map(self.nbytes, op.reads)) if isinstance(op, ops.Communication) else 0
            yield Row(self.number, index, op.stream, type(op).__name__, op.part, op.label, *of_op, sent_bytes=sent)


class _Player:
    """One run of a schedule."""

    def __init__(self, checked: Checked, cluster: Cluster, cost: CostModel, jitter: Jitter) -> None:
        self._cost = cost
        self._clock = Clock()
        self._network = Network(self._clock, cluster.resources)
        self._programs = checked.schedule.programs
        self._ranks = [_Rank(program, checked, cluster, cost, jitter) for program in self._programs]
        self._matching = checked.matching
        self._resume: dict[Key, Then] = {}
        self._offered = bytearray(len(self._matching.transfers))
        self._missing = {key: len(found) for key, found in self._matching.transfers_of.items()}
        self._absent = [len(group.members) for group in self._matching.groups]
        schedule = checked.schedule
        self._group_size = cache(lambda name, rank: len(schedule.communicator(name).group_of(rank)))
        self._sms = cluster.spec.gpu.communication_sms
        self._cuda = cluster.spec.gpu.kind == "cuda"

    def play(self) -> list[Row]:
        """Run to the end and return the rows of all ranks."""
        for rank in self._ranks:
            streams: dict[str, list[int]] = {}
            for index, op in enumerate(rank.ops):
                streams.setdefault(op.stream, []).append(index)
            for indices in streams.values():
                stream = self._stream(rank, indices)
                next(stream)  # it is given what resumes it where it first yields
                self._clock.soon(partial(stream.send, partial(next, stream)))
        self._clock.run()
        if any(end_s < 0 for rank in self._ranks for end_s in rank.ended):
            raise ScheduleError(
                f"the simulation came to a standstill: communication kernels hold all SMs of a GPU while they wait for "
                f"each other; use fewer communicators at once, or set cluster.gpu.communication_sms below {self._sms}"
            )
        return [row for rank in self._ranks for row in rank.rows()]

    def _stream(self, rank: _Rank, indices: list[int]) -> Generator[None, Then, None]:
        """Take the ops of one stream in order, each from its issue to its end."""
        clock, network = self._clock, self._network
        number, program, activities, holds, handoff = rank.number, rank.ops, rank.activities, rank.holds, rank.handoff
        posted, begun, ended, waiting = rank.posted, rank.begun, rank.ended, rank.waiting
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
            if handoff and self._hands_over(own, asleep_since_s, issued_s):
                network.run(handoff, wake)
                yield
            posted[index] = begun[index] = clock.now
            activity = activities[index]
            if activity is not None:
                network.run(activity, wake)
                yield
            elif not isinstance(program[index], ops.HostSync):  # whose waits are the ends of the streams
                for resource, amount in holds:
                    if not network.hold(resource, amount, wake):
                        yield
                if self._communicate((number, index), program[index], resume):
                    yield
                for resource, amount in holds:
                    network.release(resource, amount)
            rank.end(index, clock)
        yield  # what resumes a stream does not ask whether it is at its end

    def _hands_over(self, own: bool, asleep_since_s: float, issued_s: float) -> bool:
        """Return whether something else has to wake a stream for its next op: on a GPU an event of the compute stream,
        which all communication waits for; on a CPU another thread, if it has waited at all.
        """
        if self._cuda:
            return not own
        return self._clock.now > max(asleep_since_s, issued_s if own else 0.0)

    def _communicate(self, key: Key, op: ops.Op, resume: Then) -> bool:
        """Post a communication op; return whether it takes time, at the end of which its stream goes on."""
        if isinstance(op, ops.Exchange):
            return self._exchange(key, op, resume)
        if isinstance(op, ops.Collective):
            return self._collective(key, op, resume)
        if isinstance(op, ops.Kernel | ops.HostCopy | ops.HostSync):
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
            activity = self._cost.transfer(source[0], target[0], nbytes, self._group_size(op.communicator, key[0]))
            self._network.run(activity, partial(self._arrived, source, target))
        if not self._missing.get(key):
            return False
        self._resume[key] = resume
        return True

    def _arrived(self, *sides: Key) -> None:
        """Count a finished transfer; the last one of an Exchange ends it."""
        for key in sides:
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
            ranks = tuple(rank for rank, _ in members)
            activity = self._cost.collective(op, ranks, part_bytes(self._programs, members))
            self._network.run(activity, partial(self._clock.soon, partial(self._parted, key, members)))
        return True

    def _parted(self, last: Key, members: tuple[Key, ...]) -> None:
        """End a collective on all members; the one that began it goes on first."""
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


def part_bytes(programs: Sequence[Program], members: tuple[Key, ...]) -> int:
    """Return the bytes of one part of a collective (of AllReduce the whole). Where parts differ it is the largest, at
    whose pace a ring goes; of direct sends that is an upper bound.
    """
    largest = 0
    for rank, index in members:
        op = programs[rank].ops[index]
        assert isinstance(op, ops.Collective)
        alike = not any(isinstance(side, Split) and side.sizes for side in (op.given, op.taken))
        if op.given:
            parts = [part_of(op.given, member) for member in range(1 if alike else len(members))]
            largest = max(largest, *map(programs[rank].nbytes, parts))
    return largest


def _issues(program: Program, issue_s: Iterable[float], *, inline: bool) -> Iterator[tuple[int, float]]:
    """Yield per op the last one that the host waited for before it (-1: none), and the time for issuing since then."""
    after, since_s = -1, 0.0
    for index, (op, own_s) in enumerate(zip(program.ops, issue_s, strict=True)):
        since_s += own_s
        yield after, since_s
        if isinstance(op, ops.HostSync) or (inline and op.stream == ops.COMPUTE):
            after, since_s = index, 0.0


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
