"""What one slow rank costs each schedule: simulated, for every schedule that the same workload and ranks allow."""

from __future__ import annotations

import msgspec

from experiments.selection import Chosen
from sim.engine.simulate import simulate
from sim.errors import InputError
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked, check
from topology.cluster import Cluster
from topology.specs import ClusterSpec, PerGpu

SPEED = 0.8
"""Of the slow rank, beside 1 of all others."""
_MOST = 8
"""Ranks that are made slow in turn; of more ranks these, evenly spread."""


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one schedule."""

    schedule: str
    step_s: float
    """With all ranks at full speed."""
    slow_s: dict[int, float]
    """By the rank that is slow."""

    @property
    def worst(self) -> tuple[int, float]:
        """The rank that costs most, and by what share the step grows."""
        rank = max(self.slow_s, key=lambda rank: (self.slow_s[rank], -rank))
        return rank, self.slow_s[rank] / self.step_s - 1


def straggler_costs(chosen: Chosen) -> list[Straggler]:
    """Return the cost of a slow rank by schedule; schedules that refuse the workload are left out."""
    ranks = chosen.mesh.size
    found = []
    for name, entry in SCHEDULES.items():
        try:
            mesh = entry.mesh(ranks, chosen.workload.model)
            checked = check(entry.schedule(chosen.workload, mesh, hints=chosen.hints()))
        except InputError:
            continue
        turns = range(0, ranks, -(-ranks // _MOST))
        slow = {rank: _step_s(checked, chosen, _slowed(chosen.spec, rank)) for rank in turns}
        found.append(Straggler(schedule=name, step_s=_step_s(checked, chosen, chosen.spec), slow_s=slow))
    return found


def _step_s(checked: Checked, chosen: Chosen, spec: ClusterSpec) -> float:
    return simulate(checked, Cluster(spec), chosen.profile, chosen.jitter).trace.step_time_s


def _slowed(spec: ClusterSpec, rank: int) -> ClusterSpec:
    """Return a cluster one rank of which is slower than it was."""
    speed = spec.per_gpu[rank].speed if rank in spec.per_gpu else 1.0
    return msgspec.structs.replace(spec, per_gpu=spec.per_gpu | {rank: PerGpu(speed=SPEED * speed)})
