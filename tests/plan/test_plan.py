"""Plans: no bound above a simulation, layers that add the same each, and the answer of trying everything."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

import longstep
from longstep import InputError, Prediction, Setup
from sim.base.cpu_time import CpuTime
from sim.base.workers import Workers
from sim.plan.search.bounds import Least, least_of_any, least_room, least_seconds
from sim.plan.search.branches import SURE, Played, least_limits, least_of, played
from sim.plan.search.families import families
from sim.plan.search.room import room
from sim.plan.search.search import Search
from sim.plan.search.space import OPTIONS, Branch, Family
from sim.plan.search.steps import step_of
from sim.plan.search.usual import cut_of, guesses, of_many
from sim.schedule.methods.catalog import SCHEDULES

SMALL = Setup(model="tiny", cluster="hgx-h100", gpus=4, seq="16K", layers=2)


def random_setup(rng: random.Random) -> tuple[Setup, dict[str, list[str]]]:
    """Return a small setup, and few options to vary."""
    setup = SMALL.replace(
        cluster=rng.choice(["hgx-h100", "dgx-a100"]),
        gpus=rng.choice([1, 2, 4]),
        seq=rng.choice(["4K", "16K", "64K"]),
        schedule=rng.choice([None, *SCHEDULES]),
        set={"cluster.hbm.capacity_bytes": rng.choice([80e9, 9e9, 8e9])},
        global_batch=rng.choice(["any", 4, 8]),
    )
    if setup.schedule == "single":
        setup = setup.replace(dp_degree=setup.gpus)
    chosen = rng.sample([*OPTIONS], 2)
    return setup, {key: list(OPTIONS[key]) for key in chosen}


def that_fit(setup: Setup, options: dict[str, list[str]]) -> list[tuple[float, int]]:
    """Return the seconds of a step, and its sequences, of every configuration that fits, by simulating all of them."""
    found = []
    for leaf in (leaf for family in families(setup, options) for leaf in Branch(family).leaves):
        try:
            predicted = leaf.setup.predicted()
            assert predicted.room is not None
            if predicted.room.free_bytes >= 0:
                found.append((predicted.step_time_s, leaf.setup.dp_degree * leaf.setup.batch))
        except InputError:
            continue
    return found


def by_trying(setup: Setup, options: dict[str, list[str]]) -> list[float]:
    """Return the seconds a sequence of every configuration that fits, the fastest first."""
    return sorted(step_s / sequences for step_s, sequences in that_fit(setup, options))


def require_same_as_by_trying(seed: int) -> None:
    """Assert that a random plan is that of trying everything."""
    setup, options = random_setup(random.Random(seed))
    expected = by_trying(setup, options)
    try:
        found = longstep.plan(setup, options=options, most=2, jobs=1)
    except InputError:
        assert not expected
        return
    tokens = setup.sequence_length
    seconds = [tokens / row["tokens_per_s_per_gpu"] / (setup.gpus or 1) for row in found.best]
    assert seconds == pytest.approx(expected[:2], rel=1e-5)  # of a pipeline by few micro-batches
    assert bool(found.shortage) is (not expected)
    assert found.slack == 0


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1))
def test_plans_are_those_of_trying_everything(seed: int) -> None:
    """In small spaces of random schedules, lengths and memories."""
    require_same_as_by_trying(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 50))
def test_many_plans_are_those_of_trying_everything(seed: int) -> None:
    """As above."""
    require_same_as_by_trying(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("global_batch", [4, pytest.param("64K", marks=pytest.mark.slow)])
def test_a_plan_keeps_the_global_batch(global_batch: int | str) -> None:
    """Replicas share it, in micro-batches of one sequence: all numbers of these are tried, of which bounds play few."""
    setup = SMALL.replace(schedule="ulysses", gpus=2, layers=1, global_batch=global_batch)
    options = {"checkpoint": ["none", "full"]}
    found = longstep.plan(setup, options=options, most=9, jobs=1)
    tried = sorted(that_fit(setup, options))
    assert [row["step_time_s"] for row in found.best] == pytest.approx([step_s for step_s, _ in tried], rel=1e-9)
    assert {count for _, count in tried} == {row["sequences"] for row in found.best} == {4}
    assert {row["schedule"] for row in found.best} == {"ulysses (U 2)", "ulysses (2 replicas)"}
    first = found.best[0]
    assert first["tokens_per_s_per_gpu"] == pytest.approx(4 * 2**14 / first["step_time_s"] / 2)
    only = longstep.plan(setup.replace(batch=2), options=options, most=9, jobs=1)
    assert {row["schedule"] for row in only.best} == {"ulysses (2 replicas)"}


@pytest.mark.sweep
def test_a_global_batch_that_no_replicas_share_is_refused() -> None:
    """Where degrees leave no others; where all are refused since one sequence takes all GPUs it is said."""
    setup = SMALL.replace(schedule="ulysses", ulysses_degree=2, pp_degree=1, global_batch=3)
    with pytest.raises(InputError, match=r"`global_batch` 3 is no multiple of 2 replicas: set it to 2 or 4"):
        longstep.plan(setup)
    whole = SMALL.replace(schedule="ulysses", model="smollm2-135m", global_batch=1)
    with pytest.raises(InputError, match="a larger `global_batch` allows more replicas of fewer GPUs"):
        longstep.plan(whole)
    assert longstep.plan(whole.replace(global_batch=4), options={"checkpoint": ["full"]}, jobs=1).best


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"activations": "host", "optimiser": "host", "mlp": "tiled"}, marks=pytest.mark.slow),
        pytest.param({"sync": "last"}, marks=pytest.mark.slow),
    ],
)
def test_further_micro_batches_add_what_the_last_one_did(options: dict[str, str]) -> None:
    """Of a step of six the seconds, the bounds and the memory are what those of two and three say."""
    six = {"schedule.micro_batches": 6, **{f"schedule.{key}": value for key, value in options.items()}}
    setup = SMALL.replace(schedule="zigzag", gpus=2, jitter=0.0, batch=6, set=six)
    predicted = setup.predicted()
    assert step_of(setup)[0] == pytest.approx(predicted.step_time_s, rel=1e-9)
    found = played(Branch(Family(setup, "zigzag", {})), float("inf"))
    assert isinstance(found, Played)
    assert found.room == predicted.room
    assert predicted.room is not None
    assert [one.held_bytes for one in least_limits(setup)] == [one.held_bytes for one in predicted.room.limits]
    own, by_few = least_seconds(setup.resolved()), least_of(setup)
    assert by_few[:2] == pytest.approx(own[:2], rel=1e-9)
    assert 0 < by_few.links_s <= own.links_s * (1 + 1e-9)  # of another link, where that carries more by then


def require_told(setup: Setup) -> tuple[Prediction, Least]:
    """Assert that few layers and micro-batches say what a step of many takes, seconds within 1e-4 and memory to the
    byte, and that no bound is above either; return the step and its bound.
    """
    predicted, least = setup.predicted(), least_of(setup)
    assert step_of(setup)[0] == pytest.approx(predicted.step_time_s, rel=1e-4)
    assert 0 < least.branch_s <= least.step_s <= predicted.step_time_s * (1 + 1e-9)
    found = played(Branch(Family(setup, "", {})), float("inf"))
    assert isinstance(found, Played)
    assert found.room == predicted.room
    assert predicted.room is not None
    for limit, whole in zip(least_limits(setup), predicted.room.limits, strict=True):
        assert 0.95 * whole.held_bytes <= limit.held_bytes <= whole.held_bytes
    return predicted, least


def require_bounds(setup: Setup, options: dict[str, tuple[str, ...]]) -> int:
    """Assert that no configuration of some families is below its own bounds or those of any branch that it is in.
    Return how many there are.
    """
    checked = 0
    for family in families(setup, options):
        leaves = []
        for leaf in Branch(family).leaves:
            try:
                leaves.append((leaf, leaf.setup.predicted(), least_of(leaf.setup), least_room(leaf.setup.resolved())))
            except InputError:
                continue
        known = {leaf.chosen: (least, held) for leaf, _, least, held in leaves}
        for leaf, predicted, least, held in leaves:
            case = f"{family.named}: {leaf.named}"
            assert 0 < least.branch_s <= least.step_s <= predicted.step_time_s * (1 + 1e-9), case
            of_all = room(leaf.setup.resolved())
            taken = {limit.memory: limit.held_bytes for limit in of_all.limits}
            assert all(limit.held_bytes <= taken[limit.memory] for limit in held.limits), case
            for branch in (Branch(family, leaf.chosen[:number]) for number in range(len(leaf.chosen))):
                if all(one.chosen in known for one in branch.fast):
                    least_s = least_of_any([known[one.chosen][0] for one in branch.fast]).branch_s
                    assert least_s <= least.step_s * (1 + 1e-9), case
                if branch.leanest.chosen in known:
                    least_held = known[branch.leanest.chosen][1].limits[0].held_bytes
                    assert SURE * least_held <= held.limits[0].held_bytes, case
            checked += 1
    return checked


@pytest.mark.sweep
def test_no_bound_is_above_a_simulation() -> None:
    """Neither of time nor of memory: of a sequence in parts, with some options."""
    few = {"checkpoint": ("none", "full"), "activations": ("hbm", "host"), "optimiser": ("gpu", "host")}
    assert require_bounds(SMALL.replace(gpus=2, schedule="zigzag", ring_degree=2), few) >= 6


@pytest.mark.slow
def test_tiles_of_an_mlp_may_be_the_faster_ones() -> None:
    """As they are on A100 at 4K tokens, where products of all tokens have a lower measured rate."""
    step = SMALL.replace(cluster="dgx-a100", schedule="balanced-ring", gpus=2, ring_degree=2, seq="4K")
    both = {"mlp": ("whole", "tiled")}
    assert require_bounds(step, both) == 2
    found = longstep.plan(step, options=both, most=1, jobs=1)
    assert found.best[0]["options"] == "mlp tiled"


@pytest.mark.slow
@pytest.mark.parametrize("seq", ["2K", "64K"])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "single"])
def test_no_bound_of_any_schedule_is_above_a_simulation(schedule: str, seq: str) -> None:
    """As above: all options, of small models at several lengths; two degrees take four ranks."""
    gpus = 4 if schedule == "usp" else 2
    assert require_bounds(SMALL.replace(gpus=gpus, schedule=schedule, seq=seq), OPTIONS) >= 12


def test_calls_of_processes_are_told_apart_and_ended() -> None:
    """Whichever is finished first, an error is raised here, and what sleeps does not hold up the end."""
    with Workers(2) as workers:
        later, first = workers.submit(time.sleep, 60), workers.submit(divmod, 7, 3)
        assert later != first
        assert workers.wait(10) == (first, (2, 1))
        assert workers.idle
        assert workers.wait(0) is None
        workers.submit(divmod, 7, 0)
        with pytest.raises(ZeroDivisionError):
            workers.wait(10)


@pytest.mark.parametrize("options", [{}, {"activations": "host", "optimiser": "host", "mlp": "tiled"}])
@pytest.mark.slow
def test_further_layers_add_what_the_last_one_did(options: dict[str, str]) -> None:
    """A step of 16 layers takes what two of 3 and 4 say, within 1e-5."""
    for schedule in (name for name in SCHEDULES if name != "single"):
        setup = Setup(
            schedule, model="llama3-8b", cluster="hgx-h100", gpus=4, seq="128K", layers=16, jitter=0.0,
            set={f"schedule.{key}": value for key, value in options.items()},
        )  # fmt: skip
        predicted = setup.predicted()
        assert step_of(setup)[0] == pytest.approx(predicted.step_time_s, rel=1e-5), schedule
        found = played(Branch(Family(setup, schedule, {})), float("inf"))
        assert isinstance(found, Played)
        assert found.room == predicted.room, schedule
        assert predicted.room is not None
        for least, limit in zip(least_limits(setup), predicted.room.limits, strict=True):
            assert least.held_bytes <= limit.held_bytes, schedule


@pytest.mark.sweep
def test_where_nothing_fits_the_smallest_shortage_is_told() -> None:
    """With so much more memory it fits."""
    tight = SMALL.replace(schedule="ulysses", ulysses_degree=4, set={"cluster.hbm.capacity_bytes": 4e9})
    found = longstep.plan(tight, options={"checkpoint": ["none", "full"]})
    assert len(found.best) == 0
    assert found.shortage.startswith("ulysses (U 4) with checkpoint full needs ")
    missing = float(found.shortage.split("needs ")[1].split(" GiB")[0]) * 2**30
    more = tight.replace(set={"cluster.hbm.capacity_bytes": int(4e9 + 1.01 * missing)})
    assert len(longstep.plan(more, options={"checkpoint": ["full"]}).best) == 1


@pytest.mark.slow
def test_what_would_make_it_fit_does() -> None:
    """Each alone: an option that is not varied, more GPUs, a shorter sequence; where nothing would there is none."""
    tight = SMALL.replace(
        schedule="ulysses", gpus=2, seq="256K", global_batch=1,
        set={"cluster.hbm.capacity_bytes": 7e9, "schedule.loss": "chunked"},
    )  # fmt: skip
    how: dict[str, Any] = {"options": {"checkpoint": ["full"]}, "most": 1, "jobs": 1}
    found = longstep.plan(tight, **how)
    assert [one.partition(" ")[0] for one in found.remedies] == ["tiled", "4", "a"]
    same = tight.replace(ulysses_degree=2, set={"schedule.checkpoint": "full"})
    gpus = int(found.remedies[1].split()[0])
    setups = [
        same.replace(set={"schedule.mlp": "tiled"}),
        same.replace(gpus=gpus, ulysses_degree=gpus),
        same.replace(seq=found.remedies[2].split()[3]),
    ]
    assert room(same.resolved()).free_bytes < 0
    assert all(room(one.resolved()).free_bytes >= 0 for one in setups)
    assert not longstep.plan(tight.replace(set={"cluster.hbm.capacity_bytes": 3.2e9}), **how).remedies


@pytest.mark.sweep
@pytest.mark.slow
def test_a_usual_configuration_that_fits_is_known_first() -> None:
    """Before any other is, and it is in the result once."""
    told: list[Played | None] = []

    def show(done: int, count: int, left_s: float, best: Sequence[Played]) -> None:
        told.append(best[0] if best else None)

    some = SMALL.replace(schedule="ulysses", gpus=2, layers=1)
    found = longstep.plan(some, options={"checkpoint": ["none", "full"]}, most=99, jobs=1, progress=show)
    first = told[0]
    assert first is not None
    assert first.branch.family.named == "ulysses (2 replicas)"
    assert len({(row["schedule"], row["options"]) for row in found.best}) == len(found.best) == found.simulated


@pytest.mark.sweep
def test_of_many_families_those_cuts_are_known_first_that_may_be_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All whose guesses are near the least one; of others none, once one is known. Of few families the first that fits
    is enough.
    """
    some = SMALL.replace(schedule="ulysses", gpus=2, layers=2, global_batch=4)
    there = families(some, {"checkpoint": ["none", "full"], "tp_degree": ["1", "2"], "pp_degree": ["1", "2"]})
    guessed_s = guesses(there, lambda: False)
    assert sorted(guessed_s) == [(1, 1), (1, 2), (2, 1)]

    def known(near: float) -> list[tuple[int, int]]:
        monkeypatch.setattr("sim.plan.search.usual.NEAR", near)
        return [cut_of(one.branch.family) for one in of_many(there, guessed_s, lambda: False)]

    assert known(math.inf) == sorted(guessed_s, key=lambda cut: (cut[1], guessed_s[cut]))
    assert known(1.0) == [min(guessed_s, key=guessed_s.__getitem__)]
    monkeypatch.setattr("sim.plan.search.usual._fits", lambda leaf: cut_of(leaf.family) == (1, 2))
    assert known(1.0) == [(1, 2)]


