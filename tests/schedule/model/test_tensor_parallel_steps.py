"""Training steps whose weights are shared out over tensor-parallel groups: proved, exact, and what is wrong in them is
found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.footprint import footprint
from sim.base.errors import InputError, LengthError
from sim.schedule.ir.masks import ONE
from sim.schedule.ir.ops import (
    Accumulate,
    AllReduce,
    Embed,
    EmbedBackward,
    ExpSum,
    LogitLoss,
    Op,
    ReduceScatter,
    SquareSum,
    Unpack,
)
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.shares import Share, num_elements
from sim.schedule.ir.views import View
from sim.schedule.methods.catalog import NAMED
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.model.scope import units
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import by_tier, make_model
from tests.schedule.proof.test_check_catches import refuses

CPU = torch.device("cpu")


def step(name: str = "single", mesh: Mesh = Mesh(tp=2), **chosen: Any) -> Schedule:
    """Return a step of two layers; fields of the model, of the workload and options by their names."""
    options = {key: chosen.pop(key) for key in [*chosen] if hasattr(NAMED[name].options, key)}
    of_work = {key: chosen.pop(key) for key in [*chosen] if key in Workload.__struct_fields__}
    model = msgspec.structs.replace(make_model(8, 4, head_dim=4), **{"ffn_dim": 24, "vocab_size": 40} | chosen)
    workload = Workload(**{"model": model, "seq": 48, "dtype": "fp64", "scope": "step", "layers": 2} | of_work)
    return NAMED[name].schedule(workload, mesh, dataclasses.replace(NAMED[name].options, **options))


def is_exact(schedule: Schedule) -> None:
    checked = check(schedule)
    for seed in (1, 2):
        errors = output_errors(checked, execute_virtual(checked, CPU, seed))
        assert max(errors.values()) <= BOUNDS["fp64"]


MESHES = {
    "single": Mesh(tp=4), "ulysses": Mesh(tp=2, ulysses=2), "fpdt": Mesh(tp=2, ulysses=2),
    "usp": Mesh(tp=2, ulysses=2, ring=2), "upipe": Mesh(tp=2, ulysses=2, ring=2),
}  # fmt: skip


@pytest.mark.parametrize("scope", ["layer", "step"])
@pytest.mark.parametrize("name", by_tier({"single"}, {"ulysses"}, NAMED))
def test_every_schedule_takes_shares_of_weights(name: str, scope: str) -> None:
    is_exact(step(name, MESHES.get(name, Mesh(tp=2, ring=4)), scope=scope))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [{}, {"tp_overlap": "shards"}, {"tp_sequence": False, "tp_overlap": "gradients"}])
@pytest.mark.parametrize("name", NAMED)
def test_every_schedule_takes_every_way_to_send(name: str, chosen: dict[str, Any]) -> None:
    for scope in ("layer", "step"):
        is_exact(step(name, MESHES.get(name, Mesh(tp=2, ring=4)), scope=scope, **chosen))


CASES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "replicas": (Mesh(tp=2, dp=2), {}),
    "replicas, shards padded": (Mesh(tp=2, dp=3), {"zero_stage": 1}),
    "hybrid": (Mesh(tp=2, dp=2), {"shards": "replica", "zero_stage": 2}),
    "stage 0, buckets": (Mesh(tp=2, dp=2), {"zero_stage": 0, "bucket_mb": 1}),
    "as nanotron": (Mesh(tp=2, dp=2), {"zero_stage": 1, "reduce_to": "all", "gather": "all", "bucket_mb": 1,
                                       "accumulate": "in-place", "micro_batches": 2, "batch": 4,
                                       "loss": "subtracted"}),
    "micro-batches of two sequences": (Mesh(tp=2, dp=2), {"micro_batches": 2, "batch": 4, "sync": "last"}),
    "optimiser on the host": (Mesh(tp=2, dp=2), {"optimiser": "host", "weights": "host"}),
    "chunks of the loss": (Mesh(tp=2), {"loss": "chunked", "batch": 2, "vocab_size": 400}),
    "torch's loss": (Mesh(tp=4), {"loss": "torch", "logit_softcap": 2.0, "batch": 2}),
    "logits in fp32": (Mesh(tp=2), {"loss": "unfused", "logit_softcap": 2.0, "logit_scale": 0.5}),
    "one weight for both ends": (Mesh(tp=2, dp=2), {"tied_embeddings": True, "embedding_scale": 2.0}),
    "all kept, eager": (Mesh(tp=2), {"checkpoint": "none", "modules": "eager", "biases": ("qkv",)}),
    "kept on the host": (Mesh(tp=2), {"checkpoint": "attention", "activations": "host", "mlp": "tiled"}),
    "both norms, GELU": (Mesh(tp=4), {"norms": "around", "mlp": "gelu"}),
    "one norm before both": (Mesh(tp=2), {"parallel_residual": True, "checkpoint": "x+out"}),
    "documents": (Mesh(tp=2, dp=2), {"documents": (30, 18)}),
    "two members a key/value head": (Mesh(tp=4), {"num_kv_heads": 2, "biases": ("qkv",)}),
    "norms of q and k": (Mesh(tp=4, dp=2), {"qk_norm": "head"}),
    "eager norms of q and k": (Mesh(tp=2), {"qk_norm": "head", "modules": "eager"}),
    "one key/value head": (Mesh(tp=4, dp=2), {"num_kv_heads": 1, "zero_stage": 1}),
    "sent beside gradients": (Mesh(tp=4, dp=2), {"tp_overlap": "gradients", "biases": ("qkv",), "zero_stage": 1}),
    "own shards first": (Mesh(tp=4), {"tp_overlap": "shards", "biases": ("qkv",), "batch": 2}),
    "own shards first, one norm before both": (Mesh(tp=2), {"tp_overlap": "shards", "parallel_residual": True}),
    "own shards first, tiles": (Mesh(tp=2), {"tp_overlap": "shards", "mlp": "tiled", "tied_embeddings": True}),
    "all tokens on all": (Mesh(tp=4, dp=2), {"tp_sequence": False, "checkpoint": "none", "zero_stage": 1, "batch": 2}),
    "all tokens on all, beside gradients": (Mesh(tp=2), {"tp_sequence": False, "tp_overlap": "shards",
                                                        "loss": "chunked", "embedding_scale": 2.0,
                                                        "vocab_size": 400, "tied_embeddings": True}),
    "all tokens on all, few heads": (Mesh(tp=4), {"tp_sequence": False, "num_kv_heads": 2, "biases": ("qkv",)}),
    "all tokens on all, one head": (Mesh(tp=4, dp=2), {"tp_sequence": False, "num_kv_heads": 1, "shards": "replica"}),
    "all tokens on all, norms of q and k": (Mesh(tp=4, dp=2), {"tp_sequence": False, "qk_norm": "head"}),
    "all tokens on all, one norm before both": (Mesh(tp=2), {"tp_sequence": False, "parallel_residual": True,
                                                            "mlp": "tiled", "loss": "unfused"}),
    "all tokens on all, stages": (Mesh(tp=2, pp=2), {"tp_sequence": False, "pipeline_schedule": "zb-h1",
                                                    "micro_batches": 3, "batch": 3, "zero_stage": 0}),
    "parts handed on and gathered": (Mesh(tp=2, pp=2), {"tp_sequence": False, "tp_hands": "parts", "micro_batches": 2,
                                                        "batch": 4}),
    "parts handed on and gathered, chunks": (Mesh(tp=2, pp=2), {"tp_sequence": False, "tp_hands": "parts", "layers": 4,
                                                                "memory_order": "sbh", "pipeline_chunks": 2,
                                                                "pipeline_schedule": "interleaved", "zero_stage": 1,
                                                                "micro_batches": 2, "batch": 4}),
    "stages that make some gradients apart": (Mesh(tp=2, pp=2), {"pipeline_schedule": "dualpipe-v", "layers": 4,
                                                                "micro_batches": 4, "batch": 4}),
    "tokens first in memory": (Mesh(tp=2), {"memory_order": "sbh", "tp_overlap": "shards", "mlp": "tiled", "batch": 2}),
    "tokens first in memory, chunks of the loss": (Mesh(tp=2, dp=2), {"memory_order": "sbh", "loss": "chunked",
                                                                     "vocab_size": 400, "micro_batches": 2,
                                                                     "batch": 8, "activations": "host"}),
    "tokens first in memory, stages": (Mesh(tp=2, pp=2), {"memory_order": "sbh", "tp_overlap": "gradients",
                                                         "modules": "eager", "micro_batches": 2, "batch": 4}),
    "joined products": (Mesh(tp=2), {"products": "joined", "tp_overlap": "shards", "biases": ("qkv",)}),
    "joined products, some kept": (Mesh(tp=4), {"products": "joined", "checkpoint": "x+q+up",
                                               "qk_norm": "head", "tp_sequence": False}),
    "joined products, stages": (Mesh(tp=2, pp=2), {"products": "joined", "pipeline_schedule": "zb-h1", "zero_stage": 0,
                                                  "micro_batches": 2, "batch": 2, "accumulate": "in-products"}),
    "chunks beside hops": (Mesh(tp=4), {"tp_overlap": "chunks", "products": "joined", "memory_order": "sbh",
                                       "batch": 2}),
    "chunks beside hops, replicas": (Mesh(tp=4, dp=2), {"tp_overlap": "chunks", "biases": ("qkv",), "zero_stage": 1,
                                                       "tied_embeddings": True, "batch": 2, "loss": "unfused"}),
    "chunks beside hops, stages": (Mesh(tp=2, pp=2), {"tp_overlap": "chunks", "pipeline_schedule": "zb-h1",
                                                     "norms": "around", "micro_batches": 2, "batch": 2}),
    "chunks beside hops, adapters": (Mesh(tp=2), {"tp_overlap": "chunks", "lora_rank": 2, "parallel_residual": True,
                                                 "lora_targets": ("q", "o", "down")}),
    "buffers that stay": (Mesh(tp=2, pp=2), {"tp_buffers": "all", "tp_overlap": "shards", "memory_order": "sbh",
                                            "products": "joined", "pipeline_schedule": "zb-h1", "micro_batches": 2,
                                            "batch": 4}),
    "a buffer that stays": (Mesh(tp=2, dp=2), {"tp_buffers": "inputs", "tp_overlap": "gradients", "batch": 2,
                                               "parallel_residual": True, "lora_rank": 2, "lora_targets": ("q", "o")}),
    "own shards first, stages": (Mesh(tp=2, pp=2), {"tp_overlap": "shards", "pipeline_schedule": "zb-h1",
                                                   "micro_batches": 3, "batch": 3}),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    by_tier(
        {"chunks of the loss", "own shards first", "joined products", "buffers that stay"},
        {"as nanotron", "two members a key/value head", "all tokens on all"},
        CASES,
    ),
)
def test_what_a_step_may_have_beside(case: str) -> None:
    mesh, chosen = CASES[case]
    mlp = {"mlp": chosen["mlp"]} if chosen.get("mlp") == "gelu" else {}
    if mlp:  # a field of the model, and an option
        model = msgspec.structs.replace(make_model(8, 4, head_dim=4), ffn_dim=24, vocab_size=40, mlp="gelu")
        chosen = {key: value for key, value in chosen.items() if key != "mlp"} | {"model": model}
    is_exact(step("single", mesh, **chosen))


def test_members_that_share_a_key_value_head_and_do_not_sum_its_gradients() -> None:
    """Each of two has the terms of its own query heads of it."""
    schedule = step(mesh=Mesh(tp=4), num_kv_heads=2)
    assert [one.name for one in schedule.header.communicators if len(one.groups) == 2] == ["key/value heads"]

    def without(rank: int) -> Program:
        program = schedule.program(rank)
        return program.replace(ops=tuple([op for op in program.ops if op.label != "sum dwk"]))

    refuses(Schedule(schedule.header, without), "packs dwk.* a sum over some of 4 heads")


def test_members_that_share_a_key_value_head_and_lack_queries_of_some_of_its_keys() -> None:
    """Of a ring's block of 24 keys the gradients of 12 are added: the others have the terms of fewer queries."""
    schedule = step("zigzag", Mesh(tp=4, ring=2), num_kv_heads=2, scope="layer", layers=1)

    def halved(rank: int) -> Program:
        program = schedule.program(rank)
        if rank:
            return program
        at = next(at for at, op in enumerate(program.ops) if op.label == "add dk kv1")
        op = program.ops[at]
        assert isinstance(op, Accumulate)
        half = msgspec.structs.replace(op, source=op.source[:, :12], into=op.into[:, :12])
        return program.replace(ops=(*program.ops[:at], half, *program.ops[at + 1 :]))

    refuses(Schedule(schedule.header, halved), "dk.*: some of it is not complete yet")


