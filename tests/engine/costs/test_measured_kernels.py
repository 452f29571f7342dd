"""Every kernel that a shipped profile has measured comes back from the cost model, on the profile's own machine."""

from __future__ import annotations

import sys
from collections import defaultdict
from importlib import resources

import pytest

from sim.engine.costs.cost import CostModel
from sim.engine.costs.measured import measured_cluster
from sim.engine.costs.tiles import use_of
from sim.schedule.derive.kernels import KernelUse
from sim.words.profile import TRANSFERS, Point, load_profile
from topology.cluster import Cluster

SHIPPED = sorted(
    path.name.removesuffix(".json")
    for path in resources.files("sim").joinpath("profiles").iterdir()
    if path.name.endswith(".json")
)
NEAR = 0.01
"""Share of the measured time within which it has to come back."""


@pytest.mark.parametrize("name", SHIPPED)
def test_every_measured_kernel_comes_back(name: str) -> None:
    """At the rates of short runs, of which points are; where sources have timed the same work, between their times.
    Those exceptions are counted.
    """
    profile = load_profile(name)
    cost = CostModel(Cluster(measured_cluster(profile)), profile)
    measured: dict[KernelUse, list[Point]] = defaultdict(list)
    for point in profile.points:
        if point.kernel not in TRANSFERS and point.condition == "idle":
            measured[use_of(point)].append(point)
    several = [use for use, points in measured.items() if len({point.median_s for point in points}) > 1]
    sys.stdout.write(f"{name}: {len(measured)} kernels, of which {len(several)} were timed more than once\n")
    assert len(measured) > 100
    wrong = []
    for use, points in measured.items():
        seconds, note = cost.kernel_seconds(0, use)
        times = [point.median_s for point in points]
        if note or not min(times) * (1 - NEAR) <= seconds <= max(times) * (1 + NEAR):
            wrong.append(f"{use.kernel} {use.variant} {use.shape}: {seconds:.4g} s, measured {times} {note}")
    assert not wrong, f"{len(wrong)} of {len(measured)}: " + "; ".join(wrong[:5])
    assert len(several) <= len(measured) // 100
