"""Micro-batches whose gradients add up: exact at every stage, memory and bytes by hand, and what check refuses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from random import Random
from typing import Any

import msgspec
import pytest

from sim.accounts.memory import lifetimes, walk
from sim.base.errors import InputError
from sim.schedule.derive.kernels import kernel_use
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import (
    COMPUTE,
    Accumulate,
    AllGather,
    AllReduce,
    Divide,
    Embed,
    Hold,
    HostSync,
    Op,
    Pack,
    ReduceScatter,
    SquareSum,
    Unpack,
    Zero,
)
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.model.layer import gemm_flops
from sim.schedule.model.scope import LAYER, units
from sim.schedule.proof.check import Checked
from sim.schedule.proof.supersteps import Supersteps
from sim.words.options import ZeroStage
from tests.helpers import slow_but, sweep_but
from tests.schedule.model.test_step import is_exact, make_step, step
from tests.schedule.proof.test_check_catches import refuses
from tests.schedule.proof.test_supersteps import by_all_ops, by_calls, ends_as_the_flat_proof_does, flattened, rebinding


@pytest.mark.sweep
@pytest.mark.parametrize("stage", slow_but({3}, [0, 1, 2, 3]))
def test_every_stage_is_exact_with_replicas(stage: int) -> None:
    """As one batch: the loss is the mean over all labels, and what is clipped is the sum of all gradients."""
    for shards in ("all", "replica"):
        is_exact("ulysses", 4, step(batch=2), dp=2, zero_stage=stage, micro_batches=2, shards=shards)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"optimiser": "host", "zero_stage": 2},
        {"optimiser_states": "model"},
        {"loss": "chunked", "checkpoint": "attention"},
        {"activations": "save-on-cpu", "checkpoint": "x+out+h2", "prefetch": 0},
        {"mlp": "tiled"},
    ],
)
def test_with_other_techniques(options: dict[str, Any]) -> None:
    is_exact("zigzag", 2, step(batch=2), micro_batches=2, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("count", slow_but({4}, [2, 4]))
@pytest.mark.parametrize("name", slow_but({"upipe", "single"}, ["upipe", "allgather", "burst", "single"]))
def test_other_schedules(name: str, count: int) -> None:
    is_exact(name, 1 if name == "single" else 4, step(batch=4), micro_batches=count)


def labels(checked: Checked) -> list[str]:
    return [op.label for op in checked.schedule.program(0).ops]


def test_what_happens_how_often() -> None:
    """At stage 3 all but the optimiser happens for each; below stage 2 gradients are summed over ranks once."""
    one, three = (make_step("ring", 2, step(batch=3), micro_batches=count) for count in (1, 3))
    for label in ("gather weights", "reduce weights", "attend kv0", "loss", "reduce head"):
        assert labels(three).count(label) == 3 * labels(one).count(label) > 0, label
    for label in ("update weights", "norm of gradients", "square weights 0"):
        assert labels(three).count(label) == labels(one).count(label) > 0, label
    assert labels(three).count("add gradients of weights") == 2 * 2
    for stage in (0, 1):
        once = make_step("ring", 2, step(batch=3), micro_batches=3, zero_stage=stage)
        assert labels(once).count("reduce weights") == labels(one).count("reduce weights")


@pytest.mark.sweep
@pytest.mark.parametrize("shards", slow_but({"replica"}, ["all", "replica"]))
@pytest.mark.parametrize("stage", slow_but({3}, [2, 3]))
def test_one_sum_for_all_micro_batches(stage: int, shards: str) -> None:
    """Whole gradients add up at once, and each unit's are summed over ranks once, behind its last backward pass and
    beside that of the next unit.
    """
    options = {"zero_stage": stage, "shards": shards, "micro_batches": 3}
    last = is_exact("ulysses", 4, step(batch=3), dp=2, sync="last", **options)
    every = make_step("ulysses", 4, step(batch=3), 2, sync="every", **options)
    for label in ("reduce weights", "reduce head", "reduce embedding"):
        assert 3 * labels(last).count(label) == labels(every).count(label) > 0, label
    assert labels(last).count("add gradients of weights") == 2 * 2
    ops = labels(last)
    backward = [at for at, label in enumerate(ops) if label == "pack gradients of weights"]
    sums = [at for at, label in enumerate(ops) if label == "reduce weights"]
    assert backward[-2] < sums[0] < backward[-1] < sums[1]


@pytest.mark.sweep
@pytest.mark.parametrize(("stage", "count"), [(0, 2), (1, 1), (1, 2)])
def test_the_one_sum_below_stage_2_is_beside_the_last_backward_pass(stage: int, count: int) -> None:
    """Or behind it; never beside an earlier one."""
    for sync in ("last", "every"):
        checked = is_exact("ring", 2, step(batch=count), micro_batches=count, zero_stage=stage, sync=sync)
        ops = labels(checked)
        backward = [at for at, label in enumerate(ops) if label == "pack gradients of weights"]
        sums = [at for at, label in enumerate(ops) if label == "reduce weights"]
        assert (len(sums), len(backward)) == (2, 2 * count)
        assert backward[-2] < sums[0]
        assert (sums[0] < backward[-1]) == (sync == "last")


IN_PLACE = [(0, 2, "last"), (0, 1, "every"), (1, 2, "every"), (1, 1, "last"), (2, 2, "last"), (3, 2, "last")]


@pytest.mark.sweep
@pytest.mark.parametrize("case", slow_but({(0, 2, "last"), (1, 2, "every")}, IN_PLACE))
def test_gradients_add_up_in_place(case: tuple[int, int, str]) -> None:
    """Each is read once in the model's data type, and added to one fp32 buffer: no fp32 copy is ever there."""
    stage, count, sync = case
    options = {"zero_stage": stage, "micro_batches": count, "sync": sync, "accumulate": "in-place"}
    is_exact("ring", 2, step(batch=count), **options)
    checked = make_step("ulysses", 2, step(batch=count, dtype="bf16"), 2, **options)
    program = checked.schedule.program(0)
    packs = [op for op in program.ops if isinstance(op, Pack)]
    assert len(packs) == count * len(units(checked.schedule.header.workload))
    assert {(program.dtype(op.gradients[0]), program.dtype(op.flat), op.adds) for op in packs} == {
        ("bf16", "fp32", True)
    }
    for op in packs:
        parts = sum(map(program.nbytes, op.gradients))
        assert kernel_use(op, program).hbm_bytes == 5 * parts  # 2 bytes of an element, 4 read and 4 written
    zeroed = [op.into.buffer for op in program.ops if isinstance(op, Zero)]
    assert sorted(zeroed) == sorted({op.flat.buffer for op in packs})
    (held,) = [op.held for op in program.ops if isinstance(op, Hold) and op.label == "hold gradients"]
    assert sorted(view.buffer for view in held) == sorted(zeroed)


