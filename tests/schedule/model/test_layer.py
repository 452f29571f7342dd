"""Whole layers: every schedule is proved at this scope too, and every way to get a layer wrong is found."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from sim.base.errors import InputError
from sim.schedule.derive.kernels import kernel_use
from sim.schedule.ir.ops import Accumulate, AllReduce, Copy, Gemm, Hold, Kernel, Op, RmsNorm, Rope, TokenKernel
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.views import Split, View
from sim.schedule.methods import linear, single
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.block import Tile, act, block_of, gate, up
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload, load_model
from tests.helpers import by_tier, make_checked, make_model, slow_but
from tests.schedule.model.test_step import make_step
from tests.schedule.proof.test_check_catches import changed, drop, refuses

LLAMA = block_of(load_model("tiny"))


def layers(**fields: Any) -> Workload:
    options: dict[str, Any] = {"model": make_model(8, 4), "seq": 32, "scope": "layer", "layers": 2} | fields
    return Workload(**options)


@pytest.mark.parametrize(
    "name", by_tier({"single", "zigzag", "burst", "ulysses"}, {"allgather", "fpdt", "upipe"}, SCHEDULES)
)
@pytest.mark.parametrize("passes", slow_but({"both"}, ["forward", "both"]))
def test_every_schedule_is_proved_around_layers(name: str, passes: str) -> None:
    """In a data type narrower than the one that sums are kept in, which test_two_layers does not execute for all."""
    ranks = 1 if name == "single" else 4
    proved_in_layers(name, ranks, layers(model=make_model(8, 1), batch=2, passes=passes, dtype="bf16"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("passes", ["forward", "both"])
def test_every_schedule_is_proved_around_layers_of_every_kind(name: str, passes: str) -> None:
    proved = 0
    for ranks in (1, 2, 4):
        for heads in ((8, 8), (8, 4), (8, 1)):
            for dtype in ("fp32", "bf16"):
                workload = layers(model=make_model(*heads), batch=2, passes=passes, dtype=dtype)
                try:
                    proved_in_layers(name, ranks, workload)
                except InputError as error:
                    assert "allowed are" in str(error) or "set `gpus` 1" in str(error)
                else:
                    proved += 1
    assert proved >= 6


def proved_in_layers(name: str, ranks: int, workload: Workload) -> None:
    checked = make_checked(name, workload, ranks)
    again = Schedule.from_json(checked.schedule.to_json())
    assert again.hash == checked.schedule.hash
    check(again)


def test_one_layer_plays_each_equation_once() -> None:
    program = make_checked("single", layers(layers=1), 1).schedule.program(0)
    played = [(type(op), op.label) for op in program.ops if isinstance(op, TokenKernel | Accumulate)]
    assert sorted(played, key=str) == sorted(((one.kind, one.label) for one in LLAMA.equations), key=str)


def test_what_is_saved_is_what_the_backward_equations_read() -> None:
    made = {tensor for part in LLAMA.forward for one in part for tensor in (*one.operands, *one.results)} | {LLAMA.out}
    read = {tensor for part in LLAMA.backward for one in part for tensor in one.operands}
    assert set(LLAMA.saved) == {tensor for tensor in made & read if tensor.kind == "activation"}


def test_what_is_saved_of_a_block_whose_mlp_is_in_tiles() -> None:
    """Of the MLP what goes into it, and nothing that is as wide as the feed-forward dimension."""
    block = block_of(load_model("tiny"), Tile(8, saves=True))
    made = {tensor for part in block.forward for one in part for tensor in (*one.operands, *one.results)} | {block.out}
    read = {tensor for part in block.backward for one in part for tensor in one.operands}
    assert set(block.saved) == {tensor for tensor in made & read if tensor.kind == "activation"}
    assert set(LLAMA.saved) - set(block.saved) == {gate, up, act}
    assert block.weights == LLAMA.weights


BLOCKS: tuple[dict[str, Any], ...] = (
    {"biases": ("qkv",), "qk_norm": "head", "mlp": "geglu", "embedding_scale": 2.0},
    {"mlp": "gelu"},
    {},
)
"""Lines that together have all kernels that Llama's block has not."""


@pytest.mark.sweep
def test_every_kernel_has_a_cost() -> None:
    """No kind of kernel is missing where costs are looked up by type."""
    seen = set()
    for name, kv_heads, scope in (
        ("ring from the KV at hand", 4, "step"), ("burst", 4, "layer"), ("ulysses", 1, "layer"),
        ("usp, sums as published", 4, "layer"),
    ):  # fmt: skip
        for dtype in ("fp32", "bf16"):
            workload = layers(dtype=dtype, model=make_model(8, kv_heads), scope=scope)
            programs = make_checked(name, workload, 2).schedule.programs
            if scope == "step":
                programs = [*programs, make_step("ring", 2, workload, mlp="tiled").schedule.program(0)]
                programs += linear.build(workload, Mesh(ring=2)).programs
                programs += single.build(workload, Mesh(tp=2)).programs
                programs += make_step("single", 1, workload, products="joined").schedule.programs
                programs += make_step("ring", 2, workload, divides="before").schedule.programs
                for lines in BLOCKS:
                    other = msgspec.structs.replace(workload, model=msgspec.structs.replace(workload.model, **lines))
                    for modules in ("fused", "eager"):
                        programs += make_step("single", 1, other, modules=modules).schedule.programs
            for program in programs:
                for op in program.ops:
                    if isinstance(op, Kernel):
                        seen.add(type(op))
                        assert (kernel_use(op, program).hbm_bytes > 0) is not isinstance(op, Hold)
    assert seen == set(get_args(Kernel))


