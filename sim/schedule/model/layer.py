"""Scopes "layer" and "step": transformer layers around any distributed attention, forward and backward, alone or
between embedding and loss.

Every rank computes all of a layer for its own tokens; only attention sees those of other ranks. What a layer computes
is in ``block``, and what its ends do in ``ends``; where weights and activations are, and how many tokens are taken at a
time, is in ``params``, ``saving`` and ``tiling``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import msgspec

from sim.errors import InputError
from sim.mesh import Mesh
from sim.options import AttentionName, CheckpointName, LayerOptions, LossName
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import d
from sim.schedule.ir.views import View
from sim.schedule.model.block import LLAMA
from sim.schedule.model.ends import HEAD, HEAD_BACKWARD
from sim.schedule.model.equations import Block, Equation
from sim.schedule.model.flat import Flat, Shards, moved_bytes, shards_of
from sim.schedule.model.outside import Loss, Outside, Ports
from sim.schedule.model.params import Params, Reduced, Replicated, Room
from sim.schedule.model.saving import Keep, Offload, Saving
from sim.schedule.model.scope import Unit, units
from sim.schedule.model.tiling import Tiling, whole, write_all
from sim.schedule.model.write import Kept, TokenWriter, Values
from sim.schedule.write.attention import DistributedAttention, Shard, attention_flops, attention_program
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import Workload

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
    kernel: AttentionName = "flash"


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
    step = workload.scope == "step"
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
        claims=_claims(plan, workload, mesh, options),
    )

    across_replicas = shards.within is not None and options.shards == "all" and mesh.dp > 1

    def program(rank: int) -> Program:
        """Return what a rank does: what the one in its place in the first replica does, with shards of its own."""
        role = mesh.role(rank)
        b = ProgramBuilder(role, workload, mesh.dp)
        if not layers:
            return attention_program(b, plan.shard(role), plan.attention)
        offloaded = options.activations != "hbm" and workload.backward
        saving = Offload(b, options.activations) if offloaded else Keep()
        tokens = plan.shard(role).tokens
        params = Flat(b, shards, options, rank) if step else Replicated(b, gradients)
        techniques = (options.checkpoint, options.loss) if step else ()
        written = LayerWriter(b, LLAMA, (tokens,), plan.attention(b), params, saving, whole, *techniques).program()
        return written if rank == role else written.of_replica(rank - role, mesh.replica(rank) * workload.batch)

    return Schedule(header, program, replicated=not across_replicas)


class LayerWriter(NamedTuple):
    """Writes the layers of one rank; what may differ between techniques is in protocols."""

    b: ProgramBuilder
    block: Block
    chunks: tuple[Tokens, ...]
    """The tokens of this rank, which go forward a chunk at a time, and backward all at once."""
    attention: DistributedAttention
    params: Params
    saving: Saving
    tiling: Tiling
    checkpoint: CheckpointName = "none"
    loss: LossName = "whole"

    @property
    def tokens(self) -> Tokens:
        """Tokens of all chunks."""
        return sum(self.chunks, ())

    def program(self) -> Program:
        """Return the program of this rank."""
        b, layers = self.b, units(self.b.workload)
        ends: Outside = Ports(b, self.tokens, self.block.x)
        if b.workload.scope == "step":
            outer, layers = (layers[0], layers[-1]), layers[1:-1]
            ends = Loss(b, self.tokens, outer, self.params, self.tiling, chunked=self.loss == "chunked")
        view = ends.enter()
        for unit in layers:
            view = self._forward(unit, view)
        ends.leave(view)
        if b.workload.backward:
            b.part = "backward"
            view = ends.enter_backward()
            for unit in reversed(layers):
                view = self._backward(unit, view)
            ends.leave_backward(view)
            self.params.update()
        return b.build()

    def _forward(self, unit: Unit, x: View) -> View:
        """Append a layer; return what leaves it."""
        forward = partial(self._forward_with, unit.layer)
        following, kept = self.b.call("forward", unit.layer, forward, x, self.params.gather(unit))
        self.saving.save(unit.layer, Kept({self.block.x: x}, None, {}) if self.checkpoint == "full" else kept)
        return following

    def _forward_with(self, layer: int, x: View, weights: Values) -> tuple[View, Kept]:
        """Append a layer; return what leaves it and what it saves."""
        values, kept = self._computed(layer, x, weights, self.block.forward.after)
        return values[self.block.x.later(1)], kept

    def _again(self, layer: int, x: View, weights: Values) -> Kept:
        """Append a layer up to the last that it saves, as torch's checkpointing stops; return what it saves."""
        return self._computed(layer, x, weights, again(self.block))[1]

    def _computed(self, layer: int, x: View, weights: Values, after: tuple[Equation, ...]) -> tuple[Values, Kept]:
        """Append a layer, of which ``after`` follows attention; return all values, and what it saves. What outlives a
        chunk lies in one buffer for all of them.
        """
        block, around, stop, lasting = self.block, self.block.forward, 0, {self.block.x: x}
        if len(self.chunks) > 1:
            made = (tensor for one in (*around.before, *after) for tensor in one.results)
            kept_whole = {*block.saved, block.x.later(1)} - {block.x, block.out}
            lasting |= {
                tensor: self.b.new(tensor.later(layer), num_tokens(self.tokens))
                for tensor in dict.fromkeys(made)
                if tensor in kept_whole
            }
        for tokens in self.chunks:
            start, stop = stop, stop + num_tokens(tokens)
            values = {**weights, **{tensor: view[:, start:stop] for tensor, view in lasting.items()}}
            self._write(around.before, layer, tokens, values)
            lasting[block.out], kept = self.attention.forward(values[block.q], values[block.k], values[block.v])
            values[block.out] = lasting[block.out][:, start:stop]
            self._write(after, layer, tokens, values)
        values |= lasting
        at = block.saved.index(block.out)
        before, later = ({tensor: values[tensor] for tensor in part} for part in (block.saved[:at], block.saved[at:]))
        return values, Kept(before, kept, later)

    def _backward(self, unit: Unit, dx: View) -> View:
        """Append the backward pass of a layer; return the gradient of what came into it."""
        weights = self.params.gather(unit)
        kept = self.saving.restore(unit.layer, weights)
        if kept.attention is None:
            x = kept.before[self.block.x]
            kept = self.b.call("forward again", unit.layer, partial(self._again, unit.layer), x, weights)
        backward = partial(self._backward_with, unit)
        following, reduced = self.b.call("backward", unit.layer, backward, dx, weights, kept, self.params.room(unit))
        self.params.keep(unit, reduced)
        return following

    def _backward_with(self, unit: Unit, dx: View, weights: Values, kept: Kept, room: Room) -> tuple[View, Reduced]:
        block, around, layer = self.block, self.block.backward, unit.layer
        assert kept.attention is not None
        values = {d(block.x).later(1): dx, **weights, **kept.before, **kept.after}
        self._write(around.before, layer, self.tokens, values)
        grads = self.attention.backward(kept.attention, values[d(block.out)])
        values |= zip(map(d, (block.q, block.k, block.v)), grads, strict=True)
        self._write(around.after, layer, self.tokens, values)
        return values[d(block.x)], self.params.reduced(unit, room)

    def _write(self, equations: tuple[Equation, ...], layer: int, tokens: Tokens, values: Values) -> None:
        """Append equations of a layer."""
        write_all(equations, TokenWriter(self.b, layer, tokens, values), self.params, self.tiling)


