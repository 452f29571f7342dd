"""What may differ around a block: a second Params, Saving and Tiling each, attention in chunks; proved and exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.schedule.ir.layout import num_tokens, zigzag
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import Accumulate, AllGather, Gemm, ReduceScatter, Rope
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import Split, View
from sim.schedule.methods.ring import RingAttention, RingOptions, ring_bytes, ring_communicators
from sim.schedule.model.block import act, block_of, h1, h2, rstd1, rstd2
from sim.schedule.model.checkpoint import checkpoint
from sim.schedule.model.equations import Equation
from sim.schedule.model.layer import gemm_flops
from sim.schedule.model.outside import FromOutside, ToOutside
from sim.schedule.model.passes import LayerWriter
from sim.schedule.model.saving import Keep, Saving, Visit
from sim.schedule.model.scope import Unit, layers_of, units
from sim.schedule.model.step import Chunk, Item, StepWriter
from sim.schedule.model.tiling import Tiling, whole
from sim.schedule.model.weights.params import Params, Replicated
from sim.schedule.model.write import Kept, TokenWriter, Values
from sim.schedule.proof.check import check
from sim.schedule.write.attention import all_heads, attention_flops
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, Workload, load_model
from tests.helpers import make_model
from tests.schedule.proof.test_check_catches import refuses

LLAMA = block_of(load_model("tiny"))

RANKS = 2
EVERYONE = Communicator(name="everyone", groups=(tuple(range(RANKS)),))


class Sharded(Replicated):
    """Every rank owns some rows of each weight, gathers the others' for each pass, and sums its rows' gradients."""

    def __init__(self, b: ProgramBuilder) -> None:
        self.b = b
        self.shards = [
            {weight: b.input_of(weight.later(layer), self.rows(weight)) for weight in LLAMA.weights}
            for layer in range(b.workload.layers)
        ]

    def rows(self, weight: Tensor) -> Tokens:
        """Return the rows that this rank owns."""
        (rows,) = weight.rows(self.b.workload.model)
        each = rows.size // RANKS
        return (rows.part(self.b.rank * each, self.b.rank * each + each),)

    def gather(self, unit: Unit) -> Values:
        """See Params."""
        layer = unit.layer
        return {weight: self.gathered(weight.later(layer), shard) for weight, shard in self.shards[layer].items()}

    def gathered(self, weight: Tensor, shard: View) -> View:
        """Append an all-gather."""
        (rows,) = weight.rows(self.b.workload.model)
        view = self.b.new(weight, rows.size)
        recvs = Split(view, 0, RANKS)
        self.b.add(AllGather(label=f"gather {weight.name}", communicator=EVERYONE.name, send=shard, recvs=recvs))
        return view

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        rows = self.rows(gradient)
        own, sends = self.b.new(gradient, num_tokens(rows)), Split(view, 0, RANKS)
        label = f"reduce {gradient.name}"
        self.b.add(ReduceScatter(label=label, communicator=EVERYONE.name, sends=sends, recv=own))
        self.b.output_of(gradient, rows, own)


class Recompute(Keep):
    """Drops what a norm or SwiGLU makes, and plays their equations again."""

    DROPPED = frozenset({h1, rstd1, h2, rstd2, act})

    def __init__(self, b: ProgramBuilder, tokens: Tokens) -> None:
        super().__init__()
        self.b, self.tokens = b, tokens

    def save(self, at: Visit, kept: Kept, /) -> None:
        """See Saving."""
        before, after = (
            {tensor: view for tensor, view in values.items() if tensor not in self.DROPPED}
            for values in (kept.before, kept.after)
        )
        super().save(at, Kept(before, kept.attention, after))

    def restore(self, at: Visit, weights: Values, /) -> Kept:
        """See Saving."""
        before, attention, after = super().restore(at, weights)
        values = {**weights, **before, **after}
        for equation in (*LLAMA.forward.before, *LLAMA.forward.after):
            if not self.DROPPED.isdisjoint(equation.results):
                TokenWriter(self.b, at.layer, self.tokens, values).write(equation)
        return Kept(before, attention, values)


def tiled(equations: tuple[Equation, ...], rows: TokenWriter) -> Iterator[Tensor]:
    """Each span of tokens by itself: the results lie in whole tensors, weights' gradients are summed in place."""
    start = 0
    for span in rows.tokens:
        tile = rows._replace(tokens=(span,), values={})
        part = slice(start, start + span.size)
        start += span.size
        for equation in equations:
            for tensor in equation.results:
                if equation.kind is Rope:
                    rows.values[tensor] = rows.values[equation.operands[0]]
                elif tensor not in rows.values and not tensor.of_weight:
                    rows.values[tensor] = rows.b.new(tensor.later(rows.layer), num_tokens(rows.tokens))
            tile.values.update(
                {
                    tensor: view if tensor.of_weight else view[:, part]
                    for tensor, view in rows.values.items()
                    if tensor.kind != "weight gradient"
                }
            )
            add_tile(equation, tile, rows.values)
    for equation in equations:
        yield from equation.results


