"""Activations in the host's memory: every schedule proved, the bytes and the memory by hand, and what check refuses."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import msgspec
import pytest
import torch

import longstep
from runtime.execution.verify import output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import walk
from sim.base.errors import InputError
from sim.schedule.ir.ops import FETCH, OFFLOAD, Gemm, HostCopy, HostSync, Op
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.views import View
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, Variant, by_tier, make_checked, make_model
from tests.schedule.proof.test_check_catches import changed, drop, refuses

LAYERS = 3


def layers(**fields: Any) -> Workload:
    options: dict[str, Any] = {"model": make_model(8, 4), "seq": 32, "scope": "layer", "layers": LAYERS} | fields
    return Workload(**options)


def copies(schedule: Schedule, stream: str) -> list[HostCopy]:
    return [op for op in schedule.program(0).ops if isinstance(op, HostCopy) and op.stream == stream]


@pytest.mark.parametrize(
    "name",
    by_tier(
        {"single, offloaded", "zigzag, offloaded", "ulysses, offloaded"},
        {"fpdt, offloaded", "upipe, kept and offloaded", "ring, saved on the CPU"},
        OFFLOADED,
    ),
)
def test_every_schedule_keeps_the_activations_of_two_layers_on_the_gpu(name: str) -> None:
    keeps_those_of_two_layers(name, layers(layers=6), 1 if OFFLOADED[name].schedule == "single" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", OFFLOADED)
def test_so_it_does_in_eight_layers_on_any_number_of_ranks(name: str, ranks: int) -> None:
    if OFFLOADED[name].schedule != "single" or ranks == 1:
        keeps_those_of_two_layers(name, layers(layers=8), ranks)


def keeps_those_of_two_layers(name: str, workload: Workload, ranks: int) -> None:
    checked = make_checked(name, workload, ranks)
    assert check(Schedule.from_json(checked.schedule.to_json())).schedule.hash == checked.schedule.hash
    program, dependencies = checked.schedule.program(0), checked.dependencies[0]
    out, back = copies(checked.schedule, OFFLOAD), copies(checked.schedule, FETCH)
    assert len(out) == len(back) > 0
    assert sum(program.nbytes(op.source) for op in out) == walk(program, dependencies).host_peak_bytes
    saved = [
        sum(program.nbytes(op.source) for op in out if op.label == f"offload layer {layer}")
        for layer in range(workload.layers - 1)
    ]
    inputs = sum(program.nbytes(port.view) for port in program.inputs if port.tensor == "x")
    at_peak = walk(program, dependencies).by_category["saved"]
    assert at_peak <= 2 * max(saved) + inputs + program.nbytes(program.outputs[0].view)


def test_bytes_by_hand() -> None:
    """A layer keeps per token, of E = 128 and F = 64 and 8 and 4 heads of 16: the norms' outputs, what lies between
    attention and MLP and attention's output (E each), q, k and v (E, E/2, E/2), gate, up and act (F each), from the
    second layer on its input (E); in fp32 as the rest, a log-sum-exp per head and two numbers of the norms.
    """
    checked = make_checked("single, offloaded", layers(), 1)
    program = checked.schedule.program(0)
    model = make_model(8, 4)
    assert (model.embed_dim, model.ffn_dim) == (128, 64)
    first = 32 * 4 * (4 * 128 + 2 * 128 + 3 * 64 + 8 + 2)
    sizes = {
        layer: sum(program.nbytes(op.source) for op in copies(checked.schedule, OFFLOAD) if op.label.endswith(layer))
        for layer in ("0", "1", "2")
    }
    assert sizes == {"0": first, "1": first + 32 * 4 * 128, "2": 0}


LISTED = {
    "gate+up+act": 3 * 64,
    "q+k": 128 + 64,
    "h1": 128 + 1,
    "out": 128 + 8,
}
"""Numbers per token of the block above, with what the same kernel makes: the norm's rstd, the log-sum-exp."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", LISTED)
def test_bytes_of_a_list_by_hand(name: str) -> None:
    """The rest stays on the GPU; the results are those of one process."""
    schedule = zigzag_offloading(name)
    program, checked = schedule.program(0), check(schedule)
    copied = [program.nbytes(op.source) for op in copies(schedule, OFFLOAD) if op.label.endswith("0")]
    assert sum(copied) == 32 // 2 * 8 * LISTED[name], "in fp64, of half the tokens"
    assert sum(copied) == sum(
        program.nbytes(op.source) for op in copies(schedule, FETCH) if op.label.endswith("0")
    )  # fmt: skip
    assert max(output_errors(checked, execute_virtual(checked, torch.device("cpu"), 1)).values()) <= 1e-12


