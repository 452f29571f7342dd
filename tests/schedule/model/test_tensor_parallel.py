"""Tensor-parallel layers: proved with claims and exact, and what is wrong in them is found."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.play.simulate import simulate
from sim.engine.results.critical import critical_path
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import AllGather, AllReduce, Collective, Copy, Exchange, Gemm, HostCopy, ReduceScatter
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import TOKENS, Split
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.options import TensorOverlap
from sim.words.profile import load_profile
from sim.words.workload import Workload
from tests.helpers import make_model, slow_but
from tests.schedule.proof.test_check_catches import refuses
from topology.cluster import Cluster, load_cluster

MESHES = {"2 ranks": Mesh(tp=2), "4 ranks": Mesh(tp=4), "rings of 2": Mesh(tp=2, ring=2)}
BESIDE = ("memory_order", "activations", "tp_buffers")
"""Options that layers may be given by name."""


def layers(
    mesh: str = "2 ranks", tp_overlap: TensorOverlap = "none", *, tp_sequence: bool = True, **fields: Any
) -> Schedule:
    dtype = fields.pop("dtype", "fp64")
    batch, beside = fields.pop("batch", 1), {name: fields.pop(name) for name in BESIDE if name in fields}
    model = msgspec.structs.replace(make_model(8, 4, head_dim=4), ffn_dim=24, **fields)
    workload = Workload(model=model, seq=32, batch=batch, dtype=dtype, scope="layer", layers=2)
    entry = SCHEDULES["ring" if "ring" in mesh else "single"]
    options = dataclasses.replace(entry.options, tp_overlap=tp_overlap, tp_sequence=tp_sequence, **beside)
    return entry.schedule(workload, MESHES[mesh], options)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", slow_but({"2 ranks", "4 ranks"}, MESHES))
def test_layers_are_proved_and_exact(mesh: str) -> None:
    is_exact(layers(mesh))
    is_exact(layers(mesh, "shards"))
    is_exact(layers(mesh, "chunks"))
    is_exact(layers(mesh, "gradients", tp_sequence=False))


@pytest.mark.sweep
@pytest.mark.parametrize("fields", [{"mlp": "geglu"}, {"mlp": "gelu"}, {"norms": "around"}, {"residual_scale": 0.5}])
def test_other_models(fields: dict[str, Any]) -> None:
    is_exact(layers("rings of 2", **fields))


def is_exact(schedule: Schedule) -> None:
    """Every output has the gradients of all ranks: norms those of all tokens, other weights those of this part."""
    checked = check(schedule)
    for seed in (1, 2):
        errors = output_errors(checked, execute_virtual(checked, torch.device("cpu"), seed))
        assert errors.keys() >= {"x 2", "dx", "dwq", "dwo 1", "dw_down 1", "dnorm1"}
        assert max(errors.values()) <= BOUNDS["fp64"]


def test_collectives_of_a_layer() -> None:
    """arXiv:2205.05198 §4.2.2: forward two gathers and two sums; backward as many, and two gathers of what is not
    kept.
    """
    ops = layers().program(0).ops
    for part, kind, count in (
        *(("forward", AllGather, 2), ("forward", ReduceScatter, 2)),
        *(("backward", AllGather, 4), ("backward", ReduceScatter, 2)),
    ):
        assert sum(isinstance(op, kind) and op.part == part for op in ops) == 2 * count, (part, kind)


def test_gathered_tokens_are_copied_where_sequences_lie_one_behind_the_other() -> None:
    """Of each of 6 gathers and 4 sums of a layer. Of one sequence both orders are one."""

    def copies(**fields: Any) -> int:
        return sum(isinstance(op, Copy) for op in layers(**fields).program(0).ops)

    assert copies(batch=2) == 2 * (6 + 4)
    assert copies(batch=2, memory_order="sbh") == copies() == 0
    assert layers(memory_order="sbh").program(0) == layers().program(0)


def test_tokens_that_arrive_in_another_order_of_memory() -> None:
    """The bytes of two sequences would be taken for those of tokens."""

    def with_others(kind: type, *, first: bool, **fields: Any) -> Schedule:
        """Return layers with all that ops of a kind read in the order where tokens are first in memory, or are not."""
        schedule = layers(batch=2, memory_order="sbh", **fields)

        def change(rank: int) -> Program:
            program = schedule.program(rank)
            read = {view.buffer for op in program.ops if isinstance(op, kind) for view in op.reads}
            buffers = [
                msgspec.structs.replace(buffer, token_major=first or msgspec.UNSET) if number in read else buffer
                for number, buffer in enumerate(program.buffers)
            ]
            return program.replace(buffers=tuple(buffers))

        return Schedule(schedule.header, change)

    refuses(with_others(AllGather, first=False), r"disagree on its parts: .*'bse'.*'sbe'")
    refuses(with_others(HostCopy, first=False, activations="host"), "copies from bs.* to sb")
    refuses(with_others(Gemm, first=True), "has no tokens that could be first")


def test_buffers_that_stay_for_what_is_gathered() -> None:
    """Two of all 32 tokens of 32 features in fp64, one for inputs and one for gradients, held all through."""
    new, kept = (layers(tp_overlap="shards", tp_buffers=which) for which in ("new", "all"))
    is_exact(kept)
    gathers = [op for op in kept.program(1).ops if isinstance(op, AllGather)]
    assert [op.label for op in gathers] == [op.label for op in new.program(1).ops if isinstance(op, AllGather)]
    inputs = [op.recvs.view.buffer for op in gathers if op.label in {"gather h1", "gather h2"}]
    gradients = [op.recvs.view.buffer for op in gathers if op.label in {"gather dx", "gather dmiddle"}]
    assert (len(set(inputs)), len(set(gradients)), len(inputs + gradients)) == (1, 1, len(gathers))
    before, held = (walks(check(one))[1].in_use for one in (new, kept))
    assert held[1] - before[0] == held[-2] - before[-1] == 2 * 32 * 32 * 8


@pytest.mark.parametrize(
    ("label", "stale"),
    [
        ("gather h1", "h2 of layer 0, dq_raw of layer 0"),
        ("gather h2", "h1 of layer 1, dgate of layer 0"),
        ("gather dx", "dmiddle of layer 1, w_down of layer 0"),
    ],
)
def test_what_lies_in_a_buffer_from_before(label: str, stale: str) -> None:
    """A product would take what another layer gathered there, or another product."""
    schedule = layers(tp_buffers="all")

    def without(rank: int) -> Program:
        program = schedule.program(rank)
        found = [at for at, op in enumerate(program.ops) if op.label == label]
        return program.replace(ops=(*program.ops[: found[-1]], *program.ops[found[-1] + 1 :]))

    refuses(Schedule(schedule.header, without), f"of {stale} is no equation of the layer")


def test_sums_on_all_ranks() -> None:
    """arXiv:1909.08053 §3: two all-reduces forward and two backward, of all tokens; a ring sends 2 (T-1)/T of them from
    each rank. The gradients of norms are those of all tokens at once.
    """
    for mesh, ranks in (("2 ranks", 2), ("4 ranks", 4)):
        schedule = layers(mesh, tp_sequence=False)
        ops = [op for op in schedule.program(0).ops if isinstance(op, Collective)]
        assert [op.label for op in ops if op.part == "forward"] == 2 * ["sum middle", "sum x"]
        assert [op.label for op in ops if op.part == "backward"] == 2 * ["sum dh2", "sum dh1"]
        assert {type(op) for op in ops} == {AllReduce}
        assert schedule.header.claims
        assert schedule.header.claims.wire_bytes == 2 * 4 * 2 * (ranks - 1) * 32 * 32 * 8


def test_what_ranks_hold_of_norms() -> None:
    """All tokens of what is between products of shares, or those of a rank."""
    for sequence, tokens in ((True, 16), (False, 32)):
        buffers = layers(tp_sequence=sequence).program(0).buffers
        held = {buffer.name: buffer.shape for buffer in buffers if buffer.category == "saved"}
        assert held["h1"] == held["middle"] == held["x"] == (1, tokens, 32)
        assert held["act"] == (1, 32, 12)


def test_gradients_of_norms_that_all_ranks_have_are_not_summed_again() -> None:
    schedule = layers(tp_sequence=False)

    def summed(rank: int) -> Program:
        program = schedule.program(rank)
        at = next(at for at, op in enumerate(program.ops) if op.label == "back through norm1")
        (_, gradient) = program.ops[at].writes
        again = AllReduce(part="backward", label="sum dnorm1", communicator="tp", view=gradient)
        return program.replace(ops=(*program.ops[: at + 1], again, *program.ops[at + 1 :]))

    refuses(Schedule(schedule.header, summed), "dnorm1.* would count tokens 0..32 twice")


def in_order(overlap: TensorOverlap, *tensors: str) -> list[str]:
    """Return the products and what is sent in the backward pass of a layer, of those that name one of some tensors."""
    ops = layers(tp_overlap=overlap).program(0).ops
    found = [op.label for op in ops if op.part == "backward" and isinstance(op, Gemm | AllGather | ReduceScatter)]
    named = [label for label in found if label.split()[-1] in tensors]
    return named[: len(named) // 2]


def test_what_is_sent_beside_products_of_gradients() -> None:
    """Of one input: it is gathered before the products for its gradient, which is summed before those of weights."""
    of_mlp = ("h2", "dh2", "w_gate", "w_up", "dw_gate", "dw_up")
    led, learned = ["back through w_gate", "back through w_up"], ["gradient dw_gate", "gradient dw_up"]
    for overlap in ("gradients", "shards"):
        assert in_order(overlap, *of_mlp) == ["gather h2", *led, "sum dh2", *learned]
    assert in_order("none", *of_mlp) == [led[0], "gather h2", learned[0], led[1], "sum dh2", learned[1]]
    of_rows = ["gather dx", "back through w_down", "gradient dw_down"]
    assert in_order("gradients", "dx", "w_down", "dw_down") == of_rows
    assert in_order("shards", "dx", "w_down", "dw_down") == [*of_rows[:2], *of_rows[1:]]


@pytest.mark.parametrize("rank", range(4))
def test_products_of_own_tokens_come_first(rank: int) -> None:
    """Of 32 tokens 8 are a rank's own: products of these are issued before all are there, those of others behind."""
    program = layers("4 ranks", "shards").program(rank)
    for label, of_layer in (("w_up", 2), ("back through w_down", 2)):
        found = [op.out.slices[TOKENS] for op in program.ops if isinstance(op, Gemm) and op.label == label]
        own, others = (8 * rank, 8 * rank + 8), [(0, 8 * rank), (8 * rank + 8, 32)]
        assert found == of_layer * [own, *(span for span in others if span[0] < span[1])]


