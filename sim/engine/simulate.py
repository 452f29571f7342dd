"""The simulator: plays a checked schedule on a cluster and writes a trace.

Every stream of every rank is a SimPy process that takes its ops in order. An op is issued when the host gets to it:

    issue = max(previous issue, last synchronisation) + launch

where a HostSync synchronises, and on a CPU, whose thread runs the kernels itself, every kernel does. It is posted at
the head of its stream once everything that it waits for has ended; an Exchange then moves each message as soon as the
other side has posted too, a collective begins when its last member has posted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple, assert_never

import simpy

from sim.engine.cost import CostModel
from sim.engine.network import Activity, Flow, Network
from sim.errors import InputError, ScheduleError
from sim.profile import Profile
from sim.schedule.check import Checked
from sim.schedule.ir import Program
from sim.schedule.matching import Key
from sim.schedule.ops import COMPUTE, HOST, AllToAll, Collective, Exchange, HostSync, Kernel, Op, ReduceScatter
from sim.trace import Row, Trace
from topology.cluster import Cluster

Events = Generator[simpy.Event, Any, None]


class Simulation:
    """A trace, and what it was based on."""

    def __init__(self, trace: Trace, cost: CostModel, cluster: Cluster) -> None:
        self.trace = trace
        self.cost = cost
        self.cluster = cluster


class Jitter(NamedTuple):
    """Kernels that take longer at random: 1 + ``share`` * |z| times their time, z standard normal, never shorter."""

    share: float = 0.0
    seed: int = 0

    def factor(self, rank: int, index: int) -> float:
        """Return by how much one kernel is stretched; the same for the same seed, rank and op."""
        return 1.0 + self.share * abs(Random(f"{self.seed} {rank} {index}").gauss(0.0, 1.0))


STEADY = Jitter()


def simulate(
    checked: Checked,
    cluster: Cluster,
    profile: Profile | None,
    jitter: Jitter = STEADY,
) -> Simulation:
    """Return what happens when rank i of a schedule runs on device i; deterministic to the bit.

    Without a profile kernels and links run at the datasheet's rates. Raises InputError if the cluster has too few
    devices, or the profile is of another machine.
    """
    ranks = checked.schedule.num_ranks
    if ranks > len(cluster.devices):
        raise InputError(
            f"schedule {checked.schedule.header.name!r} needs {ranks} GPUs, cluster {cluster.spec.name!r} has "
            f"{len(cluster.devices)}: set --gpus to at most that, or --nodes"
        )
    cost = CostModel(cluster, profile)
    rows = _Player(checked, cluster, cost, jitter).play()
    trace = Trace(player="simulated", schedule_hash=checked.schedule.hash, num_ranks=ranks, rows=rows)
    return Simulation(trace, cost, cluster)


class _Player:
    """One run of a schedule."""

    def __init__(self, checked: Checked, cluster: Cluster, cost: CostModel, jitter: Jitter) -> None:
        self._checked = checked
        self._jitter = jitter
        self._cluster = cluster
        self._cost = cost
        self._env = simpy.Environment()
        self._network = Network(self._env, cluster.resources)
        self._programs = checked.schedule.programs
        self._ended: list[list[float]] = [[-1.0] * len(program.ops) for program in self._programs]
        self._rows: list[list[Row | None]] = [[None] * len(program.ops) for program in self._programs]
        self._waiting: dict[Key, simpy.Event] = {}
        self._posted: dict[Key, float] = {}
        self._missing = {key: len(found) for key, found in checked.matching.transfers_of.items()}
        self._begun: dict[Key, float] = {}
        self._done: dict[Key, simpy.Event] = {}
        cuda = cluster.spec.gpu.kind == "cuda"
        self._behind = [list(_behind(program, cuda=cuda)) for program in self._programs]
        schedule = checked.schedule
        self._group_size = cache(lambda name, rank: len(schedule.communicator(name).group_of(rank)))

    def play(self) -> list[Row]:
        """Run to the end and return the rows of all ranks."""
        for program in self._programs:
            issue = list(_issues(program, self._cluster.spec.gpu.launch_s, inline=self._cluster.spec.gpu.kind == "cpu"))
            streams: dict[str, list[int]] = {}
            for index, op in enumerate(program.ops):
                streams.setdefault(op.stream, []).append(index)
            for indices in streams.values():
                self._env.process(self._stream(program, indices, issue))
        self._env.run()
        rows = [row for of_rank in self._rows for row in of_rank if row is not None]
        if len(rows) < sum(len(program.ops) for program in self._programs):
            raise ScheduleError(
                f"the simulation came to a standstill: communication kernels hold all SMs of a GPU while they wait for "
                f"each other; use fewer communicators at once, or set cluster.gpu.communication_sms below "
                f"{self._cluster.spec.gpu.communication_sms}"
            )
        return rows

    def _stream(self, program: Program, indices: list[int], issue: list[tuple[int, float]]) -> Events:
        """Take the ops of one stream in order."""
        env, rank = self._env, program.rank
        ended, waits = self._ended[rank], self._checked.dependencies[rank].waits
        behind = self._behind[rank]
        handoff = self._cost.handoff(rank)
        for index in indices:
            asleep_since_s = env.now
            after, launch_s = issue[index]
            if after >= 0 and ended[after] < 0:
                yield self._end_of((rank, after))
            issued_s = launch_s + (ended[after] if after >= 0 else 0.0)
            if issued_s > env.now:
                yield env.timeout(issued_s - env.now)
            for other in (*waits[index], *behind[index]):
                if ended[other] < 0:
                    yield self._end_of((rank, other))
            own = program.ops[index].stream in {COMPUTE, HOST}
            if handoff and env.now > max(asleep_since_s, issued_s if own else 0.0):
                yield self._network.done(handoff)  # another thread has to wake this one
            yield from self._op(program, index, program.ops[index])

    def _op(self, program: Program, index: int, op: Op) -> Events:
        """Carry out one op from its posting to its end."""
        key, posted_s = (program.rank, index), self._env.now
        begin_s = posted_s
        use = self._checked.kernels[program.rank][index]
        if use is not None:
            activity = self._cost.kernel(program.rank, use)
            if self._jitter.share:
                activity = _stretched(activity, self._jitter.factor(program.rank, index))
            yield self._network.done(activity)
        elif isinstance(op, Exchange):
            yield from self._held(key, self._exchange(key, op))
            begin_s = self._begun.get(key, posted_s)
        elif isinstance(op, Collective):
            yield from self._held(key, self._collective(key, op))
            begin_s = self._begun[key]
        elif isinstance(op, HostSync):
            pass  # its waits are the ends of the streams
        elif isinstance(op, Kernel):
            raise AssertionError(f"no kernel for {op}")
        else:
            assert_never(op)
        end_s = self._env.now
        self._ended[program.rank][index] = end_s
        self._rows[program.rank][index] = Row(
            program.rank, index, op.stream, type(op).__name__, op.part, op.label, posted_s, begin_s, end_s
        )
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.succeed()

    def _end_of(self, key: Key) -> simpy.Event:
        """Return the event of an op's end."""
        if key not in self._waiting:
            self._waiting[key] = self._env.event()
        return self._waiting[key]

    def _held(self, key: Key, inner: Events) -> Events:
        """Carry out communication while its kernel holds SMs, also while it waits for its peers."""
        holds = self._cost.communication_holds(key[0])
        for resource, amount in holds:
            yield from self._network.hold(resource, amount)
        yield from inner
        for resource, amount in holds:
            self._network.release(resource, amount)

    def _exchange(self, key: Key, op: Exchange) -> Events:
        """Post an Exchange, start the transfers whose other side is there, and wait for all of its own."""
        self._posted[key] = self._env.now
        matching = self._checked.matching
        group = self._group_size(op.communicator, key[0])
        for number in matching.transfers_of.get(key, ()):
            transfer = matching.transfers[number]
            if transfer.source in self._posted and transfer.target in self._posted:
                self._begun[transfer.source] = self._begun[transfer.target] = self._env.now
                activity = self._cost.transfer(transfer.source[0], transfer.target[0], transfer.nbytes, group)
                self._network.run(activity, partial(self._arrived, transfer.source, transfer.target))
        if self._missing.get(key):
            self._done[key] = self._env.event()
            yield self._done[key]

    def _arrived(self, *sides: Key) -> None:
        """Count a finished transfer; the last one of an Exchange ends it."""
        for key in sides:
            self._missing[key] -= 1
            if self._missing[key] == 0 and key in self._done:
                self._done.pop(key).succeed()

    def _collective(self, key: Key, op: Collective) -> Events:
        """Wait until all members have posted; the last one plays the activity of the group."""
        matching = self._checked.matching
        members = matching.groups[matching.group_of[key]].members
        self._posted[key] = self._env.now
        if any(member not in self._posted for member in members):
            self._done[key] = self._env.event()
            yield self._done[key]
            return
        for member in members:
            self._begun[member] = self._env.now
        ranks = tuple(rank for rank, _ in members)
        yield self._network.done(self._cost.collective(op, ranks, part_bytes(self._programs[key[0]], op)))
        for member in members:
            if member != key:
                self._done.pop(member).succeed()


