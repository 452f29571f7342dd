"""What simulating costs, the first time and again: ``make bench`` prints the least CPU time of interleaved runs.

Nothing here is asserted: machines differ and are noisy. So beside each time stands what the reference engine takes in
the same run. The targets are those that Longstep was designed for, on one core of a small virtual machine.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.recipes.bench_clusters import TARGET_S, building
from sim.balance.planners import PLANNERS, asked_of
from sim.base.units import seconds
from sim.batches.batch import batch
from sim.batches.lengths import lognormal
from sim.compare.sweep import sweep
from sim.engine.costs.cost import CostModel
from sim.engine.play import native, reference
from sim.engine.play.lowered import Lowered
from sim.engine.play.simulate import Prepared
from sim.engine.results.report import Report, report
from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.ops import Exchange, Message
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.ir.views import View
from sim.schedule.methods import fpdt, ring, ulysses
from sim.schedule.proof.check import Checked, check
from sim.schedule.write.attention import all_heads, attention_program
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.hops import Lane
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.profile import Profile, load_profile
from sim.words.workload import Workload, load_model
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec, PerGpu

Made = TypeVar("Made")

ROUNDS = 5
RANKS = 4
SECOND_S = 0.5
"""Target for starting ranks once a process has started some."""


class Case(NamedTuple):
    """One thing to time."""

    name: str
    build: Callable[[], Schedule]
    spec: ClusterSpec
    profile: Profile | None = None
    target_s: float | None = None
    """Of everything, from nothing to a report with its interval."""


class TrafficRing(ring.RingAttention):
    """Ring attention with other traffic beside every hop: messages of many sizes to another node."""

    def _hop(self, over: Lane, here: Sequence[View], there: Sequence[View], way: int, label: str) -> None:
        super()._hop(over, here, there, way, label)
        self._hops = getattr(self, "_hops", 0) + 1
        ranks, view = over.ring.groups[0], here[0]
        away, source = ranks[(self._b.rank + 9) % len(ranks)], ranks[self._b.rank - 9]
        taken = self._b.like("traffic", view[:, : self._tokens(source, view)], "communication")
        self._b.add(
            Exchange(
                label="traffic",
                communicator="traffic",
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


def everything_on(seq: str, gpus: int, layers: int) -> Schedule:
    """Return a training step with all techniques, on rings of nodes where there are several."""
    setup = Setup(stack="5m", model="llama3-8b", cluster="hgx-h100", scope="step", seq=seq, gpus=gpus, layers=layers)
    return setup.replace(ulysses_degree=8).resolved().built()


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
    balanced, known = ring.RingOptions(layout="zigzag"), load_profile("h100-sxm")
    return [
        Case("ring, P = 8", lambda: ring.build(long, Mesh(ring=8)), one, None, 0.015),
        Case("ring, P = 64", lambda: ring.build(long, Mesh(ring=64)), eight, None, 0.8),
        Case("zigzag, P = 64", lambda: ring.build(long, Mesh(ring=64), balanced), eight, None, 2.5),
        Case("ulysses, P = 8", lambda: ulysses.build(long, Mesh(ulysses=8)), one),
        Case("ulysses, P = 64", lambda: ulysses.build(wide, Mesh(ulysses=64)), eight),
        Case("short ring beside traffic, P = 64", lambda: desynchronised(short, 64), uneven),
        Case("32 layers, ring, P = 8", lambda: ring.build(deep, Mesh(ring=8)), one, known, 0.5),
        Case("32 layers, zigzag, P = 8", lambda: ring.build(deep, Mesh(ring=8), balanced), one, known, 0.5),
        Case("32 layers, ulysses, P = 8", lambda: ulysses.build(deep, Mesh(ulysses=8)), one, known, 0.5),
        Case("1 layer, ring, P = 64", lambda: ring.build(layer, Mesh(ring=64)), eight),
        Case("step of 32 layers, everything on, P = 8", lambda: everything_on("5M", 8, 32), one, known, 1.0),
    ]


class Taken(NamedTuple):
    """How long one run of a case took, in seconds of CPU time."""

    build: float
    check: float
    lower: float
    costs: float
    play: float
    report: float
    """With the 90 % interval, where there is a profile: that is two more plays."""
    reference: float
    """Playing by the reference engine."""
    again: float
    """Another what-if: step time, breakdown and interval."""

    @property
    def all(self) -> float:
        """From nothing to the report."""
        return sum(self[:6])


def timed(case: Case) -> tuple[Taken, int, int]:
    """Run a case once; return also its ops and the events of one play."""
    gc.collect()  # no case pays for what another one left
    clock = Stopwatch()
    schedule = clock.of(case.build)
    clock.of(lambda: schedule.programs, more=True)
    checked = clock.of(lambda: check(schedule))
    lowered = clock.of(lambda: Lowered(checked))
    cluster = Cluster(case.spec)
    priced = clock.of(lambda: native.Priced(lowered, cluster, CostModel(Cluster(case.spec), case.profile)))
    times, events = clock.of(lambda: native.run(native.library(), lowered, priced))
    prepared = Prepared(checked)
    simulation = prepared.play(cluster, case.profile)
    clock.of(lambda: report(simulation, with_interval=True, with_bound=False))
    meant = clock.of(lambda: reference.play(checked, cluster, CostModel(cluster, case.profile), None))
    assert all((a == b).all() for a, b in zip(times, meant, strict=True)), case.name
    clock.of(lambda: report(prepared.play(Cluster(case.spec), case.profile), with_interval=True, with_bound=False))
    return Taken(*clock.taken), lowered.num_ops, events


class Stopwatch:
    """CPU time of one thing after the other."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def of(self, do: Callable[[], Made], *, more: bool = False) -> Made:
        """Do something; ``more`` adds its time to that of the last one."""
        begin = time.process_time()
        made = do()
        taken = time.process_time() - begin
        if more:
            self.taken[-1] += taken
        else:
            self.taken.append(taken)
        return made