def test_a_list_of_everything_is_all_of_it() -> None:
    everything = zigzag_offloading("x+h1+q+k+v+out+middle+h2+gate+up+act")
    assert [program.ops for program in everything.programs] == [
        program.ops for program in zigzag_offloading("all").programs
    ]


def zigzag_offloading(name: str) -> Schedule:
    options = longstep.Setup("zigzag", set={"schedule.activations": "host", "schedule.offloaded": name})
    return SCHEDULES["zigzag"].schedule(layers(dtype="fp64"), Mesh(ring=2), options.resolved().options)


def test_lists_of_what_is_not_kept_are_refused() -> None:
    with pytest.raises(InputError, match="'kv' is none of the tensors"):
        zigzag_offloading("kv")
    with pytest.raises(InputError, match="schedule.offloaded=x, but activations stay on the GPU"):
        longstep.predict("ring", gpus=2, cluster="hgx-h100", layers=2, set={"schedule.offloaded": "x"})
    step = {"schedule.activations": "host", "schedule.checkpoint": "full", "schedule.offloaded": "x+act"}
    with pytest.raises(InputError, match="act is not kept, but computed again"):
        longstep.predict("ring", gpus=2, cluster="hgx-h100", layers=2, set=step)


def test_what_would_copy_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="a forward pass alone saves nothing"):
        make_checked("ring, offloaded", layers(passes="forward"), 2)
    with pytest.raises(InputError, match="keeps the last layer on the GPU, and there is one: set `layers` 2 or more"):
        make_checked("ring, offloaded", layers(layers=1), 2)


def test_save_on_cpu_copies_every_layer_and_nothing_ahead() -> None:
    """The host waits for each copy out; a layer comes back behind the backward pass of the next one."""
    checked = make_checked("ring, saved on the CPU", layers(), 2)
    ops = checked.schedule.program(0).ops
    out, back = copies(checked.schedule, OFFLOAD), copies(checked.schedule, FETCH)
    assert list(dict.fromkeys(op.label for op in out)) == [f"offload layer {layer}" for layer in range(LAYERS)]
    assert list(dict.fromkeys(op.label for op in back)) == [f"fetch layer {layer}" for layer in reversed(range(LAYERS))]
    after = [later for op, later in pairwise(ops) if isinstance(op, HostCopy) and op.stream == OFFLOAD]
    assert all(isinstance(op, HostSync) and op.streams == (OFFLOAD,) for op in after)
    order = [op.label for op in ops if op.label == "gradient dwq" or op.stream == FETCH]
    by_turns = [word for layer in reversed(range(LAYERS)) for word in (f"fetch layer {layer}", "gradient dwq")]
    assert [label for label, _ in groupby(order)] == by_turns


@pytest.mark.parametrize("name", ["save-on-cpu", "host"])
def test_first_layers_stay_on_the_gpu(name: str) -> None:
    """Of four the first two, and of what is prefetched the last one, too; the result is that of one process."""
    variant = Variant("ulysses", {"activations": name, "offload_from": 2})
    workload = layers(layers=4, dtype="fp64")
    checked = check(variant.build(workload, variant.mesh(2, workload.model)))
    moved = [2, 3] if name == "save-on-cpu" else [2]
    assert dict.fromkeys(op.label for op in copies(checked.schedule, OFFLOAD)) == {
        f"offload layer {layer}": None for layer in moved
    }
    assert max(output_errors(checked, execute_virtual(checked, torch.device("cpu"), 1)).values()) <= 1e-12
    stays = Variant("ulysses", {"activations": name, "offload_from": 4})
    with pytest.raises(InputError, match=f"leaves all of 4 layers on the GPU: allowed are 0 to {len(moved) + 1}"):
        check(stays.build(workload, stays.mesh(2, workload.model)))