@pytest.mark.sweep
def test_a_search_of_many_families_ends_with_what_one_of_few_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order differs."""
    some = SMALL.replace(schedule="ulysses", gpus=2, layers=2, global_batch=4)
    options = {"checkpoint": ["none", "full"], "tp_degree": ["1", "2"], "pp_degree": ["1", "2"]}
    few = longstep.plan(some, options=options, jobs=1)
    monkeypatch.setattr("sim.plan.search.search.MANY", 1)
    many = longstep.plan(some, options=options, jobs=1)
    assert [*many.best] == [*few.best]


def test_what_takes_the_same_stands_in_the_order_of_its_values() -> None:
    """Whichever worker was the first to answer."""
    some = SMALL.replace(schedule="ulysses", gpus=2, layers=1)
    there = families(some, {"checkpoint": ["none", "full"], "activations": ["hbm", "host"]})
    held = room(some.resolved())
    played_ones = [Played(leaf, float(family.worth), held) for family in there for leaf in Branch(family).leaves]
    assert len(played_ones) > 2
    for arrived in (played_ones, played_ones[::-1]):
        search = Search(there, 1, CpuTime(), None)
        for one in arrived:
            search.know(one)
        assert search.best == played_ones


@pytest.mark.slow
def test_an_interrupted_plan_has_the_best_so_far() -> None:
    """Ctrl-C at the first result: what is known is the answer, and says what it may miss."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    some = SMALL.replace(schedule="ulysses", gpus=2, layers=1)
    found = longstep.plan(some, options={"checkpoint": ["none", "full"]}, jobs=1, progress=interrupt)
    assert found.interrupted
    assert found.simulated == len(found.best) == 1
    assert found.slack > 0
    assert not longstep.plan(some, options={"checkpoint": ["full"]}, jobs=1).interrupted