def test_tokens_of_another_micro_batch_in_a_buffer_that_stays() -> None:
    """What the first one gathered backward, of the same layer, lies there when the second one begins."""
    schedule = step(tp_buffers="all", micro_batches=2, batch=2, layers=1)

    def without(rank: int) -> Program:
        program = schedule.program(rank)
        at = next(at for at in range(program.begins[2], program.num_ops) if program.ops[at].label == "gather h1")
        return program.replace(ops=(*program.ops[:at], *program.ops[at + 1 :]))

    refuses(Schedule(schedule.header, without), "they are different parts of the global tensors")


def test_norms_of_the_heads_of_one_share_alone() -> None:
    schedule = step(qk_norm="head")

    def without(rank: int) -> Program:
        program = schedule.program(rank)
        return program.replace(ops=tuple([op for op in program.ops if op.label != "sum dnorm_q"]))

    refuses(Schedule(schedule.header, without), "packs dnorm_q.* a sum over some of 8 heads")


@pytest.mark.sweep
def test_all_members_on_one_device() -> None:
    is_exact(on_one_device(check(step("ring", Mesh(tp=2, ring=2)))))


@pytest.mark.sweep
def test_all_stages_on_one_device() -> None:
    """Each squares gradients of its own layers: of all others it adds zeros to the sums of the other stages."""
    is_exact(on_one_device(check(step(mesh=Mesh(tp=2, pp=2), micro_batches=2, batch=2, seq=16))))


