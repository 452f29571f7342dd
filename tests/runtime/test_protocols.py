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
from sim.mesh import Mesh
from sim.schedule.ir.layout import contiguous, num_tokens, zigzag
from sim.schedule.ir.masks import CAUSAL, Span, Tokens
from sim.schedule.ir.ops import Accumulate, AllGather, Attend, Gemm, ReduceScatter, Rope
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import HEADS, Split, View
from sim.schedule.methods.ring import RingAttention, RingOptions, ring_bytes, ring_communicators
from sim.schedule.methods.single import SingleAttention
from sim.schedule.model.block import LLAMA, act, h1, h2, rstd1, rstd2
from sim.schedule.model.equations import Equation
from sim.schedule.model.layer import LayerWriter, gemm_flops
from sim.schedule.model.params import Params, Replicated
from sim.schedule.model.saving import Keep, Saving
from sim.schedule.model.scope import Unit
from sim.schedule.model.tiling import Tiling, whole
from sim.schedule.model.write import Kept, TokenWriter, Values
from sim.schedule.proof.check import check
from sim.schedule.write.attention import Saved, Shard, all_heads, attention_flops
from sim.schedule.write.blocks import blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.head_trade import HeadTrade, TradeOptions
from sim.workload import DTYPE_BYTES, Workload
from tests.helpers import make_model, sweep_but
from tests.schedule.test_check_catches import refuses

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

    def save(self, layer: int, kept: Kept, /) -> None:
        """See Saving."""
        before, after = (
            {tensor: view for tensor, view in values.items() if tensor not in self.DROPPED}
            for values in (kept.before, kept.after)
        )
        super().save(layer, Kept(before, kept.attention, after))

    def restore(self, layer: int, weights: Values, /) -> Kept:
        """See Saving."""
        before, attention, after = super().restore(layer, weights)
        values = {**weights, **before, **after}
        for equation in (*LLAMA.forward.before, *LLAMA.forward.after):
            if not self.DROPPED.isdisjoint(equation.results):
                TokenWriter(self.b, layer, self.tokens, values).write(equation)
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

    params: Callable[[ProgramBuilder], Params] = lambda b: Replicated(b, (EVERYONE,))
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
        return LayerWriter(
            b=b,
            block=LLAMA,
            chunks=(own.tokens,),
            attention=RingAttention(b, rings, layout, own, options),
            params=technique.params(b),
            saving=technique.saving(b, own.tokens),
            tiling=technique.tiling,
        ).program()

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