NARROW = [(0, "every"), (0, "last"), (1, "every"), (1, "last"), (2, "every"), (2, "last"), (3, "every"), (3, "last")]


@pytest.mark.parametrize("case", sweep_but({(1, "every"), (3, "last")}, NARROW))
def test_gradients_add_up_as_they_are(case: tuple[int, str]) -> None:
    """In bf16: whole ones are added to those of the first micro-batch without a copy of them, shards as they come."""
    stage, sync = case
    options = {"zero_stage": stage, "sync": sync, "micro_batches": 3, "reduce": "model", "accumulate_in": "model"}
    is_exact("ring", 2, step(batch=3), **options)
    program = make_step("ulysses", 2, step(batch=3, dtype="bf16"), 2, **options).schedule.program(0)
    packs = [op for op in program.ops if isinstance(op, Pack)]
    added = [op for op in program.ops if isinstance(op, Accumulate) and op.label.startswith("add gradients")]
    assert {program.dtype(op.flat) for op in packs} | {program.dtype(op.into) for op in added} == {"bf16"}
    whole, units_ = stage < 2 or sync == "last", len(packs) // 3
    assert sum(op.adds is True for op in packs) == (2 * units_ if whole else 0)
    assert len(added) == (0 if whole else 2 * units_)
    for op in packs:
        moved = kernel_use(op, program).hbm_bytes
        assert moved == sum(map(program.nbytes, op.gradients)) * (3 if op.adds is True else 2)
    with pytest.raises(InputError, match=r"schedule\.accumulate_in=model"):
        make_step("ring", 2, step(batch=3), **options | {"sync": "last", "accumulate_in": "fp32"})


