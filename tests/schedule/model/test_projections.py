"""Projections of some heads or tokens at a time: what is proved of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sim.schedule.ir.ops import Copy, Gemm, Op
from sim.schedule.ir.program import Program, Schedule
from sim.words.workload import Workload
from tests.helpers import make_checked, make_model
from tests.schedule.proof.test_check_catches import refuses

Ops = tuple[Op, ...]


def layers(name: str) -> Schedule:
    """One layer of 8 heads and 4 of keys on two ranks: four stages of two heads, two for each pair of keys."""
    fields: dict[str, Any] = {"seq": 32, "dtype": "fp64", "scope": "layer", "layers": 1}
    return make_checked(name, Workload(model=make_model(8, 4), **fields), 2).schedule


def changed(schedule: Schedule, change: Callable[[Ops], Ops]) -> Schedule:
    """Return a schedule in which rank 0 has other ops."""

    def program(rank: int) -> Program:
        found = schedule.program(rank)
        return found if rank else found.replace(ops=change(found.ops))

    return Schedule(schedule.header, program)


def numbers(ops: Ops, label: str, part: str = "backward") -> list[int]:
    """Return which ops have a label in one pass."""
    return [number for number, op in enumerate(ops) if (op.label, op.part) == (label, part)]


@pytest.mark.parametrize(("name", "stages"), [("upipe", 4), ("fpdt in chunks", 4)])
def test_each_part_is_projected_when_its_turn_comes(name: str, stages: int) -> None:
    ops = layers(name).program(0).ops
    projected, sent = numbers(ops, "wq", "forward"), numbers(ops, "all-to-all q", "forward")
    assert len(projected) == len(sent) == stages
    assert sorted(projected + sent) == [number for pair in zip(projected, sent, strict=True) for number in pair]
    widest = max(op.out.shape[2] * op.out.shape[1] for op in ops if isinstance(op, Gemm) and op.label == "wq")
    assert widest * stages == 8 * 16


def test_upipe_projects_again_backward() -> None:
    ops = layers("upipe").program(0).ops
    assert len(numbers(ops, "wq")) == 4
    assert len(numbers(ops, "wk")) == len(numbers(ops, "wv")) == 2
    kept = layers("upipe, kept").program(0).ops
    assert not numbers(kept, "wq")


def test_a_part_that_goes_back_twice() -> None:
    def twice(ops: Ops) -> Ops:
        at = numbers(ops, "back through wq")[1]
        return (*ops[: at + 1], ops[at], *ops[at + 1 :])

    refuses(changed(layers("upipe"), twice), "twice")


@pytest.mark.parametrize("name", ["upipe", "fpdt in chunks"])
@pytest.mark.parametrize("label", ["back through wq", "back through wk"])
def test_a_part_that_does_not_go_back(name: str, label: str) -> None:
    def without(ops: Ops) -> Ops:
        at = numbers(ops, label)[-1]
        return (*ops[:at], *ops[at + 1 :])

    refuses(changed(layers(name), without), "not complete|never written|reads")


def test_a_part_through_the_weights_of_other_heads() -> None:
    """The gradient of one stage's heads, and columns of the stage before it."""

    def crossed(ops: Ops) -> Ops:
        first, second, *_ = numbers(ops, "back through wq")
        before, own = ops[first], ops[second]
        assert isinstance(before, Gemm)
        assert isinstance(own, Gemm)
        return (*ops[:second], msgspec.structs.replace(own, b=before.b), *ops[second + 1 :])

    refuses(changed(layers("upipe"), crossed), "parts .* of dq_raw, wq meet")


@pytest.mark.parametrize(("label", "message"), [("order wq", "wrong key/value heads"), ("order dwq", "cannot add dwq")])
def test_columns_in_the_order_of_stages(label: str, message: str) -> None:
    def as_they_are(ops: Ops) -> Ops:
        found = list(ops)
        for number, op in enumerate(ops):
            if isinstance(op, Copy) and op.label == label:
                found[number] = msgspec.structs.replace(op, order=())
        return tuple(found)

    refuses(changed(layers("upipe"), as_they_are), message)