def add_tile(equation: Equation, tile: TokenWriter, sums: Values) -> None:
    """Append an equation of one tile; what it adds to weights' gradients goes to their sums."""
    gradient = next((tensor for tensor in equation.results if tensor.kind == "weight gradient"), None)
    if gradient in sums and equation.kind is Gemm:
        tile.values[gradient] = sums[gradient]
        tile.write(equation, adds=True)
        return
    tile.write(equation)
    if gradient in sums:
        tile.b.add(Accumulate(label=f"add {gradient.name}", source=tile.values[gradient], into=sums[gradient]))
    elif gradient:
        sums[gradient] = tile.values[gradient]


class Techniques(NamedTuple):
    """One way to write layers."""

    params: Callable[[ProgramBuilder], Params] = lambda b: Replicated(b, (EVERYONE,), units(b.workload))
    saving: Callable[[ProgramBuilder, Tokens], Saving] = lambda _b, _tokens: Keep()
    tiling: Tiling = whole


TECHNIQUES = {
    "as they are": Techniques(),
    "sharded": Techniques(params=Sharded),
    "recomputed": Techniques(saving=Recompute),
    "tiled": Techniques(tiling=tiled),
    "all": Techniques(Sharded, Recompute, tiled),
}


def schedule_of(name: str) -> Schedule:
    """Two layers around a zigzag ring of two ranks."""
    technique, options = TECHNIQUES[name], RingOptions(layout="zigzag")
    workload = Workload(model=make_model(4, 2), seq=16, dtype="fp64", scope="layer", layers=2)
    mesh = Mesh(ring=RANKS)
    rings, layout = ring_communicators(mesh.groups("ring"), options), zigzag(workload.seq, RANKS)

    def program(rank: int) -> Program:
        b, own = ProgramBuilder(rank, workload), all_heads(workload.model, layout[rank])
        params = technique.params(b)
        layers = LayerWriter(
            b=b,
            block=LLAMA,
            tokens=own.tokens,
            attention=RingAttention(b, rings, layout, own, options),
            params=params,
            saving=technique.saving(b, own.tokens),
            tiling=technique.tiling,
            checkpoint=checkpoint(LLAMA, "none"),
        )
        ends = FromOutside(b, own.tokens, LLAMA.x), ToOutside(b, own.tokens, LLAMA.x)
        chunk = Chunk(layers_of(workload), lambda: ends)
        return StepWriter(b, {0: chunk}, ((layers,),), params).program([Item("F", 0, 0), Item("BW", 0, 0)])

    nbytes = sum(math.prod(weight.shape(workload.model)) for weight in LLAMA.weights) * DTYPE_BYTES["fp64"]
    sent = (3 if technique.params is Sharded else 2) * (RANKS - 1) * nbytes
    claims = Claims(
        attention_flops=2 * attention_flops(workload),
        gemm_flops=gemm_flops(workload),
        wire_bytes=2 * (ring_bytes(workload, options, RANKS) + sent),
        source="this test: gathered twice and reduced once, or all-reduced",
    )
    communicators = (*rings.declared, EVERYONE)
    return Schedule(
        Header(name=name, workload=workload, mesh=mesh, communicators=communicators, claims=claims), program
    )


@pytest.mark.sweep
@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_technique_is_proved_and_exact(name: str) -> None:
    checked = check(schedule_of(name))
    for seed in (1, 2):
        errors = output_errors(checked, execute_virtual(checked, torch.device("cpu"), seed))
        assert errors.keys() >= {"x 2", "dx", "dwq", "dw_down 1", "dnorm1"}
        assert max(errors.values()) <= BOUNDS["fp64"]


def without_last(schedule: Schedule, label: str) -> Schedule:
    """Leave out the last op of that name, on every rank."""
    programs = []
    for program in schedule.programs:
        *_, last = (at for at, op in enumerate(program.ops) if op.label == label)
        programs.append(program.replace(ops=(*program.ops[:last], *program.ops[last + 1 :])))
    return Schedule(schedule.header, programs.__getitem__)


def test_a_tile_that_is_lost_or_counted_twice() -> None:
    schedule = schedule_of("tiled")
    for lost in ("gradient dw_down", "gradient dwq", "add dnorm2"):
        refuses(without_last(schedule, lost), "lacks contributions")

    def overwritten(rank: int) -> Program:
        program = schedule.program(rank)
        ops = [
            msgspec.structs.replace(op, accumulate=False) if isinstance(op, Gemm) and op.form == "tn" else op
            for op in program.ops
        ]
        return program.replace(ops=tuple(ops))

    refuses(Schedule(schedule.header, overwritten), "lacks contributions")

    def doubled(rank: int) -> Program:
        program = schedule.program(rank)
        at = next(i for i, op in enumerate(program.ops) if isinstance(op, Gemm) and op.form == "tn" and op.accumulate)
        return program.replace(ops=(*program.ops[: at + 1], *program.ops[at:]))

    refuses(Schedule(schedule.header, doubled), "twice")


def test_what_is_recomputed_of_other_activations() -> None:
    """The norm of the second layer's input in place of the first's."""
    schedule = schedule_of("recomputed")
    program = schedule.program(0)
    norms = [op for op in program.ops if op.label == "norm1" and op.part == "backward"]

    def wrong(rank: int) -> Program:
        ops = [msgspec.structs.replace(op, x=norms[0].reads[0]) if op is norms[1] else op for op in program.ops]
        return program.replace(ops=tuple(ops)) if rank == 0 else schedule.program(rank)

    refuses(Schedule(schedule.header, wrong), "no equation of the layer")
