"""What is done in a host's memory: copies to it and back, and an optimiser that it runs."""

from __future__ import annotations

import math

from sim.engine.costs.kernels import KernelCosts
from sim.engine.costs.moving import MovingCosts
from sim.engine.costs.phases import Activity, Flow, Wait
from sim.engine.costs.transfer_table import Spread
from sim.schedule.derive.kernels import KernelUse
from sim.schedule.ir.ops import FETCH, OFFLOAD, AdamW, HostAdamW, HostCopy
from sim.schedule.ir.program import Program
from sim.software.host import HostAdam, host_adam, one_pass
from sim.words.options import Place
from sim.words.profile import HOST_COPIES, PAGEABLE_COPIES, Profile
from topology.cluster import Cluster

HOST_COPY_KINDS: dict[Place, dict[str, str]] = {
    "host": dict(zip((OFFLOAD, FETCH), HOST_COPIES, strict=True)),
    "pageable": dict(zip((OFFLOAD, FETCH), PAGEABLE_COPIES, strict=True)),
}
"""What copies to the host's memory and back are called in profiles, by the place there and by their stream."""


class HostCosts:
    """What hosts of one cluster do for the ranks on them."""

    def __init__(
        self, cluster: Cluster, profile: Profile | None, kernels: KernelCosts, moving: MovingCosts, notes: set[str]
    ) -> None:
        """Take where notes go of what was not measured on this host."""
        self._cluster, self._profile, self._kernels, self._moving = cluster, profile, kernels, moving
        self._notes = notes
        self._host_copy_cache: dict[tuple[int, str, int], Activity] = {}

    def kernel(self, rank: int, program: Program, op: HostAdamW) -> Activity:
        """Return a kernel of a GPU's host: a flow over the memory of its socket, which the ranks there share, no
        shorter than its part of the node's cores takes, where they are known.
        """
        spec = self._cluster.spec
        if spec.gpu.kind == "cpu":
            elements, nbytes = math.prod(op.weights.shape), sum(host_bytes(op, program))
            flops = AdamW.meta.flops_per_element * elements
            use = KernelUse(AdamW.meta.kernel, "", program.dtype(op.weights), (elements,), flops, nbytes)
            return self._kernels.at(rank, use)
        adam = host_adam(self._profile)
        named = "" if self._profile and self._profile.host_optimiser else ", as `software.host_optimiser` is not set"
        self._notes.add(
            f"CPU Adam: not measured on this host, {adam.said}{named}: at {adam.share:.2g} of the rate of its socket's "
            f"memory, as on a DGX-2"
        )
        passes = host_passes(op, program, adam)
        read, written = (sum(moved[way] / code.share for code, moved in passes) for way in (0, 1))
        load = self._cluster.dram_load(rank, read, written)
        seconds = max(nbytes / self._cluster.resources[index].capacity for index, nbytes in load.items())
        if spec.host is not None:
            cores = spec.host.cores / spec.gpus_per_node
            seconds = max(seconds, sum(sum(moved) / code.core_bytes_per_s for code, moved in passes) / cores)
        return (Flow(seconds, tuple(sorted((index, nbytes / seconds) for index, nbytes in load.items()))),)

    def copy(self, rank: int, program: Program, op: HostCopy) -> Activity:
        """Return a copy between a device and its host: a flow over the way between them and both memories, without SMs.

        Ranks of a CPU host have one memory: there it is the copy of a thread, which waits for a core.
        """
        nbytes, host = program.nbytes(op.source), self._cluster.spec.host
        if host is not None and self._cluster.spec.gpu.kind == "cpu":
            use = KernelUse("copy", "", program.dtype(op.source), (math.prod(op.source.shape),), 0, 2 * nbytes)
            return (Wait(self._cluster.devices[rank].compute, host.wakeup_s), *self._kernels.at(rank, use))
        there = program.buffers[(op.target if op.stream == OFFLOAD else op.source).buffer].place
        key = (rank, HOST_COPY_KINDS[there][op.stream], nbytes)
        if key not in self._host_copy_cache:
            route = self._cluster.host_route(rank, to_host=op.stream == OFFLOAD)
            moved = self._moving.along(key[1], (rank,), Spread(1, 1.0), route, nbytes)
            self._host_copy_cache[key] = self._moving.activity(moved)
        return self._host_copy_cache[key]


def host_passes(op: HostAdamW, program: Program, adam: HostAdam) -> list[tuple[HostAdam, tuple[float, float]]]:
    """Return whose code moves what on the host of a GPU, bytes read and written: the update, and what scales the
    gradient before it and casts the new weights behind, which pass once over what they take.
    """
    weights, gradient = (program.nbytes(view) for view in (op.weights, op.gradient))
    update = (adam.update.read * weights, adam.update.written * weights)
    of_cast = (weights, program.nbytes(op.cast)) if op.cast else (0, 0)
    return [(adam, update), (one_pass(), (gradient + of_cast[0], gradient + of_cast[1]))]


def host_bytes(op: HostAdamW, program: Program) -> tuple[int, int]:
    """Return what a kernel of the host reads and writes at least, in three passes: it scales the gradient, updates, and
    casts the new weights (DeepSpeed's runtime/zero/stage3.py, from memory, not checked).
    """
    read, written = (sum(map(program.nbytes, views)) for views in (op.reads, op.writes))
    return read + program.nbytes(op.gradient) + (program.nbytes(op.weights) if op.cast else 0), written
