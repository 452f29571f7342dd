"""Executes a schedule on this machine or on torchrun's workers, and says which of its steps count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from experiments.evidence.machine import require_machine, require_processes, require_torch
from sim.accounts.memory import walks_with
from sim.accounts.trace import Trace
from sim.base.errors import InputError
from sim.base.units import size
from sim.engine.results.report import hbm_held
from sim.schedule.ir.ops import Attend, AttendBackward
from sim.schedule.proof.check import Checked
from sim.setup.machine import require_same_host
from sim.setup.names import at_least_one
from sim.setup.prediction import Prediction, proved
from sim.words.patterns import AttentionSink
from sim.words.profile import Profile
from sim.words.workload import Workload
from topology.cluster import load_cluster
from topology.specs import ClusterSpec

if TYPE_CHECKING:
    from runtime.processes.launch import Session
    from runtime.processes.torchrun import Workers
    from runtime.run import Step

ATTENTION_OPS = (Attend.__name__, AttendBackward.__name__)
_LONGEST_S = 1e6
WARM_UP = 3
"""Steps before those that count: by then every rank has the memory that it needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How to execute."""

    repeats: int = 5
    """Steps to measure."""
    timeout: float = 120.0
    """Seconds that a rank may stand still before the run is ended."""
    attention: str = ""
    """Attention kernel of GPUs: flash-attn-3, flash-attn-2, aten-flash, aten-efficient or aten-cudnn; by default what
    the profile was calibrated with, else the fastest that is installed and runs the data type."""


@contextmanager
def open_session(
    checked: Checked,
    spec: ClusterSpec,
    profile: Profile | None = None,
    execution: Execution = Execution(),
    workers: Workers | None = None,
) -> Iterator[Session]:
    """Start the processes that a schedule runs on: over gloo on a host, over NCCL on GPUs; raises InputError without
    torch, if this machine is not what ``spec`` describes or ``profile`` was measured on, if it has less memory than
    buffers take, or if torchrun has not started ``workers`` enough.
    """
    require_torch()
    from runtime.processes.launch import Session

    at_least_one("repeats", execution.repeats)
    if not isinstance(execution.timeout, int | float) or not 0 < execution.timeout < _LONGEST_S:
        raise InputError(f"`timeout` {execution.timeout}: expected seconds above 0, at most {_LONGEST_S:g}")
    ranks, workload = checked.schedule.num_ranks, checked.schedule.header.workload
    if profile and spec.gpu.kind == "cpu":
        require_same_host(profile)
    if workers:
        require_processes(spec, ranks, workers.world)
    attention = execution.attention or timed_attention(profile, workload)
    _require_room(checked, spec, attention)
    gpus = min(ranks, workers.world.local_size) if workers else ranks
    require_machine(spec, gpus, [workload.dtype], attention)
    with Session(
        ranks, device=spec.gpu.kind, timeout_s=execution.timeout, workers=workers, attention=attention
    ) as session:
        yield session


def _require_room(checked: Checked, spec: ClusterSpec, attention: str) -> None:
    """Raise InputError for what would take more memory than there is: better than ranks that the system kills."""
    held, has = hbm_held(walks_with(checked, attention), spec), spec.hbm.capacity_bytes
    if held > has:
        raise InputError(
            f"executing it takes {size(held)} of memory, and cluster {spec.name!r} has {size(has)}: set a "
            f"shorter `seq`, fewer `documents`, or more `gpus`"
        )


def timed_attention(profile: Profile | None, workload: Workload) -> str:
    """Return the name of the attention kernel that a profile was calibrated with, since what is timed is what is run;
    empty where there is none, as on a host, or it is none for the data type or for windows.
    """
    timed = profile.machine.software.get("attention", "") if profile else ""
    if not timed:
        return ""
    from runtime.execution.ops.attention_choice import runs
    from runtime.execution.tensors import TORCH_DTYPE

    windows = workload.window is not None or isinstance(workload.pattern, AttentionSink)
    return timed if runs(timed, TORCH_DTYPE[workload.dtype], windows=windows) else ""


def attention_ran(trace: Trace) -> str:
    """Return which implementations of attention an executed step ran."""
    names = dict.fromkeys(row.ran for row in trace.rows if row.kind in ATTENTION_OPS)
    return "; ".join(names)


def measured_steps(step: Callable[[], Step], repeats: int) -> list[Step]:
    """Return ``repeats`` steps after the warm-up."""
    for _ in range(WARM_UP):
        step()
    return [step() for _ in range(repeats)]


def median_step(steps: list[Step]) -> Step:
    """Return the step whose time is the (lower) median."""
    return sorted(steps, key=lambda step: step.trace.step_time_s)[(len(steps) - 1) // 2]


def execute(
    played: Prediction | Checked, repeats: int = 5, *, timeout: float = 120.0, attention: str = ""
) -> list[Trace]:
    """Return the traces of some steps, executed on this machine with one process per rank: those that count, after a
    warm-up. It needs torch; a schedule without a cluster runs on the CPU.

    Raises InputError without torch, or if this machine is not what the prediction is of, RankError if a rank fails.

    >>> from longstep import build, workload
    >>> (trace,) = execute(build("ring", workload("tiny", "256"), 2), repeats=1)
    >>> trace.player, trace.num_ranks
    ('executed', 2)
    """
    checked = proved(played)
    spec, profile = (
        (played.cluster.spec, played.profile) if isinstance(played, Prediction) else (load_cluster("host"), None)
    )
    execution = Execution(repeats=repeats, timeout=timeout, attention=attention)
    with open_session(checked, spec, profile, execution) as session:
        from runtime.run import ScheduleRun

        return [step.trace for step in measured_steps(ScheduleRun(session, checked).step, repeats)]


def attention_seconds(played: Prediction | Checked, repeats: int = 5) -> list[float]:
    """Return per rank the seconds that its attention kernels take on this CPU, to hold beside those that are simulated
    (``sim.accounts.breakdown.attention_s``). Ranks are played one at a time, so that they do not share cores. It needs
    torch.

    >>> from longstep import build, workload
    >>> seconds = attention_seconds(build("ring", workload("tiny", "256"), 2), repeats=1)
    >>> len(seconds), min(seconds) > 0
    (2, True)
    """
    require_torch()
    import torch

    from runtime.execution import virtual

    return virtual.attention_seconds(proved(played), torch.device("cpu"), repeats)


def verify(played: Prediction | Checked, order: int = 0) -> dict[str, float]:
    """Return the largest relative error of each output and gradient against attention (or layers) computed by one
    process in fp64. All ranks run in this process, in a random order that ``order`` draws. It needs torch.

    Raises InputError without torch, or for a sequence that is too long for the reference.

    >>> from longstep import build, workload
    >>> max(verify(build("zigzag", workload("tiny", "256", dtype="fp64"), 4)).values()) < 1e-12
    True
    """
    require_torch()
    import torch

    from runtime.execution.verify import output_errors, verifiable
    from runtime.execution.virtual import execute_virtual

    checked = proved(played)
    verifiable(checked.schedule.header.workload)
    return output_errors(checked, execute_virtual(checked, torch.device("cpu"), order))