@pytest.mark.sweep
@pytest.mark.parametrize("shards", sweep_but({"all"}, ["all", "replica"]))
@pytest.mark.parametrize("stage", [1, 2])
def test_owners_copy_their_part_of_an_all_reduce(stage: int, shards: str) -> None:
    """Which sends twice what a reduce-scatter does; at stage 3 it changes nothing."""
    options = {"zero_stage": stage, "shards": shards, "micro_batches": 2}
    summed = is_exact("ring", 4, step(batch=2), dp=2, reduce_by="all-reduce", **options)
    scattered = make_step("ring", 4, step(batch=2), 2, **options)
    ops = [op for op in summed.schedule.program(3).ops if op.label.startswith("reduce")]
    assert {type(op) for op in ops} == {AllReduce}
    taken = [label for label in labels(summed) if label.startswith("take own part")]
    scatters = [op for op in scattered.schedule.program(3).ops if isinstance(op, ReduceScatter)]
    assert len(taken) == len(scatters) > 0
    sent = [one.schedule.header.claims.wire_bytes for one in (summed, scattered)]
    assert sent[0] > sent[1]
    last = [make_step("ring", 2, step(), reduce_by=by) for by in ("all-reduce", "reduce-scatter")]
    assert last[0].schedule.program(0) == last[1].schedule.program(0)


def beside(ops: Sequence[Op], at: int) -> list[str]:
    """Return the kinds of kernels behind a collective that a rank may begin with before it has ended."""
    written = {view.buffer for view in ops[at].writes}
    behind = takewhile(lambda op: not written & {view.buffer for view in op.reads}, ops[at + 1 :])
    return [type(op).__name__ for op in behind if op.stream == COMPUTE]


def beside_sums(**options: Any) -> list[list[str]]:
    """Return these by layer, from the last to the first, of the sum of its gradients at stage 2."""
    ops = is_exact("ring", 4, step(batch=2), dp=2, zero_stage=2, **options).schedule.program(3).ops
    sums = [at for at, op in enumerate(ops) if isinstance(op, ReduceScatter | AllReduce)]
    return [beside(ops, at) for at in sums[1:-2]]


@pytest.mark.parametrize("by", slow_but({"all-reduce"}, ["reduce-scatter", "all-reduce"]))
def test_kernels_run_beside_sums_or_wait_for_them(by: str) -> None:
    """What an owner copies of an all-reduce comes behind those of the next unit, whose gradients lie elsewhere then."""
    behind_second, behind_first = beside_sums(reduce_by=by)
    assert "AttendBackward" in behind_second
    assert "EmbedBackward" in behind_first
    for waits in ("below-3", "always"):
        assert not any(beside_sums(reduce_by=by, sum_waits=waits))