def test_where_ranks_have_whole_weights_nothing_is_sent_beside_products() -> None:
    changed = [{}, {"tp_overlap": "shards"}, {"tp_sequence": False}]
    assert len({step("ring", Mesh(ring=2), **chosen).hash for chosen in changed}) == 1


def test_members_hold_their_shares() -> None:
    """Of four members a quarter of what is divided, and all of the norms."""
    for mesh in (Mesh(tp=4), Mesh(tp=4, dp=2)):
        schedule = step("single", mesh, zero_stage=1)
        model = schedule.header.workload.model
        share, flats = Share(model, 3, 4), [unit.flat for unit in units(schedule.header.workload)]
        norms = 5 * model.embed_dim
        assert sum(map(share.size, flats)) == norms + (sum(num_elements(flat, model) for flat in flats) - norms) // 4
        states = [port for port in schedule.program(3).inputs if port.tensor.endswith("parameters")]
        whole = sum(map(share.size, flats))
        assert sum(math.prod(port.view.shape) for port in states) == whole // mesh.dp
        found = footprint(schedule.header)
        assert found.states_bytes == 8 * (3 * whole // mesh.dp + 2 * whole)
        assert found.saved_bytes == 2 * 12 * model.embed_dim * 8
        counted = [share.counted(flat, share.rows(flat)) for flat in flats]
        assert sum(span.size for spans in counted for span in spans) == sum(map(share.size, flats)) - norms


def test_collectives_of_a_step() -> None:
    """Of each token's logits three statistics, as Megatron-LM's core/tensor_parallel/cross_entropy.py has them; what is
    embedded and the gradient behind the head are scattered as a layer's sums are.
    """
    ops = step().program(0).ops
    reduced = [op.label for op in ops if isinstance(op, AllReduce)]
    assert reduced[:3] == ["largest of top", "sum target", "sum sums"]
    assert sum(label.startswith("sum dnorm") for label in reduced) == 5
    assert reduced[-1] == "norm of gradients"
    scattered = [op.label for op in ops if isinstance(op, ReduceScatter)]
    assert scattered.count("sum x") == 3
    assert scattered.count("sum dh") == 1


Change = Callable[[Op], Op | None]


def changed(kind: type, change: Change, label: str = "", **chosen: Any) -> Schedule:
    """Return a step with a change of the first op of a kind, and of a label, on rank 1."""
    schedule = step(**chosen)

    def program(rank: int) -> Program:
        program = schedule.program(rank)
        if rank != 1:
            return program
        at = next(at for at, op in enumerate(program.ops) if isinstance(op, kind) and label in op.label)
        made = change(program.ops[at])
        return program.replace(ops=(*program.ops[:at], *([made] if made else []), *program.ops[at + 1 :]))

    return Schedule(schedule.header, program)


def put(**fields: Any) -> Change:
    return lambda op: msgspec.structs.replace(op, **fields)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (Embed, {"first": 0}, "Embed begins at 0 with 20..40 of the vocabulary"),
        (Embed, {"first": msgspec.UNSET}, "Embed of 20..40 of the vocabulary does not say where these begin"),
        (EmbedBackward, {"first": 0}, "square of dembedding parameters.* would count tokens 0..640 twice"),
        (ExpSum, {"first": 0}, "ExpSum begins at 0 with 20..40"),
        (LogitLoss, {"first": 0}, "LogitLoss begins at 0 with 20..40"),
        (LogitLoss, {"count": 3}, "has count 3: the number of labels is 47"),
    ],
)
def test_another_share_of_the_vocabulary(kind: type, fields: dict[str, Any], says: str) -> None:
    refuses(changed(kind, put(**fields)), says)


