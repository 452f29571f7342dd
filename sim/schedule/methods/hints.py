"""What a builder may know about the machine: the caller provides it, since schedules are independent of machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.schedule.derive.kernels import KernelUse


class Hints(NamedTuple):
    """Figures for builders that plan by cost. They change which schedule is built, never whether it is right."""

    gpus_per_node: int = 8
    seconds: Callable[[KernelUse], float] | None = None
    """Predicted solo time of a kernel; None without a cost model."""