@pytest.mark.parametrize("stage", slow_but({1}, [0, 1, 2, 3]))
def test_gradients_are_divided_before_each_sum(stage: int) -> None:
    """In a pass that reads and writes all of each, but where there is nobody to sum with."""
    checked = is_exact("ring", 2, step(batch=2), dp=2, zero_stage=stage, micro_batches=2, divides="before")
    for program, uses in zip(checked.schedule.programs, checked.kernels, strict=True):
        divided = [(op.label, use) for op, use in zip(program.ops, uses, strict=True) if isinstance(op, Divide) and use]
        sums = [op.label for op in program.ops if isinstance(op, ReduceScatter | AllReduce)]
        assert [label for label, _ in divided] == [f"divide {label[7:]}" for label in sums if label[:7] == "reduce "]
        assert all(use.hbm_bytes == 2 * 8 * use.shape[0] for _, use in divided)
    alone = make_step("single", 1, step(), divides="before").schedule.program(0)
    assert not any(isinstance(op, Divide) for op in alone.ops)


@pytest.mark.parametrize("waits", slow_but({"never"}, ["never", "always"]))
def test_what_all_micro_batches_add_up_is_summed_beside_the_last_pass_at_stage_1(waits: str) -> None:
    options = {"zero_stage": 1, "sync": "last", "micro_batches": 2, "reduce_by": "all-reduce", "sum_waits": waits}
    ops = is_exact("ring", 4, step(batch=2), dp=2, **options).schedule.program(3).ops
    second, first = [beside(ops, at) for at, op in enumerate(ops) if op.label == "reduce weights"]
    assert ("AttendBackward" in second) == ("EmbedBackward" in first) == (waits == "never")


def test_weights_are_gathered_in_backward_when_their_turn_comes() -> None:
    """Behind the sum of the layer before; forward as far ahead as ever."""
    never = is_exact("ring", 2, step(), backward_prefetch="never")
    ahead = make_step("ring", 2, step())
    for checked, between in ((never, ["gather weights"]), (ahead, [])):
        found = [label for label in labels(checked) if label in {"gather weights", "reduce weights", "attend kv0"}]
        sums = [at for at, label in enumerate(found) if label == "reduce weights"]
        assert [label for label in found[sums[0] + 1 : sums[1]] if label != "attend kv0"] == between
        assert found[:2] == ["gather weights", "gather weights"]


@pytest.mark.sweep
@pytest.mark.parametrize("shards", sweep_but({"all"}, ["all", "replica"]))
def test_all_ranks_get_all_sums_at_stage_1(shards: str) -> None:
    """Each rank finds the norm of all gradients by itself, and updates what it owns."""
    workload, options = step(), {"zero_stage": 1, "shards": shards}
    owner, to_all = (is_exact("ring", 4, workload, dp=2, reduce_to=to, **options) for to in ("owner", "all"))
    kinds = [Counter(type(op).__name__ for op in checked.schedule.program(3).ops) for checked in (owner, to_all)]
    sums = len(units(workload))
    assert kinds[0]["ReduceScatter"] - kinds[1]["ReduceScatter"] == sums
    assert kinds[1]["AllReduce"] - kinds[0]["AllReduce"] == sums - 1
    sizes = [math.prod(unit.flat.shape(workload.model)) for unit in units(workload)]
    squared = [op.gradient.shape for op in to_all.schedule.program(3).ops if isinstance(op, SquareSum)]
    assert sorted(squared) == sorted((size,) for size in sizes)
    with pytest.raises(InputError, match="reduce_to=all is of stage 1"):
        make_step("ring", 2, workload, reduce_to="all")


