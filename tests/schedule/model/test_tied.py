"""Models whose embedding is their head, too: one weight, one gradient of both ends."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from sim.schedule.ir.ops import Accumulate, AllGather, EmbedBackward, Gemm, ReduceScatter
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.scope import HEADED, ROOT, units
from sim.words.workload import Workload
from tests.helpers import by_tier, slow_but
from tests.schedule.model.test_step import STACKS, errors_of, make_step, step
from tests.schedule.proof.test_check_catches import refuses


def exact(name: str, ranks: int, workload: Workload, dp: int = 1, **options: Any) -> dict[str, float]:
    return errors_of(make_step(name, ranks, workload, dp, **options))


def tied(**fields: Any) -> Workload:
    model = msgspec.structs.replace(step().model, tied_embeddings=True)
    return step(**({"model": model} | fields))


@pytest.mark.parametrize("name", by_tier({"zigzag"}, {"fpdt"}, SCHEDULES))
def test_every_schedule_is_exact(name: str) -> None:
    """Autograd of the formulas with one matrix for both ends."""
    errors = exact(name, 1 if name == "single" else 4, tied(batch=2))
    assert errors.keys() >= {"new root parameters", "new first moments of root", "loss 2"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "stack",
    slow_but({"chunked loss", "micro-batches, one sum", "optimiser on the host", "nothing"}, STACKS),
)
def test_every_technique(stack: str) -> None:
    batch = STACKS[stack].get("micro_batches", 1)
    exact("ulysses", 2, tied(batch=batch, dtype="fp64"), **STACKS[stack])


@pytest.mark.sweep
@pytest.mark.parametrize("fields", [{"dtype": "bf16"}, {"padding": 5}, {"layers": 1}])
def test_other_steps(fields: dict[str, Any]) -> None:
    exact("striped", 2, tied(**fields))


@pytest.mark.sweep
def test_replicas() -> None:
    for shards in ("replica", "all"):
        exact("ring", 4, tied(), dp=2, shards=shards)


def test_its_weights_by_hand() -> None:
    """512 x 64 less than with a head of its own, which is what an optimiser has to hold, too."""
    sizes = [sum(math.prod(unit.flat.shape(one.model)) for unit in units(one)) for one in (step(), tied())]
    assert sizes[0] - sizes[1] == step().model.vocab_size * step().model.embed_dim
    assert math.prod(ROOT.flat.shape(tied().model)) == math.prod(HEADED.flat.shape(tied().model))


def test_it_is_gathered_and_summed_once() -> None:
    """Both ends use one buffer of gathered weights, and ranks sum one gradient of both."""
    ops = make_step("ring", 2, tied()).schedule.program(0).ops
    for kind, label in ((AllGather, "gather root"), (ReduceScatter, "reduce root")):
        assert [op.label for op in ops if isinstance(op, kind)].count(label) == 1
    products = [op for op in ops if isinstance(op, Gemm) and "w_embed" in op.label]
    assert [op.form for op in products] == ["nt", "nn", "tn"]
    assert products[0].b == products[1].b


def test_a_product_costs_what_it_costs_untied() -> None:
    claims = [make_step("ring", 2, one).schedule.header.claims for one in (step(), tied())]
    assert claims[0].gemm_flops == claims[1].gemm_flops


@pytest.mark.parametrize(
    ("kind", "label"),
    [(Accumulate, "add dw_embed of both ends"), (Gemm, "gradient dw_embed"), (EmbedBackward, "gradient dw_embed")],
)
def test_a_gradient_of_one_end_only(kind: type, label: str) -> None:
    """Nor of one end twice."""
    schedule = make_step("ring", 2, tied()).schedule

    def program(rank: int) -> Program:
        found = schedule.program(rank)
        ops = [op for op in found.ops if not (isinstance(op, kind) and op.label == label)]
        assert len(ops) < len(found.ops)
        return found.replace(ops=tuple(ops))

    refuses(Schedule(schedule.header, program), "not complete yet|before all of it is written")

    def twice(rank: int) -> Program:
        found = schedule.program(rank)
        at = next(at for at, op in enumerate(found.ops) if isinstance(op, Accumulate) and "both ends" in op.label)
        return found.replace(ops=(*found.ops[: at + 1], *found.ops[at:]))

    refuses(Schedule(schedule.header, twice), "twice")
