"""Checks of a profile: some points measured again, and measured slowdowns next to simulated ones.

``leave_one_out`` predicts its points from each other.
"""

from __future__ import annotations

import statistics
from typing import Literal, NamedTuple

from calibrate.measure.cases import KernelCase, case_of
from calibrate.measure.interference import compared
from calibrate.measure.interference_schedules import Transfer, interference_schedules
from calibrate.measure.kernels import time_kernel
from runtime.processes.launch import Session
from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.engine.costs.phases import Activity, Flow
from sim.engine.play.simulate import simulate
from sim.schedule.proof.check import check
from sim.words.profile import TRANSFERS, Point, Profile, Slowdown
from sim.words.workload import Dtype, ModelSpec
from topology.cluster import Cluster

_SHORT_S = 0.05
"""Longest kernel that is repeated."""


class Repeated(NamedTuple):
    """One point, measured again."""

    point: Point
    now_s: float

    @property
    def drift(self) -> float:
        """How much longer it takes now."""
        return self.now_s / self.point.median_s - 1


def repeat(profile: Profile, session: Session, *, most: int, budget_s: float) -> list[Repeated]:
    """Return about ``most`` short kernels of a profile, small and large ones of each kind, measured again on the first
    rank of a session. Empty if the profile has none that can be repeated.
    """
    found: list[tuple[Point, KernelCase]] = []
    for point in profile.points:
        if point.condition == "idle" and point.kernel not in TRANSFERS and point.median_s < _SHORT_S:
            case = case_of(point)
            found += [(point, case)] if case else []
    found.sort(key=lambda pair: (pair[0].kernel, pair[0].median_s))
    chosen = found[:: -(-len(found) // most) or 1]
    return [Repeated(point, time_kernel(session, case, "idle", budget_s).point.median_s) for point, case in chosen]


class Explained(NamedTuple):
    """A measured slowdown, and the simulated one."""

    measured: Slowdown
    simulated: float


def explained(profile: Profile, model: ModelSpec) -> list[Explained]:
    """Return every wall-clock slowdown of a profile with the simulated one; ``model`` is that of the calibration."""
    cluster = Cluster(measured_cluster(profile))
    cost = CostModel(cluster, profile)
    found = []
    for (beside, ranks, dtype), group in _grouped(profile.interference).items():
        if beside == "ranks":
            schedules = interference_schedules("exchange", max(ranks, 2), model, dtype)
        else:
            schedules = interference_schedules(beside, ranks, model, dtype)
        places = {(place.use.kernel, place.use.variant): place for place in schedules.places}
        steps = []
        if beside != "ranks":
            checked = check(schedules.sequential), check(schedules.overlapped)
            behind, together = (simulate(one, cluster, profile).trace for one in checked)
            steps = [(behind, together)]
        for one in group:
            place = places[one.kernel, one.variant]
            if beside == "ranks":
                simulated = _crowded(cost.kernel(0, place.use), ranks, cluster)
            else:
                simulated = statistics.median(slow / alone for alone, slow in compared(place, steps)[one.slowed])
            found.append(Explained(one, simulated))
    return found


def _grouped(slowdowns: tuple[Slowdown, ...]) -> dict[tuple[Literal["ranks"] | Transfer, int, Dtype], list[Slowdown]]:
    """Return wall-clock slowdowns by what ran at the same time."""
    found: dict[tuple[Literal["ranks"] | Transfer, int, Dtype], list[Slowdown]] = {}
    for one in slowdowns:
        if one.clock == "wall":
            found.setdefault((one.beside, one.ranks, one.dtype), []).append(one)
    return found


def _crowded(activity: Activity, count: int, cluster: Cluster) -> float:
    """Return how much longer an activity takes when that many like it share all that it uses."""
    demands = [demand for phase in activity if isinstance(phase, Flow) for demand in phase.demands]
    return max(1.0, *(count * amount / cluster.resources[resource].capacity for resource, amount in demands))