@pytest.mark.sweep
def test_buckets_end_with_the_weight_that_fills_them() -> None:
    """1 MiB is 512K elements of bf16: a bucket of w_down alone, then two of w_up and w_gate, then what is left."""
    model = msgspec.structs.replace(step().model, embed_dim=256, ffn_dim=2048, head_dim=64)
    workload = msgspec.structs.replace(step(dtype="bf16"), model=model)
    whole = make_step("ring", 2, workload, zero_stage=0)
    cut = is_exact("ring", 2, workload, zero_stage=0, bucket_mb=1)
    sums = [op for op in cut.schedule.program(0).ops if isinstance(op, AllReduce) and op.label == "reduce weights"]
    of_first = [op.view for op in sums if op.view.buffer == sums[0].view.buffer]
    elements = math.prod(units(workload)[1].flat.shape(model))
    assert [view.shape[0] for view in of_first] == [2048 * 256] * 3 + [elements - 3 * 2048 * 256]
    assert [view.slices[0][1] for view in of_first] == [elements - at * 2048 * 256 for at in range(4)]
    assert whole.schedule.header.claims.wire_bytes == cut.schedule.header.claims.wire_bytes
    for options in ({"zero_stage": 0, "bucket_mb": -1}, {"zero_stage": 1, "bucket_mb": 25}):
        with pytest.raises(InputError, match="expected 0 or more, and above 0 only with schedule.zero_stage=0"):
            make_step("ring", 2, step(), **options)


@pytest.mark.sweep
def test_products_add_gradients_of_matrices() -> None:
    """Nothing of them is moved again, but of an embedding and of norms, whose gradients no product makes."""
    options = {"zero_stage": 1, "micro_batches": 2, "accumulate": "in-products"}
    is_exact("ring", 2, step(batch=2), **options)
    workload = step(batch=2, dtype="bf16")
    program = make_step("ring", 2, workload, **options).schedule.program(0)
    embedded, layer, *_ = units(workload)
    moved = {op.label: kernel_use(op, program).hbm_bytes for op in program.ops if isinstance(op, Pack)}
    norms = 2 * workload.model.embed_dim
    assert moved[f"add gradients of {embedded.name}"] == 10 * math.prod(embedded.flat.shape(workload.model))
    assert moved[f"add gradients of {layer.name}"] == 10 * norms
    alone = make_step("ring", 2, step(), zero_stage=0, accumulate="in-products", bucket_mb=25).schedule.program(0)
    assert not [
        op for op in alone.ops if isinstance(op, Pack) and not op.adds
    ]  # all-reduces are of the sums themselves


@pytest.mark.sweep
@pytest.mark.parametrize("count", [1, 2])
def test_the_last_gradients_are_added_out_of_buckets(count: int) -> None:
    """2 bytes of an element into a bucket and 2 out of it, beside the sum in fp32; buckets stay to the end."""
    options = {"zero_stage": 0, "micro_batches": count, "sync": "last", "accumulate": "in-place", "bucket_mb": 1}
    is_exact("ring", 2, step(batch=count), **options)
    workload = step(batch=count, dtype="bf16")
    program = make_step("ring", 2, workload, **options).schedule.program(0)
    filled = [op for op in program.ops if isinstance(op, Pack) and not op.adds]
    added = [op for op in program.ops if isinstance(op, Accumulate) and op.label.startswith("add gradients")]
    assert [op.flat for op in filled] == [op.source for op in added]
    assert len(filled) == len(units(workload))
    assert len([op for op in program.ops if isinstance(op, Pack) and op.adds]) == (count - 1) * len(filled)
    (held,) = [op.held for op in program.ops if isinstance(op, Hold) and op.label == "hold gradients"]
    elements = sum(math.prod(unit.flat.shape(workload.model)) for unit in units(workload))
    assert sum(map(program.nbytes, held)) == (4 + 2) * elements