@pytest.mark.parametrize("overlap", ["none", "gradients", "shards"])
def test_what_runs_meanwhile(overlap: TensorOverlap) -> None:
    """A gather of the backward pass, the sum behind it, and gathers before products of own tokens, each with the next
    product.
    """
    checked = check(layers(tp_overlap=overlap, dtype="bf16"))
    trace = simulate(checked, Cluster(load_cluster("hgx-h100")), None).trace
    rows = [row for row in trace.rows if row.rank == 0]

    def meets(part: str, sent: str, product: str) -> bool:
        at = next(at for at, row in enumerate(rows) if (row.part, row.label) == (part, sent))
        beside = next(row for row in rows[at:] if row.label == product)
        return beside.begin_s < rows[at].end_s

    assert meets("backward", "gather h2", "back through w_gate") == (overlap != "none")
    assert meets("backward", "sum dh2", "gradient dw_gate") == (overlap != "none")
    assert meets("forward", "gather h2", "w_gate") == meets("backward", "gather dx", "back through w_down")
    assert meets("forward", "gather h2", "w_gate") == (overlap == "shards")


def test_what_is_sent_begins_before_the_product_beside_it_where_launches_have_one_queue() -> None:
    """Else the product is on all multiprocessors first, and what is sent waits for its last wave."""
    for software, sooner in (("megatron", True), ("torchtitan", False)):
        found = Setup(
            "single", model="llama3-8b", cluster="hgx-h100", gpus=8, tp_degree=8, seq="8K", scope="layer", layers=1,
            software=software, set={"schedule.tp_overlap": "gradients", "schedule.products": "joined"}, jitter=0,
        ).predicted()  # fmt: skip
        rows = [row for row in found.trace.rows if row.rank == 0 and row.part == "backward"]
        sent, product = (
            next(row for row in rows if row.label == label) for label in ("gather h2", "back through w_gate w_up")
        )
        assert (sent.begin_s <= product.begin_s) == sooner
        assert sooner or sent.begin_s > (product.begin_s + product.end_s) / 2
        spans = critical_path(found.simulation)
        assert sum(one.seconds for one in spans) == pytest.approx(found.step_time_s, rel=1e-9)
        assert all(one.end_s == pytest.approx(other.begin_s) for one, other in itertools.pairwise(spans))


