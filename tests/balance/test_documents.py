"""Plans for documents: planners beside schedules, and the answer of trying everything."""

from __future__ import annotations

import random
import re

import pytest

import longstep
from longstep import Setup
from sim.balance.documents import BY_BLOCKS
from sim.base.errors import InputError
from sim.plan.search.bounds import least_room
from sim.plan.search.branches import Lost, least_of, opened
from sim.plan.search.families import families
from sim.plan.search.room import room
from sim.plan.search.space import Branch
from sim.plan.search.steps import step_of
from tests.plan.test_plan import SMALL, by_trying

OPTIONS = {"checkpoint": ["full"], "activations": ["hbm"], "optimiser": ["gpu"], "mlp": ["whole"], "loss": ["chunked"]}
PACKED = (1500, 250, 250, 48)


def require_same_as_by_trying(setup: Setup) -> None:
    """Assert that a plan for documents is that of trying all schedules and planners."""
    setup = setup.replace(global_batch="any")
    expected = by_trying(setup, OPTIONS)
    found = longstep.plan(setup, options=OPTIONS, most=2, jobs=1)
    assert {row["schedule"] for row in found.lost} >= {*BY_BLOCKS}
    tokens = setup.sequence_length
    seconds = [tokens / row["tokens_per_s_per_gpu"] / (setup.gpus or 1) for row in found.best]
    assert seconds == pytest.approx(expected[:2], rel=1e-12)
    assert found.slack == 0


@pytest.mark.slow
def test_plans_for_documents_are_those_of_trying_every_planner() -> None:
    """On two GPUs that share each sequence."""
    require_same_as_by_trying(SMALL.replace(gpus=2, ring_degree=2, documents=PACKED, layers=1))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "window:64", "lambda:16:128"])
def test_plans_under_other_masks_are_those_of_trying_every_planner(mask: str) -> None:
    require_same_as_by_trying(SMALL.replace(gpus=2, ring_degree=2, documents=PACKED, layers=1, mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_more_plans_for_documents_are_those_of_trying_every_planner(seed: int) -> None:
    """Of random lengths, on four GPUs, where the least memory leaves no replicas."""
    rng = random.Random(seed)
    documents = [rng.choice([64, 500, 2000, 8000]) for _ in range(rng.choice([2, 5, 9]))]
    documents.append(-sum(documents) % 512 + 512)
    require_same_as_by_trying(SMALL.replace(documents=tuple(documents), gpus=4))


@pytest.mark.sweep
def test_bounds_of_unequal_ranks() -> None:
    """Memory is that of all, also of the host's, of which every rank takes as much as its own tokens."""
    host = {key: value[:1] for key, value in OPTIONS.items()} | {"activations": ["host"], "optimiser": ["host"]}
    setup = SMALL.replace(gpus=2, ring_degree=2, documents=PACKED, layers=2)
    for family in families(setup, host):
        if family.named.partition(" ")[0] in {"fcp-style", "groups"}:
            (leaf,) = Branch(family).leaves
            found = leaf.setup.resolved()
            assert step_of(leaf.setup)[0] >= least_of(leaf.setup).step_s > 0
            assert least_room(found).limits == room(found).limits, family.named


def test_what_a_planner_refuses_is_told() -> None:
    """As why it loses: here every one of them has too many tasks."""
    few = SMALL.replace(gpus=2, ring_degree=2, documents=PACKED, layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.balance.documents.MOST_TASKS", 1)
        refusing = [family for family in families(few, OPTIONS) if family.named.partition(" ")[0] in BY_BLOCKS]
    (groups,) = (family for family in refusing if family.named == "groups (R 2)")
    found = opened(next(Branch(groups).leaves))
    assert isinstance(found, Lost)
    assert re.fullmatch(r"groups has \d+ tasks: at most 1 are simulated; choose fewer `documents`", found.refused)


@pytest.mark.sweep
def test_planners_are_for_documents_alone() -> None:
    """Under any mask, and for no schedule that is named."""
    assert not {one.named.partition(" ")[0] for one in families(SMALL)} & {*BY_BLOCKS}
    for more in ({}, {"mask": "full"}, {"window": 64}, {"mask": "lambda:16:64"}):
        assert {one.named.partition(" ")[0] for one in families(SMALL.replace(documents=PACKED, **more))} >= {
            *BY_BLOCKS
        }
    assert {one.named.partition(" ")[0] for one in families(SMALL.replace(documents=PACKED, schedule="ring"))} == {
        "ring"
    }


@pytest.mark.sweep
@pytest.mark.parametrize(
    "schedule",
    ["ulysses", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ring", "striped", "allgather", "upipe"))],
)
def test_a_document_longer_than_all_memory_does_not_fit(schedule: str) -> None:
    """What is missing is said soon, of a step of all layers."""
    found = Setup(schedule, model="llama3-8b", cluster="hgx-h100", gpus=8, documents=(10**9,), seeds=1).predicted()
    assert found.fits is False
    assert found.room is not None
    assert found.room.free_bytes < -(10**13)


@pytest.mark.sweep
def test_chunks_without_end_are_refused() -> None:
    """A billion tokens in chunks of 64K, of which each meets all before it, would take all memory to write down."""
    long = Setup("fpdt", model="llama3-8b", cluster="hgx-h100", gpus=8, documents=(10**9,), pad=True, layers=1)
    with pytest.raises(InputError, match="15259 chunks.*at most 256; set schedule.chunk=3906304 or more"):
        long.predicted()
    assert long.replace(set={"schedule.chunk": 2**28}, seeds=1).predicted().fits is False


@pytest.mark.sweep
@pytest.mark.slow
def test_no_plan_for_a_document_longer_than_all_memory() -> None:
    """But what is missing least."""
    found = longstep.plan(
        Setup("ring", model="llama3-8b", cluster="hgx-h100", gpus=2, documents=(10**8, 10**6)),
        options={"checkpoint": ["none", "full"]},
        jobs=1,
    )
    assert not found.best.rows
    assert re.match(r"ring \(R 2\) with checkpoint full needs .* GiB more of GPU memory", found.shortage)