@pytest.mark.parametrize("optimiser", sweep_but({"gpu"}, ["gpu", "host"]))
@pytest.mark.parametrize("stage", sweep_but({1}, [1, 2]))
def test_new_weights_are_gathered_behind_all_updates(stage: int, optimiser: str) -> None:
    """And are held twice beside where they belong, until all of them are there."""
    options = {"zero_stage": stage, "optimiser": optimiser}
    checked = is_exact("ring", 2, step(), gather="all", **options)
    program, ops = checked.schedule.program(0), checked.schedule.program(0).ops
    updates = [at for at, op in enumerate(ops) if op.label.startswith("update ")]
    gathers = [at for at, op in enumerate(ops) if isinstance(op, AllGather)]
    assert len(updates) == len(gathers) == len(units(checked.schedule.header.workload))
    assert updates[-1] < gathers[0]
    (held,) = [op.held for op in ops if isinstance(op, Hold)]
    (apart,) = [op.calls for op in ops if isinstance(op, HostSync) and op.calls]
    assert apart == 2 * (2 * 6 + 1 + 2)  # ranks; norms, qkv, out, gate_up and down of two layers; embedding; norm, head
    unpacked = sum(program.nbytes(op.flat) for op in ops if isinstance(op, Unpack))
    assert sum(map(program.nbytes, held)) >= 2 * unpacked > 0
    with pytest.raises(InputError, match="gather=all is of stages 1 and 2"):
        make_step("ring", 2, step(), gather="all")


@pytest.mark.sweep
def test_one_rank_gathers_no_new_weights() -> None:
    """It has them all, whenever others would gather them (nanotron 0.4 optim/zero.py, _all_gather_params)."""
    found = [is_exact("single", 1, step(), zero_stage=1, gather=gather) for gather in ("units", "all")]
    assert found[0].schedule.program(0).ops == found[1].schedule.program(0).ops


@pytest.mark.parametrize(
    ("options", "each", "of_shard"),
    [
        ({"zero_stage": 0, "sync": "last", "bucket_mb": 25}, 20, 0),  # bf16 2, gradients 4, states 12, buckets 2
        ({"zero_stage": 1, "reduce_to": "all", "gather": "all"}, 10, 14),  # bf16 2, gradients 4, gathered 2 and 2, sent
    ],
)
def test_bytes_a_weight_behind_the_passes(options: dict[str, Any], each: int, of_shard: int) -> None:
    """As nanotron's logs have them: no activations, and no copy of any unit."""
    workload = step(batch=2, dtype="bf16", seq=512)
    checked = make_step("ring", 2, workload, micro_batches=2, accumulate="in-place", **options)
    sizes = [math.prod(unit.flat.shape(workload.model)) for unit in units(workload)]
    found = walk(checked.schedule.program(0), checked.dependencies[0])
    wanted = sum(sizes) * (each + of_shard / 2)
    of_tokens = 2 * 512 * (8 + 8 + 4)  # ids, labels and losses stay
    assert wanted <= found.update_peak_bytes <= wanted + of_tokens + 4096
    assert found.update_peak_bytes < found.peak_bytes


@pytest.mark.sweep
def test_the_host_waits_before_each_further_micro_batch() -> None:
    """No kernel of the next one is issued before: an embedding follows each wait."""
    checked = is_exact("ring", 2, step(batch=3), micro_batches=3, zero_stage=0, host_waits="micro-batch")
    ops = [op for op in checked.schedule.program(0).ops if not isinstance(op, Hold)]
    waits = [at for at, op in enumerate(ops) if isinstance(op, HostSync) and op.label == "wait for the micro-batch"]
    assert len(waits) == 2
    for at in waits:
        assert isinstance(ops[at + 1], Embed)
    assert "wait for the micro-batch" not in labels(make_step("ring", 2, step(batch=3), micro_batches=3))


def test_what_cannot_add_up_in_place_is_refused() -> None:
    for options in ({}, {"zero_stage": 1, "reduce": "model"}):
        with pytest.raises(InputError, match="accumulate=in-place adds whole gradients up in fp32"):
            make_step("ring", 2, step(), accumulate="in-place", **options)


def test_kernels_do_not_wait_for_sums() -> None:
    """A gradient is added to those before it behind the backward pass of the next unit, not behind its own."""
    checked = make_step("ring", 2, step(batch=2, layers=3), micro_batches=2)
    ops = checked.schedule.program(0).ops
    sums = [at for at, op in enumerate(ops) if isinstance(op, ReduceScatter)]
    added = [at for at, op in enumerate(ops) if isinstance(op, Accumulate) and op.label.startswith("add gradients")]
    assert len(sums) == 2 * len(added)
    for own, following, at in zip(sums[5:-1], sums[6:], added[:-1], strict=True):
        assert own < following < at


