"""Schedules of every scope around any distributed attention: alone, in transformer layers, or in a training step, whose
layers stand between embedding and loss.

What a layer computes is in ``block``, and what a step's ends do in ``ends``. ``passes`` writes layers, ``step`` what a
rank does with them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens, mask_of, restarted
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.renaming import Renaming, tokens_later
from sim.schedule.ir.shares import computed_model, workload_of_share
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import checkpoint, offloaded
from sim.schedule.model.ends import head_of
from sim.schedule.model.equations import Block, Equation, back
from sim.schedule.model.outside import Embedding, Entry, Exit, FromOutside, Loss, ToOutside
from sim.schedule.model.passes import LayerWriter, backward_apart
from sim.schedule.model.pipeline.stages import Borders, Stages
from sim.schedule.model.projections import made_again, with_projections_apart
from sim.schedule.model.saving import Chosen, saving
from sim.schedule.model.scope import ends_of, layers_of, units
from sim.schedule.model.step import Chunk, StepWriter
from sim.schedule.model.tensor.group import Group, alike_of, ends_bytes, group_of, own_tokens, sent_bytes, share_of
from sim.schedule.model.tiling import Tiling, block_in_tiles, whole
from sim.schedule.model.weights.flat import Flat
from sim.schedule.model.weights.params import Params, Replicated
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
    stages = Stages(mesh, workload, options)
    shards = shards_of(mesh, options, workload.model, stages.both_ends) if step else Shards()
    header = Header(
        name=plan.name,
        workload=workload,
        mesh=mesh,
        options=options.of_scope(workload.scope, mesh.tp),
        communicators=(*plan.communicators, *gradients, *stages.links, *dict.fromkeys((*alike, *shards.declared))),
        claims=_claims(plan, workload, mesh, options, block, stages),
    )

    ranks = _Ranks(
        plan=plan, whole=workload, workload=of_share, mesh=mesh, options=options, blocks=(block, *others),
        chosen=chosen, gradients=gradients, shards=shards, stages=stages, group=group, alike=alike,
    )  # fmt: skip
    return Schedule(header, ranks.program, replicated=not ranks.own_shards, shards_alike=ranks.shards_alike)


def _require_takes(plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions) -> None:
    """Raise InputError where an option or a degree is of another scope, or does not go with the workload."""
    layers = workload.scope != "attention"
    if mesh.tp > 1 and not layers:
        raise InputError(
            f"`tp_degree` {mesh.tp} divides the weights of layers, and scope 'attention' has none: set it to 1, or "
            f"set `scope` layer or step"
        )
    if mesh.tp > 1 and plan.partwise and workload.model.lora_rank:
        raise InputError(
            f"`tp_degree` {mesh.tp}: adapters of {workload.model.name} are not computed in parts yet where schedule "
            f"{plan.name!r} projects q, k and v part by part; set it to 1, or choose another `schedule`"
        )
    if mesh.tp > 1 and not options.tp_sequence and workload.model.lora_rank:
        raise InputError(
            f"`set` schedule.tp_sequence=false: adapters of {workload.model.name} are shared out with sequence "
            f"parallelism alone yet; leave it out, or set `tp_degree` 1"
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


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """Writes the programs of all ranks of a schedule."""

    plan: AttentionPlan
    whole: Workload
    """Of all of the model's weights."""
    workload: Workload
    """Of what a rank has of the model's weights."""
    mesh: Mesh
    options: LayerOptions
    blocks: tuple[Block, ...]
    """Of the model's kinds of layers."""
    chosen: Chosen | None
    gradients: tuple[Communicator, ...]
    shards: Shards
    stages: Stages
    group: Communicator | None
    """Those that have shares of weights."""
    alike: tuple[Communicator, ...]
    """Those that have the same of some weights: see ``alike_of``."""

    @property
    def own_shards(self) -> bool:
        """Whether replicas differ, each rank having shards of its own."""
        return self.shards.within is not None and self.options.shards == "all" and self.mesh.dp > 1

    @cached_property
    def _of_role(self) -> Callable[[int], Program]:
        return cache(self._written)

    def program(self, rank: int) -> Program:
        """Return what a rank does: what the first one of those that do the same does, or else the one in its place in
        the first replica, with tokens, peers and shards of its own.
        """
        mesh, role = self.mesh, self.mesh.role(rank)
        layers = self.workload.scope != "attention"
        for one in dict.fromkeys((mesh.first(role, *self.plan.alike), role) if layers else ()):
            renaming = self._renaming(one, rank)
            if renaming is not None:
                with suppress(LookupError):  # it turns tokens by other positions than those that it has
                    return self._of_role(one) if rank == one else self._of_role(one).renamed(renaming)
        own = self._written(rank)
        return own if rank == role else own.renamed(Renaming(rank - role, mesh.replica(rank) * self.workload.batch))

    def _renaming(self, one: int, rank: int) -> Renaming | None:
        """Return how what one rank does becomes what another one does, if both do the same; None where shards, or spans
        of tokens, are unlike, or positions are none of the sequence.
        """
        workload, mesh = self.workload, self.mesh
        here, there = self.plan.shard(one).tokens, self.plan.shard(mesh.role(rank)).tokens
        tokens, rows = tokens_later(here, there), self._rows_later(one, rank)
        if tokens is None or rows is None:
            return None
        if tokens and any(restarted(some, mask_of(workload)) != some for some in (here, there)):
            return None
        return Renaming(rank - one, mesh.replica(rank) * workload.batch, rows, tokens)

    def _rows_later(self, one: int, rank: int) -> dict[str, int] | None:
        """Return how many rows later those are that a rank owns than those of another one: see ``rows_later``."""
        if not self.shards.within:
            return {}
        share = share_of(self.mesh, rank, self.whole.model)
        return rows_later(self.workload, self.shards, self.options, share, one, rank)

    @property
    def shards_alike(self) -> bool:
        """Whether ranks of other replicas own as many rows as those in their place in the first one."""
        mesh = self.mesh
        others = [mesh.size - 1] if mesh.tp == 1 else range(mesh.size)  # the last one owns no more rows than any other
        return self.own_shards and all(self._rows_later(mesh.role(rank), rank) is not None for rank in others)

    def _written(self, rank: int) -> Program:
        """Return the program of the one in its place, with the shards of a rank."""
        plan, workload, mesh, options, stages = self.plan, self.workload, self.mesh, self.options, self.stages
        role = mesh.role(rank)
        b = ProgramBuilder(role, workload, mesh.dp, share_of(mesh, role, self.whole.model))
        if workload.scope == "attention":
            b.workload = workload.of_layer(0)
            return attention_program(b, plan.shard(role), plan.attention)
        stage = mesh.place(role)["pp"]
        layers = {number: stages.layers(number) for number in stages.chunks_of(stage)}
        own = tuple([unit for unit in units(workload) if stages.owns(stage, unit)])
        every = plan.shard(role).tokens
        divided = own_tokens(mesh, role, every, workload)
        tokens = divided if options.tp_sequence else every
        group = Group(self.group, every, options) if self.group else None
        tiling: Tiling = group.tiling if group else whole
        kept = saving(b, options.activations, self.chosen, options.offload_from, tuple(layers.values()))
        step = workload.scope == "step"
        params = (
            Flat(b, self.shards, options, rank, own)
            if step
            else Replicated(b, self.gradients, own, self.alike, sequence=options.tp_sequence)
        )
        kinds = []
        for number, ((one, _), its) in enumerate(zip(workload.kinds(), self.blocks, strict=True)):
            b.workload = one
            keeps = checkpoint(its, options.checkpoint if step else "none")
            attention = plan.attention(b)
            kinds.append(LayerWriter(b, its, tokens, attention, params, kept, tiling, keeps, number, group))
        b.workload = workload
        borders = stages.borders(b, tokens, self.blocks[0].x)
        chunks = self._chunks(b, tokens, params, layers, borders, group)
        waits, come = options.host_waits == "micro-batch", partial(borders.come, stage)
        writer = StepWriter(b, chunks, tuple(kinds), params, options.micro_batches, waits, options.rotary_table, come)
        return writer.program(stages.items(stage))

    def _chunks(
        self,
        b: ProgramBuilder,
        tokens: Tokens,
        params: Params,
        layers: Mapping[int, range],
        borders: Borders,
        group: Group | None,
    ) -> dict[int, Chunk]:
        """Return the chunks of a rank by number, each of some layers, with what these stand between."""
        of_layers, x = layers_of(self.workload), self.blocks[0].x
        if self.workload.scope != "step":
            return {0: Chunk(of_layers, lambda: (FromOutside(b, tokens, x, group), ToOutside(b, tokens, x, group)))}
        options, stages, found = self.options, self.stages, dict[int, Chunk]()
        tiling: Tiling = group.tiling if group else whole
        first, last = ends_of(self.workload)

        def ends(number: int) -> tuple[Entry, Exit]:
            alone, head = not stages.is_last(0), None
            if stages.is_last(number):
                head = Loss(b, tokens, params, tiling, options.loss, options.modules, group, alone=alone)
            entry = borders.before(number) if number else Embedding(b, tokens, params, tiling, head, group)
            return entry, head or borders.behind(number)

        for number, its in layers.items():
            of_ends = () if number else (first,), (last,) if stages.is_last(number) else ()
            found[number] = Chunk(of_layers[its.start : its.stop], partial(ends, number), *of_ends)
        return found