def _stretched(activity: Activity, factor: float) -> Activity:
    """Return a kernel that takes ``factor`` times as long, and moves its bytes more slowly."""
    return tuple(
        Flow(phase.seconds * factor, phase.demands) if isinstance(phase, Flow) else phase for phase in activity
    )


def part_bytes(program: Program, op: Collective) -> int:
    """Return the bytes of one part of a collective (of AllReduce the whole)."""
    if isinstance(op, AllToAll | ReduceScatter):
        return program.nbytes(op.sends.view) // op.sends.parts
    return program.nbytes(op.reads[0]) if op.reads else 0


def _issues(program: Program, launch_s: float, *, inline: bool) -> Iterator[tuple[int, float]]:
    """Yield per op the last one that the host waited for before it (-1: none), and the launch time since then."""
    after, since = -1, 0
    for index, op in enumerate(program.ops):
        since += 1
        yield after, since * launch_s
        if isinstance(op, HostSync) or (inline and op.stream == COMPUTE):
            after, since = index, 0


def _behind(program: Program, *, cuda: bool) -> Iterator[tuple[int, ...]]:
    """Yield per op the kernel that communication waits for beyond its data: on CUDA the last one issued before it.

    torch's process groups do so, since a receive buffer may take memory that such a kernel still reads under another
    name (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, syncStream); the memory walk relies on it.
    """
    last: tuple[int, ...] = ()
    for index, op in enumerate(program.ops):
        yield last if cuda and isinstance(op, Exchange | Collective) else ()
        if op.stream == COMPUTE:
            last = (index,)
