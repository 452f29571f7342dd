"""Pipelines of training steps, for tests: a schedule that hands activations on between stages.

No schedule offers them yet. They are written with the tables that there are: a stage has chunks of layers, whose ends
are embedding and loss, or other stages. Weights are those of ZeRO's stages 0 to 2, sharded within a pipeline stage.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from sim.schedule.ir.layout import contiguous, num_tokens
from sim.schedule.ir.ops import Exchange, Message
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.ir.views import View
from sim.schedule.methods.ring import RingAttention, RingOptions, ring_bytes, ring_communicators
from sim.schedule.methods.single import SingleAttention
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import checkpoint
from sim.schedule.model.layer import gemm_flops
from sim.schedule.model.outside import Embedding, Entry, Exit, Loss
from sim.schedule.model.passes import LayerWriter
from sim.schedule.model.saving import saving
from sim.schedule.model.scope import ends_of, layers_of, trained
from sim.schedule.model.step import Chunk, StepWriter, Timetable
from sim.schedule.model.tiling import whole
from sim.schedule.model.weights.flat import Flat
from sim.schedule.model.weights.shards import Shards, moved_bytes
from sim.schedule.write.attention import all_heads, attention_flops
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions
from sim.words.workload import DTYPE_BYTES, Workload, accumulation_dtype


class Neighbour(NamedTuple):
    """A stage beside a chunk, which hands it activations and gets their gradients, or the reverse."""

    b: ProgramBuilder
    tokens: int
    x: Tensor
    """What is handed on forward."""
    peer: int
    forward: str
    """The communicators of both directions: each of a pair of chunks has its own, so that no receive waits for a send
    of the same rank."""
    back: str

    def sent(self, by: str, tensor: Tensor, view: View) -> None:
        self.b.add(Exchange(label=f"send {tensor.name}", communicator=by, sends=(Message(self.peer, view),), recvs=()))

    def received(self, by: str, tensor: Tensor) -> View:
        view = self.b.new(tensor, self.tokens)
        recvs = (Message(self.peer, view),)
        self.b.add(Exchange(label=f"receive {tensor.name}", communicator=by, sends=(), recvs=recvs))
        return view


class FromStage(NamedTuple):
    """See Entry: what comes in is what the stage before hands on."""

    stage: Neighbour

    def forward(self) -> View:
        return self.stage.received(self.stage.forward, self.stage.x)

    def backward(self, first: View, /) -> None:
        self.stage.sent(self.stage.back, d(self.stage.x), first)


class ToStage(NamedTuple):
    """See Exit: what leaves is handed on to the stage behind."""

    stage: Neighbour

    def forward(self, last: View, /) -> None:
        self.stage.sent(self.stage.forward, self.stage.x, last)

    def backward(self) -> View:
        return self.stage.received(self.stage.back, d(self.stage.x))


def pipelined(
    workload: Workload, mesh: Mesh, timetable: Timetable, split: tuple[int, ...], options: LayerOptions
) -> Schedule:
    """Return a training step over the mesh's axis pp, whose stages are rings; ``split`` says how many layers each chunk
    has, which stages take in turn.
    """
    rings, layout = ring_communicators(mesh.groups("ring"), RingOptions()), contiguous(workload.seq, mesh.ring)
    lines, within = mesh.groups("pp"), mesh.groups("ring")
    links = [Communicator(name=f"{way} {at}", groups=lines) for way in ("forward", "back") for at in (0, 1)]
    several, sharded = mesh.ring > 1, options.zero_stage > 0
    sums = Communicator(name="gradients", groups=within) if several else None
    squares = mesh.groups("pp", "ring") if sharded else lines
    shards = Shards(sums if sharded else None, sums, norm=Communicator(name="norm", groups=squares))
    last, inner, (embedded, headed) = len(split) - 1, layers_of(workload), ends_of(workload)
    cuts = [sum(split[:number]) for number in range(len(split) + 1)]

    def program(rank: int) -> Program:
        place, b, block = mesh.place(rank), ProgramBuilder(rank, workload), block_of(workload.model)
        own, line = layout[place["ring"]], links[0].group_of(rank)
        mine = {number: inner[cuts[number] : cuts[number + 1]] for number in range(place["pp"], len(split), mesh.pp)}
        held = [unit for layers in mine.values() for unit in layers]
        held = [*([embedded] if 0 in mine else []), *held, *([headed] if last in mine else [])]
        params = Flat(b, shards, options, rank, tuple(held))
        shard = all_heads(workload.model, own)
        attention = RingAttention(b, rings, layout, shard, RingOptions()) if several else SingleAttention(b, shard)
        point, kept = checkpoint(block, options.checkpoint), saving(b, options.activations)
        layers = LayerWriter(b, block, own, attention, params, kept, whole, point)

        def beside(before: int) -> Neighbour:
            """Return the stage on the other side of the border between two chunks."""
            peer = line[before % mesh.pp] if before not in mine else line[(before + 1) % mesh.pp]
            x, at = block.x.later(cuts[before + 1]), before % 2
            return Neighbour(b, num_tokens(own), x, peer, f"forward {at}", f"back {at}")

        def ends(number: int) -> tuple[Entry, Exit]:
            head = Loss(b, own, params, whole, options.loss) if number == last else None
            entry = FromStage(beside(number - 1)) if number else Embedding(b, own, params, whole, head)
            return entry, head or ToStage(beside(number))

        chunks = {number: Chunk(layers, partial(ends, number)) for number, layers in mine.items()}
        items = timetable(place["pp"], mesh.pp, options.micro_batches, len(split) // mesh.pp)
        waits = options.host_waits == "micro-batch"
        return StepWriter(b, chunks, (layers,), params, options.micro_batches, waits).program(items)

    nbytes, wide = (DTYPE_BYTES[dtype] for dtype in (workload.dtype, accumulation_dtype(workload.dtype)))
    handed = 2 * last * workload.batch * workload.seq * workload.model.embed_dim * nbytes
    of_ring = ring_bytes(workload, RingOptions(), mesh.ring) if several else 0
    of_weights = moved_bytes(workload, msgspec.structs.replace(mesh, pp=1), options)
    more = mesh.size - mesh.ring if sharded else (mesh.pp - 1) * mesh.ring
    claims = Claims(
        attention_flops=attention_flops(workload) * workload.layers,
        gemm_flops=gemm_flops(workload),
        wire_bytes=workload.layers * of_ring + handed + of_weights + 2 * more * len(trained(workload)) * wide,
        source="arXiv:2104.04473 §2.2: B S E elements between chunks, forward and back; the norm over all stages",
    )
    communicators = (*(rings.declared if several else ()), *links, *shards.declared)
    header = Header(
        name="pipeline",
        workload=workload,
        mesh=mesh,
        options=options.of_scope("step"),
        communicators=communicators,
        claims=claims,
    )
    return Schedule(header, program)