def single_messages(ranks: int) -> tuple[int, float]:
    """Return the messages of an all-to-all of single messages, all at once, and how long they take to play."""
    workload, everyone = Workload(model=load_model("tiny"), seq=16 * ranks), tuple(range(ranks))

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        out, into = (b.tensor(name, 16 * ranks, 4, "communication") for name in ("out", "in"))
        sides = (
            [Message(peer, x[:, 16 * peer : 16 * peer + 16]) for peer in everyone if peer != rank] for x in (out, into)
        )
        sends, recvs = map(tuple, sides)
        b.add(Exchange(label="all to all", communicator="all", sends=sends, recvs=recvs))
        return b.build()

    header = Header(
        name="single messages", workload=workload, mesh=Mesh(ring=ranks),
        communicators=(Communicator(name="all", groups=(everyone,)),),
    )  # fmt: skip
    schedule = Schedule(header, program)
    lowered = Lowered(Checked(schedule))
    cluster = Cluster(msgspec.structs.replace(load_cluster("hgx-h100"), nodes=ranks // 8))
    priced = native.Priced(lowered, cluster, CostModel(cluster, None))
    clock = Stopwatch()
    for _ in range(ROUNDS):
        clock.of(lambda: native.run(native.library(), lowered, priced))
    return len(lowered.transfers), min(clock.taken)


def equal_replicas(replicas: int) -> float:
    """Return the CPU time of Ulysses on 8 GPUs in so many replicas, from nothing to a report."""
    clock = Stopwatch()
    workload = Workload(model=load_model("llama3-8b"), seq=128 * 1024, dtype="bf16")
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=replicas)
    for _ in range(ROUNDS):
        clock.of(lambda: _played(ulysses.build(workload, Mesh(dp=replicas, ulysses=8)), spec, with_bound=False))
    return min(clock.taken)


def large_step(*, bound: bool = False) -> float:
    """Return the CPU time of a step of 64 layers on 64 GPUs with all techniques, from nothing to a report with its
    interval, or with what bounds it.
    """
    clock = Stopwatch()
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=8)
    clock.of(lambda: _played(everything_on("4M", 64, 64), spec, with_interval=not bound, with_bound=bound))
    return clock.taken[0]


def bounded_step() -> float:
    """Return the CPU time of the same with what bounds it."""
    return large_step(bound=True)


def long_fpdt() -> float:
    """Return the CPU time of one layer of FPDT's attention at 5M tokens on 8 GPUs, from nothing to a report with its
    interval.
    """
    clock = Stopwatch()
    workload = Workload(model=load_model("llama3-8b"), seq=5 * 2**20, dtype="bf16")
    spec = load_cluster("hgx-h100")
    clock.of(lambda: _played(fpdt.build(workload, Mesh(ulysses=8)), spec, with_interval=True, with_bound=False))
    return clock.taken[0]


def _played(schedule: Schedule, spec: ClusterSpec, *, with_interval: bool = False, with_bound: bool = True) -> Report:
    simulation = Prepared(check(schedule)).play(Cluster(spec), load_profile("h100-sxm"))
    return report(simulation, with_interval=with_interval, with_bound=with_bound)


