"""What the native library has to pass before it is kept: eleven small schedules, played equally by both engines."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import NamedTuple

import msgspec
import numpy as np

from sim.engine import native, reference
from sim.engine.cost import CostModel
from sim.engine.lowered import Lowered
from sim.native.library import UnavailableError
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.words.workload import Scope, Workload, load_model
from topology.cluster import Cluster, load_cluster


class _Cell(NamedTuple):
    schedule: str
    ranks: int
    cluster: str
    scope: Scope = "attention"
    options: dict[str, str] = {}  # noqa: RUF012 - never written to
    stretched: bool = False


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
)


def require_equal(library: ctypes.CDLL) -> None:
    """Raise UnavailableError if a library plays any of the schedules other than the reference engine does."""
    for cell in _CELLS:
        if not _equal(library, cell):
            raise UnavailableError(f"its times of {cell.schedule} on {cell.cluster} are not those of SimPy's engine")


def _equal(library: ctypes.CDLL, cell: _Cell) -> bool:
    workload = Workload(
        model=load_model("tiny"), seq=64 * cell.ranks, scope=cell.scope, layers=1 + (cell.scope == "layer")
    )
    entry, spec = SCHEDULES[cell.schedule], load_cluster(cell.cluster)
    if spec.nic:
        spec = msgspec.structs.replace(spec, nodes=2, gpus_per_node=4)
    options = dataclasses.replace(entry.options, **cell.options)
    checked = check(entry.schedule(workload, entry.mesh(cell.ranks, workload.model), options))
    cluster, lowered = Cluster(spec), Lowered(checked)
    stretch = 1 + np.arange(lowered.num_ops) % 7 / 50 if cell.stretched else None
    cost = CostModel(cluster, None)
    found, _ = native.run(library, lowered, native.Priced(lowered, cluster, cost), stretch)
    return all(map(np.array_equal, found, reference.play(checked, cluster, cost, stretch)))
