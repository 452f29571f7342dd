"""Times communication between processes by small schedules, idle and during computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from calibrate.measure.kernels import sample
from runtime.processes.launch import Session
from runtime.run import ScheduleRun
from sim.accounts.trace import Row
from sim.schedule.ir.masks import FULL, Span
from sim.schedule.ir.ops import Accumulate, Attend, Zero
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.methods.single_op import communicate
from sim.schedule.proof.check import check
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.profile import Condition, Point
from sim.words.workload import DTYPE_BYTES, Dtype, ModelSpec, Workload

LinkKernel = Literal["exchange", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"]

_KINDS: dict[LinkKernel, str] = {
    "exchange": "Exchange",
    "all_to_all": "AllToAll",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
}
"""What ops of each are called."""
_LARGEST = 26
"""Its power of two: the bytes of an embedding of 32000 x 512 in fp32."""
_STEPS = 3
_PER_STEP = 4
_WARM = 2
_LAUNCHES = 200
_BESIDE_TOKENS = 1024
_DURING, _ALONE = "attend during", "attend alone"
_PAUSE_TOKENS = 64


class LinkCase(NamedTuple):
    """One kind of communication at one size, idle or during attention."""

    kernel: LinkKernel
    nbytes: int
    """About the size of the whole tensor on each rank: what an exchange sends, what an all-gather receives."""
    condition: Condition

    @property
    def label(self) -> str:
        """What a progress bar shows."""
        during = " during attention" if self.condition == "busy" else ""
        return f"{self.kernel} of {self.nbytes} bytes{during}"


class LinkTimes(NamedTuple):
    """A measured point, and what else the run showed."""

    point: Point
    lost_s: list[float]
    """Extra seconds of attention during the transfer compared with right after it; of busy cases."""
    handoff_s: list[float]
    """Seconds from the end of the transfer to the start of the kernel that waited for it; of idle cases."""
    during_s: Sequence[float] = ()
    """Seconds of attention during the transfer; of busy cases."""


def link_cases(*, quick: bool, shared: bool) -> list[LinkCase]:
    """Return what is to be timed: idle sizes over four decades, and some of ring and Ulysses busy. Sizes of FSDP's two
    collectives go further, since it sends a whole embedding at once.

    ``shared`` is for more ranks than cores, which are never all busy with something else: fewer sizes, idle only.
    """
    kinds: tuple[LinkKernel, ...] = get_args(LinkKernel)
    each: Iterable[int] = (12, 16, 20, 22, 24) if quick else range(12, 25, 2)
    if shared:
        each = (12, 18, 24) if quick else (12, 16, 20, 24)
    of_states: Iterable[int] = (12, 20, _LARGEST) if quick else (*each, _LARGEST)
    sizes = {kind: of_states if kind in {"all_gather", "reduce_scatter"} else each for kind in kinds}
    idle = [LinkCase(kind, 2**n, "idle") for kind in kinds for n in sizes[kind]]
    return idle if shared else idle + [LinkCase(kind, 2**n, "busy") for kind in kinds[:2] for n in (12, 22, 24)]


class Played(NamedTuple):
    """What some steps of a communication op have shown."""

    steps: list[list[Row]]
    nbytes: int
    """Of the whole tensor on each rank."""


def play(session: Session, case: LinkCase, model: ModelSpec, dtype: Dtype, *, ahead: bool = False) -> Played:
    """Play a communication op among all ranks of a session several times; ``model`` shapes what computes meanwhile,
    ``ahead`` is as of ``ScheduleRun.step``.
    """
    run = ScheduleRun(session, check(link_schedule(case, session.ranks, model, dtype)))
    steps = [run.step(ahead=ahead).trace.rows for _ in range(_WARM + _STEPS)]
    run.close()
    return Played(steps[_WARM:], _num_tokens(case, session.ranks, model, dtype) * _row_bytes(model, dtype))


def time_link(session: Session, case: LinkCase, model: ModelSpec, dtype: Dtype) -> LinkTimes:
    """Return the time of a communication op among all ranks of a session on a host."""
    steps, nbytes = play(session, case, model, dtype)
    rows = [row for step in steps for row in step]
    times = sample([row.busy_s for row in rows if row.stream == "link"])
    point = Point(
        kernel=case.kernel,
        dtype=dtype,
        shape=(session.ranks, nbytes),
        condition=case.condition,
        nbytes=_sent_bytes(case.kernel, nbytes, session.ranks),
        **times._asdict(),
    )
    during, alone = ([row.busy_s for row in rows if row.label == label] for label in (_DURING, _ALONE))
    lost = [slow - fast for slow, fast in zip(during, alone, strict=True)]
    return LinkTimes(point, lost, [] if lost else _handoffs(rows), during)


def _handoffs(rows: list[Row]) -> list[float]:
    """Return how long the thread that computes took to go on after each awaited transfer."""
    gaps, ended = [], {}
    for row in rows:
        if row.stream == "link":
            ended[row.rank] = row.end_s
        elif row.label == "await":
            gaps.append(row.begin_s - ended[row.rank])
    return gaps


def time_launch(session: Session, model: ModelSpec, dtype: Dtype, *, inline: bool) -> float:
    """Return what issuing an op costs: the time from one small kernel to the next. ``inline``: where the thread that
    issues them runs them itself, without their own.
    """
    workload = Workload(model=model, seq=1, dtype=dtype, passes="forward")

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        given = b.input("dq", (Span(0, 1),), Span(0, model.num_heads))
        total = b.like("sum", given, "attention")
        b.copy(given, total, "first")
        for _ in range(_LAUNCHES):
            b.add(Accumulate(label="small kernel", source=given, into=total))
        return b.build()

    header = Header(name="launch", workload=workload, mesh=Mesh(ring=session.ranks))
    run = ScheduleRun(session, check(Schedule(header, program)))
    gaps = []
    for _ in range(_STEPS):
        rows = run.step().trace.of_rank(0)
        gaps += [after.posted_s - (before.end_s if inline else before.posted_s) for before, after in pairwise(rows)]
    run.close()
    return sample(gaps).median_s


def _row_bytes(model: ModelSpec, dtype: Dtype) -> int:
    return model.num_heads * model.head_dim * DTYPE_BYTES[dtype]


def _num_tokens(case: LinkCase, ranks: int, model: ModelSpec, dtype: Dtype) -> int:
    """Return how many tokens make up about the size of a case: a whole number on every rank."""
    return max(case.nbytes // _row_bytes(model, dtype) // ranks, 1) * ranks


def _sent_bytes(kernel: LinkKernel, nbytes: int, ranks: int) -> int:
    """Return the bytes that each rank puts on the wire (rings for all but exchange and all-to-all)."""
    if kernel == "exchange":
        return nbytes
    share = nbytes * (ranks - 1) // ranks
    return 2 * share if kernel == "all_reduce" else share


def link_schedule(case: LinkCase, ranks: int, model: ModelSpec, dtype: Dtype) -> Schedule:
    """Return a schedule that does the same communication several times, each time during one block of attention."""
    tokens = _num_tokens(case, ranks, model, dtype)
    link = Communicator(name="link", groups=(tuple(range(ranks)),))
    workload = Workload(model=model, seq=max(tokens, _BESIDE_TOKENS), mask="full", dtype=dtype, passes="forward")

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        heads, kv_heads = Span(0, model.num_heads), Span(0, model.num_kv_heads)
        given = b.tensor("given", tokens, model.num_heads, "communication")
        b.add(Zero(label="fill", into=given))  # drawn at random as inputs are, a large one would take the host seconds
        taken = b.like("taken", given, "communication")
        block = (Span(0, _BESIDE_TOKENS),)
        q, k, v = b.input("q", block, heads), b.input("k", block, kv_heads), b.input("v", block, kv_heads)
        out, lse = b.like("out", q, "attention"), b.lse("lse", _BESIDE_TOKENS, model.num_heads, "attention")
        awaited = b.like("awaited", taken[:, :1], "attention")
        for _ in range(_PER_STEP):
            communicate(b, _KINDS[case.kernel], link, given, taken, case.label)
            if case.condition == "busy":
                b.add(Attend(label=_DURING, q=q, k=k, v=v, out=out, lse=lse, band=FULL))
                b.copy(taken[:, :1], awaited, "await")
                b.add(Attend(label=_ALONE, q=q, k=k, v=v, out=out, lse=lse, band=FULL))
            else:  # let it be awaited, and let the threads that carried it fall asleep, as in a step
                b.copy(taken[:, :1], awaited, "await")
                b.add(
                    Attend(
                        label="pause",
                        q=q[:, :_PAUSE_TOKENS],
                        k=k,
                        v=v,
                        out=out[:, :_PAUSE_TOKENS],
                        lse=lse[:, :, :_PAUSE_TOKENS],
                        band=FULL,
                    )
                )
        return b.build()

    header = Header(name="link", workload=workload, mesh=Mesh(ring=ranks), communicators=(link,))
    return Schedule(header, program)
