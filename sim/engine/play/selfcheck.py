"""What the native library has to pass before it is kept: twelve small schedules, played equally by both engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from sim.engine.costs.cost import CostModel
from sim.engine.play import reference
from sim.engine.play.jitter import Stretch
from sim.engine.play.lowered import Lowered, Times
from sim.native.library import UnavailableError
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.words.profile import load_profile
from sim.words.workload import Scope, Workload, load_model
from topology.cluster import Cluster, load_cluster

Player = Callable[[Lowered, Cluster, CostModel, Stretch], Times]
"""What plays a schedule with some noise: times of all ops."""


class _Cell(NamedTuple):
    schedule: str
    ranks: int
    cluster: str
    scope: Scope = "attention"
    options: dict[str, str] = {}  # noqa: RUF012 - never written to
    stretched: bool = False
    profile: str = ""
    """Datasheets' rates where there is none."""
    model: str = "tiny"
    tokens: int = 64
    """Of a rank."""


_CELLS = (
    _Cell("ring", 4, "hgx-h100"),
    _Cell("zigzag", 8, "l20-pcie"),
    _Cell("striped", 2, "host"),
    _Cell("balanced-ring", 5, "hgx-h100", stretched=True),
    _Cell("double-ring", 8, "dgx-a100"),
    _Cell("allgather", 4, "a100-pcie", "layer"),
    _Cell("ulysses", 4, "hgx-b200", "layer", stretched=True),
    _Cell("usp", 8, "dgx-a100"),
    _Cell("upipe", 2, "host", "layer"),
    _Cell("zigzag", 4, "hgx-h100", "layer", {"activations": "host"}, stretched=True),
    _Cell("ring", 2, "hgx-h100", "step", {"optimiser": "host"}, stretched=True),
    _Cell("allgather", 8, "hgx-h100", "layer", profile="h100-sxm", model="llama3-8b", tokens=1024),
)


def require_equal(play: Player) -> None:
    """Raise UnavailableError if a player plays any of the schedules other than the reference engine does."""
    for cell in _CELLS:
        if not _equal(play, cell):
            raise UnavailableError(f"its times of {cell.schedule} on {cell.cluster} are not those of SimPy's engine")


def _equal(play: Player, cell: _Cell) -> bool:
    workload = Workload(
        model=load_model(cell.model),
        seq=cell.tokens * cell.ranks,
        scope=cell.scope,
        layers=1 + (cell.scope == "layer"),
    )
    entry, spec = SCHEDULES[cell.schedule], load_cluster(cell.cluster)
    if spec.nic:
        spec = msgspec.structs.replace(spec, nodes=2, gpus_per_node=4)
    options = dataclasses.replace(entry.options, **cell.options)
    checked = check(entry.schedule(workload, entry.mesh(cell.ranks, workload.model), options))
    cluster, lowered = Cluster(spec), Lowered(checked)
    stretch = 1 + np.arange(lowered.num_ops) % 7 / 50 if cell.stretched else None
    cost = CostModel(cluster, load_profile(cell.profile) if cell.profile else None)
    found = play(lowered, cluster, cost, stretch)
    return all(map(np.array_equal, found, reference.play(checked, cluster, cost, stretch)))