@pytest.mark.parametrize(
    ("label", "largest", "says"),
    [
        ("largest of top", msgspec.UNSET, "adds up top.*: what is largest of logits"),
        ("sum sums", True, "takes the largest of sums"),
        ("sum target", True, "takes the largest of target"),
        ("sum dnorm1", True, "takes the largest of dnorm1"),
    ],
)
def test_a_sum_for_the_largest(label: str, largest: Any, says: str) -> None:
    """On all ranks."""
    schedule = step()

    def program(rank: int) -> Program:
        program = schedule.program(rank)
        ops = [
            msgspec.structs.replace(op, largest=largest) if isinstance(op, AllReduce) and op.label == label else op
            for op in program.ops
        ]
        return program.replace(ops=tuple(ops))

    refuses(Schedule(schedule.header, program), says)


def test_statistics_of_one_share_alone() -> None:
    schedule = step()

    def without(label: str) -> Schedule:
        def program(rank: int) -> Program:
            program = schedule.program(rank)
            return program.replace(ops=tuple([op for op in program.ops if op.label != label]))

        return Schedule(schedule.header, program)

    refuses(without("largest of top"), "top.* is not complete yet")
    refuses(without("sum sums"), "sums.* is not complete yet")
    refuses(without("sum target"), "target.* is not complete yet")
    refuses(without("sum dnorm1"), "squares dweights.*heads 0..1.*not complete yet")


