"""Tensor-parallel layers, for tests: heads and MLPs split over ranks, tokens between them (arXiv:2205.05198 §4.2).

No schedule offers them yet. They are written with the tables and protocols that there are: a ``Tiling`` gathers tokens
for kernels of divided tensors and scatters what these sum up, and a ``Params`` has parts of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from sim.schedule.ir.fragments import Port
from sim.schedule.ir.layout import contiguous, cut, num_tokens
from sim.schedule.ir.masks import ONE, Span, Tokens
from sim.schedule.ir.ops import AllGather, AllReduce, ReduceScatter
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import Split, View
from sim.schedule.methods.ring import RingAttention, RingOptions, ring_bytes, ring_communicators
from sim.schedule.methods.single import SingleAttention
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import checkpoint
from sim.schedule.model.equations import Equation
from sim.schedule.model.layer import gemm_flops
from sim.schedule.model.outside import FromOutside, ToOutside
from sim.schedule.model.passes import LayerWriter
from sim.schedule.model.saving import Keep
from sim.schedule.model.scope import Unit, layers_of, units
from sim.schedule.model.step import Chunk, StepWriter, one_stage
from sim.schedule.model.weights.params import Replicated
from sim.schedule.model.write import TokenWriter, Values
from sim.schedule.write.attention import all_heads, attention_flops
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, ModelSpec, Workload


def part_of(model: ModelSpec, ranks: int) -> ModelSpec:
    """Return what one of so many ranks has of a model."""
    return msgspec.structs.replace(
        model,
        num_heads=model.num_heads // ranks,
        num_kv_heads=model.num_kv_heads // ranks,
        ffn_dim=model.ffn_dim // ranks,
    )


class Placed(NamedTuple):
    """Kernels of divided tensors have all tokens of a group and a part of the tensors; all others own tokens."""

    group: Communicator
    every: Tokens
    """The tokens of the group."""

    def __call__(self, equations: tuple[Equation, ...], rows: TokenWriter) -> Iterator[Tensor]:
        """See Tiling."""
        model, values = rows.b.workload.model, rows.values
        divided = [any(one.divided(model) for one in (*e.operands, *e.results)) for e in equations]
        last = {made: e for e, wide in zip(equations, divided, strict=True) if wide for made in e.results}
        whole: Values = {}
        """Of all tokens of the group: what is gathered, and sums that lack terms."""
        for equation, wide in zip(equations, divided, strict=True):
            if wide:
                of_all = rows._replace(tokens=self.every, values=whole)
                for tensor in equation.operands:
                    if self.is_narrow(tensor, model) and tensor not in whole:
                        whole[tensor] = self.gathered(tensor, of_all, values[tensor])
                whole |= {tensor: view for tensor, view in values.items() if not self.is_narrow(tensor, model)}
                of_all.write(equation)
                for tensor in equation.results:
                    if not self.is_narrow(tensor, model):
                        values[tensor] = whole[tensor]
                    elif last[tensor] is equation:
                        values[tensor] = self.scattered(tensor, rows, whole.pop(tensor))
            else:
                rows.write(equation)
            yield from equation.results

    @staticmethod
    def is_narrow(tensor: Tensor, model: ModelSpec) -> bool:
        """Return whether ranks have whole features of own tokens."""
        return not (tensor.of_weight or tensor.divided(model))

    def gathered(self, tensor: Tensor, rows: TokenWriter, own: View) -> View:
        view = rows.b.new(tensor.later(rows.layer), num_tokens(rows.tokens))
        recvs = Split(view, 1, len(self.group.groups[0]))
        rows.b.add(AllGather(label=f"gather {tensor.name}", communicator=self.group.name, send=own, recvs=recvs))
        return view

    def scattered(self, tensor: Tensor, rows: TokenWriter, terms: View) -> View:
        view = rows.b.new(tensor.later(rows.layer), num_tokens(rows.tokens))
        sends = Split(terms, 1, len(self.group.groups[0]))
        rows.b.add(ReduceScatter(label=f"sum {tensor.name}", communicator=self.group.name, sends=sends, recv=view))
        return view


class Parts(Replicated):
    """Each rank of a group has a part of divided weights, and all of others."""

    def __init__(
        self, b: ProgramBuilder, over: tuple[Communicator, ...], own: tuple[Unit, ...], group: Communicator
    ) -> None:
        self.group = group
        super().__init__(b, over, own)

    def port(self, tensor: Tensor, view: View) -> Port:
        """Return which rows and columns of all ranks' weight a view has."""
        model, at = self._b.workload.model, self.group.position(self._b.rank)
        divided, spans = tensor.divided(model), [Span(0, size) for size in tensor.shape(model)]
        if divided:
            spans[divided.axis] = spans[divided.axis].moved(at * spans[divided.axis].size)
        rows, *columns = spans
        features = columns[0] if divided and divided.axis == 1 else None
        return Port(
            tensor=tensor.name, layer=tensor.layer, view=view, batch=ONE, tokens=(rows,), heads=ONE, features=features
        )

    def _of(self, unit: Unit) -> Values:
        b, found = self._b, dict[Tensor, View]()
        for weight in unit.weights:
            here = weight.later(unit.layer)
            found[weight] = b._input(self.port(here, b.new(here, here.shape(b.workload.model)[0])))
        return found

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params. Each rank of the group makes of a whole weight's gradient what its own tokens give."""
        divided = gradient.divided(self._b.workload.model)
        for over in (*self._over, *(() if divided else (self.group,))):
            self._b.add(AllReduce(label=f"reduce {gradient.name}", communicator=over.name, view=view))
        self._b._output(self.port(gradient, view))


