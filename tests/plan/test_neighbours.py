"""One change away: which setups there are, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from sim.base.errors import InputError
from sim.plan.neighbours import neighbours, steps
from sim.setup.setup import Setup
from tests.engine.play.test_engines import requires_compiler


def make_setup(schedule: str = "usp", **changes: Any) -> Setup:
    fields = {"model": "tiny", "cluster": "hgx-h100", "seq": "8K", "gpus": 4, "layers": 1, "scope": "layer", **changes}
    return Setup(schedule, **fields)


def test_degrees_keep_all_gpus_in_use() -> None:
    named = {step.change: step.setup for step in steps(make_setup(ulysses_degree=2, ring_degree=2))}
    degrees = {change: setup.resolved().mesh for change, setup in named.items() if " x " in change}
    assert {(mesh.tp, mesh.ulysses, mesh.ring, mesh.dp) for mesh in degrees.values()} == {
        (1, 4, 1, 1), (1, 1, 4, 1), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 2, 1), (2, 2, 1, 1),
    }  # fmt: skip
    assert "ulysses 1 x ring 2 x dp 1 x tp 2" in named
    assert "placement ring-inner" in named


def test_stages_are_a_degree_where_there_are_several_micro_batches() -> None:
    """With another order in which they take these, and none where there is one stage."""
    said = {"scope": "step", "layers": 4, "batch": 4, "set": {"schedule.micro_batches": 4}}
    named = {step.change: step.setup for step in steps(make_setup("ulysses", ulysses_degree=2, pp_degree=2, **said))}
    degrees = {change: setup.resolved().mesh for change, setup in named.items() if " x " in change}
    assert {(mesh.pp, mesh.ulysses, mesh.dp, mesh.tp) for mesh in degrees.values()} == {
        (1, 4, 1, 1), (1, 2, 2, 1), (4, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 2),
    }  # fmt: skip
    both = named["pipeline_schedule interleaved, pipeline_chunks 2"].resolved().options
    assert (both.pipeline_schedule, both.pipeline_chunks) == ("interleaved", 2)
    assert "pipeline_chunks 2" not in named
    one_stage = {step.change for step in steps(make_setup("ulysses", **said))}
    assert {change for change in one_stage if "pp 2" in change} == {"ulysses 2 x dp 1 x pp 2"}
    assert not [change for change in one_stage if "pipeline" in change]
    alone = {step.change for step in steps(make_setup("ulysses", scope="step"))}
    assert not [change for change in alone if "pp" in change]


def test_shares_of_weights_are_a_degree_where_layers_have_them() -> None:
    """Of a model that has such shares; attention by itself has no weights."""
    named = {step.change: step.setup for step in steps(make_setup("ulysses", tp_degree=2))}
    assert {change for change in named if " x " in change} == {
        "ulysses 4 x dp 1 x tp 1", "ulysses 1 x dp 2 x tp 2", "ulysses 1 x dp 1 x tp 4", "ulysses 2 x dp 2 x tp 1",
    }  # fmt: skip
    assert named["ulysses 1 x dp 1 x tp 4"].resolved().mesh.named() == "TP 4"
    alone = [make_setup("ulysses", scope="attention"), make_setup("ulysses", set={"model.qk_norm": "all"})]
    assert not [step.change for one in alone for step in steps(one) if "tp " in step.change]


def test_options_of_steps_are_varied_in_steps_alone() -> None:
    layer = {step.change for step in steps(make_setup("ulysses"))}
    step = {step.change for step in steps(make_setup("ulysses", scope="step"))}
    assert "all_to_alls async" in layer < step
    assert {"checkpoint none", "checkpoint attention", "zero_stage 2", "micro_batches 2", "prefetch 2"} <= step
    assert "zero_stage 1" not in step


@pytest.mark.sweep
@requires_compiler
def test_the_setup_itself_is_one_row_and_others_are_held_against_it() -> None:
    setup = make_setup("ring", seq="64K")
    found = neighbours(setup)
    (own,) = [row for row in found if not row["change"]]
    assert (own["ratio"], own["error"]) == (1.0, "")
    zigzag = next(row for row in found if row["change"] == "layout zigzag")
    played = setup.replace(set={"schedule.layout": "zigzag"}).predicted()
    assert zigzag["step_time_s"] == played.step_time_s
    assert zigzag["ratio"] == played.step_time_s / setup.predicted().step_time_s < 1


@requires_compiler
def test_twice_the_replicas_are_held_against_it_by_the_token() -> None:
    found = {row["change"]: row for row in neighbours(make_setup("ulysses", gpus=4, scope="attention"))}
    row = found["ulysses 2 x dp 2"]
    assert row["ratio"] == pytest.approx(row["step_time_s"] / found[""]["step_time_s"] / 2)


@pytest.mark.sweep
@requires_compiler
def test_what_is_refused_is_last_with_its_reason() -> None:
    found = neighbours(make_setup("ulysses", gpus=8, seq="8K"))
    refused = [row for row in found if row["error"]]
    assert found.rows[len(found) - len(refused) :] == refused
    assert all(row["step_time_s"] is None for row in refused)


def test_a_setup_that_cannot_be_played_is_refused() -> None:
    with pytest.raises(InputError, match="ulysses"):
        neighbours(make_setup("ulysses", gpus=3))