def spin(seconds: float) -> None:
    """Take so much of a processor."""
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


def test_a_limit_is_of_cpu_time() -> None:
    """Of this process and of workers, and not of waiting."""
    cpu = CpuTime(10.0)
    with Workers(2) as workers:
        workers.submit(spin, 0.05)
        workers.submit(time.sleep, 0.2)
        while workers.wait(10) is None or workers.wait(10) is None:
            pass
        assert 0.05 <= workers.cpu_s < 0.15
        assert 9.5 < cpu.left_s(workers.cpu_s) < 9.95
        cpu.add(workers.cpu_s)
    assert cpu.left_s() < 9.95
    cpu.interrupted = True
    assert cpu.left_s() == 0


@pytest.mark.slow
@pytest.mark.gloo
def test_the_front_page_has_an_answer_within_seconds_of_cpu_time() -> None:
    """In processes of its own, from nothing: 3.2 to 3.7 s beside two busy loops on two cores, 3.9 beside a dozen."""
    asked = ["plan", "--model", "llama3-70b", "--cluster", "hgx-h100", "--nodes", "8", "--seq", "2M", "--limit", "1"]
    before = os.times()
    ran = subprocess.run([sys.executable, "-m", "longstep", *asked], capture_output=True, text=True, check=True)
    after = os.times()
    assert " trains fastest, with " in ran.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5