def once(timed: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds that a function of this module says it takes in a process of its own, and the most memory, in
    bytes, that the process had, imports included. Linux tells it: the most that getrusage knows of counts what the
    process that started this one had until then.
    """
    code = (
        f"from experiments.recipes import bench; bench.native.library(); print(bench.{timed.__name__}()); "
        f"print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return float(said[0]), 1024 * float(said[1])


def single_imports() -> float:
    """Return the CPU time of what predicting imports, the bare interpreter apart."""
    code = (
        "import time; begin = time.process_time(); import longstep; longstep.predict; import sim.engine.play.native; "
        "import sim.engine.results.report; print(time.process_time() - begin)"
    )
    runs = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(ROUNDS)
    )
    return min(float(run.stdout) for run in runs)


def thousand(*, intervals: bool) -> float:
    """Return the seconds on the clock of 1,000 what-ifs of 32 layers, each with its breakdown."""
    step = Setup("ring", model="llama3-8b", seq="128K", cluster="hgx-h100", gpus=8, scope="layer", layers=32)
    first = step.predicted()
    rates = [f"*{1 + number / 50:.3g}" for number in range(40)]
    begin = time.perf_counter()
    found = sweep(
        first,
        {"cluster.nvlink.bytes_per_s": rates, "cluster.hbm.bytes_per_s": rates[:25]},
        intervals=intervals,
        bounds=False,
    )
    assert len(found) == 1000
    return time.perf_counter() - begin


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


def planning() -> Iterator[tuple[str, float, float]]:
    """Yield what planning 2,000 documents of 1M tokens for 64 ranks takes, by planner, beside its target. DCP plans
    once: it remembers a batch.
    """
    drawn = lognormal(median=224, sigma=1.3)(np.random.default_rng(0), 2000)
    lengths = np.maximum(drawn * 2**20 // drawn.sum(), 1).tolist()
    packed = batch((*lengths[:-1], lengths[-1] + 2**20 - sum(lengths)))
    asked = asked_of(Setup(model="llama3-8b", cluster="hgx-h100", gpus=64, scope="attention"), packed)
    for name, runs, target_s in (("wlb-llm", ROUNDS, 0.1), ("dcp", 1, 10.0)):
        clock = Stopwatch()
        for _ in range(runs):
            clock.of(partial(PLANNERS[name], packed, asked))
        yield name, min(clock.taken), target_s


def bench(console: Console) -> None:
    """Time all cases in turn, several times, and print the least of each."""
    runs: dict[str, list[tuple[Taken, int, int]]] = {}
    for _ in range(ROUNDS):
        for case in cases():
            runs.setdefault(case.name, []).append(timed(case))
    heads = ("build", "check", "lower", "costs", "play", "report", "all", "target", "another", "SimPy", "x", "ns/event")
    table = Table("forward and backward", "ops", *heads, title="CPU time, least of five runs", title_justify="left")
    for case in cases():
        taken, (_, ops, events) = [one for one, _, _ in runs[case.name]], runs[case.name][0]
        least = Taken(*map(min, zip(*taken, strict=True)))
        ratio = statistics.median(one.reference / one.play for one in taken)
        row = [*map(seconds, least[:6]), seconds(min(one.all for one in taken))]
        row += [seconds(case.target_s) if case.target_s else "", seconds(least.again), seconds(least.reference)]
        table.add_row(case.name, str(ops), *row, f"{ratio:.0f}", f"{1e9 * least.play / events:.0f}")
    console.print(table)
    messages, play_s = single_messages(512)
    first, second = zip(*(sessions() for _ in range(ROUNDS)), strict=True)
    table = Table("other", "measured", "target", title="Least of five runs", title_justify="left")
    table.add_row(f"all-to-all of {messages} single messages, 512 ranks: play", seconds(play_s), seconds(0.3))
    table.add_row("ulysses (8) in 512 data-parallel replicas: all", seconds(equal_replicas(512)), seconds(0.2))
    for name, function, target_s, target in (
        ("step of 64 layers, everything on, P = 64", large_step, 15.0, ", 1 GB"),
        ("the same with what bounds it instead of an interval", bounded_step, 0.0, ""),
        ("one layer of attention by FPDT at 5M, P = 8", long_fpdt, 5.0, ""),
    ):
        taken_s, peak_bytes = once(function)
        measured = f"{seconds(taken_s)}, {peak_bytes / 1e9:.2f} GB"
        table.add_row(f"{name}: all, once", measured, seconds(target_s) + target if target_s else "")
    for name, intervals, target in (("breakdowns", False, seconds(10)), ("breakdowns and 90 % intervals", True, "")):
        taken_s = thousand(intervals=intervals)
        table.add_row(f"1,000 what-ifs of 32 layers with {name}, all cores (wall time)", seconds(taken_s), target)
    for name, taken_s, target_s in planning():
        what = f"planning 2,000 documents of 1M tokens for 64 ranks by {name} (CPU time of all cores)"
        table.add_row(what, seconds(taken_s), seconds(target_s))
    slowest, taken_s = max(building(ROUNDS), key=lambda one: one[1])
    table.add_row(f"1,024 GPUs of every fabric, the slowest ({slowest}): build", seconds(taken_s), seconds(TARGET_S))
    table.add_row("imports of a first prediction", seconds(single_imports()), seconds(0.35))
    table.add_row(f"first session of {RANKS} ranks (median, wall time)", seconds(statistics.median(first)), "")
    table.add_row(
        f"second session of {RANKS} ranks (median, wall time)", seconds(statistics.median(second)), seconds(SECOND_S)
    )
    console.print(table)