WHOLE: dict[str, dict[str, Any]] = {
    "owners": {"zero_stage": 1}, "all": {"zero_stage": 1, "reduce_to": "all"}, "replicas": {"zero_stage": 0},
    "in place": {"zero_stage": 1, "accumulate": "in-place"}, "in the last pass": {"zero_stage": 2, "sync": "last"},
    "in products": {"zero_stage": 0, "sync": "last", "accumulate": "in-products"},
}  # fmt: skip
"""Options with which whole gradients of micro-batches add up."""


def _sums(schedule: Schedule) -> list[AllReduce]:
    """Return what sums the first norm of layer 0 over the group, on rank 0."""
    return [op for op in schedule.program(0).ops if op.label == "sum dnorm1" and isinstance(op, AllReduce)]


@pytest.mark.parametrize("case", by_tier({"in place"}, {"owners", "in the last pass"}, WHOLE))
def test_norms_are_summed_over_members_with_whole_gradients(case: str) -> None:
    """Once a step and layer, where each micro-batch's would be behind its backward pass; proved, and exact."""
    schedule = step("ring", Mesh(tp=2, ring=2), batch=3, micro_batches=3, **WHOLE[case])
    assert len(_sums(schedule)) == 2
    is_exact(schedule)
    assert len(_sums(step("ring", Mesh(tp=2, ring=2), batch=3, micro_batches=3))) == 6


