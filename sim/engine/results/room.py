"""Whether a training step fits: what each memory has, what is taken of it, and what buffers hold at their peak."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from sim.accounts.footprint import Footprint, footprint
from sim.accounts.memory import MemoryWalk, Term, walks
from sim.accounts.reserved import Allocations, Reserved, allocations_of
from sim.engine.play.fold import Fold
from sim.schedule.ir.program import Header
from sim.schedule.proof.check import Checked
from sim.words.mesh import Mesh
from sim.words.options import AllocatorName
from topology.cluster import Cluster
from topology.fabric.fabrics import socket_of
from topology.reserved import BESIDE_ALLOCATOR, PARTS, Basis, Part
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


class Limit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One memory. Sizes in bytes."""

    memory: str
    """GPU: of the rank that holds most; host, and CXL as its second tier: of the socket that is given most; all ranks
    share that of a CPU host."""
    capacity_bytes: int
    held_bytes: int
    """What buffers hold at their peak; where it is known what gives them their memory, what that needs of the GPU, if
    it can wait no sooner than the host does until tensors of other streams are free."""
    reserved_bytes: int
    """What they cannot have: ``topology.reserved``."""
    within_bytes: int
    """How much more or less that may be."""
    free_bytes: int
    """What is left; below 0 what is missing."""
    early_bytes: int = 0
    """How much less it needs if such tensors are free at once."""
    allocator: AllocatorName | None = None
    """What was walked; then ``held_bytes`` are those that it reserves, not those that it gives to buffers."""

    @property
    def fits(self) -> bool | None:
        """None if that hangs on what is not known of ``reserved_bytes``, or on when tensors are free: at the limit."""
        if self.free_bytes >= self.within_bytes:
            return True
        return False if self.free_bytes + self.early_bytes <= -self.within_bytes else None

    @property
    def known_to_bytes(self) -> int:
        """How far what is free may be off."""
        return self.within_bytes + self.early_bytes

    @property
    def beside(self) -> tuple[Part, ...]:
        """What ``reserved_bytes`` consist of, where nobody has set them."""
        return BESIDE_ALLOCATOR if self.allocator else PARTS


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

    @property
    def verdict(self) -> Verdict:
        """The same in words."""
        return "at the limit" if self.fits is None else "yes" if self.fits else "no"


class Allocated(NamedTuple):
    """What an allocator reserves for a step."""

    name: AllocatorName
    stages: tuple[Reserved, ...]
    """What logs have of it, on each stage of a pipeline, or on all ranks where there is one. Where a GPU has less, that
    is as free blocks go back to CUDA, or else as if it had enough."""
    needs: Reserved
    """The least that any of it may run in, as blocks go back, and tensors of other streams are free at once; and what
    all of it runs in without either."""


def allocated(checked: Checked, cluster: Cluster, name: AllocatorName | None) -> Allocated | None:
    """Return what an allocator reserves for the ranks of a schedule that are on the first devices of a cluster, of each
    stage for the one that allocates most; None where it is not known, and on a CPU host, whose memory ranks share.
    """
    fullest = fullest_of(checked.schedule.header.mesh, dict(enumerate(walks(checked))))
    return allocated_for((allocations_of(checked, rank) for rank in fullest), cluster, name)


def fullest_of(mesh: Mesh, walked: Mapping[int, MemoryWalk]) -> list[int]:
    """Return of each stage of a pipeline the rank that allocates most, of equal ones the last, by walks of ranks."""
    found: dict[int, int] = {}
    for rank in sorted(walked, key=lambda rank: (walked[rank].peak_bytes, rank)):
        found[mesh.place(rank)["pp"]] = rank
    return [found[stage] for stage in sorted(found)]


def allocated_for(stages: Iterable[Allocations], cluster: Cluster, name: AllocatorName | None) -> Allocated | None:
    """Return the same for one rank of each stage, by what its steps take and give back; none is asked for where the
    allocator is not known.
    """
    spec = cluster.spec
    if name is None or spec.gpu.kind == "cpu":
        return None
    beside, within = spec.reserved_beside_allocator
    of = [_of_stage(found, name, spec.hbm.capacity_bytes - beside, within) for found in stages]
    needs = Reserved(max(needed.least_bytes for _, needed in of), max(needed.most_bytes for _, needed in of))
    return Allocated(name, tuple([logged for logged, _ in of]), needs)


def _of_stage(found: Allocations, name: AllocatorName, has: int, within: int) -> tuple[Reserved, Reserved]:
    """Return what logs have of a stage, and what it needs, on a GPU that has so many bytes, more or less."""
    logged = []
    free = [found.peak(name, ahead=ahead) or 0 for ahead in (False, True)]
    for ahead, peak in enumerate(free):
        fits = peak if peak <= has else found.peak(name, ahead=bool(ahead), limit=has)
        logged.append(fits or peak)
    limits = [limit for limit in (has - within, has + within) if limit < free[0]]
    may_do = [limit for limit in limits if found.peak(name, ahead=False, limit=limit) is not None]
    return Reserved(*logged), Reserved(min([free[0], *may_do]), free[1])


def room_played(header: Header, folded: Fold, name: AllocatorName | None) -> Room:
    """Return the memory of a schedule's step, by what is played of it, with an allocator where that is known."""
    reserved = allocated(folded.checked, folded.cluster, name)
    return room_of(header, walks(folded.checked), folded.cluster, reserved)


def room_of(header: Header, walked: list[MemoryWalk], cluster: Cluster, allocator: Allocated | None = None) -> Room:
    """Return the memory of a schedule's step, by the walks of the ranks on the first devices of a cluster, and by what
    the allocator of its software reserves, where that is known.
    """
    most, spec = max(walked, key=lambda found: found.peak_bytes), cluster.spec
    shared, capacity = spec.gpu.kind == "cpu", spec.hbm.capacity_bytes
    if allocator:
        least, needed = allocator.needs.least_bytes, allocator.needs.most_bytes
        one = _limit("GPU", capacity, needed, *spec.reserved_beside_allocator)
        limits = [msgspec.structs.replace(one, early_bytes=max(0, needed - least), allocator=allocator.name)]
    else:
        held = sum(found.peak_bytes for found in walked) if shared else most.peak_bytes
        limits = [_limit("host" if shared else "GPU", capacity, held, *spec.reserved)]
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
