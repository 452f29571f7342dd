"""What bounds a step, or may: its kernels, its links or its host. From costs alone, never from how far one is off."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from sim.engine.play.lowered import lowered
from sim.engine.play.simulate import Simulation
from sim.engine.play.work import links_s

Regime = Literal["kernels", "links", "host"]


def regime(simulation: Simulation) -> Regime:
    """Return what is busiest, of all ranks: the host at the upper bound of its profile, since where a busy host decides
    an idle one may have been simulated. The Python of eager modules counts as measured: that bound is also of hosts
    whose entries lack it.
    """
    (checked, cluster, *_), profile = simulation.fold, simulation.profile
    longer = profile.host.high if profile and profile.host else 1.0
    busy_s: dict[Regime, float] = {
        "kernels": _kernels_s(simulation),
        "links": max(links_s(checked, cluster).values(), default=0.0),
        "host": _host_s(simulation, longer),
    }
    return max(busy_s, key=lambda name: busy_s[name])


def _kernels_s(simulation: Simulation) -> float:
    """Return the seconds that the kernels of a rank take, each by itself: of the rank with most to do."""
    arrays, cost = lowered(simulation.fold.checked), simulation.cost
    some = arrays.op_use >= 0
    counts = np.zeros((len(arrays.programs), len(arrays.uses.found) or 1))
    np.add.at(counts, (arrays.op_rank[some], arrays.op_use[some]), 1)
    return max(
        math.fsum(row[use] * cost.kernel_seconds(rank, arrays.uses.found[use])[0] for use in np.flatnonzero(row))
        for rank, row in enumerate(counts)
    )


def _host_s(simulation: Simulation, longer: float = 1.0) -> float:
    """Return the seconds in which the host issues the ops of a rank, entries so many times as long: of the rank with
    most to do.
    """
    arrays, cost = lowered(simulation.fold.checked), simulation.cost
    both_s = [(cost.issue_s(op, use, ranks), cost.python_s(op, use)) for op, use, ranks in arrays.issues.found]
    each_s = np.array([longer * (issue_s - python_s) + python_s for issue_s, python_s in both_s])
    per_rank = np.bincount(arrays.op_rank, each_s[arrays.ops["issue"]], minlength=len(arrays.programs))
    return float(per_rank.max(initial=0.0))
