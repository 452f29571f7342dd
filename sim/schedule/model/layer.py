"""Schedules of every scope around any distributed attention: alone, in transformer layers, or in a training step, whose
layers stand between embedding and loss.

What a layer computes is in ``block``, and what a step's ends do in ``ends``. ``passes`` writes layers, ``step`` what a
rank does with them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.shares import computed_model, workload_of_share
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
from sim.schedule.model.tensor.group import Group, alike_of, ends_bytes, group_of, own_tokens, sent_bytes, share_of
from sim.schedule.model.tiling import Tiling, block_in_tiles, whole
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
from sim.words.mesh import Mesh
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


def build_around(
    plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions = LayerOptions()
) -> Schedule:
    """Return the schedule of the workload's scope: attention alone, or layers around it; every data-parallel
    replica does the same as the first, with a batch of its own, and maybe shards.
    """
    _require_takes(plan, workload, mesh, options)
    layers, step = workload.scope != "attention", workload.scope == "step"
    of_share, group = workload_of_share(workload, mesh.tp), group_of(mesh) if layers else None
    alike = alike_of(mesh, workload.model) if layers else ()
    part = msgspec.structs.replace(of_share, batch=workload.batch // options.micro_batches)
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
    replicas = mesh.groups("dp", "ring", "ulysses")
    reduces = layers and not step and workload.backward and len(replicas[0]) > 1
    gradients = (Communicator(name=GRADIENTS, groups=replicas),) if reduces else ()
    shards = shards_of(mesh, options, workload.model) if step else Shards()
    header = Header(
        name=plan.name,
        workload=workload,
        mesh=mesh,
        options=options.of_scope(workload.scope),
        communicators=(*plan.communicators, *gradients, *dict.fromkeys((*alike, *shards.declared))),
        claims=_claims(plan, workload, mesh, options, block),
    )

    across_replicas = shards.within is not None and options.shards == "all" and mesh.dp > 1

    def program(rank: int) -> Program:
        """Return what a rank does: what the one in its place in the first replica does, with shards of its own."""
        role = mesh.role(rank)
        share = share_of(mesh, role, workload.model)
        later = rows_later(of_share, shards, options, share, role, rank) if across_replicas else None
        own = written(rank) if later is None else of_role(role)
        return own if rank == role else own.of_replica(rank - role, mesh.replica(rank) * workload.batch, later or {})

    def written(rank: int) -> Program:
        """Return the program of the one in its place, with the shards of a rank."""
        role = mesh.role(rank)
        b = ProgramBuilder(role, of_share, mesh.dp, share_of(mesh, role, workload.model))
        if not layers:
            b.workload = workload.of_layer(0)
            return attention_program(b, plan.shard(role), plan.attention)
        every, kept = plan.shard(role).tokens, saving(b, options.activations, chosen, options.offload_from)
        tokens, its_group = own_tokens(mesh, role, every, workload), Group(group, every) if group else None
        tiling: Tiling = its_group.tiling if its_group else whole
        own = units(of_share)
        params = Flat(b, shards, options, rank, own) if step else Replicated(b, gradients, own, alike)
        kinds = []
        for number, ((one, _), its) in enumerate(zip(of_share.kinds(), (block, *others), strict=True)):
            b.workload = one
            keeps = checkpoint(its, options.checkpoint if step else "none")
            kinds.append(LayerWriter(b, its, tokens, plan.attention(b), params, kept, tiling, keeps, number, its_group))
        b.workload = of_share

        def ends() -> tuple[Entry, Exit]:
            if not step:
                return FromOutside(b, tokens, block.x), ToOutside(b, tokens, block.x)
            head = Loss(b, tokens, params, tiling, options.loss, options.modules, its_group)
            return Embedding(b, tokens, params, tiling, head, its_group), head

        count, waits = options.micro_batches, options.host_waits == "micro-batch"
        chunks = {0: Chunk(layers_of(of_share), ends)}
        writer = StepWriter(b, chunks, tuple(kinds), params, count, waits, options.rotary_table)
        return writer.program(one_stage(0, 1, count, 1))

    of_role = cache(written)
    return Schedule(header, program, replicated=not across_replicas)


def _require_takes(plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions) -> None:
    """Raise InputError where an option or a degree is of another scope, or does not go with the workload."""
    layers = workload.scope != "attention"
    if mesh.tp > 1 and not layers:
        raise InputError(
            f"`tp_degree` {mesh.tp} divides the weights of layers, and scope 'attention' has none: set it to 1, or "
            f"set `scope` layer or step"
        )
    if mesh.tp > 1 and options.loss == "torch":
        raise InputError(
            f"`set` schedule.loss=torch is of logits of all of the vocabulary, and `tp_degree` {mesh.tp} divides it: "
            f"allowed are whole, chunked and unfused"
        )
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
    """Attention by its paper, in every replica, of each share of the heads; the matrix products of the block; what
    moves weights and gradients, and tokens between members of a tensor-parallel group.
    """
    of_share = workload_of_share(workload, mesh.tp)
    whole = msgspec.structs.replace(workload, model=computed_model(workload.model, mesh.tp))
    dp, step, passes, laid_out, gemms = mesh.dp, workload.scope == "step", [of_share], 0, gemm_flops(whole, block)
    written = [*block.forward, block.projections]
    written += [*block.backward, back(*block.projections)] if workload.backward else []
    if plan.partwise and workload.backward:
        gemms += gemm_flops_again(whole, made_again(block))
    if plan.projects_again and workload.backward:
        gemms += gemm_flops_again(whole, block.projections)
    if step:
        point = checkpoint(block, options.checkpoint)
        forward = msgspec.structs.replace(of_share, scope="attention", layers=1, passes="forward")
        passes += [forward] if point.attends else []
        laid_out = plan.laid_out_bytes(forward) if point.lays_out else 0
        projections = block.projections if point.attends else ()
        gemms += gemm_flops_again(whole, (*point.again.before, *projections, *point.again.after))
        written += [*point.again, projections]
    layers = workload.layers
    flops, sent = (
        mesh.tp * dp * sum(of(one) * count for work in passes for one, count in work.kinds(layers))
        for of in (plan.flops, plan.wire_bytes)
    )
    of_group = layers * sent_bytes(workload, mesh.tp, written) if workload.scope != "attention" else 0
    of_group += ends_bytes(workload, mesh.tp, options) if step else 0
    wire_bytes = sent + dp * (layers * mesh.tp * laid_out + of_group)
    if workload.scope == "attention":
        return Claims(attention_flops=flops, wire_bytes=wire_bytes, source=plan.source)
    of_weights = moved_bytes(workload, mesh, options) if step else Replicated.reduced_bytes(workload, mesh)
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
