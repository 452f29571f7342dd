"""The formulas of the field against the walk: equal to the byte but for what is named here."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from sim.accounts.footprint import footprint
from sim.accounts.memory import terms_in_use, walks
from sim.base.errors import InputError
from sim.schedule.ir.ops import AdamW, HostAdamW, ReduceScatter
from sim.schedule.model.scope import units
from sim.schedule.proof.check import Checked
from sim.words.options import LayerOptions
from sim.words.workload import Workload
from tests.helpers import make_model, slow_but
from tests.schedule.model.test_step import make_step, step

MODEL = msgspec.structs.replace(make_model(8, 4), vocab_size=512)


def workload(**fields: Any) -> Workload:
    return step(**({"dtype": "bf16", "layers": 3, "model": MODEL, "seq": 64} | fields))


def at(checked: Checked, kind: type, rank: int = 0) -> dict[str, int]:
    """Return the bytes of each term while the first op of a kind runs."""
    program, dependencies = checked.schedule.program(rank), checked.dependencies[rank]
    number = next(number for number, op in enumerate(program.ops) if isinstance(op, kind))
    return {term: of[number] for term, of in terms_in_use(program, dependencies).items()}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stage", "reduce", "whole", "sharded"),
    [(0, "fp32", 18, 0), (0, "model", 18, 0), (1, "fp32", 2 + 4, 12), (1, "model", 2 + 2, 12), (2, "fp32", 2, 16),
     (3, "fp32", 0, 16), (3, "model", 0, 16)],
)  # fmt: skip
def test_model_states(stage: int, reduce: str, whole: int, sharded: int) -> None:
    """When all gradients are there: before the first update, at stage 1 before the first of them is summed. Beside the
    formula there is a place for the square of each unit's gradient then, at stage 1 that for the first sum, which is
    the head's; nothing else is held but what comes from outside, and losses.
    """
    checked = make_step("zigzag", 4, workload(), zero_stage=stage, reduce=reduce)
    weights = sum(math.prod(unit.flat.shape(MODEL)) for unit in units(workload()))
    said = footprint(checked.schedule.header).states_bytes
    assert said == whole * weights + sharded * weights // 4
    held = at(checked, ReduceScatter if stage == 1 else AdamW)
    head = math.prod(units(workload())[-1].flat.shape(MODEL))
    more = (2 if reduce == "model" else 4) * head // 4 if stage == 1 else 4 * len(units(workload()))
    assert held["parameters"] + held["gradients"] + held["optimiser"] == said + more
    assert held["communication"] == held["saved activations"] == held["attention"] == 0


@pytest.mark.sweep
def test_model_states_in_the_models_type_and_on_the_host() -> None:
    """8 bytes a parameter, and 18, of which 2 are on the GPU, when the CPU begins to update."""
    weights = sum(math.prod(unit.flat.shape(MODEL)) for unit in units(workload()))
    narrow = make_step("zigzag", 4, workload(), optimiser_states="model")
    assert footprint(narrow.schedule.header).states_bytes == 8 * weights // 4
    held = at(narrow, AdamW)
    squares = 4 * len(units(workload()))
    assert held["parameters"] + held["gradients"] + held["optimiser"] == 8 * weights // 4 + squares
    there = make_step("zigzag", 4, workload(), optimiser="host")
    assert footprint(there.schedule.header).states_bytes == 18 * weights // 4
    held = at(there, HostAdamW)
    assert held["parameters"] + held["gradients"] + held["optimiser"] == 2 * weights // 4 + squares


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"zigzag", "upipe"}, ["single", "zigzag", "ulysses", "upipe"]))
@pytest.mark.parametrize("loss", ["whole", "chunked", "unfused", "torch"])
def test_saved_activations(name: str, loss: str) -> None:
    """Between the passes the head keeps beside the formula what enters it, one number a token, and its input with the
    gradient of the logits, in fp32 where the loss is not fused, or with a loss in chunks the gradient of its input.
    """
    ranks = 1 if name == "single" else 4
    checked = make_step(name, ranks, workload(), loss=loss)
    tokens, own = 64 // ranks, 2
    gradient = {"whole": MODEL.vocab_size, "unfused": 2 * MODEL.vocab_size, "chunked": 0, "torch": MODEL.vocab_size}[
        loss
    ]
    features = 2 * MODEL.embed_dim + gradient
    said = footprint(checked.schedule.header).saved_bytes
    assert said == 3 * tokens * MODEL.embed_dim * own
    program, dependencies = checked.schedule.program(0), checked.dependencies[0]
    between = next(number for number, op in enumerate(program.ops) if op.part == "backward")
    saved = terms_in_use(program, dependencies)["saved activations"][between]
    assert saved == said + tokens * (own * features + 4)


@pytest.mark.parametrize(("activations", "layers"), [("host", 2), ("save-on-cpu", 3)])
def test_saved_activations_on_the_host(activations: str, layers: int) -> None:
    """The inputs of all layers, or of all but the last, which is needed at once."""
    checked = make_step("zigzag", 4, workload(), activations=activations)
    said = footprint(checked.schedule.header).saved_bytes
    assert said is not None
    assert walks(checked)[0].host_peak_bytes == said * layers // 3


@pytest.mark.sweep
def test_micro_batches() -> None:
    """Layers leave what one of them leaves; when all gradients are there, these are held once."""
    one, four = (make_step("zigzag", 4, workload(batch=count), micro_batches=count) for count in (1, 4))
    said = footprint(four.schedule.header)
    assert said == footprint(one.schedule.header)
    held = at(four, AdamW)
    squares = 4 * len(units(workload()))
    assert held["parameters"] + held["gradients"] + held["optimiser"] == said.states_bytes + squares
    assert held == at(one, AdamW) | {"other": held["other"]}, "but for ids, labels and losses"


def test_no_formula_where_layers_leave_more() -> None:
    assert footprint(make_step("ring", 2, workload(), checkpoint="none").schedule.header).saved_bytes is None


@pytest.mark.sweep
def test_a_rotary_table_of_all_positions_stays_on_the_gpu() -> None:
    """Half as many complex numbers as a head has features, for each position; as long as the step lasts."""
    without, table = (make_step("zigzag", 4, workload(), **options) for options in ({}, {"rotary_table": True}))
    before, found = walks(without)[0], walks(table)[0]
    nbytes = workload().seq * workload().model.head_dim // 2 * 8
    assert found.in_use[1:-1] == [before_it + nbytes for before_it in before.in_use]
    assert found.by_term["other"] == before.by_term["other"] + nbytes
    assert without.schedule.hash == make_step("zigzag", 4, workload(), rotary_table=False).schedule.hash
    with pytest.raises(InputError, match="schedule.rotary_table=True is of training steps"):
        LayerOptions(rotary_table=True).of_scope("layer")
