"""Measured times of communication on other machines and in other groups than those that were measured."""

from __future__ import annotations

import pytest

from sim.engine.cost import CostModel, measured_cluster
from sim.engine.phases import Activity, Flow, Latency
from sim.presets import override
from sim.profile import load_profile
from sim.schedule.ir.ops import AllReduce
from sim.schedule.ir.views import View
from topology.cluster import Cluster

SUM = AllReduce(label="", communicator="c", view=View(0, ()))


def seconds(activity: Activity) -> float:
    return sum(phase.seconds for phase in activity if isinstance(phase, Flow | Latency))


@pytest.mark.parametrize("mib", [1, 16, 64])
def test_a_wider_nic_reaches_what_was_measured_over_nics(mib: int) -> None:
    """Two nodes of 8: also where trees over NVLink's chains are what takes longest at the links' rates."""
    profile = load_profile("h100-sxm")
    times = [
        seconds(
            CostModel(
                Cluster(override(measured_cluster(profile), [("nic.bytes_per_s", factor)], "--set")), profile
            ).collective(SUM, tuple(range(16)), mib * 2**20)
        )
        for factor in ("/2", "*1", "*2")
    ]
    assert times[0] > 1.15 * times[1] > 1.15 * 1.03 * times[2], "twice the NIC is held to PCIe, a quarter faster"