def _claims(
    plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions, block: Block, stages: Stages
) -> Claims:
    """Attention by its paper, in every replica, of each share of the heads; the matrix products of the block; what
    moves weights and gradients, and tokens between members of a tensor-parallel group and between stages.
    """
    of_share = workload_of_share(workload, mesh.tp)
    whole = msgspec.structs.replace(workload, model=computed_model(workload.model, mesh.tp))
    dp, step, passes, laid_out, gemms = mesh.dp, workload.scope == "step", [of_share], 0, gemm_flops(whole, block)
    written = [*block.forward, block.projections]
    if workload.backward:
        written += [*block.backward, back(*block.projections)]
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
    sent_by_group = partial(sent_bytes, workload, mesh.tp, sequence=options.tp_sequence)
    of_group = layers * sent_by_group(written) + (ends_bytes(workload, mesh.tp, options) if step else 0)
    if workload.backward:
        more = sent_by_group(backward_apart(block)) - sent_by_group(block.backward)
        of_group += stages.visits_apart * more // options.micro_batches
    wire_bytes = sent + dp * (layers * mesh.tp * laid_out + of_group + stages.handed_bytes(workload))
    if workload.scope == "attention":
        return Claims(attention_flops=flops, wire_bytes=wire_bytes, source=plan.source)
    of_weights = (
        moved_bytes(workload, mesh, options)
        if step
        else Replicated.reduced_bytes(workload, mesh, sequence=options.tp_sequence)
    )
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
