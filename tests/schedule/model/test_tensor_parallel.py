"""Tensor-parallel layers: proved with claims and exact, and what is wrong in them is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import AllGather, Copy, Gemm, ReduceScatter
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Split
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_model, sweep_but
from tests.schedule.proof.test_check_catches import refuses

MESHES = {"2 ranks": Mesh(tp=2), "4 ranks": Mesh(tp=4), "rings of 2": Mesh(tp=2, ring=2)}


def layers(mesh: str = "2 ranks", **fields: Any) -> Schedule:
    model = msgspec.structs.replace(make_model(8, 4, head_dim=4), ffn_dim=24, **fields)
    workload = Workload(model=model, seq=32, dtype="fp64", scope="layer", layers=2)
    return SCHEDULES["ring" if "ring" in mesh else "single"].schedule(workload, MESHES[mesh])


@pytest.mark.parametrize("mesh", sweep_but({"2 ranks", "rings of 2"}, MESHES))
def test_layers_are_proved_and_exact(mesh: str) -> None:
    is_exact(layers(mesh))


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