def test_products_in_chunks() -> None:
    """Of the tokens of one member at a time, those of rank 1 first, then as they come around the group of four; what is
    meant for others before what is its own.
    """
    program = layers("4 ranks", "chunks").program(1)

    def begins(label: str) -> list[int]:
        some = [op for op in program.ops if isinstance(op, Gemm) and op.label == label]
        return [op.a.slices[TOKENS][0] // 8 for op in some[: len(some) // 2]]

    products = [op for op in program.ops if isinstance(op, Gemm) and op.label == "w_up"]
    assert [op.out.slices[TOKENS][0] // 8 for op in products[:4]] == [1, 0, 3, 2]
    assert begins("w_down") == [2, 3, 0, 1]
    sent = [op for op in program.ops if isinstance(op, Exchange)]
    assert all(op.by_copies and len(op.sends) == len(op.recvs) == 1 for op in sent)
    assert [op.sends[0].peer for op in sent if op.label.startswith("hop") and "h2" in op.label][:3] == [2, 2, 2]
    assert [op.sends[0].peer for op in sent if op.label.startswith("terms")][:3] == [2, 3, 0]
    assert not [op for op in program.ops if isinstance(op, AllGather | ReduceScatter) and op.part == "forward"]


def test_copies_hold_no_multiprocessors_and_run_at_the_rate_of_links() -> None:
    """32 tokens of 32 features in bf16 on 4 ranks: a hop has 512 bytes. It takes the latency of NVLink and 376 GB/s."""
    checked, cluster = check(layers("4 ranks", "chunks", dtype="bf16")), Cluster(load_cluster("hgx-h100"))
    trace = simulate(checked, cluster, load_profile("h100-sxm")).trace
    hop = next(row for row in trace.rows if row.kind == "Exchange")
    assert hop.end_s - hop.begin_s == pytest.approx(3.4e-6 + 512 / (0.835 * 450e9), rel=1e-9)
    assert CostModel(cluster, None).held_by_messages((0, 1, 2, 3), 0, 0) == 0
    with pytest.raises(InputError, match="on two nodes, and copy engines reach no other one"):
        simulate(checked, Cluster(msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2, gpus_per_node=2)), None)


def test_one_side_that_does_not_copy() -> None:
    schedule = layers("4 ranks", "chunks")

    def by_kernels(rank: int) -> Program:
        program = schedule.program(rank)
        at = next(at for at, op in enumerate(program.ops) if isinstance(op, Exchange))
        op = msgspec.structs.replace(program.ops[at], by_copies=msgspec.UNSET)
        return program if rank else program.replace(ops=(*program.ops[:at], op, *program.ops[at + 1 :]))

    refuses(Schedule(schedule.header, by_kernels), "by copies")


def changed(change: Callable[[Program], Program]) -> Schedule:
    """Return layers with a change on rank 1."""
    schedule = layers()
    return Schedule(schedule.header, lambda rank: change(schedule.program(rank)) if rank else schedule.program(rank))


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ("w_up", "parts 0..12 and 12..24 of gate, up meet"),
        ("w_down", "parts 0..12 and 12..24 of act, w_down meet"),
        ("wq", "heads 0..4. attends with the wrong key/value heads 2..4"),
        ("wo", "parts 0..4 and 4..8 of out, wo meet"),
    ],
)
def test_the_part_of_another_rank(tensor: str, says: str) -> None:
    """Of heads or features that other operands do not have."""

    def of_another(program: Program) -> Program:
        inputs = [
            msgspec.structs.replace(port, features=_first(port.features), tokens=tuple(map(_first, port.tokens)))
            if port.tensor == tensor
            else port
            for port in program.inputs
        ]
        return program.replace(inputs=tuple(inputs))

    refuses(changed(of_another), says)