def again(block: Block) -> tuple[Equation, ...]:
    """Return what follows attention up to the last that a block saves."""
    after = block.forward.after
    last = max(at for at, one in enumerate(after) if not set(block.saved).isdisjoint(one.results))
    return after[: last + 1]


def _claims(plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions) -> Claims:
    """Attention by its paper, in every replica; the matrix products of the block; what moves weights and gradients."""
    dp, step = mesh.dp, workload.scope == "step"
    passes = [workload]
    if step and options.checkpoint == "full":
        passes.append(msgspec.structs.replace(workload, scope="attention", layers=1, passes="forward"))
    flops = dp * sum(attention_flops(one, plan.kernel) for one in passes)
    wire_bytes = dp * sum(plan.wire_bytes(one) for one in passes)
    if workload.scope == "attention":
        return Claims(attention_flops=flops, wire_bytes=wire_bytes, source=plan.source)
    of_weights = moved_bytes(workload, mesh, options) if step else Replicated.reduced_bytes(workload, mesh.size)
    return Claims(
        attention_flops=workload.layers * flops,
        gemm_flops=dp * (gemm_flops(workload) + (gemm_flops_again(workload) if len(passes) > 1 else 0)),
        wire_bytes=workload.layers * wire_bytes + of_weights,
        source=f"{plan.source}; 6 FLOPs per token and weight (arXiv:2001.08361 §2.1), 2 (P-1) bytes per gradient byte",
    )


def gemm_flops(workload: Workload) -> int:
    """Return the FLOPs of all linear layers over all ranks of a replica: 2 per token and weight of each product."""
    if workload.scope == "attention":
        return 0
    passes = [LLAMA.forward, LLAMA.backward] if workload.backward else [LLAMA.forward]
    per_token = workload.layers * _gemm_flops((one for around in passes for part in around for one in part), workload)
    if workload.scope == "step":
        per_token += _gemm_flops((*HEAD, *HEAD_BACKWARD), workload)
    return per_token * workload.batch * workload.seq


def gemm_flops_again(workload: Workload) -> int:
    """Return the FLOPs of linear layers that full checkpointing computes again, over all ranks of a replica."""
    per_token = _gemm_flops((*LLAMA.forward.before, *again(LLAMA)), workload)
    return workload.layers * per_token * workload.batch * workload.seq


def _gemm_flops(equations: Iterable[Equation], workload: Workload) -> int:
    return sum(one.gemm_flops(workload.model) for one in equations)
