"""Whether a training step fits: what each memory has, what is taken of it, and what buffers hold at their peak."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, NamedTuple

import msgspec

from sim.accounts.footprint import Footprint, footprint
from sim.accounts.memory import MemoryWalk, Term
from sim.schedule.ir.program import Header
from topology.cluster import Cluster
from topology.fabric.fabrics import socket_of
from topology.reserved import PARTS, Basis
from topology.specs import ClusterSpec

Verdict = Literal["yes", "at the limit", "no", "not known"]

BASIS: dict[Term, tuple[Basis, str]] = {
    "parameters": ("derived", "buffers of the schedule"),
    "gradients": ("derived", "buffers of the schedule"),
    "optimiser": ("derived", "buffers of the schedule"),
    "saved activations": ("derived", "buffers of the schedule"),
    "attention": ("derived", "buffers of the schedule, and what the code of flash-attention 2 allocates"),
    "communication": ("derived", "buffers of the schedule"),
    "temporaries": ("derived", "buffers of the schedule, and what the runtime's kernels hold on CUDA"),
    "other": ("derived", "buffers of the schedule"),
}
"""What each term rests on. Executed on gloo, buffers take the same bytes; no allocator of a GPU was asked yet."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One memory. Sizes in bytes."""

    memory: str
    """GPU: of the rank that holds most; host, and CXL as its second tier: of the socket that is given most; all ranks
    share that of a CPU host."""
    capacity_bytes: int
    held_bytes: int
    """What buffers hold at their peak."""
    reserved_bytes: int
    """What they cannot have: ``topology.reserved``."""
    within_bytes: int
    """How much more or less that may be."""
    free_bytes: int
    """What is left; below 0 what is missing."""

    @property
    def fits(self) -> bool | None:
        """None if that hangs on what is not known of ``reserved_bytes``: at the limit."""
        return None if abs(self.free_bytes) < self.within_bytes else self.free_bytes >= 0


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a training step."""

    terms: dict[Term, int]
    """What the GPU's peak consists of, in bytes."""
    limits: tuple[Limit, ...]
    """Of the GPU and, where anything is kept there, of its host."""
    formula: Footprint
    """What the formulas of the field say of model states and saved activations."""

    @property
    def tightest(self) -> Limit:
        """The memory with least to spare: the one that is exceeded most, if any is."""
        return min(self.limits, key=lambda limit: limit.free_bytes)

    @property
    def free_bytes(self) -> int:
        """What is left of it; below 0 what is missing."""
        return self.tightest.free_bytes

    @property
    def fits(self) -> bool | None:
        """True, False, or None where it is at the limit: so near that the constant's uncertainty decides."""
        found = [limit.fits for limit in self.limits]
        return False if False in found else None if None in found else True


def room_of(header: Header, walked: list[MemoryWalk], cluster: Cluster) -> Room:
    """Return the memory of a schedule's step, by the walks of the ranks on the first devices of a cluster."""
    most, spec = max(walked, key=lambda found: found.peak_bytes), cluster.spec
    shared, reserved = spec.gpu.kind == "cpu", spec.reserved
    held = sum(found.peak_bytes for found in walked) if shared else most.peak_bytes
    limits = [_limit("host" if shared else "GPU", spec.hbm.capacity_bytes, held, *reserved)]
    if kept := held_by_socket(walked, cluster):
        limits += [_limit(tier.memory, tier.capacity_bytes, tier.held(max(kept.values()))) for tier in tiers(spec)]
    return Room(terms=most.by_term, limits=tuple(limits), formula=footprint(header))


def _limit(memory: str, capacity: int, held: int, reserved: int = 0, within: int = 0) -> Limit:
    return Limit(
        memory=memory,
        capacity_bytes=capacity,
        held_bytes=held,
        reserved_bytes=reserved,
        within_bytes=within,
        free_bytes=capacity - held - reserved,
    )


def held_by_socket(walked: list[MemoryWalk], cluster: Cluster) -> dict[int, int]:
    """Return the bytes that the ranks of each socket keep in its memory, of those that are given any."""
    held: Counter[int] = Counter()
    for device, found in zip(cluster.devices, walked, strict=False):
        if cluster.spec.socket and found.host_peak_bytes:
            held[socket_of(cluster.spec, device.number)] += found.host_peak_bytes
    return held


class Tier(NamedTuple):
    """One of the memories of a socket."""

    memory: str
    capacity_bytes: int
    share: float
    """Of what is kept there."""

    def held(self, kept: int) -> int:
        """Return what it holds of so many bytes."""
        return kept if self.share == 1 else math.ceil(kept * self.share)


def tiers(spec: ClusterSpec) -> list[Tier]:
    """Return the memories that a socket keeps things in."""
    if spec.socket is None:
        return []
    far, cxl = spec.socket.cxl_share, spec.socket.cxl
    second = [Tier("CXL", cxl.capacity_bytes, far)] if cxl else []
    return [Tier("host", spec.socket.dram.capacity_bytes, 1 - far), *second]


def by_basis() -> dict[Basis, list[str]]:
    """Return the terms, and the parts of what is reserved, by what they rest on."""
    found: dict[Basis, list[str]] = {}
    for name, basis in [*((term, basis) for term, (basis, _) in BASIS.items()), *((p.name, p.basis) for p in PARTS)]:
        found.setdefault(basis, []).append(name)
    return found
