"""Scopes "layer" and "step": transformer layers around any distributed attention, forward and backward, alone or
between embedding and loss.

Every rank computes all of a layer for its own tokens; only attention sees those of other ranks. What a layer computes
is in ``block``, and what its ends do in ``ends``; where weights and activations are, and how many tokens are taken at a
time, is in ``params``, ``saving`` and ``tiling``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from sim.errors import InputError
from sim.mesh import Mesh
from sim.options import AttentionName, LayerOptions
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import d
from sim.schedule.ir.views import View
from sim.schedule.model.block import LLAMA
from sim.schedule.model.ends import HEAD, HEAD_BACKWARD
from sim.schedule.model.equations import Block, Equation
from sim.schedule.model.outside import Loss, Outside, Ports
from sim.schedule.model.params import Params, Replicated
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
    wire_bytes: int
    """What attention of one layer sends over all ranks of one replica, by the paper's formula."""
    source: str
    kernel: AttentionName = "flash"


def build_around(
    plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions = LayerOptions()
) -> Schedule:
    """Return the schedule of the workload's scope: attention alone, or layers around it; every data-parallel
    replica does the same as the first, with a batch of its own.
    """
    layers = workload.scope != "attention"
    if options.activations != "hbm" and not layers:
        raise InputError(
            "activations of scope 'attention' stay where they are: leave out `set` schedule.activations, or set "
            "`scope` layer"
        )
    alike = mesh.groups("dp", "ring", "ulysses")
    reduces = layers and workload.backward and len(alike[0]) > 1
    gradients = (Communicator(name=GRADIENTS, groups=alike),) if reduces else ()
    header = Header(
        name=plan.name,
        workload=workload,
        mesh=mesh,
        options=msgspec.to_builtins(options),
        communicators=plan.communicators + gradients,
        claims=_claims(plan, workload, mesh),
    )

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload, mesh.dp)
        if not layers:
            return attention_program(b, plan.shard(rank), plan.attention)
        offloaded = options.activations != "hbm" and workload.backward
        saving = Offload(b, options.activations) if offloaded else Keep()
        params, tokens = Replicated(b, gradients), plan.shard(rank).tokens
        return LayerWriter(b, LLAMA, (tokens,), plan.attention(b), params, saving, whole).program()

    return Schedule(header, program, replicated=True)


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

    @property
    def tokens(self) -> Tokens:
        """Tokens of all chunks."""
        return sum(self.chunks, ())

    def program(self) -> Program:
        """Return the program of this rank."""
        b, layers = self.b, units(self.b.workload)
        ends: Outside = Ports(b, self.tokens, self.block.x)
        if b.workload.scope == "step":
            first, *layers, last = layers
            ends = Loss(b, self.tokens, first, last, self.params, self.tiling)
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
        return b.build()

    def _forward(self, unit: Unit, x: View) -> View:
        """Append a layer; return what leaves it."""
        forward = partial(self._forward_with, unit.layer)
        following, kept = self.b.call("forward", unit.layer, forward, x, self.params.gather(unit))
        self.saving.save(unit.layer, kept)
        return following

    def _forward_with(self, layer: int, x: View, weights: Values) -> tuple[View, Kept]:
        """Append a layer; return what leaves it and what it saves. What outlives a chunk lies in one buffer for all of
        them.
        """
        block, around, stop, lasting = self.block, self.block.forward, 0, {self.block.x: x}
        if len(self.chunks) > 1:
            made = (tensor for tensor in (*block.saved, block.x.later(1)) if tensor not in {block.x, block.out})
            lasting |= {tensor: self.b.new(tensor.later(layer), num_tokens(self.tokens)) for tensor in made}
        for tokens in self.chunks:
            start, stop = stop, stop + num_tokens(tokens)
            values = {**weights, **{tensor: view[:, start:stop] for tensor, view in lasting.items()}}
            self._write(around.before, layer, tokens, values)
            lasting[block.out], kept = self.attention.forward(values[block.q], values[block.k], values[block.v])
            values[block.out] = lasting[block.out][:, start:stop]
            self._write(around.after, layer, tokens, values)
        values |= lasting
        at = block.saved.index(block.out)
        before, after = ({tensor: values[tensor] for tensor in part} for part in (block.saved[:at], block.saved[at:]))
        return values[block.x.later(1)], Kept(before, kept, after)

    def _backward(self, unit: Unit, dx: View) -> View:
        """Append the backward pass of a layer; return the gradient of what came into it."""
        weights = self.params.gather(unit)
        kept = self.saving.restore(unit.layer, weights)
        return self.b.call("backward", unit.layer, partial(self._backward_with, unit.layer), dx, weights, kept)

    def _backward_with(self, layer: int, dx: View, weights: Values, kept: Kept) -> View:
        block, around = self.block, self.block.backward
        values = {d(block.x).later(1): dx, **weights, **kept.before, **kept.after}
        self._write(around.before, layer, self.tokens, values)
        grads = self.attention.backward(kept.attention, values[d(block.out)])
        values |= zip(map(d, (block.q, block.k, block.v)), grads, strict=True)
        self._write(around.after, layer, self.tokens, values)
        return values[d(block.x)]

    def _write(self, equations: tuple[Equation, ...], layer: int, tokens: Tokens, values: Values) -> None:
        """Append equations of a layer."""
        write_all(equations, TokenWriter(self.b, layer, tokens, values), self.params, self.tiling)


def _claims(plan: AttentionPlan, workload: Workload, mesh: Mesh) -> Claims:
    """Attention by its paper, in every replica; the matrix products of the block; what sums the gradients."""
    flops, wire_bytes = mesh.dp * attention_flops(workload, plan.kernel), mesh.dp * plan.wire_bytes
    if workload.scope == "attention":
        return Claims(attention_flops=flops, wire_bytes=wire_bytes, source=plan.source)
    return Claims(
        attention_flops=workload.layers * flops,
        gemm_flops=mesh.dp * gemm_flops(workload),
        wire_bytes=workload.layers * wire_bytes + Replicated.reduced_bytes(workload, mesh.size),
        source=f"{plan.source}; 6 FLOPs per token and weight (arXiv:2001.08361 §2.1), 2 (P-1) bytes per gradient byte",
    )


def gemm_flops(workload: Workload) -> int:
    """Return the FLOPs of all linear layers over all ranks of a replica: 2 per token and weight of each product."""
    if workload.scope == "attention":
        return 0
    passes = [LLAMA.forward, LLAMA.backward] if workload.backward else [LLAMA.forward]
    of_layer: int = sum(one.gemm_flops(workload.model) for around in passes for part in around for one in part)
    of_ends: int = sum(one.gemm_flops(workload.model) for one in (*HEAD, *HEAD_BACKWARD))
    per_token = workload.layers * of_layer + (of_ends if workload.scope == "step" else 0)
    return per_token * workload.batch * workload.seq
