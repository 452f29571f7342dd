"""Schedules of every scope around any distributed attention: alone, in transformer layers, or in a training step, whose
layers stand between embedding and loss.

What a layer computes is in ``block``, and what a step's ends do in ``ends``. ``passes`` writes layers, ``step`` what a
rank does with them in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens, mask_of, restarted
from sim.schedule.ir.program import Claims, Communicator, Header, Later, Program, Schedule
from sim.schedule.ir.renaming import Renaming, tokens_later
from sim.schedule.ir.shares import Share, computed_model, workload_of_share
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
from sim.schedule.model.tensor.buffers import stand
from sim.schedule.model.tensor.group import (
    Group,
    alike_of,
    copies_of,
    ends_bytes,
    group_of,
    own_tokens,
    sent_bytes,
    share_of,
)
from sim.schedule.model.tiling import Tiling, block_in_tiles, whole
from sim.schedule.model.weights.flat import Flat
from sim.schedule.model.weights.params import Params, Replicated
from sim.schedule.model.weights.shards import Ownership, Shards, moved_bytes, shards_of
from sim.schedule.write.attention import (
    DistributedAttention,
    Shard,
    attention_flops,
    attention_program,
)
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.stretches import Stretches
from sim.schedule.write.traces import Traces
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
    plan: AttentionPlan | Callable[[Workload], AttentionPlan],
    workload: Workload,
    mesh: Mesh,
    options: LayerOptions = LayerOptions(),
) -> Schedule:
    """Return the schedule of the workload's scope: attention alone, or layers around it; every data-parallel
    replica does the same as the first, with a batch of its own, and maybe shards.

    What makes a plan of a workload is asked for one of each sequence where these have documents of their own. Raises
    InputError where they have, and there is one plan of all.
    """
    plans = _plans(plan, workload)
    plan = plans[0]
    _require_takes(plan, workload, mesh, options)
    layers, step = workload.scope != "attention", workload.scope == "step"
    of_share, group = workload_of_share(workload, mesh.tp), group_of(mesh) if layers else None
    alike = alike_of(mesh, workload.model) if layers else ()
    blocks = tuple([_blocks(one, form, options) for one, form in zip(plans, of_share.forms, strict=True)])
    (block, *_), *_ = blocks
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
    if plan.partwise:
        _require_whole_passes(plan, stages, options)
    if layers:
        for one, form in zip(plans, of_share.forms, strict=True):
            own_tokens(mesh, 0, one.shard(0).tokens, form)  # which refuses tokens that do not divide
    shards = shards_of(mesh, options, workload.model, stages.both_ends, stages.copies) if step else Shards()
    of_plans = dict.fromkeys([communicator for one in plans for communicator in one.communicators])
    header = Header(
        name=plan.name,
        workload=workload,
        mesh=mesh,
        options=options.of_scope(workload.scope, mesh.tp),
        communicators=(
            *(*of_plans, *gradients, *stages.links, *dict.fromkeys((*alike, *shards.declared))),
            *(copies_of(mesh, options) if layers else ()),
        ),
        claims=_claims(plans, workload, mesh, options, block, stages),
    )

    ranks = _Ranks(
        plans=plans, whole=workload, workload=of_share, mesh=mesh, options=options, blocks=blocks,
        chosen=chosen, gradients=gradients, shards=shards, stages=stages, group=group, alike=alike,
    )  # fmt: skip
    return Schedule(
        header,
        ranks.program,
        replicated=not ranks.own_shards,
        later=ranks.later,
        kind=ranks.kind,
        outline=ranks.outline,
    )


def _plans(plan: AttentionPlan | Callable[[Workload], AttentionPlan], workload: Workload) -> tuple[AttentionPlan, ...]:
    """Return the plan of each form of sequences."""
    if not isinstance(plan, AttentionPlan):
        return tuple(map(plan, workload.forms))
    if workload.sequences:
        raise InputError(
            f"schedule {plan.name!r} does not play `documents` of each micro-batch yet: choose another `schedule`, "
            f"such as ring, zigzag, allgather, ulysses or usp, or give documents that all sequences share"
        )
    return (plan,)


def _blocks(plan: AttentionPlan, workload: Workload, options: LayerOptions) -> tuple[Block, ...]:
    """Return what layers of each kind compute of a micro-batch of sequences of a form."""
    step, rows = workload.scope == "step", num_tokens(plan.shard(0).tokens)
    batch = workload.batch // options.micro_batches or 1  # of a form there is one sequence
    products = "apart" if plan.partwise else options.products
    if products == "joined-views" and options.activations != "hbm":
        products = "joined"  # q is copied by itself, and nothing beside it stays
    found = [
        block_in_tiles(options.mlp if step else "whole", one, rows, options.modules, products)
        for one, _ in msgspec.structs.replace(workload, batch=batch).kinds()
    ]
    return tuple([with_projections_apart(one) if plan.partwise else one for one in found])


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
    if workload.sequences and options.micro_batches != workload.batch:
        raise InputError(
            f"`set` schedule.micro_batches={options.micro_batches}: {workload.batch} sequences with `documents` of "
            f"their own are a micro-batch each; set it to {workload.batch}"
        )
    if options.micro_batches < 1 or workload.batch % options.micro_batches:
        allowed = [count for count in range(1, min(workload.batch, 64) + 1) if workload.batch % count == 0]
        raise InputError(
            f"`set` schedule.micro_batches={options.micro_batches} does not divide the {workload.batch} sequences of a "
            f"replica's batch: allowed are {', '.join(map(str, allowed))}; or set `batch` to a multiple of it"
        )


def _require_whole_passes(plan: AttentionPlan, stages: Stages, options: LayerOptions) -> None:
    """Raise InputError where stages make gradients of weights later than those of inputs."""
    if stages.splits_backward:
        raise InputError(
            f"`set` schedule.pipeline_schedule={options.pipeline_schedule} makes gradients of weights later than those "
            f"of inputs, and schedule {plan.name!r}, which projects q, k and v part by part, makes them together: "
            f"allowed are 1f1b, gpipe, interleaved and looped-bfs; or choose another `schedule`"
        )


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """Writes the programs of all ranks of a schedule."""

    plans: tuple[AttentionPlan, ...]
    """Of the forms of sequences."""
    whole: Workload
    """Of all of the model's weights."""
    workload: Workload
    """Of what a rank has of the model's weights."""
    mesh: Mesh
    options: LayerOptions
    blocks: tuple[tuple[Block, ...], ...]
    """Of the forms of sequences, of the model's kinds of layers."""
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

    def later(self) -> Later:
        """See Schedule: most replicas, of those that are alike, are written as the first one of these."""
        mesh, alike = self.mesh, dict[Hashable, list[int]]()
        for replica in range(mesh.dp) if self.own_shards else ():
            alike.setdefault(tuple(map(self.kind, mesh.at({"dp": [replica]}))), []).append(replica)
        most = max(alike.values(), key=len, default=[])
        rows = self._rows_between(most) if len(most) > 1 else {}
        return Later(rows, tuple([most[0] if one in most else one for one in range(mesh.dp)])) if rows else Later()

    def _rows_between(self, replicas: Sequence[int]) -> dict[str, int]:
        """Return by tensor how many rows of it those of a replica are behind those of the one before it, for some
        replicas; none where these are not as many for all ranks.
        """
        mesh, found = self.mesh, list[dict[str, int] | None]()
        for role in mesh.first_replica:
            at = [self._positions[rank] for rank in mesh.along(role, "dp", range(mesh.dp))]
            rows, each = self._owning(mesh.place(role)["tp"]).rows, at[1] - at[0]
            alike = all(at[replica] - at[0] == replica * each for replica in replicas)
            found.append({name: each * of_part for name, of_part in rows.items()} if rows and alike else None)
        return found[0] if found[0] and all(one == found[0] for one in found) else {}

    @cached_property
    def _of_role(self) -> Callable[[int], Program]:
        return cache(self._written)

    def program(self, rank: int) -> Program:
        """Return what a rank does: what the first one of those that do the same does, or else the one in its place in
        the first replica, with tokens, peers and shards of its own.
        """
        mesh, role = self.mesh, self.mesh.role(rank)
        for one in dict.fromkeys((mesh.first(role, *self.plans[0].alike), role)):
            renaming = self._renaming(one, rank) if rank != one else None
            if renaming is not None:
                with suppress(LookupError):  # it turns tokens by other positions than those that it has
                    return self._of_role(one).renamed(renaming)
        own = self._of_role(rank)
        return own if rank == role else own.renamed(Renaming(rank - role, mesh.replica(rank) * self.workload.batch))

    def _renaming(self, one: int, rank: int) -> Renaming | None:
        """Return how what one rank does becomes what another one does, if both do the same; None where shards, or spans
        of tokens, are unlike, or positions are none of the sequence.
        """
        workload, mesh = self.workload, self.mesh
        (here, there), *others = [(plan.shard(one).tokens, plan.shard(mesh.role(rank)).tokens) for plan in self.plans]
        tokens, rows = tokens_later(here, there), self._rows_later(one, rank)
        if others and any(own != other for own, other in ((here, there), *others)):
            return None
        if tokens is None or rows is None:
            return None
        if tokens and any(restarted(some, mask_of(workload.forms[0])) != some for some in (here, there)):
            return None
        return Renaming(rank - one, mesh.replica(rank) * workload.batch, rows, tokens)

    def _rows_later(self, one: int, rank: int) -> dict[str, int] | None:
        """Return by the tensors of ports how many rows later those are that a rank owns than those of another one; None
        where its program may differ from that one's in more.
        """
        if not self.shards.within:
            return {}
        rows = self._owning(self.mesh.place(rank)["tp"]).rows
        if rows is None or self.kind(one) != self.kind(rank):
            return None
        later = self._positions[rank] - self._positions[one]
        return {name: each * later for name, each in rows.items()}

    @cached_property
    def kind(self) -> Callable[[int], Hashable]:
        """See Schedule: how many tokens and rows of weights a rank has, and which of these it counts in norms; which
        they are where it takes them from where they lie among all.
        """
        return cache(self._kind)

    @cached_property
    def outline(self) -> Callable[[int], Hashable]:
        """See Schedule."""
        return cache(partial(self._kind, counts=False))

    def _kind(self, rank: int, *, counts: bool = True) -> Hashable:
        if self.workload.scope == "attention":
            return 0
        mesh, options, at = self.mesh, self.options, self._positions.get(rank, 0)
        member = mesh.place(rank)["tp"]
        owned = self._owning(member).kind(at, counts=counts) if self.workload.scope == "step" else ()
        of_all = at if options.reduce_to == "all" or options.cuts_sums else 0
        return owned, of_all, member if options.begins_with_own else 0, self._num_tokens(mesh.role(rank))

    @cached_property
    def _positions(self) -> dict[int, int]:
        """By rank which of the parts of weights it owns, where these are sharded."""
        within = self.shards.within
        return {rank: at for group in within.groups for at, rank in enumerate(group)} if within else {}

    @cached_property
    def _owning(self) -> Callable[[int], Ownership]:
        """Of the members of tensor-parallel groups."""
        parts = len(self.shards.within.groups[0]) if self.shards.within else 1
        model, tp = self.whole.model, self.mesh.tp
        return cache(lambda member: Ownership(self.workload, Share(model, member, tp), parts))

    @cached_property
    def _num_tokens(self) -> Callable[[int], Hashable]:
        """How many of a rank's own tokens follow each other, by the forms of sequences."""

        def counts(role: int) -> Hashable:
            found = [self._shared(role, *one)[0] for one in zip(self.plans, self.workload.forms, strict=True)]
            return tuple([tuple([span.size for span in tokens]) for tokens in found])

        return cache(counts)

    def _in_layers(self, rank: int) -> Hashable:
        """Return what decides what a rank does in a layer: its place in its stage, as stages hand on the same tokens,
        and what it owns of weights.
        """
        return self.mesh.first(rank, "pp"), self._positions.get(rank), self.kind(rank)

    @cached_property
    def _traces(self) -> defaultdict[Hashable, Traces]:
        return defaultdict(Traces)

    @cached_property
    def _stretches(self) -> Stretches:
        return Stretches()

    def _written(self, rank: int) -> Program:
        """Return the program of the one in its place, with the shards of a rank."""
        plans, workload, mesh, options, stages = self.plans, self.workload, self.mesh, self.options, self.stages
        role = mesh.role(rank)
        major = mesh.tp > 1 and options.memory_order == "sbh"
        share, traces = share_of(mesh, role, self.whole.model), self._traces[self._in_layers(rank)]
        if workload.scope == "attention":
            b = ProgramBuilder(role, workload, mesh.dp, share, token_major=major, stretches=self._stretches)
            b.workload = workload.of_layer(0)
            return attention_program(b, plans[0].shard(role), plans[0].attention)
        b = ProgramBuilder(role, workload, mesh.dp, share, token_major=major, traces=traces)
        stage = mesh.place(role)["pp"]
        layers = {number: stages.layers(number) for number in stages.chunks_of(stage)}
        own = tuple([unit for unit in units(workload) if stages.owns(stage, unit)])
        kept = saving(b, options.activations, self.chosen, options.offload_from, tuple(layers.values()))
        shared = [self._shared(role, plan, form) for plan, form in zip(plans, workload.forms, strict=True)]
        step = workload.scope == "step"
        params = (
            Flat(b, self.shards, options, rank, own)
            if step
            else Replicated(b, self.gradients, own, self.alike, sequence=options.tp_sequence)
        )
        writers = []
        for form, (plan, (tokens, group), blocks) in enumerate(zip(plans, shared, self.blocks, strict=True)):
            kinds, tiling = [], group.tiling if group else whole
            for number, ((one, _), its) in enumerate(zip(workload.forms[form].kinds(), blocks, strict=True)):
                b.workload = one
                keeps = checkpoint(its, options.checkpoint if step else "none")
                attention = plan.attention(b)
                kinds.append(LayerWriter(b, its, tokens, attention, params, kept, tiling, keeps, number, group))
            writers.append(tuple(kinds))
        if self.group:
            b.take(0, options.micro_batches, "forward")
            stand(b, max([plan.shard(role).tokens for plan in plans], key=num_tokens), options)
        b.workload = workload
        borders = stages.borders(b, shared, self.blocks[0][0].x)
        chunks = self._chunks(b, shared, params, layers, borders)
        waits, come = options.host_waits != "never", borders.come
        writer = StepWriter(b, chunks, tuple(writers), params, options.micro_batches, waits, options.rotary_table, come)
        return writer.program(stages.items(stage))

    def _shared(self, role: int, plan: AttentionPlan, form: Workload) -> tuple[Tokens, Group | None]:
        """Return a rank's own tokens of sequences of a form, and the group that has all that attention takes."""
        every = plan.shard(role).tokens
        divided = own_tokens(self.mesh, role, every, form)
        tokens = divided if self.options.tp_sequence else every
        return tokens, Group(self.group, every, self.options) if self.group else None

    def _chunks(
        self,
        b: ProgramBuilder,
        shared: Sequence[tuple[Tokens, Group | None]],
        params: Params,
        layers: Mapping[int, range],
        borders: Borders,
    ) -> dict[int, Chunk]:
        """Return the chunks of a rank by number, each of some layers, with what these stand between."""
        of_layers, x = layers_of(self.workload), self.blocks[0][0].x
        if self.workload.scope != "step":
            ((tokens, group),) = shared
            return {0: Chunk(of_layers, lambda: (FromOutside(b, tokens, x, group), ToOutside(b, tokens, x, group)))}
        options, stages, found = self.options, self.stages, dict[int, Chunk]()
        first, last = ends_of(self.workload)

        def ends(number: int) -> tuple[Entry, Exit]:
            tokens, group = shared[b.form]
            tiling: Tiling = group.tiling if group else whole
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
    plans: Sequence[AttentionPlan], workload: Workload, mesh: Mesh, options: LayerOptions, block: Block, stages: Stages
) -> Claims:
    """Attention by its paper, in every replica, of each share of the heads; the matrix products of the block; what
    moves weights and gradients, and tokens between members of a tensor-parallel group and between stages.
    """
    of_share = workload_of_share(workload, mesh.tp)
    whole = msgspec.structs.replace(workload, model=computed_model(workload.model, mesh.tp))
    dp, step, gemms, plan = mesh.dp, workload.scope == "step", gemm_flops(whole, block), plans[0]
    written = [*block.forward, block.projections]
    if workload.backward:
        written += [*block.backward, back(*block.projections)]
    if plan.partwise and workload.backward:
        gemms += gemm_flops_again(whole, made_again(block))
    if plan.projects_again and workload.backward:
        gemms += gemm_flops_again(whole, block.projections)
    if step:
        point = checkpoint(block, options.checkpoint)
        projections = block.projections if point.attends else ()
        gemms += gemm_flops_again(whole, (*point.again.before, *projections, *point.again.after))
        written += [*point.again, projections]
    layers, flops, sent, laid_out = workload.layers, 0, 0, 0
    for number, times in Counter(map(workload.form_of, range(len(workload.sequences or (None,))))).items():
        one, passes = plans[number], [of_share.forms[number]]
        if step:
            forward = msgspec.structs.replace(passes[0], scope="attention", layers=1, passes="forward")
            passes += [forward] if point.attends else []
            laid_out += times * one.laid_out_bytes(forward) if point.lays_out else 0
        visited = [(work, times * count) for each in passes for work, count in each.kinds(layers)]
        flops += mesh.tp * dp * sum(one.flops(work) * count for work, count in visited)
        sent += mesh.tp * dp * sum(one.wire_bytes(work) * count for work, count in visited)
    sent_by_group = partial(sent_bytes, workload, mesh.tp, sequence=options.tp_sequence)
    of_group = layers * sent_by_group(written) + (ends_bytes(workload, mesh.tp, options) if step else 0)
    if workload.backward:
        more = sent_by_group(backward_apart(block)) - sent_by_group(block.backward)
        of_group += more * stages.tokens_apart(workload) // workload.num_tokens
    wire_bytes = sent + dp * (layers * mesh.tp * laid_out + of_group + stages.handed_bytes(workload))
    if workload.scope == "attention":
        return Claims(attention_flops=flops, wire_bytes=wire_bytes, source=plan.source)
    of_weights = (
        moved_bytes(workload, mesh, options, stages.copies)
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
    return per_token * workload.num_tokens


def gemm_flops_again(workload: Workload, equations: Iterable[Equation]) -> int:
    """Return the FLOPs of linear layers whose equations are computed again, over all ranks of a replica."""
    per_token = _gemm_flops(equations, workload) if workload.scope != "attention" else 0
    return workload.layers * per_token * workload.num_tokens


def _gemm_flops(equations: Iterable[Equation], workload: Workload) -> int:
    return sum(one.gemm_flops(workload.model) for one in equations)
