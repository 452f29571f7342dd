"""How much of a step rests on kernels beyond the measured range, and how far the one that decides is beyond it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sim.engine.costs.kernel_table import series_size
from sim.engine.costs.series import BEYOND_RANGE
from sim.engine.play.lowered import lowered
from sim.engine.play.simulate import Simulation
from sim.schedule.derive.kernels import ATTENTION_KERNELS, KernelUse


def extrapolated(simulation: Simulation) -> float:
    """Return the share of kernel seconds, of all ranks, whose costs are extrapolated; 0 where nothing was measured."""
    total = beyond = 0.0
    for _, seconds, note in _kernels(simulation):
        total += seconds
        beyond += seconds * note.endswith(BEYOND_RANGE)
    return beyond / total if total else 0.0


class Decisive(NamedTuple):
    """The kernel that most of the kernel seconds of a step go to."""

    kernel: str
    share: float
    """Of the kernel seconds of all ranks."""
    size: float
    """Of its largest use: tokens of attention (the mean of queries and keys) and of gemm, elements of others."""
    measured: float | None
    """The largest one of that kernel in the profile; None where there is none."""

    @property
    def unit(self) -> str:
        """What sizes count."""
        return "tokens" if self.kernel in (*ATTENTION_KERNELS, "gemm") else "elements"


def decisive(simulation: Simulation, before: Simulation | None = None, more: float = 0) -> Decisive | None:
    """Return the kernel that decides; None for a step without any. Of a step of which few layers were simulated it has
    so many times ``more`` what the last of these adds to the simulation ``before``.
    """
    by_kernel: dict[str, float] = defaultdict(float)
    sizes: dict[str, float] = defaultdict(float)
    for use, seconds, _ in _kernels(simulation):
        by_kernel[use.kernel] += seconds * (1 + more)
        for one, _ in use.documents or ((use, 1),):
            sizes[use.kernel] = max(sizes[use.kernel], series_size(use.kernel, one.shape))
    for use, seconds, _ in _kernels(before) if before else ():
        by_kernel[use.kernel] -= seconds * more
    total = sum(by_kernel.values())
    if not total:
        return None
    kernel = max(by_kernel, key=lambda name: by_kernel[name])
    points = simulation.profile.points if simulation.profile else ()
    passed_over = kernel in simulation.profile.runs if simulation.profile else False
    measured = (series_size(kernel, point.shape) for point in points if point.kernel == kernel and not passed_over)
    return Decisive(kernel, by_kernel[kernel] / total, sizes[kernel], max(measured, default=None))


def _kernels(simulation: Simulation) -> Iterator[tuple[KernelUse, float, str]]:
    """Yield each kernel of a rank with the seconds that all its runs take, and the note on its cost."""
    arrays, cost = lowered(simulation.fold.checked), simulation.cost
    some = arrays.op_use >= 0
    uses = max(len(arrays.uses.found), 1)
    counts = np.bincount(arrays.op_rank[some].astype(np.int64) * uses + arrays.op_use[some])
    of_each = np.flatnonzero(counts)
    for number, count in zip(of_each.tolist(), counts[of_each].tolist(), strict=True):
        rank, use = divmod(number, uses)
        for kernel, times in arrays.uses.found[use].each:
            seconds, note = cost.kernel_seconds(rank, kernel)
            yield kernel, count * times * seconds, note
