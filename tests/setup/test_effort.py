"""What building takes, told before: counts held to what is built, and refused where nobody can wait for it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

import longstep
from sim.balance.balance import balance
from sim.balance.planners import PLANNERS
from sim.base.errors import InputError, TooLargeError
from sim.engine.play.fold import fold
from sim.plan.fit import fit
from sim.schedule.derive.roles import firsts, of_kinds
from sim.schedule.proof.check import Checked
from sim.setup.effort import (
    MOST_BYTES,
    MOST_S,
    PLANNING,
    Asked,
    Effort,
    effort_of_plans,
    estimate,
    growth_of,
    require_few,
    require_small,
    sizes_of,
)
from sim.setup.names import entry, workload
from sim.setup.setup import Setup
from sim.words.mesh import Mesh

STEP = Setup(model="llama3-8b", cluster="hgx-h100", seq="1M")
ATTENTION = STEP.replace(scope="attention")
HUGE = ATTENTION.replace(schedule="ring", gpus=16384, seq="16M")


def told(setup: Setup) -> Effort:
    """Return what is told of a setup."""
    found = estimate(setup.resolved().asked)
    assert found is not None
    return found.at(sizes_of(found.asked))


@pytest.mark.parametrize(
    "setup",
    [
        ATTENTION.replace(schedule="ring", gpus=48, seq="768K"),
        ATTENTION.replace(schedule="zigzag", gpus=48, seq="768K", passes="forward"),
        ATTENTION.replace(schedule="burst", gpus=24, seq="768K"),
        pytest.param(ATTENTION.replace(schedule="balanced-ring", gpus=48, seq="768K"), marks=pytest.mark.slow),
        ATTENTION.replace(schedule="double-ring", gpus=32, passes="forward"),
        ATTENTION.replace(schedule="allgather", gpus=32),
        pytest.param(
            STEP.replace(schedule="usp", gpus=48, seq="768K", ulysses_degree=2, layers=4), marks=pytest.mark.slow
        ),
        pytest.param(
            STEP.replace(schedule="usp", gpus=32, ulysses_degree=1, dp_degree=2, layers=4), marks=pytest.mark.slow
        ),
        STEP.replace(schedule="upipe", gpus=8, layers=6),
        pytest.param(STEP.replace(schedule="fpdt", layers=4, seq="768K"), marks=pytest.mark.slow),
        pytest.param(
            STEP.replace(schedule="ulysses", layers=5, batch=9, seq="64K", set={"schedule.micro_batches": 9}),
            marks=pytest.mark.slow,
        ),
        STEP.replace(schedule="ulysses", layers=3, batch=3, seq="64K", set={"schedule.micro_batches": 3}),
        STEP.replace(schedule="zigzag", layers=4, seq="64K", set={"schedule.zero_stage": 1}),
    ],
    ids=lambda setup: f"{setup.schedule} {setup.gpus} {setup.scope}",
)
@pytest.mark.sweep
def test_ops_are_told_within_a_tenth(setup: Setup) -> None:
    """All of these are larger than what is counted, so that growth is carried on."""
    schedule = setup.resolved().built()
    mesh = schedule.header.mesh
    ranks = mesh.at({"dp": firsts(of_kinds(schedule, "dp"))})
    built = sum(schedule.program(rank).num_ops for rank in ranks)
    assert told(setup).ops == pytest.approx(built, rel=0.1)


SHARED = STEP.replace(schedule="ring", layers=4, gpus=32, tp_degree=8, ring_degree=4, seq="64K", jitter=0.0)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("setup", "ranks"),
    [
        (SHARED, 8),
        (SHARED.replace(jitter=0.01), 32),
        (SHARED.replace(set={"schedule.optimiser": "host"}), 32),
        (SHARED.replace(set={"cluster.nic.per_node": 4}), 32),
    ],
    ids=["equal members", "noise of their own", "hosts that they share", "NICs that they share"],
)
def test_of_equal_members_as_many_are_told_as_are_played(setup: Setup, ranks: int) -> None:
    found = setup.resolved()
    played = fold(Checked(found.built()), found.cluster, members=not found.jitter.share).checked.schedule
    assert played.num_ranks == ranks
    built = sum(program.num_ops for program in played.programs)
    assert told(setup).ops == pytest.approx(built, rel=0.1)


def test_what_is_written_once_for_many_ranks_is_told_once() -> None:
    """More replicas of equal shards take no more ops; ranks that trade heads take less than as many in a ring."""
    of_8 = STEP.replace(schedule="ulysses", layers=8, ulysses_degree=8)
    few, many = (told(of_8.replace(gpus=gpus, dp_degree=gpus // 8)) for gpus in (64, 512))
    assert few.ops == many.ops
    assert few.seconds < many.seconds < 8 * few.seconds
    trading, alone = (STEP.replace(schedule="usp", layers=8, gpus=64, ulysses_degree=degree) for degree in (8, 1))
    assert told(trading).seconds < told(alone).seconds / 3


@pytest.mark.sweep
@pytest.mark.parametrize(
    "setup",
    [
        HUGE,
        HUGE.replace(gpus=4096),
        ATTENTION.replace(schedule="balanced-ring", gpus=1024),
        STEP.replace(schedule="ulysses", batch=100_000, set={"schedule.micro_batches": 100_000}),
        STEP.replace(schedule="fpdt", seq="16M"),
        STEP.replace(schedule="usp", gpus=1024),
    ],
)
def test_what_nobody_can_wait_for_is_refused(setup: Setup) -> None:
    with pytest.raises(TooLargeError, match="would take .*`yes`"):
        setup.predicted()


@pytest.mark.sweep
def test_documents_are_counted() -> None:
    documents = (512,) * 200_000
    with pytest.raises(TooLargeError, match="set `yes`"):
        ATTENTION.replace(schedule="zigzag", documents=documents, gpus=8, pad=True).predicted()
    with pytest.raises(TooLargeError, match="planning 200000 documents"):
        balance(ATTENTION, documents, ["dcp"])


def test_each_change_that_is_named_is_enough() -> None:
    setup = STEP.replace(schedule="usp", gpus=64, layers=1000)
    with pytest.raises(TooLargeError) as refused:
        setup.predicted()
    layers = int(str(refused.value).partition("`layers` ")[2].split()[0])
    assert told(setup.replace(layers=layers)).is_small
    assert not told(setup.replace(layers=2 * layers + 1)).is_small


def test_yes_goes_on() -> None:
    asked = HUGE.replace(yes=True).resolved().asked
    require_small(asked, yes=True)
    assert not told(HUGE).is_small
    require_few([*PLANNERS], 10**9, 8, yes=True)


@pytest.mark.sweep
def test_rows_say_that_they_are_too_large() -> None:
    found = longstep.explore(ATTENTION.replace(schedule="ring"), {"gpus": [2, 2048]}, jobs=1)
    assert found[0]["step_time_s"] > 0
    assert "`yes`" in found[1]["error"]
    (cell,) = fit(STEP.replace(gpus=2048), ["ring"], ["16M"])
    assert "`yes`" in cell["error"]


def test_a_builder_that_refuses_small_sizes_is_asked_itself() -> None:
    def only_4096(work: Any, mesh: Mesh) -> Any:
        raise InputError(f"{mesh.ring}: only 4096")

    with pytest.raises(InputError, match="4096: only 4096"):
        ATTENTION.replace(schedule=only_4096, gpus=4096, ring_degree=4096).predicted()


def test_library_builders_ask_too() -> None:
    with pytest.raises(TooLargeError):
        longstep.build("ring", workload("llama3-8b", "16M"), 4096)


def test_one_program_is_small_where_all_are_not() -> None:
    """Bounds of plans build one."""
    asked = Asked(
        "ring", entry("ring"), workload("tiny", "16M"), Mesh(ring=512), entry("ring").options, HUGE.resolved().hints
    )
    require_small(asked, ranks=1)
    with pytest.raises(TooLargeError):
        require_small(asked)


def test_large_ones_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longstep.effort"):
        STEP.replace(schedule="ulysses", layers=300, seq="64K").resolved().built()
    assert "ulysses of 8 ranks: about" in caplog.text


def test_limits_are_those_that_are_told() -> None:
    assert Effort(1, MOST_S, MOST_BYTES).is_small
    assert not Effort(1, MOST_S * 1.01, 0).is_small
    assert not Effort(1, 0, MOST_BYTES * 1.01).is_small


def test_every_planner_has_its_seconds() -> None:
    assert {*PLANNING} == {*PLANNERS}
    assert all(effort_of_plans([name], 500, 8).is_small for name in PLANNERS)


def test_small_schedules_of_larger_ones_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of unlike numbers of layers grow from the same; one that folds members is not one that does not."""
    asked = STEP.replace(schedule="ulysses", tp_degree=2, seq="96K", layers=9).resolved().asked
    found = growth_of(asked)
    monkeypatch.setattr(type(asked.entry), "schedule", None)  # no builder is asked
    deeper = msgspec.structs.replace(asked.workload, layers=17)
    assert growth_of(asked._replace(workload=deeper)) == found
    with pytest.raises(TypeError):
        growth_of(asked._replace(folds_members=not asked.folds_members))