@pytest.mark.sweep
def test_save_on_cpu_takes_as_long_as_its_copies() -> None:
    """Of 2 layers' inputs of 8K tokens in bf16, out and back, at the 55 GB/s that PCIe leaves; beside them the host
    issues kernels anew behind a wait. What is offloaded with prefetch takes no time that one sees. No weights are
    gathered, which copies would hide.
    """
    options = {"model": "llama3-8b", "seq": "64K", "cluster": "hgx-h100", "scope": "step", "layers": 2}
    seconds = {
        name: longstep.predict(
            "zigzag", **options, set={"schedule.activations": name, "schedule.zero_stage": 0}
        ).step_time_s
        for name in ("hbm", "host", "save-on-cpu")
    }
    copied_s = 2 * 2 * 8192 * 4096 * 2 / 55e9
    assert seconds["save-on-cpu"] - seconds["hbm"] == pytest.approx(copied_s, rel=0.03)
    assert seconds["host"] - seconds["hbm"] < 0.1 * copied_s


def test_save_on_cpu_works_with_one_layer() -> None:
    checked = make_checked("ring, saved on the CPU", layers(layers=1), 2)
    assert copies(checked.schedule, OFFLOAD)


def test_the_host_waits_for_copies_of_pageable_memory() -> None:
    """The same copies, each with a wait behind it; on one device too."""
    pinned, pageable = (make_checked(f"zigzag, offloaded{to}", layers(), 2) for to in ("", " to pageable memory"))
    for checked in (pageable, check(on_one_device(pageable))):
        ops = checked.schedule.program(0).ops
        behind = [after for op, after in pairwise(ops) if isinstance(op, HostCopy)]
        assert behind
        assert all(isinstance(op, HostSync) and op.label.endswith("pageable memory") for op in behind)
    for stream in (OFFLOAD, FETCH):
        assert [op.label for op in copies(pinned.schedule, stream)] == [
            op.label for op in copies(pageable.schedule, stream)
        ]
    peaks = {walk(one.schedule.program(0), one.dependencies[0]).host_peak_bytes for one in (pinned, pageable)}
    assert len(peaks) == 1


def test_attention_alone_has_no_activations_to_copy() -> None:
    with pytest.raises(InputError, match="`scope` layer"):
        make_checked("ring, offloaded", Workload(model=make_model(8, 4), seq=32), 2)


def wrong(kind: type, change: Any, number: int = 0) -> Schedule:
    return changed("ring, offloaded", 2, kind, change, rank=0, number=number, scope="layer", layers=LAYERS)


def test_a_copy_left_out_is_found() -> None:
    refuses(wrong(HostCopy, drop), "before all of it is written")


def test_the_activations_of_another_layer_are_found() -> None:
    schedule = make_checked("ring, offloaded", layers(), 2).schedule
    one, other = (
        next(op for op in copies(schedule, FETCH) if op.label == f"fetch layer {layer}" and op.source.shape == shape)
        for layer, shape in ((1, (1, 16, 64)), (0, (1, 16, 64)))
    )
    number = [op for op in schedule.program(0).ops if isinstance(op, HostCopy)].index(one)

    def from_other(op: Op) -> Op:
        return msgspec.structs.replace(op, source=other.source)

    refuses(wrong(HostCopy, from_other, number), "layer|equation")


def test_a_kernel_does_not_reach_the_hosts_memory() -> None:
    schedule = make_checked("ring, offloaded", layers(), 2).schedule
    on_host = copies(schedule, OFFLOAD)[0].target

    def reads_it(op: Op) -> Op:
        return msgspec.structs.replace(op, a=View(on_host.buffer, on_host.slices))

    refuses(wrong(Gemm, reads_it, 30), "is in host memory; copy it first")


def test_a_copy_engine_only_moves_bytes_between_two_memories() -> None:
    def into_itself(op: Op) -> Op:
        assert isinstance(op, HostCopy)
        return msgspec.structs.replace(op, target=op.source)

    def transposed(op: Op) -> Op:
        assert isinstance(op, HostCopy)
        return msgspec.structs.replace(op, source=View(op.source.buffer, (*op.source.slices[:-1], (0, 1))))

    refuses(wrong(HostCopy, into_itself), "copies from hbm to hbm: takes one of them in hbm; use a Copy")
    refuses(wrong(HostCopy, transposed, 2), "a view with gaps")
