"""Products of one input as one: exact, a launch for each input, and what is wrong in them is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sim.accounts.memory import walks
from sim.schedule.derive.kernels import kernel_use
from sim.schedule.ir.ops import JoinedGemm, Kernel
from sim.schedule.ir.program import Schedule
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import nameable
from sim.schedule.proof.check import check
from sim.words.workload import DTYPE_BYTES, load_model
from tests.schedule.model.test_step import is_exact, make_step, step
from tests.schedule.proof.test_check_catches import refuses


def products(joined: str) -> list[tuple[tuple[int, ...], int]]:
    """Return the shapes and FLOPs of the products of a step of one layer that keeps all."""
    checked = make_step("single", 1, step(layers=1), checkpoint="none", products=joined)
    program = checked.schedule.program(0)
    uses = [kernel_use(op, program) for op in program.ops if isinstance(op, Kernel)]
    return [(use.shape, use.flops) for use in uses if use.kernel == "gemm"]


def test_a_product_for_each_input() -> None:
    """Of a layer q, k and v, out, gate and up, and down, each forward and two backward; and the head's three."""
    apart, joined = products("apart"), products("joined")
    assert (len(apart), len(joined)) == (3 * 7 + 3, 3 * 4 + 3)
    assert sum(flops for _, flops in apart) == sum(flops for _, flops in joined)
    model, tokens = step().model, step().seq
    of_heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    assert joined[0][0] == (tokens, model.embed_dim, of_heads)
    assert sum(shape == joined[0][0] for shape, _ in joined) == 3


@pytest.mark.parametrize("chosen", [{"checkpoint": "x+q+up"}, {"mlp": "tiled", "modules": "eager"}])
def test_steps_are_exact(chosen: dict[str, Any]) -> None:
    is_exact("zigzag", 2, step(), products="joined", **chosen)


def kept_more(activations: str = "hbm", **fields: Any) -> int:
    """Return how many more bytes a step of two layers holds where q is a view of what one product makes."""
    peaks = []
    for products in ("joined", "joined-views"):
        model = msgspec.structs.replace(step().model, **fields)
        options = {"products": products, "checkpoint": "none", "activations": activations}
        checked = make_step("single", 1, step(model=model, layers=2), **options)
        peaks.append(walks(checked)[0].buffer_peak_bytes)
    return peaks[1] - peaks[0]


def test_what_lies_beside_a_view_of_q() -> None:
    """k and v as they were, of each layer, where there are as many as query heads, and q is rotated where it lies."""
    work = step()
    model, size = work.model, DTYPE_BYTES[work.dtype]
    assert kept_more(num_kv_heads=model.num_heads) == 2 * 2 * work.seq * model.num_heads * model.head_dim * size
    assert kept_more(num_kv_heads=model.num_heads // 2) == 0
    assert kept_more(num_kv_heads=model.num_heads, rotary_dims=0) == 0
    assert kept_more("save-on-cpu", num_kv_heads=model.num_heads) == 0
    equal = msgspec.structs.replace(model, num_kv_heads=model.num_heads)
    is_exact("zigzag", 2, step(model=equal), products="joined-views", checkpoint="none")


def test_lists_may_have_each_result() -> None:
    model = load_model("tiny")
    assert nameable(block_of(model, products="joined")).keys() == nameable(block_of(model)).keys()


CHANGES: dict[str, tuple[Callable[[JoinedGemm], JoinedGemm], str]] = {
    "a weight left out": (lambda op: msgspec.structs.replace(op, b=op.b[:-1]), "of one side one"),
    "weights swapped": (lambda op: msgspec.structs.replace(op, b=op.b[::-1]), "is no equation of the layer"),
    "one result twice": (lambda op: msgspec.structs.replace(op, out=(*op.out[:-1], op.out[0])), "overlapping parts"),
    "added to nothing": (lambda op: msgspec.structs.replace(op, accumulate=True), "before all of it is written"),
    "a bias that is none": (lambda op: msgspec.structs.replace(op, bias=op.b), "takes|shape"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_wrong(change: str) -> None:
    schedule = make_step("single", 1, step(layers=1), products="joined").schedule
    of_op, says = CHANGES[change]
    program = schedule.program(0)
    at = next(at for at, op in enumerate(program.ops) if isinstance(op, JoinedGemm) and "w_gate" in op.label)
    op = program.ops[at]
    assert isinstance(op, JoinedGemm)
    wrong = program.replace(ops=(*program.ops[:at], of_op(op), *program.ops[at + 1 :]))
    refuses(Schedule(schedule.header, lambda _: wrong), says)


def test_a_gradient_that_lacks_a_layer() -> None:
    """What leads back through one of three alone is a sum that lacks terms, though each is an equation."""
    schedule = make_step("single", 1, step(layers=1), products="joined").schedule
    check(schedule)
    program = schedule.program(0)
    at = next(at for at, op in enumerate(program.ops) if isinstance(op, JoinedGemm) and op.form == "nt")
    op = program.ops[at]
    assert isinstance(op, JoinedGemm)
    fewer = msgspec.structs.replace(op, a=op.a[:-1], b=op.b[:-1])
    wrong = program.replace(ops=(*program.ops[:at], fewer, *program.ops[at + 1 :]))
    refuses(Schedule(schedule.header, lambda _: wrong), "is not complete yet|claims")
