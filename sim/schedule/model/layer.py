"""Scopes "layer" and "step": transformer layers around any distributed attention, forward and backward, alone or
between embedding and loss.

Every rank computes all of a layer for its own tokens; only attention sees those of other ranks. What a layer computes
is in ``block``, and what its ends do in ``ends``; where weights and activations are, and how many tokens are taken at a
time, is in ``params``, ``saving`` and ``tiling``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Literal, NamedTuple, cast

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import COMPUTE, Hold, HostSync
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import d
from sim.schedule.ir.views import View
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import Checkpoint, checkpoint, offloaded
from sim.schedule.model.ends import head_of
from sim.schedule.model.equations import Around, Block, Equation, back
from sim.schedule.model.flat import Flat, Shards, moved_bytes, rows_later, shards_of
from sim.schedule.model.outside import Loss, Outside, Ports
from sim.schedule.model.params import Params, Reduced, Replicated, Room
from sim.schedule.model.projections import Projections, made_again, with_projections_apart
from sim.schedule.model.saving import Chosen, Saving, saving
from sim.schedule.model.scope import Unit, layers_of
from sim.schedule.model.tiling import Tiling, block_in_tiles, whole, write_all
from sim.schedule.model.write import Kept, TokenWriter, Values
from sim.schedule.write.attention import (
    DistributedAttention,
    LaysOut,
    Saved,
    Shard,
    attention_flops,
    attention_program,
)
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.inputs import PartwiseAttention
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions, LossName, ModulesName
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
    step = workload.scope == "step"
    if options.micro_batches < 1 or workload.batch % options.micro_batches:
        allowed = [count for count in range(1, min(workload.batch, 64) + 1) if workload.batch % count == 0]
        raise InputError(
            f"`set` schedule.micro_batches={options.micro_batches} does not divide the {workload.batch} sequences of a "
            f"replica's batch: allowed are {', '.join(map(str, allowed))}; or set `batch` to a multiple of it"
        )
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

    across_replicas = shards.within is not None and options.shards == "all" and mesh.dp > 1

    def program(rank: int) -> Program:
        """Return what a rank does: what the one in its place in the first replica does, with shards of its own."""
        role = mesh.role(rank)
        later = rows_later(workload, shards, options, role, rank) if across_replicas else None
        own = written(rank) if later is None else of_role(role)
        return own if rank == role else own.of_replica(rank - role, mesh.replica(rank) * workload.batch, later or {})

    def written(rank: int) -> Program:
        """Return the program of the one in its place, with the shards of a rank."""
        role = mesh.role(rank)
        b = ProgramBuilder(role, workload, mesh.dp)
        if not layers:
            b.workload = workload.of_layer(0)
            return attention_program(b, plan.shard(role), plan.attention)
        tokens, kept = plan.shard(role).tokens, saving(b, options.activations, chosen, options.offload_from)
        params = Flat(b, shards, options, rank) if step else Replicated(b, gradients)
        techniques = (options.loss, options.micro_batches) if step else ("whole", 1)
        kinds = []
        for number, ((one, _), its) in enumerate(zip(workload.kinds(), (block, *others), strict=True)):
            b.workload = one
            keeps = checkpoint(its, options.checkpoint if step else "none")
            kinds.append(
                LayerWriter(b, its, tokens, plan.attention(b), params, kept, whole, keeps, *techniques, number)
            )
        b.workload = workload
        waits = options.host_waits == "micro-batch"
        first = kinds[0]._replace(
            rotary_table=options.rotary_table, modules=options.modules, kinds=tuple(kinds), waits=waits
        )
        return first.program()

    of_role = cache(written)
    return Schedule(header, program, replicated=not across_replicas)


class LayerWriter(NamedTuple):
    """Writes the layers of one rank; what may differ between techniques is in protocols."""

    b: ProgramBuilder
    block: Block
    tokens: Tokens
    attention: DistributedAttention | PartwiseAttention
    """The latter where the block has projections apart."""
    params: Params
    saving: Saving
    tiling: Tiling
    checkpoint: Checkpoint
    loss: LossName = "whole"
    micro_batches: int = 1
    kind: int = 0
    """Which of the model's kinds of layers it writes."""
    rotary_table: bool = False
    waits: bool = False
    """Whether the host waits before each further micro-batch."""
    modules: ModulesName = "fused"
    kinds: tuple[LayerWriter, ...] = ()
    """Those of all kinds, where there are several."""

    def program(self) -> Program:
        """Return the program of this rank."""
        b, tables = self.b, list[View]()
        if self.rotary_table:
            model = b.workload.model
            shape = (b.workload.seq, model.rotary_dims or model.head_dim)
            tables = [b.buffer("rotary table", "sd", shape, b.sum_dtype, "other")]
        for table in tables:
            b.add(Hold(label="keep the rotary table", held=(table,)))
        for number in range(self.micro_batches):
            b.take(number, self.micro_batches)
            if self.waits and number:
                b.add(HostSync(label="wait for the micro-batch", streams=(COMPUTE,)))
            self._passes()
        if b.workload.backward:
            self.params.update()
        for table in tables:
            b.add(Hold(label="keep the rotary table", held=(table,)))
        return b.build()

    def _passes(self) -> None:
        """Append both passes over one micro-batch."""
        b, layers = self.b, layers_of(self.b.workload)
        ends: Outside = Ports(b, self.tokens, self.block.x)
        if b.workload.scope == "step":
            ends = Loss(b, self.tokens, self.params, self.tiling, self.loss, self.modules)
        view = ends.enter()
        for unit in layers:
            view = self._of_kind(unit, LayerWriter._forward, view)
        ends.leave(view)
        if b.workload.backward:
            b.part = "backward"
            view = ends.enter_backward()
            for unit in reversed(layers):
                view = self._of_kind(unit, LayerWriter._backward, view)
            ends.leave_backward(view)
            self.params.end_pass()

    def _of_kind(self, unit: Unit, write: Callable[[LayerWriter, Unit, View], View], view: View) -> View:
        """Append a pass over a layer by the writer of its kind, whose workload the builder has meanwhile."""
        whole = self.b.workload
        self.b.workload = whole.of_layer(unit.layer)
        made = write(self.kinds[unit.layer % len(self.kinds)] if self.kinds else self, unit, view)
        self.b.workload = whole
        return made

    def _call(self, name: str) -> str:
        """Return the key of a call that layers of this kind make."""
        return f"{name} of kind {self.kind}" if self.kind else name

    def _forward(self, unit: Unit, x: View) -> View:
        """Append a layer; return what leaves it."""
        forward = partial(self._forward_with, unit.layer)
        following, kept = self.b.call(self._call("forward"), unit.layer, forward, x, self.params.gather(unit))
        self.saving.save(unit.layer, kept)
        return following

    def _forward_with(self, layer: int, x: View, weights: Values) -> tuple[View, Kept]:
        """Append a layer; return what leaves it and what it saves."""
        values, saved = self._attended(layer, {self.block.x: x}, weights, self.block.forward)
        return values[self.block.x.later(1)], self._kept(values, saved, self.checkpoint)

    def _again(self, layer: int, kept: Kept, weights: Values) -> Kept:
        """Append what makes the rest of what a backward pass needs of what was kept; return it all."""
        block, point, values = self.block, self.checkpoint, {**kept.before, **kept.after}
        everything = checkpoint(block, "none")
        if point.attends:
            return self._kept(*self._attended(layer, values, weights, point.again), everything)
        values |= weights
        self._write(point.again.before, layer, self.tokens, values)
        saved = kept.attention
        assert saved is not None
        if point.lays_out:
            q, k, v = values[block.q], values[block.k], values[block.v]
            if isinstance(self.attention, LaysOut):
                q, k, v = self.attention.lay_out(q, k, v)
            saved = saved._replace(q=q, k=k, v=v)
        self._write(point.again.after, layer, self.tokens, values)
        return self._kept(values, saved, everything)

    def _attended(self, layer: int, at_hand: Values, weights: Values, around: Around) -> tuple[Values, Saved]:
        """Append attention of a layer with the equations around it; return all values, and what attention saves."""
        block, values = self.block, {**weights, **at_hand}
        self._write(around.before, layer, self.tokens, values)
        if block.projections:
            values[block.out], saved = self._partwise.forward_from(self._projections(layer, values))
        else:
            values[block.out], saved = self.attention.forward(values[block.q], values[block.k], values[block.v])
        self._write(around.after, layer, self.tokens, values)
        return values, saved

    @property
    def _partwise(self) -> PartwiseAttention:
        return cast("PartwiseAttention", self.attention)

    def _projections(self, layer: int, values: Values) -> Projections:
        return Projections(self.b, layer, self.tokens, self.block, values, self._partwise.q_heads)

    def _kept(self, values: Values, saved: Saved, point: Checkpoint) -> Kept:
        """Return what is kept of a layer's values, and of what attention saves."""
        held = point.held
        at = held.index(self.block.out) if self.block.out in held else len(held)
        before, after = ({tensor: values[tensor] for tensor in part} for part in (held[:at], held[at:]))
        attention = None if point.attends else saved.without_inputs() if point.lays_out else saved
        return Kept(before, attention, after)

    def _backward(self, unit: Unit, dx: View) -> View:
        """Append the backward pass of a layer; return the gradient of what came into it."""
        weights = self.params.gather(unit)
        kept = self.saving.restore(unit.layer, weights)
        if self.checkpoint.is_needed:
            again = partial(self._again, unit.layer)
            kept = self.b.call(self._call("forward again"), unit.layer, again, kept, weights)
        backward = partial(self._backward_with, unit)
        room = self.params.room(unit)
        following, reduced = self.b.call(self._call("backward"), unit.layer, backward, dx, weights, kept, room)
        self.params.keep(unit, reduced)
        return following

    def _backward_with(self, unit: Unit, dx: View, weights: Values, kept: Kept, room: Room) -> tuple[View, Reduced]:
        block, around, layer = self.block, self.block.backward, unit.layer
        assert kept.attention is not None
        values = {d(block.x).later(1): dx, **weights, **kept.before, **kept.after}
        self._write(around.before, layer, self.tokens, values)
        dout = values[d(block.out)]
        if block.projections:
            projections = self._projections(layer, values)
            self._partwise.backward_into(kept.attention, dout, projections)
            projections.reduce(self.params)
        else:
            grads = self.attention.backward(kept.attention, dout)
            values |= zip(map(d, (block.q, block.k, block.v)), grads, strict=True)
        self._write(around.after, layer, self.tokens, values)
        return values[d(block.x)], self.params.reduced(unit, room)

    def _write(self, equations: tuple[Equation, ...], layer: int, tokens: Tokens, values: Values) -> None:
        """Append equations of a layer."""
        write_all(equations, TokenWriter(self.b, layer, tokens, values), self.params, self.tiling)


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
