"""What simulating costs: build, check and simulate, as whole steps; and what starting ranks does. ``make bench`` prints
medians of interleaved runs.

Nothing here is asserted: machines differ and are noisy. The targets are those that Longstep was designed for, on two
cores of a small virtual machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from experiments.evidence.units import seconds
from sim.engine.simulate import simulate
from sim.mesh import Mesh
from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.ops import Exchange, Message
from sim.schedule.ir.program import Communicator, Header, Schedule
from sim.schedule.ir.views import View
from sim.schedule.methods import ring, ulysses
from sim.schedule.proof.check import check
from sim.schedule.write.attention import all_heads, attention_program
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import Workload, load_model
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec, PerGpu

ROUNDS = 5
RANKS = 4
SECOND_S = 0.5
"""Target for starting ranks once a process has started some."""


class Case(NamedTuple):
    """One thing to time."""

    name: str
    build: Callable[[], Schedule]
    spec: ClusterSpec
    target_s: float | None


class TrafficRing(ring.RingAttention):
    """Ring attention with other traffic beside every hop: messages of many sizes to another node."""

    def _hop(self, over: Communicator, here: Sequence[View], there: Sequence[View], way: int, label: str) -> None:
        super()._hop(over, here, there, way, label)
        self._hops = getattr(self, "_hops", 0) + 1
        ranks, view = over.groups[0], here[0]
        away, source = ranks[(self._b.rank + 9) % len(ranks)], ranks[self._b.rank - 9]
        taken = self._b.like("traffic", view[:, : self._tokens(source, view)], "communication")
        self._b.add(
            Exchange(
                label="traffic",
                communicator=Communicator(name="traffic", groups=over.groups).name,
                sends=(Message(away, view[:, : self._tokens(self._b.rank, view)]),),
                recvs=(Message(source, taken),),
            )
        )

    def _tokens(self, rank: int, view: View) -> int:
        """Return how many tokens a rank sends beside this hop."""
        return 1 + (7 * rank + 5 * self._hops) % view.shape[1]


def desynchronised(workload: Workload, ranks: int) -> Schedule:
    """Return a short ring with other traffic beside it: the worst case, where no two ranks do the same at a time."""
    mesh, options = Mesh(ring=ranks), ring.RingOptions()
    layout, groups = contiguous(workload.seq, ranks), mesh.groups("ring")
    rings, traffic = ring.ring_communicators(groups, options), Communicator(name="traffic", groups=groups)
    header = Header(name="ring beside traffic", workload=workload, mesh=mesh, communicators=(*rings.declared, traffic))
    shards = [all_heads(workload.model, tokens) for tokens in layout]
    return Schedule(
        header,
        lambda rank: attention_program(
            ProgramBuilder(rank, workload), shards[rank], lambda b: TrafficRing(b, rings, layout, shards[rank], options)
        ),
    )


def cases() -> list[Case]:
    """Return what is timed."""
    model = load_model("llama3-8b")
    one = load_cluster("hgx-h100")
    eight = msgspec.structs.replace(one, nodes=8)
    uneven = msgspec.structs.replace(eight, per_gpu={gpu: PerGpu(speed=1 - gpu % 13 / 200) for gpu in range(64)})
    long = Workload(model=model, seq=1024 * 1024, dtype="bf16")
    short = Workload(model=model, seq=64 * 1024, dtype="bf16")
    wide = Workload(model=msgspec.structs.replace(model, num_heads=64, num_kv_heads=64), seq=1024 * 1024, dtype="bf16")
    deep = Workload(model=model, seq=128 * 1024, dtype="bf16", scope="layer", layers=32)
    layer = Workload(model=model, seq=1024 * 1024, dtype="bf16", scope="layer")
    balanced = ring.RingOptions(layout="zigzag")
    return [
        Case("ring, P = 8", lambda: ring.build(long, Mesh(ring=8)), one, 0.05),
        Case("ring, P = 64", lambda: ring.build(long, Mesh(ring=64)), eight, 1.5),
        Case("zigzag, P = 64", lambda: ring.build(long, Mesh(ring=64), balanced), eight, None),
        Case("ulysses, P = 8", lambda: ulysses.build(long, Mesh(ulysses=8)), one, None),
        Case("ulysses, P = 64", lambda: ulysses.build(wide, Mesh(ulysses=64)), eight, None),
        Case("short ring beside traffic, P = 64", lambda: desynchronised(short, 64), uneven, None),
        Case("32 layers, ring, P = 8", lambda: ring.build(deep, Mesh(ring=8)), one, None),
        Case("32 layers, ulysses, P = 8", lambda: ulysses.build(deep, Mesh(ulysses=8)), one, None),
        Case("1 layer, ring, P = 64", lambda: ring.build(layer, Mesh(ring=64)), eight, None),
    ]


class Taken(NamedTuple):
    """How long one run of a case took."""

    ops: int
    build_s: float
    check_s: float
    simulate_s: float

    @property
    def all_s(self) -> float:
        """The whole run."""
        return self.build_s + self.check_s + self.simulate_s


def timed(case: Case) -> Taken:
    """Run a case once. What it made is freed on return, outside of what the next one times."""
    begin = time.perf_counter()
    schedule = case.build()
    ops = sum(len(program.ops) for program in schedule.programs)
    built = time.perf_counter()
    checked = check(schedule)
    proved = time.perf_counter()
    simulate(checked, Cluster(case.spec), None)
    return Taken(ops, built - begin, proved - built, time.perf_counter() - proved)


def sessions() -> tuple[float, float]:
    """Return how long the first session of a process takes to start, and the second."""
    from runtime.processes.fork_server import fork_server
    from runtime.processes.launch import Session

    def started() -> float:
        begin = time.perf_counter()
        with Session(RANKS):
            return time.perf_counter() - begin

    taken = started(), started()
    fork_server().close()
    return taken


def bench(console: Console) -> None:
    """Time all cases in turn, several times, and print medians."""
    taken: dict[str, list[Taken]] = {}
    for _ in range(ROUNDS):
        for case in cases():
            taken.setdefault(case.name, []).append(timed(case))
    table = Table(
        "forward and backward; attention where not said otherwise", "ops", "build", "check", "simulate", "all", "target"
    )
    for case in cases():
        runs = taken[case.name]
        parts = ([run.build_s for run in runs], [run.check_s for run in runs], [run.simulate_s for run in runs])
        medians = [seconds(statistics.median(times)) for times in (*parts, [run.all_s for run in runs])]
        table.add_row(case.name, str(runs[0].ops), *medians, seconds(case.target_s) if case.target_s else "")
    console.print(table)
    first, second = zip(*(sessions() for _ in range(ROUNDS)), strict=True)
    table = Table("processes of ranks", "all", "target")
    table.add_row(f"first session of {RANKS} ranks starts in", seconds(statistics.median(first)), "")
    table.add_row(f"second session of {RANKS} ranks starts in", seconds(statistics.median(second)), seconds(SECOND_S))
    console.print(table)
