"""What a peak of memory contains, in words: the same below every table and on every page that has one."""

from __future__ import annotations

from sim.base.units import size
from sim.setup.names import cluster, pairs
from sim.setup.setup import Setup
from topology.reserved import PARTS
from topology.specs import ClusterSpec

PEAK = "peak allocated"
"""Head of ``peak_hbm_bytes``: buffers and what kernels hold meanwhile, as torch.cuda.max_memory_allocated counts."""
_PARTS = ", ".join(part.name for part in PARTS)
BESIDE = f"{PEAK}: buffers and what kernels hold; beside it lie {_PARTS} (cluster.hbm.reserved_bytes)"
"""What it says where the cluster is not known, or not one."""


def beside(spec: ClusterSpec) -> str:
    """Return what a device's memory holds: the peak, what no buffer can have, and what is left add up to all of it."""
    whole, taken = size(spec.hbm.capacity_bytes), spec.reserved.nbytes
    if spec.gpu.kind == "cpu":
        return f"{PEAK}: buffers of one rank; all ranks share the {whole} of their host"
    return f"{PEAK} + {size(taken)} beside it ({_PARTS}) + what is left = {whole} of a GPU"


def spec_of(setup: Setup) -> ClusterSpec:
    """Return a setup's cluster, with what the setup changes of it."""
    changes = [(key, value) for key, value in pairs(setup.set) if key.startswith("cluster.")]
    return cluster(setup.cluster, set={key.removeprefix("cluster."): value for key, value in changes}).spec
