"""What an op does to a machine: an activity, a row of phases that queue, delay or flow over shared resources."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from topology.cluster import Device

OWN_COMPUTE = -2
OWN_MEMORY = -3
"""Stand for the compute units and the memory of the device that an activity runs on: kernels of equal devices have one
activity."""

Demands: TypeAlias = tuple[tuple[int, float], ...]
"""(resource, amount per second at x = 1, or amount held)."""


class Wait(NamedTuple):
    """Queue for a resource that is full when this phase begins: ``seconds`` for each whole round of users ahead."""

    resource: int
    seconds: float


class Latency(NamedTuple):
    """A delay that nothing shares."""

    seconds: float


class Flow(NamedTuple):
    """Work that takes ``seconds`` alone and slows when a resource that it demands is full."""

    seconds: float
    demands: Demands
    fills: int = -1
    """A resource of which nothing can be held before this ends, as a grid whose blocks still queue fills the SMs."""
    late: float = 0.0
    """Of a persistent grid, which has a block per SM, each with a fixed share of the work: blocks that find no SM when
    it begins run once nothing is held, or behind the others. So much longer does the grid take by the time that they
    wait and by SM that is held, at most as long as they wait."""


Phase: TypeAlias = Wait | Latency | Flow


Activity: TypeAlias = tuple[Phase, ...]
"""What an op does to the machine, one phase after the other."""


def located(activity: Activity, device: Device) -> Activity:
    """Return an activity with the resources of one device in the place of its own ones."""
    own = {OWN_COMPUTE: device.compute, OWN_MEMORY: device.hbm}
    phases: list[Phase] = []
    for phase in activity:
        if isinstance(phase, Flow):
            demands = tuple((own.get(resource, resource), amount) for resource, amount in phase.demands)
            phases.append(phase._replace(demands=demands, fills=own.get(phase.fills, phase.fills)))
        elif isinstance(phase, Wait):
            phases.append(phase._replace(resource=own.get(phase.resource, phase.resource)))
        else:
            phases.append(phase)
    return tuple(phases)