def test_bytes_by_hand() -> None:
    """2 ranks send each byte of a gathered or reduce-scattered weight once: at stage 3 layers' weights are gathered
    twice, others once, and gradients summed once, in each of two micro-batches.
    """
    workload = step(batch=2)
    one, two = (
        make_step("ring", 2, workload, micro_batches=count).schedule.header.claims.wire_bytes for count in (1, 2)
    )
    sizes = [math.prod(unit.flat.shape(workload.model)) for unit in units(workload)]
    of_layers = sum(math.prod(u.flat.shape(workload.model)) for u in units(workload) if u.name == LAYER)
    assert two - one == 8 * (sum(sizes) + of_layers) + 8 * sum(sizes)
    once = make_step("ring", 2, workload, micro_batches=2, sync="last").schedule.header.claims.wire_bytes
    assert two - once == 8 * sum(sizes)


def test_flops_are_those_of_the_whole_batch() -> None:
    one, two = (make_step("ring", 2, step(batch=2), micro_batches=count).schedule.header.claims for count in (1, 2))
    assert one.gemm_flops == two.gemm_flops > gemm_flops(step(batch=2))
    assert one.attention_flops == two.attention_flops


@pytest.mark.sweep
@pytest.mark.parametrize(("stage", "share", "sync"), [(3, 2, "every"), (3, 1, "last"), (1, 1, "every")])
def test_only_sums_outlive_a_micro_batch(stage: ZeroStage, share: int, sync: str) -> None:
    """Of each weight one fp64 number: from stage 2 on of what a rank owns, half on 2 ranks; below it, and where they
    are summed over ranks with the last one, of all.
    """
    workload = step(batch=2, layers=3)
    checked = make_step("zigzag", 2, workload, micro_batches=2, zero_stage=stage, sync=sync)
    program = checked.schedule.program(0)
    parts = [op.part for op in program.ops]
    second = parts.index("forward", parts.index("backward"))
    ports = {port.view.buffer for port in (*program.inputs, *program.outputs)}
    held = Counter[str]()
    for number, life in enumerate(lifetimes(program, checked.dependencies[0])):
        if life.first < second < life.end and number not in ports:
            held[program.buffers[number].category] += program.buffers[number].nbytes
    total = sum(math.prod(unit.flat.shape(workload.model)) for unit in units(workload))
    assert held == {"gradient": 8 * total // share}


@pytest.mark.sweep
def test_activations_are_those_of_one_micro_batch() -> None:
    peaks = {}
    for batch, count in ((1, 1), (2, 2), (2, 1)):
        checked = make_step("zigzag", 2, step(batch=batch, seq=512, layers=4), micro_batches=count)
        peaks[batch, count] = walk(checked.schedule.program(0), checked.dependencies[0]).by_category
    assert peaks[2, 2]["attention"] == peaks[1, 1]["attention"] == peaks[2, 1]["attention"] / 2


def changed(schedule: Schedule, change: Callable[[list[Op]], list[Op]]) -> Schedule:
    """Return a schedule whose programs' ops are changed."""
    programs = [program.replace(ops=tuple(change(list(program.ops)))) for program in schedule.programs]
    return Schedule(schedule.header, programs.__getitem__)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", sweep_but({3}, [1, 3]))
def test_a_gradient_that_lacks_a_micro_batch_or_has_it_twice(stage: int) -> None:
    schedule = make_step("ring", 2, step(batch=2), micro_batches=2, zero_stage=stage).schedule
    for name in ("weights", "embedding", "head"):

        def added(ops: list[Op], name: str = name) -> int:
            return next(at for at, op in enumerate(ops) if op.label == f"add gradients of {name}")

        refuses(changed(schedule, lambda ops: ops[: added(ops)] + ops[added(ops) + 1 :]), "not complete")
        refuses(changed(schedule, lambda ops: ops[: added(ops)] + ops[added(ops) :][:1] + ops[added(ops) :]), "twice")


def test_a_micro_batch_that_is_played_twice() -> None:
    """The second pass embeds the ids of the first one; its labels are of others then."""
    schedule = make_step("ring", 2, step(batch=2), micro_batches=2).schedule

    def first_ids(ops: list[Op]) -> list[Op]:
        first = next(op.ids for op in ops if isinstance(op, Embed))
        return [msgspec.structs.replace(op, ids=first) if isinstance(op, Embed) else op for op in ops]

    refuses(changed(schedule, first_ids), "with other tokens")


def test_a_batch_that_is_not_played() -> None:
    """An id port that says it holds another sequence."""
    schedule = make_step("ring", 2, step(batch=2), micro_batches=2).schedule

    def program(rank: int) -> Program:
        found = schedule.program(rank)
        ports = [msgspec.structs.replace(port, batch=Span(0, 1)) if port.tensor in {"ids", "labels"} else port
                 for port in found.inputs]  # fmt: skip
        return found.replace(inputs=tuple(ports))

    refuses(Schedule(schedule.header, program), "twice|belong to two|expected")


@pytest.mark.parametrize("count", [0, 3])
def test_batches_that_do_not_divide(count: int) -> None:
    with pytest.raises(InputError, match=f"micro_batches={count} does not divide the 4 .*: allowed are 1, 2, 4"):
        make_step("ring", 2, step(batch=4), micro_batches=count)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="schedule.micro_batches=2 is of training steps"):
        make_step("ring", 2, step(batch=2, scope="layer"), micro_batches=2)
    with pytest.raises(InputError, match="micro_batches=2 adds gradients up in fp32, and below zero_stage 2"):
        make_step("ring", 2, step(batch=2), micro_batches=2, zero_stage=1, reduce="model")
    with pytest.raises(InputError, match="or with schedule.sync=last these are what ranks sum"):
        make_step("ring", 2, step(batch=2), micro_batches=2, sync="last", reduce="model")
    with pytest.raises(InputError, match="schedule.sync=last is of training steps"):
        make_step("ring", 2, step(batch=2, scope="layer"), sync="last")


