"""What a peak of memory contains, in words: the same below every table and on every page that has one."""

from __future__ import annotations

from sim.base.units import size
from sim.engine.results.room import Room
from sim.setup.names import cluster, pairs
from sim.setup.setup import Setup
from sim.words.options import AllocatorName
from topology.reserved import BESIDE_ALLOCATOR, PARTS
from topology.specs import ClusterSpec

PEAK = "peak allocated"
"""Head of ``peak_hbm_bytes``: buffers and what kernels hold meanwhile, as torch.cuda.max_memory_allocated counts."""
_PARTS, _BESIDE_ALLOCATOR = (", ".join(part.name for part in parts) for parts in (PARTS, BESIDE_ALLOCATOR))
BESIDE = f"{PEAK}: buffers and what kernels hold; beside it lie {_PARTS} (cluster.hbm.reserved_bytes)"
"""What it says where the cluster is not known, or not one."""


def beside(spec: ClusterSpec, allocator: AllocatorName | None = None) -> str:
    """Return in words what a device's memory holds: the peak, what no buffer can have, and what is left. Where the
    allocator is walked, what it keeps beyond the peak is among them.
    """
    whole, taken = size(spec.hbm.capacity_bytes), spec.reserved.nbytes
    if spec.gpu.kind == "cpu":
        return f"{PEAK}: buffers of one rank; all ranks share the {whole} of their host"
    if allocator:
        taken = spec.reserved_beside_allocator.nbytes
        parts = f"{PEAK} + what its allocator keeps + {size(taken)} beside it ({_BESIDE_ALLOCATOR})"
        return f"{parts} + what is left = {whole} of a GPU"
    return f"{PEAK} + {size(taken)} beside it ({_PARTS}) + what is left = {whole} of a GPU"


def beside_in(room: Room | None, spec: ClusterSpec) -> str:
    """Return the same of the memory of a step."""
    return beside(spec, room.limits[0].allocator if room else None)


def beside_of(setup: Setup) -> str:
    """Return the same of a setup, whose global batch may be one that only plans know."""
    return beside(spec_of(setup), setup.replace(global_batch=None).resolved().allocator)


def spec_of(setup: Setup) -> ClusterSpec:
    """Return a setup's cluster, with what the setup changes of it."""
    changes = [(key, value) for key, value in pairs(setup.set) if key.startswith("cluster.")]
    return cluster(setup.cluster, set={key.removeprefix("cluster."): value for key, value in changes}).spec
