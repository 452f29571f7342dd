"""How much of a step rests on kernels beyond the measured range."""

from __future__ import annotations

import numpy as np

from sim.engine.lowered import lowered
from sim.engine.series import BEYOND_RANGE
from sim.engine.simulate import Simulation


def extrapolated(simulation: Simulation) -> float:
    """Return the share of kernel seconds, of all ranks, whose costs are extrapolated; 0 where nothing was measured."""
    arrays, cost = lowered(simulation.fold.checked), simulation.cost
    some = arrays.op_use >= 0
    of_each, counts = np.unique(np.stack([arrays.op_rank[some], arrays.op_use[some]]), axis=1, return_counts=True)
    total = beyond = 0.0
    for (rank, use), count in zip(of_each.T.tolist(), counts.tolist(), strict=True):
        seconds, note = cost.kernel_seconds(rank, arrays.uses.found[use])
        total += count * seconds
        beyond += count * seconds * note.endswith(BEYOND_RANGE)
    return beyond / total if total else 0.0
