"""Over which ranks weights are sharded by ZeRO's stages (arXiv:1910.02054 §5), FSDP (arXiv:2304.11277) being the third;
and what these send of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sim.schedule.ir.program import Communicator
from sim.schedule.model.scope import ADAPTERS, LAYER, trained, units, updated
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions
from sim.words.workload import DTYPE_BYTES, Workload, accumulation_dtype


class Shards(NamedTuple):
    """Over which ranks weights are sharded and their gradients summed; each None where there is one rank."""

    within: Communicator | None = None
    """Gathers weights. At stage 0 None, too."""
    gradients: Communicator | None = None
    """The same ranks: sums gradients. The same communicator, or one with a stream of its own."""
    across: Communicator | None = None
    """Those that have the same shards in all replicas, where each replica has shards of all."""
    norm: Communicator | None = None
    """Sums squares of gradients: all that own different ones, of shards or of stages of a model."""

    @property
    def declared(self) -> tuple[Communicator, ...]:
        """All that there are."""
        return tuple(dict.fromkeys(filter(None, self)))


def shards_of(mesh: Mesh, options: LayerOptions) -> Shards:
    """Return the communicators of a mesh, of HSDP (arXiv:2304.11277 §3.2.2) where shards lie within its replicas."""
    hybrid = options.shards == "replica"
    across = mesh.groups("dp")
    within = mesh.groups("ring", "ulysses") if hybrid else mesh.groups("dp", "ring", "ulysses")
    several, gathers = len(within[0]) > 1, options.zero_stage > 0
    weights, gradients = (Communicator(name=name, groups=within) for name in ("weights", "gradients"))
    shared = gathers and options.weight_communicators == "one"
    return Shards(
        within=weights if several and gathers else None,
        gradients=(weights if shared else gradients) if several else None,
        across=Communicator(name="replicas", groups=across) if hybrid and len(across[0]) > 1 else None,
        norm=weights if several and gathers and options.reduce_to == "owner" else None,
    )


def moved_bytes(workload: Workload, mesh: Mesh, options: LayerOptions) -> int:
    """Return what is sent of weights and gradients, over all ranks.

    (P-1) bytes for each byte that P ranks gather or reduce-scatter, twice that if they reduce it to all. Weights of
    layers are gathered for both passes over each micro-batch at stage 3, of both ends once for each; below it all once,
    where they are sharded. Gradients are summed for each micro-batch from stage 2 on, below it and with sync=last once.
    Frozen weights are gathered at stage 3 alone, and have none.
    """
    own, wide = DTYPE_BYTES[workload.dtype], DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    on_wire = own if options.reduce == "model" else wide
    hybrid, stage = options.shards == "replica", options.zero_stage
    groups, ranks = (mesh.dp, mesh.size // mesh.dp) if hybrid else (1, mesh.size)
    gathers = options.micro_batches if stage == 3 else 1
    sums = options.micro_batches if stage >= 2 and options.sync == "every" else 1
    total = gathered = 0
    for unit in units(workload):
        (size,) = unit.flat.shape(workload.model)
        size = part_of(size, ranks) * ranks if stage else size
        total += 0 if unit.frozen else size
        if stage == 3 or (stage and not unit.frozen):
            gathered += gathers * size * (2 if stage == 3 and unit.name in {LAYER, ADAPTERS} else 1)
    to_owners = stage > 0 and options.reduce_to == "owner"
    summed = sums * total * on_wire * (1 if to_owners else 2)
    squares = 2 * len(trained(workload)) * wide if to_owners else 0
    across = 2 * (groups - 1) * sums * total * on_wire * (1 if to_owners else ranks)
    return groups * (ranks - 1) * (gathered * own + summed + squares) + across


def part_of(size: int, parts: int) -> int:
    """Return how many elements each of some equal parts has, the last of which are padded (arXiv:2304.11277 §3.2.1)."""
    return -(-size // parts)


def rows_later(
    workload: Workload, shards: Shards, options: LayerOptions, role: int, owner: int
) -> dict[str, int] | None:
    """Return by the tensors of ports how many rows later those are that ``owner`` owns than those that ``role`` does;
    None where its program may differ from that of ``role`` in more: where either owns fewer than others, or takes them
    from where they lie among all.
    """
    within = shards.within
    if within is None or options.reduce_to == "all" or len(within.group_of(role)) != len(within.group_of(owner)):
        return None
    here, there = within.position(role), within.position(owner)
    each, full = _rows_of_each(workload, len(within.group_of(role)))
    if max(here, there) >= full:
        return None
    return {name: rows * (there - here) for name, rows in each.items()}


@lru_cache(maxsize=64)
def _rows_of_each(workload: Workload, parts: int) -> tuple[dict[str, int], int]:
    """Return by the tensors of ports how many rows each of some equal parts has, and how many parts have so many: none
    where that is not the same in all units.
    """
    each: dict[str, int] = {}
    full = parts
    for unit in units(workload):
        (size,) = unit.flat.shape(workload.model)
        rows = part_of(size, parts)
        full = min(full, size // rows)
        for tensor in (*unit.states, unit.working):
            for port in (tensor, updated(tensor)):
                if each.setdefault(port.name, rows) != rows:
                    return {}, 0
    return each, full
