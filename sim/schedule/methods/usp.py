"""USP: heads are split by Ulysses over U ranks, and the sequence by a ring over R (arXiv:2405.07719 §3).

An all-to-all among U ranks gives each the tokens of a ring member for H/U heads; with these it takes part in a ring.
Groups of neighbouring ranks share a node, so the order of the mesh's axes says which of the two uses the faster links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim.schedule.ir.layout import laid_out, shared_out
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.methods.ring import (
    RingAttention,
    RingOptions,
    check_backward,
    keeps_inputs,
    ring_attention,
    ring_bytes,
    ring_communicators,
)
from sim.schedule.methods.torch_ring import TorchRing
from sim.schedule.methods.ulysses import UlyssesAttention, check_heads, input_bytes, ulysses_bytes
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.attention import DistributedAttention, Shard, all_heads
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.head_trade import TradeOptions
from sim.words.mesh import Mesh
from sim.words.options import LayoutName
from sim.words.workload import Workload


@dataclass(frozen=True, kw_only=True)
class UspOptions(RingOptions, TradeOptions):
    """Options of its rings, and of its trades of heads."""

    layout: LayoutName = "zigzag"


def build(workload: Workload, mesh: Mesh, options: UspOptions = UspOptions()) -> Schedule:
    """Return USP attention over U * R ranks; raises InputError where heads or tokens do not divide over them."""
    mesh.only("usp", "ring", "ulysses")
    check_heads(workload.model, mesh)
    check_backward(workload, options)
    return around_rings(
        workload,
        mesh,
        options,
        name="usp",
        outside=UlyssesAttention,
        wire_bytes=lambda work: ulysses_bytes(work, mesh.ulysses) + ring_bytes(work, options, mesh.ring, mesh.ulysses),
        source="arXiv:2405.07719 §3; its rings as in ring-flash-attention",
        laid_out_bytes=lambda work: input_bytes(work, mesh.ulysses),
        keeps_inputs=keeps_inputs(options),
    )


def around_rings(
    workload: Workload,
    mesh: Mesh,
    options: UspOptions,
    *,
    name: str,
    outside: Callable[..., DistributedAttention],
    wire_bytes: Callable[[Workload], int],
    source: str,
    laid_out_bytes: Callable[[Workload], int] = lambda _: 0,
    keeps_inputs: bool = False,
    partwise: bool = False,
    projects_again: bool = False,
) -> Schedule:
    """Return a schedule in which ``outside`` trades heads in each Ulysses group, and what it attends to with the heads
    that a rank gets goes around a ring.
    """
    ulysses = Communicator(name="ulysses", groups=mesh.groups("ulysses"))
    rings = ring_communicators(mesh.groups("ring"), options)

    def plan(work: Workload) -> AttentionPlan:
        shares = shared_out(options.layout, work, mesh.ring, mesh.ulysses, options.sharding)
        layout = laid_out(options.layout, work, mesh.ring, options.sharding)

        def inside(b: ProgramBuilder, shard: Shard) -> RingAttention | TorchRing:
            return ring_attention(b, rings, layout, shard, options)

        def shard(rank: int) -> Shard:
            place = mesh.place(rank)
            return all_heads(work.model, shares[place["ring"]][place["ulysses"]])

        return AttentionPlan(
            name=name,
            communicators=(ulysses, *(rings.declared if mesh.ring > 1 else ())),
            shard=shard,
            attention=lambda b: outside(b, ulysses, layout[mesh.place(b.rank)["ring"]], inside, options),
            wire_bytes=wire_bytes,
            source=source,
            laid_out_bytes=laid_out_bytes,
            keeps_inputs=keeps_inputs,
            partwise=partwise,
            projects_again=projects_again,
            alike=("ulysses",),
        )

    return build_around(plan, workload, mesh, options)