def rebuilt(count: int, dp: int = 1) -> Schedule:
    """Return a step of so many micro-batches of one sequence, written in calls."""
    return make_step("ring", 2 * dp, step(batch=count, layers=3), dp, micro_batches=count).schedule


@pytest.mark.sweep
def test_later_micro_batches_are_remembered_by_the_proof() -> None:
    """Of them only the sums are played that follow on others, and the ends of the pass."""
    played = []
    for count in (2, 3, 4):
        supersteps = Supersteps(rebuilt(count))
        supersteps.play()
        played.append(supersteps.num_played)
    more, same = (later - before for before, later in pairwise(played))
    assert more == same < played[0] / 4


@pytest.mark.sweep
@pytest.mark.parametrize("dp", sweep_but({2}, [1, 2]))
def test_the_proof_that_remembers_finds_what_the_flat_one_finds(dp: int) -> None:
    ends_as_the_flat_proof_does(rebuilt(3, dp))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_is_given_another_buffer(seed: int) -> None:
    """As that of another micro-batch: what the proof that remembers accepts the flat one accepts."""
    draw, verdicts, schedule = Random(seed), Counter[tuple[bool, bool]](), rebuilt(3)
    for _ in range(40):
        changed = rebinding(draw, schedule)
        if changed.programs != schedule.programs:
            verdicts[by_calls(changed), by_all_ops(flattened(changed))] += 1
    assert not verdicts[True, False]
    assert verdicts[False, False] > 15