def test_norms_that_are_not_summed_with_whole_gradients() -> None:
    """Or an element less of them, or twice, or other weights of which each member has its share."""
    schedule = step(batch=2, micro_batches=2, **WHOLE["owners"])

    def changed(change: Callable[[AllReduce], tuple[AllReduce, ...]]) -> Schedule:
        def program(rank: int) -> Program:
            program, sums = schedule.program(rank), {"sum dnorm1"}
            each = [change(op) if op.label in sums else (op,) for op in program.ops]  # type: ignore[arg-type]
            return program.replace(ops=tuple([op for some in each for op in some]))

        return Schedule(schedule.header, program)

    def moved(op: AllReduce, start: int, stop: int) -> tuple[AllReduce, ...]:
        ((first, last),) = op.view.slices
        return (msgspec.structs.replace(op, view=View(op.view.buffer, ((first + start, last + stop),))),)

    refuses(changed(lambda _: ()), "dweights.*not complete yet")
    refuses(changed(lambda op: moved(op, 1, 0)), "dweights.*not complete yet")
    refuses(changed(lambda op: (op, op)), "would count tokens .* twice")
    refuses(changed(lambda op: moved(op, 0, 1)), "different parts of the global tensors")


def test_norms_that_all_members_count() -> None:
    """Rank 1 squares all of its share: of norms that rank 0 has counted."""

    def all_of_it(op: Op) -> Op:
        assert isinstance(op, SquareSum)
        assert op.gradient.slices[0][0] > 0
        whole = View(op.gradient.buffer, ((0, op.gradient.slices[0][1]),))
        return msgspec.structs.replace(op, gradient=whole)

    refuses(changed(SquareSum, all_of_it, "square weights"), "square of dweights.* would count tokens 0..32 twice")


def test_the_flat_share_of_another_member() -> None:
    """Rank 1 has weights of member 0, or moments."""
    schedule = step()

    def of_another(rank: int, names: set[str]) -> Program:
        program = schedule.program(rank)
        inputs = [msgspec.structs.replace(port, heads=ONE) if port.tensor in names else port for port in program.inputs]
        return program.replace(inputs=tuple(inputs)) if rank else program

    flats = {"weights parameters", "first moments of weights", "second moments of weights"}
    refuses(Schedule(schedule.header, lambda rank: of_another(rank, {"weights parameters"})), "would count .* twice")
    refuses(Schedule(schedule.header, lambda rank: of_another(rank, flats - {"weights parameters"})), "updates .* with")


def test_a_weight_unpacked_to_another_shape() -> None:
    """Of as many elements: views of it would have the rows and columns of the weight, but others of its elements."""
    schedule = step()

    def misshapen(rank: int) -> Program:
        program = schedule.program(rank)
        op = next(op for op in program.ops if isinstance(op, Unpack) and op.label == "unpack weights")
        (place,) = {view.buffer for view in op.weights if program.buffers[view.buffer].name == "w_up"}
        shapes = [(64, 6) if view.buffer == place else view.shape for view in op.weights]
        first = len(program.buffers)
        views = [View(first + at, tuple((0, extent) for extent in shape)) for at, shape in enumerate(shapes)]
        buffers = [
            msgspec.structs.replace(program.buffers[view.buffer], shape=shape)
            for view, shape in zip(op.weights, shapes, strict=True)
        ]
        again = msgspec.structs.replace(op, weights=tuple(views))
        at = program.ops.index(op) + 1
        return program.replace(ops=(*program.ops[:at], again, *program.ops[at:]), buffers=(*program.buffers, *buffers))

    refuses(Schedule(schedule.header, misshapen), r"writes w_up.* to buffer 'w_up' of dims 'io' and shape \(64, 6\)")


