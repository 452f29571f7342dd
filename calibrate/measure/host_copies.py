"""Times copies between a GPU and its host's memory, pinned and pageable: each way alone, and both at the same time."""

from __future__ import annotations

from typing import NamedTuple

from calibrate.measure.kernels import sample
from runtime.processes.launch import Session
from runtime.run import ScheduleRun
from sim.accounts.trace import Row
from sim.engine.costs.on_host import HOST_COPY_KINDS
from sim.schedule.ir.ops import FETCH, OFFLOAD, HostCopy, HostSync, Zero
from sim.schedule.ir.program import Header, Program, Schedule
from sim.schedule.proof.check import check
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import Place
from sim.words.profile import Point
from sim.words.workload import DTYPE_BYTES, Dtype, ModelSpec, Workload

PLACES: dict[Place, str] = {"host": "pinned", "pageable": "pageable"}
"""What the host's memory is at each place."""
SIZES = tuple(2**n for n in range(22, 31, 2))
"""Bytes; from those that take several times as long to copy as to issue, to those of a layer's activations."""
_PER_STEP = 4
_STEPS, _WARM = 3, 1
_ALONE, _TOGETHER = "alone", "together"


class HostCopyTimes(NamedTuple):
    """What copies of one size take."""

    points: tuple[Point, ...]
    """Offload and fetch, one at a time."""
    both_bytes_per_s: float | None
    """What both ways get together; None of pageable memory, where the host waits for each."""


def time_host_copies(
    session: Session, nbytes: int, model: ModelSpec, dtype: Dtype, place: Place = "host"
) -> HostCopyTimes:
    """Return the times of copies of about so many bytes between rank 0's GPU and a place in its host's memory."""
    tokens = max(nbytes // (model.num_heads * model.head_dim * DTYPE_BYTES[dtype]), 1)
    checked = check(_copies(tokens, model, dtype, place))
    run = ScheduleRun(session, checked)
    rows: list[Row] = []
    for step in range(_WARM + _STEPS):
        trace = run.step(ahead=True).trace
        rows += trace.of_rank(0) if step >= _WARM else []
    run.close()
    program = checked.schedule.program(0)
    moved = program.nbytes(next(op.source for op in program.ops if isinstance(op, HostCopy)))
    points = tuple(
        Point(
            kernel=kind, variant="dram", dtype=dtype, shape=(1, moved), condition="idle", nbytes=moved,
            **sample(_busy_s(rows, stream, _ALONE))._asdict()
        )
        for stream, kind in HOST_COPY_KINDS[place].items()
    )  # fmt: skip
    if place == "pageable":
        return HostCopyTimes(points, None)
    slower_s = max(sample(_busy_s(rows, stream, _TOGETHER)).median_s for stream in (OFFLOAD, FETCH))
    return HostCopyTimes(points, 2 * moved / slower_s)


def _busy_s(rows: list[Row], stream: str, label: str) -> list[float]:
    return [row.busy_s for row in rows if (row.stream, row.label) == (stream, label)]


def _copies(tokens: int, model: ModelSpec, dtype: Dtype, place: Place) -> Schedule:
    """Return a schedule that copies a tensor out and back several times, then one out while another comes back."""
    workload = Workload(model=model, seq=tokens, dtype=dtype, passes="forward")

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        here = b.tensor("here", tokens, model.num_heads, "saved")
        b.add(Zero(label="fill", into=here))  # drawn at random as inputs are, it would take the host seconds
        there, back = b.elsewhere(here, place), b.elsewhere(here, "hbm")
        also_there = b.elsewhere(here, place)
        for source, target in ((here, there), (there, back)):
            for _ in range(_PER_STEP):
                b.host_copy(source, target, _ALONE)
            b.add(HostSync(streams=(OFFLOAD, FETCH)))
        for _ in range(_PER_STEP):
            b.host_copy(here, also_there, _TOGETHER)
            b.host_copy(there, back, _TOGETHER)
        b.add(HostSync(streams=(OFFLOAD, FETCH)))
        return b.build()

    return Schedule(Header(name="host copies", workload=workload, mesh=Mesh()), program)