def _first(span: Any) -> Any:
    """Return the part of rank 0 where a span is that of rank 1."""
    return Span(0, span.size) if span and span.start else span


def without(kind: type, label: str) -> Callable[[Program], Program]:
    """Return the change that leaves out the first op of a kind and name."""

    def change(program: Program) -> Program:
        at = next(at for at, op in enumerate(program.ops) if isinstance(op, kind) and op.label == label)
        return program.replace(ops=(*program.ops[:at], *program.ops[at + 1 :]))

    return change


def test_a_product_that_does_not_add_to_the_sum() -> None:
    """Of the features of one rank one of the two products that lead back to h2."""
    refuses(changed(without(Gemm, "back through w_up")), "dh2.* is not complete yet")


def test_a_sum_over_ranks_that_is_left_out() -> None:
    """Each rank takes its own terms for all of them."""
    schedule = layers()

    def own_terms(rank: int) -> Program:
        program = schedule.program(rank)
        at = next(at for at, op in enumerate(program.ops) if isinstance(op, ReduceScatter))
        op = program.ops[at]
        own = op.sends.view[:, rank * 16 : (rank + 1) * 16]
        copy = Copy(part=op.part, label="own terms", source=Split(own, 0, 1), target=Split(op.recv, 0, 1))
        return program.replace(ops=(*program.ops[:at], copy, *program.ops[at + 1 :]))

    refuses(Schedule(schedule.header, own_terms), "not complete yet")
