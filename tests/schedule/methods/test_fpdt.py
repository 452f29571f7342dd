"""FPDT: exact in any number of chunks; what goes over PCIe and what lies on the GPU by hand; what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from runtime.execution.verify import output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import walk
from sim.base.errors import InputError, LengthError
from sim.schedule.ir.ops import FETCH, OFFLOAD, Attend, AttendBackward, Barrier, HostCopy, HostSync
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.fpdt import FpdtOptions, build
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_model, slow_but
from tests.schedule.model.test_step import is_exact, make_step, step
from tests.schedule.proof.test_check_catches import refuses

MASKS: dict[str, dict[str, Any]] = {"causal": {}, "full": {"mask": "full"}, "window": {"window": 12}}


def fpdt(ranks: int, chunk: int, fields: dict[str, Any] | None = None, **options: Any) -> Checked:
    """64 tokens, if not said otherwise, with two query heads for each key/value head."""
    given: dict[str, Any] = {"model": make_model(4, 2), "seq": 64, "dtype": "fp64", **(fields or {})}
    return check(build(Workload(**given), Mesh(ulysses=ranks), FpdtOptions(chunk=chunk, **options)))


def is_right(checked: Checked) -> None:
    errors = output_errors(checked, execute_virtual(checked, torch.device("cpu"), order_seed=1))
    assert errors.keys() >= {"dq", "dk", "dv"} or errors.keys() >= {"dx"}
    assert max(errors.values()) <= 1e-12


@pytest.mark.sweep
@pytest.mark.parametrize("mask", slow_but({"causal"}, MASKS))
@pytest.mark.parametrize("chunk", slow_but({8, 64}, [8, 16, 32, 64, 65536]))
@pytest.mark.parametrize("ranks", slow_but({2}, [1, 2, 4]))
@pytest.mark.parametrize("options", [{}, {"offload": False}, {"pipeline": "published"}], ids=str)
def test_any_number_of_chunks_is_exact(ranks: int, chunk: int, mask: str, options: dict[str, Any]) -> None:
    """With as many key/value heads as there are, or replicated over 4 ranks; a batch where chunks then have gaps."""
    is_right(fpdt(ranks, chunk, {**MASKS[mask], "batch": 2 if chunk == 16 else 1}, **options))


STEPS: dict[str, dict[str, Any]] = {
    "ideal": {},
    "everything kept": {"checkpoint": "none", "activations": "host"},
    "published": {"pipeline": "published", "loss": "chunked", "activations": "host"},
    "chunks on the GPU": {"offload": False, "zero_stage": 1},
    "with all techniques": {"mlp": "tiled", "optimiser": "host", "activations": "save-on-cpu", "loss": "chunked"},
    "a list": {"checkpoint": "x+out"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"everything kept", "with all techniques"}, STEPS))
def test_steps_are_exact(name: str) -> None:
    """Three layers, and four chunks."""
    is_exact("fpdt", 2, step(layers=3), chunk=8, **STEPS[name])


@pytest.mark.sweep
@pytest.mark.parametrize("fields", [{}, {"mask": "full"}, {"padding": 5}], ids=str)
def test_layers_are_exact(fields: dict[str, Any]) -> None:
    """With activations of layers on the host beside the chunks of attention, which stay there."""
    layers = {"scope": "layer", "layers": 3, "seq": 32, **fields}
    is_right(fpdt(2, 8, layers, activations="host"))


def copied(checked: Checked, stream: str, part: str) -> Counter[str]:
    """Return the bytes that rank 0 copies one way in one pass, by what."""
    program, found = checked.schedule.program(0), Counter[str]()
    for op in program.ops:
        if isinstance(op, HostCopy) and (op.stream, op.part) == (stream, part):
            found[op.label.split(" ", 1)[1]] += program.nbytes(op.source)
    return found


@pytest.mark.parametrize("pipeline", ["ideal", "published"])
def test_bytes_over_pcie_by_hand(pipeline: str) -> None:
    """u = 8 chunks of 8 tokens on 2 ranks. A rank has 2 heads of q and one of k and v, of 16 numbers of 2 bytes,
    and 2 log-sum-exps of 4. Forward all of it goes out once, and each chunk of keys comes back for each later chunk of
    queries: u (u - 1) / 2 times. Backward each chunk of keys comes once; queries, out and lse come for each chunk of
    keys up to their own: u (u + 1) / 2 times, but once less, as the last ones are on the GPU from the step before. So
    do dout, but the first time, when it comes by its all-to-all, and sums of dq, of which there is none yet then.
    """
    u, q, k, lse = 8, 8 * 2 * 16 * 2, 8 * 16 * 2, 8 * 2 * 4
    checked = fpdt(2, 8, {"dtype": "bf16"}, pipeline=pipeline)
    pairs = u * (u - 1) // 2
    assert copied(checked, OFFLOAD, "forward") == {"q": u * q, "k": u * k, "v": u * k, "out": u * q, "lse": u * lse}
    assert copied(checked, FETCH, "forward") == {"k": pairs * k, "v": pairs * k}
    back = {"k": u * k, "v": u * k} | dict.fromkeys(("q", "out"), (pairs + u - 1) * q)
    back |= {"lse": (pairs + u - 1) * lse, "dout": (pairs - 1) * q, "dq": (pairs - 1) * 2 * q}
    assert copied(checked, FETCH, "backward") == back
    assert copied(checked, OFFLOAD, "backward") == {"dout": (u - 1) * q, "dq": (pairs - 1) * 2 * q}


def held(chunks: int, **options: Any) -> int:
    """Return what rank 0 of two holds at most beside what comes in and goes out, in chunks of 8 tokens."""
    checked = fpdt(2, 8, {"seq": 8 * chunks, "dtype": "bf16"}, **options)
    program, dependencies = checked.schedule.program(0), checked.dependencies[0]
    outside = {port.view.buffer: program.nbytes(port.view) for port in (*program.inputs, *program.outputs)}
    return walk(program, dependencies).buffer_peak_bytes - sum(outside.values())


@pytest.mark.sweep
def test_what_the_gpu_holds_does_not_grow_with_the_number_of_chunks() -> None:
    """But for local tensors that come in and go out. So it does where chunks stay: q, k, v, out and lse of each."""
    assert held(8) == held(12)
    assert held(8, pipeline="published") == held(12, pipeline="published")
    assert held(12, offload=False) - held(8, offload=False) >= 4 * 8 * (3 * 2 * 16 * 2 + 2 * 4)


def test_two_places_by_hand() -> None:
    """In the middle of backward as published: two places of q, out, dout (2 heads of 16 numbers of 2 bytes), the sum of
    dq (of 4), lse (4 a head), of k and v; the sums of dk and dv; what a kernel makes of dq, dk and dv.
    """
    q, k, lse = 8 * 2 * 16 * 2, 8 * 16 * 2, 8 * 2 * 4
    places = 2 * (3 * q + 2 * q + lse) + 2 * 2 * k
    assert held(8, pipeline="published") == places + 2 * 2 * k + (q + 2 * k)


def test_published_code_waits_in_every_step_and_meets_once_a_chunk() -> None:
    ops = fpdt(2, 8, pipeline="published").schedule.program(0).ops
    count = Counter(type(op) for op in ops)
    assert count[Attend] == count[AttendBackward] == 8 * 9 // 2
    assert count[Barrier] == 2 * 8
    assert sum(isinstance(op, HostSync) and "compute" in op.streams for op in ops) == 2 * 8 * 9 // 2
    assert not {type(op) for op in fpdt(2, 8).schedule.program(0).ops} & {Barrier, HostSync}


def test_keys_are_fetched_while_those_before_are_attended_to() -> None:
    """All 8 x 7 / 2 fetches are issued before a kernel that they do not wait for."""
    checked = fpdt(2, 8)
    ops, known = checked.schedule.program(0).ops, checked.dependencies[0].known
    kernels = [at for at, op in enumerate(ops) if isinstance(op, Attend)]
    fetches = [at for at, op in enumerate(ops) if op.label == "fetch k" and op.part == "forward"]
    beside = [min(kernel for kernel in kernels if kernel > at) for at in fetches]
    assert len(set(beside)) == len(fetches) == 8 * 7 // 2
    assert all(known[at].get("compute", -1) < kernel for at, kernel in zip(fetches, beside, strict=True))
    using = [at for at in kernels if ops[at].label.split("kv")[1] != ops[at].label.split("q")[1].split()[0]]
    assert all(kernel < use for kernel, use in zip(beside, using, strict=True))


LOST = {
    "fetch k": "used as keys and values of one block",
    "fetch dq": "they are different parts of the global tensors",
    "offload dq": "before all of it is written",
    "add dq": "output dq: .* lacks contributions",
}


@pytest.mark.sweep
@pytest.mark.parametrize("label", LOST)
def test_an_op_that_is_lost(label: str) -> None:
    """What lies in its place is of another chunk, or as it was before."""
    schedule = fpdt(2, 8, pipeline="published").schedule

    def program(rank: int) -> Program:
        found = schedule.program(rank)
        _, _, at, *_ = (number for number, op in enumerate(found.ops) if op.label.startswith(label))
        return found.replace(ops=(*found.ops[:at], *found.ops[at + 1 :]))

    refuses(Schedule(schedule.header, program), LOST[label])


def test_lengths_and_chunks_that_do_not_divide() -> None:
    with pytest.raises(LengthError, match="the nearest are 48 or 72"):
        fpdt(2, 24)
    with pytest.raises(InputError, match=r"schedule.chunk=9: .* allowed are multiples of 2"):
        fpdt(2, 9)
    with pytest.raises(InputError, match="'q' is none of the tensors that a layer can keep"):
        make_step("fpdt", 2, step(), chunk=8, checkpoint="x+q+out")
    with pytest.raises(InputError, match="set `passes` both"):
        fpdt(2, 8, {"passes": "backward"})
