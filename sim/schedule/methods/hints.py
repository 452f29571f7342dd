"""What a builder may be told of the machine, which the score does not know: by whoever builds for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.schedule.derive.kernels import KernelUse


class Hints(NamedTuple):
    """Figures for builders that plan by cost. They change which schedule is built, never whether it is right."""

    gpus_per_node: int = 8
    seconds: Callable[[KernelUse], float] | None = None
    """What a kernel takes alone, as the cost model of a machine predicts it; None where none was asked."""
