"""Schedules of every scope around any distributed attention: alone, in transformer layers, or in a training step, whose
layers stand between embedding and loss.

What a layer computes is in ``block``, and what a step's ends do in ``ends``. ``passes`` writes layers, ``step`` what a
rank does with them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import mask_of, restarted
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.renaming import Renaming, tokens_later
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import checkpoint, offloaded
from sim.schedule.model.ends import head_of
from sim.schedule.model.equations import Block, Equation, back
from sim.schedule.model.outside import Embedding, Entry, Exit, FromOutside, Loss, ToOutside
from sim.schedule.model.passes import LayerWriter
from sim.schedule.model.projections import made_again, with_projections_apart
from sim.schedule.model.saving import Chosen, saving
from sim.schedule.model.scope import layers_of, units
from sim.schedule.model.step import Chunk, StepWriter, one_stage
from sim.schedule.model.tiling import block_in_tiles, whole
from sim.schedule.model.weights.flat import Flat
from sim.schedule.model.weights.params import Replicated
from sim.schedule.model.weights.shards import Shards, moved_bytes, rows_later, shards_of
from sim.schedule.write.attention import (
    DistributedAttention,
    Shard,
    attention_flops,
    attention_program,
)
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Axis, Mesh
from sim.words.options import LayerOptions
from sim.words.workload import Workload

GRADIENTS = "gradients"
"""The communicator that sums the gradients of weights over all ranks."""


class AttentionPlan(NamedTuple):
    """What ``build_around`` needs to make a schedule of any scope around an attention."""

    name: str
    communicators: tuple[Communicator, ...]
    shard: Callable[[int], Shard]
    """Which tokens and heads a rank owns."""
    attention: Callable[[ProgramBuilder], DistributedAttention]
    wire_bytes: Callable[[Workload], int]
    """What attention of one layer sends over all ranks of one replica in the passes of a workload, by the paper's
    formula."""
    source: str
    flops: Callable[[Workload], int] = attention_flops
    """What attention of one layer computes over all ranks of one replica."""
    computes: Literal["softmax", "linear"] = "softmax"
    partwise: bool = False
    """Whether it asks for q, k and v part by part: see ``PartwiseAttention``."""
    projects_again: bool = False
    """Whether it asks for them backward, too."""
    laid_out_bytes: Callable[[Workload], int] = lambda _: 0
    """What it sends of one layer to lay out q, k and v again: see ``LaysOut``."""
    keeps_inputs: bool = False
    """Whether it keeps q, k or v in a form of its own, so that computing them again spares nothing."""
    alike: tuple[Axis, ...] = ()
    """Along which axes ranks do the same in a layer, but for tokens, shards, and peers, whose numbers differ as theirs:
    what they do is then written once."""


def build_around(
    plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions = LayerOptions()
) -> Schedule:
    """Return the schedule of the workload's scope: attention alone, or layers around it; every data-parallel
    replica does the same as the first, with a batch of its own, and maybe shards.
    """
    _require_takes(plan, workload, options)
    layers, step = workload.scope != "attention", workload.scope == "step"
    part = msgspec.structs.replace(workload, batch=workload.batch // options.micro_batches)
    block, *others = [
        block_in_tiles(options.mlp if step else "whole", one, num_tokens(plan.shard(0).tokens), options.modules)
        for one, _ in part.kinds()
    ]
    block, *others = [with_projections_apart(one) if plan.partwise else one for one in (block, *others)]
    point = checkpoint(block, options.checkpoint if step else "none")
    if point.lays_out and plan.keeps_inputs:
        raise InputError(
            f"`set` schedule.checkpoint={options.checkpoint} computes q, k and v again, but {plan.name} keeps them in "
            f"a form of its own with these options: add q+k+v to the list, or leave out `set` schedule.recompute and "
            f"schedule.ring_backward"
        )
    names = offloaded(block, options.offloaded, point)
    if names is not None and options.activations == "hbm":
        raise InputError(
            f"`set` schedule.offloaded={options.offloaded}, but activations stay on the GPU: leave it out, or set "
            f"schedule.activations=host"
        )
    chosen = None if names is None else Chosen(names, block)
    alike = mesh.groups("dp", "ring", "ulysses")
    reduces = layers and not step and workload.backward and len(alike[0]) > 1
    gradients = (Communicator(name=GRADIENTS, groups=alike),) if reduces else ()
    shards = shards_of(mesh, options) if step else Shards()
    header = Header(
        name=plan.name,
        workload=workload,
        mesh=mesh,
        options=options.of_scope(workload.scope),
        communicators=plan.communicators + gradients + shards.declared,
        claims=_claims(plan, workload, mesh, options, block),
    )

    likeness = _Likeness(plan, workload, mesh, options, shards)
    across_replicas = shards.within is not None and options.shards == "all" and mesh.dp > 1

    def program(rank: int) -> Program:
        """Return what a rank does: what the first one of those that do the same does, or else the one in its place in
        the first replica, with tokens, peers and shards of its own.
        """
        role = mesh.role(rank)
        for one in dict.fromkeys((mesh.first(role, *plan.alike), role) if layers else ()):
            renaming = likeness.renaming(one, rank)
            if renaming is not None:
                with suppress(LookupError):  # it turns tokens by other positions than those that it has
                    return of_role(one) if rank == one else of_role(one).renamed(renaming)
        own, replica = written(rank), mesh.replica(rank)
        return own if rank == role else own.renamed(Renaming(rank - role, replica * workload.batch))

    def written(rank: int) -> Program:
        """Return the program of the one in its place, with the shards of a rank."""
        role = mesh.role(rank)
        b = ProgramBuilder(role, workload, mesh.dp)
        if not layers:
            b.workload = workload.of_layer(0)
            return attention_program(b, plan.shard(role), plan.attention)
        tokens, kept = plan.shard(role).tokens, saving(b, options.activations, chosen, options.offload_from)
        params = Flat(b, shards, options, rank, units(workload)) if step else Replicated(b, gradients, units(workload))
        kinds = []
        for number, ((one, _), its) in enumerate(zip(workload.kinds(), (block, *others), strict=True)):
            b.workload = one
            keeps = checkpoint(its, options.checkpoint if step else "none")
            kinds.append(LayerWriter(b, its, tokens, plan.attention(b), params, kept, whole, keeps, number))
        b.workload = workload

        def ends() -> tuple[Entry, Exit]:
            if not step:
                return FromOutside(b, tokens, block.x), ToOutside(b, tokens, block.x)
            head = Loss(b, tokens, params, whole, options.loss, options.modules)
            return Embedding(b, tokens, params, whole, head), head

        count, waits = options.micro_batches, options.host_waits == "micro-batch"
        chunks = {0: Chunk(layers_of(workload), ends)}
        writer = StepWriter(b, chunks, tuple(kinds), params, count, waits, options.rotary_table)
        return writer.program(one_stage(0, 1, count, 1))

    of_role, last = cache(written), mesh.size - 1
    # The last rank owns no more rows than any other one.
    shards_alike = across_replicas and rows_later(workload, shards, options, mesh.role(last), last) is not None
    return Schedule(header, program, replicated=not across_replicas, shards_alike=shards_alike)


class _Likeness(NamedTuple):
    """Which ranks do the same in the layers of a schedule."""

    plan: AttentionPlan
    workload: Workload
    mesh: Mesh
    options: LayerOptions
    shards: Shards

    def renaming(self, one: int, rank: int) -> Renaming | None:
        """Return how what one rank does becomes what another one does, if both do the same; None where shards, or spans
        of tokens, are unlike, or positions are none of the sequence.
        """
        workload, mesh = self.workload, self.mesh
        here, there = self.plan.shard(one).tokens, self.plan.shard(mesh.role(rank)).tokens
        tokens = tokens_later(here, there)
        rows = rows_later(workload, self.shards, self.options, one, rank) if self.shards.within else {}
        if tokens is None or rows is None:
            return None
        if tokens and any(restarted(some, mask_of(workload)) != some for some in (here, there)):
            return None
        return Renaming(rank - one, mesh.replica(rank) * workload.batch, rows, tokens)


def _require_takes(plan: AttentionPlan, workload: Workload, options: LayerOptions) -> None:
    """Raise InputError where an option is of another scope, or does not go with the workload."""
    layers = workload.scope != "attention"
    if options.activations != "hbm" and not layers:
        raise InputError(
            "activations of scope 'attention' stay where they are: leave out `set` schedule.activations, or set "
            "`scope` layer"
        )
    if options.modules != "fused" and not layers:
        raise InputError(
            f"`set` schedule.modules={options.modules} is of norms and MLPs, and scope 'attention' has none: leave it "
            f"out, or set `scope` layer or step"
        )
    if workload.attention is not msgspec.UNSET and plan.computes == "softmax":
        raise InputError(f"schedule {plan.name!r} is of softmax attention: set `schedule` to linear")
    if options.micro_batches < 1 or workload.batch % options.micro_batches:
        allowed = [count for count in range(1, min(workload.batch, 64) + 1) if workload.batch % count == 0]
        raise InputError(
            f"`set` schedule.micro_batches={options.micro_batches} does not divide the {workload.batch} sequences of a "
            f"replica's batch: allowed are {', '.join(map(str, allowed))}; or set `batch` to a multiple of it"
        )


def _claims(plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions, block: Block) -> Claims:
    """Attention by its paper, in every replica; the matrix products of the block; what moves weights and gradients."""
    dp, step, passes, laid_out, gemms = mesh.dp, workload.scope == "step", [workload], 0, gemm_flops(workload, block)
    if plan.partwise and workload.backward:
        gemms += gemm_flops_again(workload, made_again(block))
    if plan.projects_again and workload.backward:
        gemms += gemm_flops_again(workload, block.projections)
    if step:
        point = checkpoint(block, options.checkpoint)
        forward = msgspec.structs.replace(workload, scope="attention", layers=1, passes="forward")
        passes += [forward] if point.attends else []
        laid_out = plan.laid_out_bytes(forward) if point.lays_out else 0
        projections = block.projections if point.attends else ()
        gemms += gemm_flops_again(workload, (*point.again.before, *projections, *point.again.after))
    layers = workload.layers
    flops, sent = (
        dp * sum(of(one) * count for whole in passes for one, count in whole.kinds(layers))
        for of in (plan.flops, plan.wire_bytes)
    )
    wire_bytes = sent + dp * layers * laid_out
    if workload.scope == "attention":
        return Claims(attention_flops=flops, wire_bytes=wire_bytes, source=plan.source)
    of_weights = moved_bytes(workload, mesh, options) if step else Replicated.reduced_bytes(workload, mesh.size)
    return Claims(
        attention_flops=flops,
        gemm_flops=dp * gemms,
        wire_bytes=wire_bytes + of_weights,
        source=f"{plan.source}; 6 FLOPs per token and weight (arXiv:2001.08361 §2.1), 2 (P-1) bytes per gradient byte",
    )


def gemm_flops(workload: Workload, block: Block | None = None) -> int:
    """Return the FLOPs of all linear layers over all ranks of a replica: 2 per token and weight of each product."""
    if workload.scope == "attention":
        return 0
    block = block or block_of(workload.model)
    equations = [*block.forward.before, *block.projections, *block.forward.after]
    if workload.backward:
        equations += [*block.backward.before, *back(*block.projections), *block.backward.after]
    per_token = workload.layers * _gemm_flops(equations, workload)
    if workload.scope == "step":
        head = head_of(workload.model)
        per_token += _gemm_flops((*head.forward, *head.backward), workload)
    return per_token * workload.batch * workload.seq


def gemm_flops_again(workload: Workload, equations: Iterable[Equation]) -> int:
    """Return the FLOPs of linear layers whose equations are computed again, over all ranks of a replica."""
    per_token = _gemm_flops(equations, workload) if workload.scope != "attention" else 0
    return workload.layers * per_token * workload.batch * workload.seq


def _gemm_flops(equations: Iterable[Equation], workload: Workload) -> int:
    return sum(one.gemm_flops(workload.model) for one in equations)