class Cached:
    """Ulysses attention of the chunks of all ranks: what each brings lies in whole buffers, behind the ones before."""

    def __init__(self, b: ProgramBuilder, chunks: int, *, forgetful: bool) -> None:
        self.b, self.chunks, self.forgetful = b, chunks, forgetful
        self.trade = HeadTrade(b, EVERYONE, TradeOptions())
        heads = Span(b.rank * 2, b.rank * 2 + 2)
        shard = Shard((Span(0, b.workload.seq),), heads, Span(b.rank, b.rank + 1))
        self.inside = SingleAttention(b, shard)
        self.fed = chunks

    def begin(self) -> None:
        """Make room for a layer: of all tokens and this rank's heads q, k, v, out, and of its tokens out."""
        b, seq = self.b, self.b.workload.seq
        sizes = {"q": 2, "k": 1, "v": 1, "out": 2}
        self.held = {name: b.tensor(f"all {name}", seq, heads, "saved") for name, heads in sizes.items()}
        self.lse = b.lse("all lse", seq, 2, "saved")
        self.out = b.tensor("out", seq // RANKS, 4, "saved")
        self.fed = 0

    def rows(self, chunk: int, ranks: int) -> slice:
        """Return where a chunk lies among the tokens of so many ranks."""
        each = ranks * self.b.workload.seq // RANKS // self.chunks
        return slice(chunk * each, chunk * each + each)

    def hold(self, chunk: int, **local: View) -> None:
        """Append what brings this rank's heads of a chunk here."""
        for name, view in zip(local, self.trade.to_heads(local, "attention"), strict=True):
            self.b.copy(view, self.held[name][:, self.rows(chunk, RANKS)], f"hold {name}")

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """See DistributedAttention."""
        if self.fed == self.chunks:
            self.begin()
        self.hold(self.fed, q=q, k=k, v=v)
        rows = self.rows(self.fed, RANKS)
        keys = Span(rows.start if self.forgetful else 0, rows.stop)
        (block,) = blocks(CAUSAL, (Span(rows.start, rows.stop),), (keys,))
        q, out = self.held["q"][:, rows], self.held["out"][:, rows]
        k, v = (self.held[name][:, keys.start : keys.stop] for name in "kv")
        lse = self.lse[:, :, rows]
        self.b.add(Attend(label=f"attend {self.fed}", q=q, k=k, v=v, out=out, lse=lse, band=block.band))
        own = self.rows(self.fed, 1)
        self.trade.to_tokens({"out": out}, {"out": self.out[:, own]})
        self.fed += 1
        so_far = {name: view[:, : rows.stop] for name, view in self.held.items()}
        return self.out[:, : own.stop], Saved(**so_far, lse=self.lse[:, :, : rows.stop])

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """See DistributedAttention."""
        b, (_, own, _, _) = self.b, dout.shape
        self.held["dout"] = b.like("all dout", saved.out, "attention")
        for chunk in range(self.chunks):
            self.hold(chunk, dout=dout[:, self.rows(chunk, 1)])
        grads = dict(zip(("dq", "dk", "dv"), self.inside.backward(saved, self.held["dout"]), strict=True))
        local = {name: b.tensor(name, own, 2 * view.shape[HEADS], "attention") for name, view in grads.items()}
        for chunk in range(self.chunks):
            here, there = self.rows(chunk, 1), self.rows(chunk, RANKS)
            self.trade.to_tokens(
                {name: view[:, there] for name, view in grads.items()},
                {name: view[:, here] for name, view in local.items()},
            )
        return local["dq"], local["dk"], local["dv"]


def chunked(chunks: int, technique: Techniques, *, forgetful: bool = False) -> Schedule:
    """Two layers that go forward chunk by chunk; of each every rank has as many neighbouring tokens."""
    workload = Workload(model=make_model(4, 2), seq=16, dtype="fp64", scope="layer", layers=2)
    spans = contiguous(workload.seq, RANKS * chunks)

    def program(rank: int) -> Program:
        b, own = ProgramBuilder(rank, workload), spans[rank::RANKS]
        return LayerWriter(
            b=b,
            block=LLAMA,
            chunks=own,
            attention=Cached(b, chunks, forgetful=forgetful),
            params=technique.params(b),
            saving=technique.saving(b, sum(own, ())),
            tiling=technique.tiling,
        ).program()

    return Schedule(
        Header(name="chunked", workload=workload, mesh=Mesh(ulysses=RANKS), communicators=(EVERYONE,)), program
    )


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("chunks", sweep_but({2}, [1, 2, 4]))
def test_layers_fed_in_chunks_are_proved_and_exact(chunks: int, name: str) -> None:
    checked = check(chunked(chunks, TECHNIQUES[name]))
    program = checked.schedule.program(0)
    labels = [op.label for op in program.ops if op.part == "forward"]
    assert labels.index("attend 0") < labels.index("w_down")
    assert labels.count("attend 0") == labels.count(f"attend {chunks - 1}") == 2
    assert {buffer.shape[1] for buffer in program.buffers if buffer.name == "q_raw"} == {8 // chunks}
    errors = output_errors(checked, execute_virtual(checked, torch.device("cpu"), 1))
    assert errors.keys() >= {"x 2", "dx", "dwq", "dw_down 1", "dnorm1"}
    assert max(errors.values()) <= BOUNDS["fp64"]


def test_a_chunk_that_forgets_the_keys_before_it() -> None:
    refuses(chunked(2, Techniques(), forgetful=True), "not complete")


def test_what_is_recomputed_of_other_activations() -> None:
    """The norm of the second layer's input in place of the first's."""
    schedule = schedule_of("recomputed")
    program = schedule.program(0)
    norms = [op for op in program.ops if op.label == "norm1" and op.part == "backward"]

    def wrong(rank: int) -> Program:
        ops = [msgspec.structs.replace(op, x=norms[0].reads[0]) if op is norms[1] else op for op in program.ops]
        return program.replace(ops=tuple(ops)) if rank == 0 else schedule.program(rank)

    refuses(Schedule(schedule.header, wrong), "no equation of the layer")