def test_what_is_set_of_a_cluster_counts_where_degrees_are_placed() -> None:
    """Of nodes of 2 GPUs a half of USP of 4 spans two, and may have either degree inside."""
    usp = SMALL.replace(schedule="usp", dp_degree=1)
    named = [one.named for one in families(usp.replace(set={"cluster.gpus_per_node": 2}))]
    assert {"usp (U 2, R 2, ulysses-inner)", "usp (U 2, R 2, ring-inner)"} <= {*named}
    assert "usp (U 2, R 2)" in [one.named for one in families(usp)]


@pytest.mark.parametrize(("schedule", "degrees"), [("ring", 3), ("ulysses", 3), ("usp", 6), ("upipe", 6), (None, 23)])
def test_a_schedule_that_is_named_has_all_of_its_degrees(schedule: str | None, degrees: int) -> None:
    """Degree 1 among them, which is not varied where other schedules are: it is one of those."""
    found = families(SMALL.replace(schedule=schedule))
    meshes = [one.setup.resolved().mesh for one in found]
    assert len(found) == len({one.named for one in found}) == degrees
    assert {mesh.size for mesh in meshes} == {4}
    assert sum(mesh.dp == 4 for mesh in meshes) == 1


@pytest.mark.slow
def test_a_ring_of_one_in_replicas_is_the_fastest_over_pcie() -> None:
    """Where links are slow and a sequence is short."""
    setup = Setup("ring", model="llama3.2-3b", cluster="l20-pcie", gpus=4, pp_degree=1, seq="8K", layers=2)
    found = longstep.plan(setup, options={"checkpoint": ["full"], "mlp": ["whole"]}, jobs=1).best
    assert [row["schedule"] for row in found] == ["ring (4 replicas)", "ring (R 2, 2 replicas)", "ring (R 4)"]


def test_bad_plans_are_refused() -> None:
    """With what is allowed."""
    with pytest.raises(InputError, match="no schedule has it"):
        longstep.plan(SMALL, options={"chekpoint": ["full"]})
    with pytest.raises(InputError, match="expected a list of values"):
        longstep.plan(SMALL, options={"checkpoint": []})
    with pytest.raises(InputError, match="`price` -1"):
        longstep.plan(SMALL, price=-1)
    with pytest.raises(InputError, match="no configuration can be built"):
        longstep.plan(SMALL.replace(schedule="ring"), options={"checkpoint": ["nonsense"]})