def tensor_parallel(workload: Workload, mesh: Mesh) -> Schedule:
    """Return layers of one sequence over the mesh's axis tp, in a ring of such groups where there are several."""
    model, part = workload.model, msgspec.structs.replace(workload, model=part_of(workload.model, mesh.tp))
    group, options = Communicator(name="tp", groups=mesh.groups("tp")), RingOptions()
    layout, rings = contiguous(workload.seq, mesh.ring), ring_communicators(mesh.groups("ring"), options)
    gradients = Communicator(name="gradients", groups=mesh.groups("ring"))
    several = mesh.ring > 1

    def program(rank: int) -> Program:
        place, b, block = mesh.place(rank), ProgramBuilder(rank, part), block_of(part.model)
        every = layout[place["ring"]]
        each = num_tokens(every) // mesh.tp
        own = cut(every, place["tp"] * each, (place["tp"] + 1) * each)
        shard = all_heads(part.model, every)
        attention = RingAttention(b, rings, layout, shard, options) if several else SingleAttention(b, shard)
        params = Parts(b, (gradients,) if several else (), units(part), group)
        tiling, keeps = Placed(group, every), checkpoint(block, "none")
        layers = LayerWriter(b, block, own, attention, params, Keep(), tiling, keeps)
        chunk = Chunk(layers_of(part), lambda: (FromOutside(b, own, block.x), ToOutside(b, own, block.x)))
        return StepWriter(b, {0: chunk}, (layers,), params).program(one_stage(0, 1, 1, 1))

    nbytes, layers = DTYPE_BYTES[workload.dtype], workload.layers
    tokens = (mesh.tp - 1) * workload.batch * workload.seq * model.embed_dim * nbytes
    divided, whole = (
        sum(math.prod(one.shape(model)) for one in block_of(model).weights if bool(one.divided(model)) == wanted)
        for wanted in (True, False)
    )
    sent = layers * (10 * tokens + 2 * (mesh.tp - 1) * mesh.ring * whole * nbytes)
    if several:
        of_ring = (divided + mesh.tp * whole) * nbytes
        sent += layers * (ring_bytes(workload, options, mesh.ring) + 2 * (mesh.ring - 1) * of_ring)
    claims = Claims(
        attention_flops=attention_flops(workload) * layers,
        gemm_flops=gemm_flops(workload),
        wire_bytes=sent,
        source="arXiv:2205.05198 §4.2.2: 4 collectives of S E elements forward, 6 backward, two of them gathered again",
    )
    declared = (group, *((*rings.declared, gradients) if several else ()))
    return Schedule(
        Header(name="tensor parallel", workload=workload, mesh=mesh, communicators=declared, claims=claims), program
    )
