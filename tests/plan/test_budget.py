"""What becomes of each tensor of a block within a memory budget: the answers of trying every way."""

from __future__ import annotations

import pytest

import longstep
from longstep import InputError, Setup
from sim.plan.search.branches import SURE, least_limits
from sim.plan.search.families import families
from sim.plan.search.space import Branch
from sim.plan.search.tensors import TENSORS, as_options, grid_of
from tests.plan.test_plan import SMALL

FIXED = {"optimiser": ["gpu"], "mlp": ["whole"], "loss": ["chunked"]}
HBM = int(80e9)


def require_same_as_by_trying(setup: Setup, groups: list[str], shares: list[float]) -> None:
    """Assert that plans within budgets between what the leanest way takes and all take the least time that fits."""
    setup = setup.replace(global_batch=1, set={"cluster.hbm.capacity_bytes": HBM})
    tried = []
    for family in families(setup, FIXED, tensors=groups):
        of_family = []
        for leaf in Branch(family).leaves:
            try:
                predicted = leaf.setup.predicted()
            except InputError:
                continue
            assert predicted.room is not None
            of_family.append((leaf, predicted.step_time_s, HBM - predicted.room.free_bytes))
        tried += of_family
        least = least_limits(Branch(family).leanest.setup)[0].held_bytes
        assert all(least_limits(leaf.setup)[0].held_bytes >= SURE * least for leaf, _, _ in of_family)
    assert len(tried) >= 6
    taken = [bytes_taken for _, _, bytes_taken in tried]
    for share in shares:
        budget = int(min(taken) + share * (max(taken) - min(taken)))
        expected = min(step_s for _, step_s, bytes_taken in tried if bytes_taken <= budget)
        found = longstep.plan(setup, options=FIXED, memory_budget=budget, tensors=groups, jobs=1, most=1)
        assert found.slack == 0
        assert found.best[0]["step_time_s"] == pytest.approx(expected, rel=1e-12), share
        assert found.best[0]["free_bytes"] >= 0
    nothing = longstep.plan(setup, options=FIXED, memory_budget=min(taken) - 1, tensors=groups, jobs=1, most=1)
    assert len(nothing.best) == 0
    assert "GiB more of" in nothing.shortage


@pytest.mark.slow
def test_plans_within_budgets_are_those_of_trying_every_way() -> None:
    """Of two layers of zigzag on two GPUs, where each tensor is decided by itself."""
    setup = SMALL.replace(schedule="zigzag", gpus=2, ring_degree=2, layers=2, seq="64K")
    require_same_as_by_trying(setup, ["x", "gate+up+act"], [0.5])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ring", "ulysses", "upipe", "fpdt"])
def test_more_plans_within_budgets_are_those_of_trying_every_way(schedule: str) -> None:
    """Of more tensors, and of schedules that keep others."""
    setup = SMALL.replace(schedule=schedule, gpus=2, layers=3, seq="32K")
    require_same_as_by_trying(setup, ["x", "gate+up+act", "out+h2"], [0.0, 0.2, 0.6])


def test_tensors_that_a_schedule_does_not_keep_are_left_out() -> None:
    """No q, k and v where heads are projected in stages; nothing of an MLP in tiles; a layer's input always stays."""
    whole = SMALL.replace(schedule="ring", gpus=2)
    assert list(grid_of(whole, TENSORS)) == list(TENSORS)
    assert grid_of(whole, ["x+out"]) == {"x+out": ("keep", "offload")}
    assert list(grid_of(whole.replace(schedule="upipe"), ["x", "q+k+v+h1"])) == ["x", "h1"]
    assert list(grid_of(whole.replace(set={"schedule.mlp": "tiled"}), ["gate+h2", "act"])) == ["h2"]


def test_what_was_chosen_is_options_of_a_schedule() -> None:
    """A layer's input is kept where no group has it."""
    assert as_options({"out": "keep", "q": "recompute"}) == {"checkpoint": "x+out", "activations": "hbm"}
    assert as_options({"x": "keep", "h1": "offload"}) == {
        "checkpoint": "x+h1",
        "activations": "host",
        "offloaded": "h1",
    }


def test_bad_budgets_are_refused() -> None:
    """With what is allowed."""
    with pytest.raises(InputError, match="`memory_budget` 0 bytes: expected more than 0"):
        longstep.plan(SMALL, memory_budget=0)
    with pytest.raises(InputError, match="at most what a GPU has"):
        longstep.plan(SMALL, memory_budget=1e12)
    with pytest.raises(InputError, match="out is there twice"):
        longstep.plan(SMALL, tensors=["x+out", "out"])
    with pytest.raises(InputError, match="unknown tensor 'kv'"):
        longstep.plan(SMALL, tensors=["kv"])
    with pytest.raises(InputError, match="expected a list of tensors"):
        longstep.plan(SMALL, tensors=[])
    with pytest.raises(InputError, match="`tensors` are decided one by one: leave out `set` schedule.checkpoint"):
        longstep.plan(SMALL.replace(set={"schedule.checkpoint": "full"}), tensors=["x"])
