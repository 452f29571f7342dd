"""Plans with shares of weights: no bound is above a step, few layers say what many take, and where they are tried."""

from __future__ import annotations

from typing import Any

import pytest

import longstep
from longstep import InputError, Setup
from sim.plan.remedies import remedies
from sim.plan.search.degrees import FEW_TOKENS
from sim.plan.search.families import families
from sim.plan.search.space import Branch
from sim.plan.search.steps import step_of
from tests.helpers import by_tier, slow_but
from tests.plan.test_plan import SMALL, by_trying, require_bounds, require_told

FEW: dict[str, tuple[str, ...]] = {"checkpoint": ("none", "full"), "optimiser": ("gpu", "host")}
SPLITS: dict[str, dict[str, Any]] = {
    "alone": {"schedule": "single", "tp_degree": 4},
    "ring": {"schedule": "zigzag", "tp_degree": 2, "ring_degree": 2},
    "Ulysses": {"schedule": "ulysses", "tp_degree": 2, "ulysses_degree": 2},
    "USP": {"schedule": "usp", "gpus": 8, "tp_degree": 2, "ulysses_degree": 2, "ring_degree": 2},
    "replicas": {"schedule": "single", "tp_degree": 2, "global_batch": 2},
    "stages": {"schedule": "single", "tp_degree": 2, "pp_degree": 2, "global_batch": 4},
    "stages of a ring": {"schedule": "zigzag", "gpus": 8, "tp_degree": 2, "pp_degree": 2, "global_batch": 2},
    "shared heads": {"schedule": "ulysses", "tp_degree": 4, "gpus": 8, "set": {"model.num_kv_heads": 2}},
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", by_tier(["ring"], [], SPLITS))
def test_no_bound_of_shares_is_above_a_simulation(name: str) -> None:
    """Of branches and leaves, in time and memory."""
    assert require_bounds(SMALL.replace(**SPLITS[name]), FEW) >= 4


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"Ulysses"}, ["stages", "Ulysses", "alone"]))
def test_few_layers_of_shares_say_what_many_take(name: str) -> None:
    """Seconds within 1e-4, memory to the byte."""
    said = {"layers": 12, "jitter": 0.0, "scope": "step", **SPLITS[name]}
    setup = SMALL.replace(**said).spelled_out()
    require_told(setup)


@pytest.mark.sweep
def test_a_plan_over_shares_is_that_of_trying_everything() -> None:
    """Of those that divide a node and the model, beside replicas."""
    setup = SMALL.replace(schedule="ulysses", gpus=2, layers=1, seq="8K", global_batch=2)
    options = {"checkpoint": ["none"], "tp_degree": ["any"]}
    found = longstep.plan(setup, options=options, most=3, jobs=1)
    seconds = [row["step_time_s"] / row["sequences"] for row in found.best]
    assert seconds == pytest.approx(by_trying(setup, options)[:3], rel=1e-9)
    assert "ulysses (TP 2)" in found.best.to_dict()["schedule"]
    assert found.slack == 0


def shares(setup: Setup, **options: list[str]) -> set[int]:
    """Return over how many ranks the families of a setup share out weights."""
    return {one.setup.tp_degree for one in families(setup, {"checkpoint": ["full"], **options})}


def test_shares_are_tried_where_gpus_have_few_tokens_or_one_asks() -> None:
    """Degrees of a node that the model has; what is set stays, and so does a number of stages."""
    few = SMALL.replace(schedule="ulysses", gpus=8, seq=FEW_TOKENS, global_batch=4)
    assert shares(few) == {1, 2, 4, 8}
    assert shares(few.replace(set={"model.vocab_size": 1001 * 2})) == {1, 2}
    assert shares(few.replace(set={"cluster.gpus_per_node": 2})) == {1, 2}
    assert shares(few.replace(tp_degree=1)) == shares(few, tp_degree=["1"]) == {1}
    assert shares(few.replace(global_batch=8)) == shares(few.replace(global_batch="any")) == {1}
    many = few.replace(global_batch=8)
    assert shares(many, tp_degree=["any"]) == {1, 2, 4, 8}
    assert shares(many, tp_degree=["2", "4"]) == {2, 4}
    assert shares(many.replace(gpus=4), tp_degree=["2", "8"]) == {2}
    asked = families(many, {"checkpoint": ["full"], "tp_degree": ["2"], "pp_degree": ["2"]})
    assert {one.setup.resolved().mesh.named() for one in asked} == {
        "TP 2 U 2 PP 2", "TP 2 PP 2 DP 2",
    }  # fmt: skip
    assert asked[0].named.startswith("ulysses (TP 2, ")
    assert {one.setup.resolved().mesh.size for one in asked} == {8}


@pytest.mark.sweep
@pytest.mark.slow
def test_shares_win_where_gpus_have_few_tokens() -> None:
    """As ``FEW_TOKENS`` says, of a Llama-3-8B step of one sequence on eight H100."""
    step = Setup("ulysses", model="llama3-8b", cluster="hgx-h100", gpus=8, jitter=0.0, set={"schedule.loss": "chunked"})

    def ratio(seq: str) -> float:
        alone, shared = (step_of(step.replace(seq=seq, tp_degree=degree))[0] for degree in (1, 2))
        return shared / alone

    assert ratio("8K") < 0.8
    assert 1 < ratio("128K") < 1.1


def test_degrees_that_are_none_are_refused() -> None:
    """With those that there are."""
    with pytest.raises(InputError, match="`tp_degree` 3 does not divide num_heads 8 of tiny: allowed are 1, 2, 4, 8"):
        families(SMALL, {"tp_degree": ["1", "3"]})
    with pytest.raises(InputError, match="`tp_degree` two: expected a whole number of 1 or more, or any"):
        families(SMALL, {"tp_degree": ["two"]})
    with pytest.raises(InputError, match="`pp_degree` 0: expected a whole number of 1 or more"):
        families(SMALL, {"pp_degree": ["0"]})
    with pytest.raises(InputError, match="no schedule takes so many GPUs"):
        longstep.plan(SMALL.replace(gpus=2), options={"tp_degree": ["4"]}, jobs=1)
    with pytest.raises(InputError, match="`until` 1000: expected 1024 tokens or more where 4 GPUs"):
        longstep.longest_context(SMALL.replace(tp_degree=2), until=1000, jobs=1)


@pytest.mark.sweep
def test_fewer_gpus_are_whole_groups() -> None:
    """And what would make a step fit keeps the degree."""
    found = longstep.fewest_gpus(
        SMALL.replace(schedule="ulysses", gpus=8, tp_degree=2), options={"checkpoint": ["full"]}, jobs=1
    )
    assert [row["gpus"] for row in found.tried] == [found.value] == [2]
    tight = SMALL.replace(schedule="ulysses", tp_degree=2, seq="128K", global_batch=1)
    tight = tight.replace(set={"cluster.hbm.capacity_bytes": 7e9})  # 8.1 GB are held on 4, with contexts, and 5.7 on 8
    options = {"checkpoint": ["full"]}
    (family, *_) = [one for one in families(tight, options) if one.setup.dp_degree == 1]
    (more,) = [one for one in remedies(tight, Branch(family).leanest, options) if "GPUs" in one]
    assert more == "8 GPUs: ulysses (TP 2, U 4)"