@pytest.mark.parametrize(
    ("mesh", "chosen", "says"),
    [
        (Mesh(tp=3), {}, "`tp_degree` 3 does not divide num_heads 8 of test8:4: allowed are 1, 2, 4, 8"),
        (Mesh(tp=2), {"num_heads": 6, "num_kv_heads": 3}, "does not divide num_kv_heads 3 .*: allowed are 1$"),
        (
            Mesh(tp=2),
            {"vocab_size": 41},
            "does not divide vocab_size 41 .*: allowed are 1; or `set` model.vocab_size=42",
        ),
        (
            Mesh(tp=2),
            {"qk_norm": "all"},
            "norms of all heads of q and k as one of test8:4 are not computed in parts yet",
        ),
        (Mesh(tp=8), {"qk_norm": "head"}, "norms of 4 key/value heads that several ranks have of test8:4 are not"),
        (Mesh(tp=2), {"biases": ("out",)}, "biases behind sums over ranks of test8:4 are not computed in parts yet"),
        (Mesh(tp=8), {"lora_rank": 2, "lora_targets": ("k", "v")}, "adapters of 4 key/value heads alone that several"),
        (Mesh(tp=2), {"lora_rank": 2, "tp_sequence": False}, "adapters of test8:4 are shared out with sequence"),
        (Mesh(tp=2), {"scope": "attention", "layers": 1}, "`tp_degree` 2 divides the weights of layers"),
    ],
)
def test_what_is_not_shared_out_is_refused(mesh: Mesh, chosen: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        step("single", mesh, **chosen)


ADAPTERS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    "all, two members a key/value head": ("single", Mesh(tp=4), {"num_kv_heads": 2}),
    "some, eager": ("single", Mesh(tp=2), {"lora_targets": ("q", "v", "o"), "modules": "eager"}),
    "of sums alone": ("single", Mesh(tp=2, dp=2), {"lora_targets": ("o", "down"), "zero_stage": 1}),
    "kept, in stages": ("single", Mesh(tp=2, pp=2), {"checkpoint": "none", "micro_batches": 2, "batch": 2}),
    "in parts of a sequence": ("zigzag", Mesh(tp=2, ring=2), {"checkpoint": "attention", "activations": "host"}),
    "in groups of heads": ("ulysses", Mesh(tp=2, ulysses=2), {"qk_norm": "head"}),
    "beside products": ("single", Mesh(tp=2), {"tp_overlap": "shards"}),
    "of gradients": ("single", Mesh(tp=2, dp=2), {"tp_overlap": "gradients"}),
    "of gradients, weights apart": ("single", Mesh(tp=2, pp=2), {"tp_overlap": "gradients", "micro_batches": 2,
                                                                "pipeline_schedule": "zb-h1", "batch": 2}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_tier({"some, eager"}, {"of sums alone", "of gradients, weights apart"}, ADAPTERS),
)
def test_adapters_lie_as_what_they_multiply(case: str) -> None:
    """Proved, and exact."""
    name, mesh, chosen = ADAPTERS[case]
    is_exact(step(name, mesh, lora_rank=2, lora_alpha=1.0, **chosen))


def test_adapters_that_are_not_summed_over_members() -> None:
    """Of A beside columns each member has the terms of its own tokens."""
    schedule = step(lora_rank=2)

    def without(rank: int) -> Program:
        program = schedule.program(rank)
        return program.replace(ops=tuple([op for op in program.ops if op.label != "sum dlora_a_q"]))

    refuses(Schedule(schedule.header, without), "packs gradients that are sums over different tokens")


@pytest.mark.parametrize("name", ["upipe", "fpdt"])
def test_adapters_beside_projections_in_parts_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"`tp_degree` 2: adapters of .* where schedule '{name}' projects q, k and v"):
        step(name, MESHES[name], lora_rank=2)


def test_lengths_that_members_do_not_divide_are_refused() -> None:
    with pytest.raises(LengthError, match="length 50 is no multiple of 4: the nearest are 48 or 52"):
        step("single", Mesh(tp=4), seq=50).program(0)
    with pytest.raises(LengthError, match="length 52 is no multiple of 8: the nearest are 48 or 56"):
        step("ring", Mesh(tp=4, ring=2), seq=52).program(0)


def test_heads_of_a_share_are_traded() -> None:
    """Four members of two heads each, of which Ulysses takes no more than two ranks."""
    with pytest.raises(
        InputError, match="degree 4 does not divide num_heads 2 of test8:4 on each of 4 tensor-parallel"
    ):
        step("ulysses", Mesh(tp=4, ulysses=4))