def test_flops_by_hand() -> None:
    """6 FLOPs per token and weight: wq, wo of 128 x 128, wk, wv of 128 x 64, gate, up, down of 128 x 64."""
    checked = make_checked("ring", layers(batch=2), 4)
    weights = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 64
    claims = checked.schedule.header.claims
    assert claims is not None
    assert claims.gemm_flops == 6 * weights * 2 * 32 * 2
    assert [len(weight.axes) for weight in LLAMA.weights].count(2) == 7


def test_a_gradient_that_is_not_reduced() -> None:
    schedule = make_checked("ring", layers(), 2).schedule
    programs = [
        program.replace(ops=tuple(op for op in program.ops if op.label != "reduce dwv"))
        for program in schedule.programs
    ]
    refuses(
        Schedule(schedule.header, programs.__getitem__),
        "output dwv.* lacks contributions",
    )


def test_a_gradient_reduced_twice() -> None:
    schedule = make_checked("ring", layers(), 2).schedule
    programs = []
    for program in schedule.programs:
        ops: list[Op] = []
        for op in program.ops:
            ops += [op, op] if isinstance(op, AllReduce) and op.label == "reduce dwo" else [op]
        programs.append(program.replace(ops=tuple(ops)))
    refuses(Schedule(schedule.header, programs.__getitem__), "twice")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "label", "message"),
    [
        (Accumulate, "residual of mlp", "is not complete yet"),
        (Rope, "rope k", "used as keys and values of one block"),
        (RmsNorm, "norm2", "before"),
    ],
)
def test_a_kernel_left_out(kind: type, label: str, message: str) -> None:
    schedule = make_checked("single", layers(), 1).schedule
    number = [op.label for op in schedule.program(0).ops if isinstance(op, kind)].index(label)
    refuses(changed("single", 1, kind, drop, rank=0, number=number, scope="layer", layers=2), message)


def test_positions_of_another_rank() -> None:
    def shifted(op: Op) -> Op:
        assert isinstance(op, Rope)
        return msgspec.structs.replace(op, tokens=other)

    first = next(op for op in make_checked("ring", layers(), 2).schedule.program(0).ops if isinstance(op, Rope))
    other = first.tokens
    schedule = changed("ring", 2, Rope, shifted, rank=1, number=0, scope="layer", layers=2)
    refuses(schedule, "is rotated by positions 0..16")


def test_the_weight_of_another_layer() -> None:
    schedule = make_checked("single", layers(), 1).schedule
    wq = next(port.view for port in schedule.program(0).inputs if (port.tensor, port.layer) == ("wq", 1))

    def wrong(op: Op) -> Op:
        assert isinstance(op, Gemm)
        return msgspec.structs.replace(op, b=wq)

    refuses(changed("single", 1, Gemm, wrong, rank=0, number=0, scope="layer", layers=2), "no equation of the layer")


@pytest.mark.parametrize(
    ("dim", "order", "message"),
    [
        (0, (1, 0), "wq.* where all of the weight is needed"),
        (0, (0, 0), "wq.* where all of the weight is needed"),
        (1, (1, 0), "attends with the wrong key/value heads"),
    ],
)
def test_a_weight_in_another_order(dim: int, order: tuple[int, int], message: str) -> None:
    """Its rows from a copy: the right tensor, and half of it in the place of the other half."""
    schedule = make_checked("single", layers(layers=1), 1).schedule
    program = schedule.program(0)
    at = next(at for at, op in enumerate(program.ops) if op.label == "wq")
    gemm = program.ops[at]
    assert isinstance(gemm, Gemm)
    turned = View(len(program.buffers), gemm.b.slices)
    copy = Copy(label="turn", source=Split(gemm.b, dim, 2), target=Split(turned, dim, 2), order=order)
    ops = (*program.ops[:at], copy, msgspec.structs.replace(gemm, b=turned), *program.ops[at + 1 :])
    buffers = (*program.buffers, program.buffers[gemm.b.buffer])
    wrong = program.replace(ops=ops, buffers=buffers)
    refuses(Schedule(schedule.header, [wrong].__getitem__), message)


def test_a_result_without_heads_where_heads_are_asked_for() -> None:
    """As many features as heads times head dim: the shapes fit, the meanings do not."""
    schedule = make_checked("single", layers(layers=1), 1).schedule
    gemms = {op.label: op for op in schedule.program(0).ops if isinstance(op, Gemm)}
    number = list(gemms).index("wo")

    def with_heads(op: Op) -> Op:
        return msgspec.structs.replace(op, out=gemms["back through wo"].out)

    refuses(changed("single", 1, Gemm, with_heads, rank=0, number=number, scope="layer"), "of dims 'bshd'")


def test_weights_without_tokens() -> None:
    schedule = make_checked("single", layers(layers=1), 1).schedule
    program = schedule.program(0)
    gate, up = (op.b for op in program.ops if isinstance(op, Gemm) and op.label in {"w_gate", "w_up"})
    total = View(len(program.buffers), gate.slices)
    copy = Copy(label="copy", source=Split(gate, 0, 1), target=Split(total, 0, 1))
    ops = (copy, Accumulate(label="odd", source=up, into=total), *program.ops)
    buffers = (*program.buffers, program.buffers[gate.buffer])
    wrong = program.replace(ops=ops, buffers=buffers)
    refuses(Schedule(schedule.header, [wrong].__getitem__), "of weights alone")


def test_layers_have_no_backward_pass_alone() -> None:
    with pytest.raises(InputError, match="set `passes` both"):
        layers(passes="backward")
    with pytest.raises(InputError, match="or `scope` layer"):
        layers(scope="attention")
