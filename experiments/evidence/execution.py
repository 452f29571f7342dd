"""Executing a schedule on this machine, or where torchrun has put workers, and which of its steps count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from experiments.evidence.machine import require_machine, require_processes
from experiments.verbs.selection import Chosen
from sim.errors import InputError
from sim.schedule.proof.check import Checked

if TYPE_CHECKING:
    from runtime.processes.launch import Session
    from runtime.processes.torchrun import Workers
    from runtime.run import Step

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
    the profile was calibrated with, else the first of them that is installed and runs the data type."""


@contextmanager
def open_session(
    chosen: Chosen, checked: Checked, execution: Execution, workers: Workers | None = None
) -> Iterator[Session]:
    """Start the processes that a schedule runs on: over gloo on a host, over NCCL on GPUs; raises InputError if this
    machine cannot, or torchrun has not started ``workers`` enough.
    """
    from runtime.processes.launch import Session

    if execution.repeats < 1:
        raise InputError(f"--repeats {execution.repeats}: expected 1 or more")
    if not 0 < execution.timeout < _LONGEST_S:
        raise InputError(f"--timeout {execution.timeout:g}: expected seconds above 0, at most {_LONGEST_S:g}")
    ranks = checked.schedule.num_ranks
    if workers:
        require_processes(chosen.spec, ranks, workers.world)
    attention = execution.attention or timed_attention(chosen)
    gpus = min(ranks, workers.world.local_size) if workers else ranks
    require_machine(chosen.spec, gpus, [chosen.workload.dtype], attention)
    with Session(
        ranks, device=chosen.spec.gpu.kind, timeout_s=execution.timeout, workers=workers, attention=attention
    ) as session:
        yield session


def timed_attention(chosen: Chosen) -> str:
    """Return the name of the attention kernel that a profile was calibrated with, since what is timed is what is run;
    empty where there is none, or none for the data type.
    """
    timed = chosen.profile.machine.software.get("attention", "") if chosen.profile else ""
    if chosen.spec.gpu.kind == "cpu":
        return ""
    from runtime.execution.attention_choice import runs
    from runtime.execution.tensors import TORCH_DTYPE

    return timed if runs(timed, TORCH_DTYPE[chosen.workload.dtype]) else ""


def measured_steps(step: Callable[[], Step], repeats: int) -> list[Step]:
    """Return ``repeats`` steps after the warm-up."""
    for _ in range(WARM_UP):
        step()
    return [step() for _ in range(repeats)]


def median_step(steps: list[Step]) -> Step:
    """Return the step whose time is the (lower) median."""
    return sorted(steps, key=lambda step: step.trace.step_time_s)[(len(steps) - 1) // 2]
