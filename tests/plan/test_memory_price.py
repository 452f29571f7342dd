"""What more memory would buy: against the least time that fits with it, by simulating every way."""

from __future__ import annotations

import math
import random

import pytest

import longstep
from longstep import InputError, Setup
from sim.plan.memory_price import memory_prices
from sim.plan.search.space import OPTIONS
from tests.plan.test_plan import SMALL

Way = tuple[float, dict[str, int]]
"""Seconds of a step, and bytes that it takes of each memory, with what is reserved."""
FEW = {"checkpoint": OPTIONS["checkpoint"], "activations": OPTIONS["activations"]}
HBM, DRAM = "cluster.hbm.capacity_bytes", "cluster.socket.dram.capacity_bytes"


def every_way(setup: Setup) -> list[Way]:
    """Simulate all combinations of the options of ``FEW``, each in full."""
    found = []
    for checkpoint in FEW["checkpoint"]:
        for activations in FEW["activations"]:
            options = {"schedule.checkpoint": checkpoint, "schedule.activations": activations}
            one = setup.replace(pad=True, jitter=0.0, set=options).predicted()
            assert one.room is not None
            found.append((one.step_time_s, {m.memory: m.held_bytes + m.reserved_bytes for m in one.room.limits}))
    return found


def least_s(ways: list[Way], room: dict[str, int]) -> float:
    """Return the least time of what fits into memories of some sizes."""
    fits = (step_s for step_s, taken in ways if all(nbytes <= room[name] for name, nbytes in taken.items()))
    return min(fits, default=math.inf)


def require_prices(setup: Setup) -> set[str]:
    """Assert that prices are the steepest finite differences of the least time that fits; return which memory binds."""
    ways, binds = every_way(setup), set()
    found = {row["memory"]: row for row in memory_prices(setup, options=FEW)}
    has = {name: row["capacity_bytes"] for name, row in found.items()}
    now_s = least_s(ways, has)
    for name, row in found.items():
        assert row["sure"]
        if now_s == math.inf:
            assert row["elasticity"] is row["step_time_s"] is None
            continue
        assert row["step_time_s"] == pytest.approx(now_s, rel=1e-12)
        more = {taken[name] for _, taken in ways if taken.get(name, 0) > has[name]}
        differences = {at: math.log(least_s(ways, has | {name: at}) / now_s) / math.log(at / has[name]) for at in more}
        assert row["elasticity"] == pytest.approx(min([0.0, *differences.values()]), rel=1e-9)
        if row["elasticity"]:
            binds.add(name)
            at = has[name] + row["more_bytes"]
            assert now_s > row["more_step_time_s"] == pytest.approx(least_s(ways, has | {name: at}), rel=1e-12)
            assert least_s(ways, has | {name: at - 1}) > row["more_step_time_s"]
        else:
            assert row["more_bytes"] is None
    return binds


WIDE = SMALL.replace(schedule="zigzag", gpus=2, ring_degree=2, layers=3, seq="256K")


@pytest.mark.sweep
def test_prices_are_the_steepest_finite_differences() -> None:
    """Of a step that keeps only inputs in 22 GB, where keeping more is faster."""
    assert require_prices(WIDE.replace(set={HBM: int(22e9)})) == {"GPU"}


@pytest.mark.slow
def test_with_room_for_all_it_is_0() -> None:
    assert require_prices(WIDE) == set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_prices_of_random_steps(seed: int) -> None:
    """Of all schedules, within memories of GPU and host that hold all, some or none of their ways."""
    rng = random.Random(seed)
    schedule = rng.choice(["ring", "zigzag", "ulysses", "upipe", "fpdt", "usp", "allgather"])
    step = SMALL.replace(schedule=schedule, seq=rng.choice(["64K", "256K"]), layers=3, model="tiny")
    step = step.replace(cluster=rng.choice(["hgx-h100", "dgx-a100"]))
    taken = [nbytes for _, nbytes in every_way(step)]
    of_gpu = [one["GPU"] for one in taken]
    of_host = [one["host"] for one in taken if "host" in one] or [1]
    sizes = {HBM: rng.uniform(0.98 * min(of_gpu), 1.02 * max(of_gpu)), DRAM: rng.uniform(0.5, 1.1) * max(of_host)}
    require_prices(step.replace(set={key: int(size) for key, size in sizes.items()}))


@pytest.mark.slow
def test_a_plan_with_so_much_more_memory_takes_what_was_said() -> None:
    """And with a MiB less it takes longer; of groups of tensors as of options."""
    step = SMALL.replace(
        schedule="ulysses", gpus=2, ulysses_degree=2, seq="256K", global_batch=1, set={HBM: int(11e9)}
    )  # fmt: skip
    few = {"mlp": ["whole"], "optimiser": ["gpu"], "loss": ["chunked"]}
    groups = ["x", "gate+up+act"]
    row = memory_prices(step.replace(set={"schedule.loss": "chunked"}), options=few, tensors=groups)[0]
    assert row["memory"] == "GPU"
    assert row["elasticity"] < 0

    def planned_s(more_bytes: int) -> float:
        larger = step.replace(set={HBM: int(11e9) + more_bytes})
        found = longstep.plan(larger, options=few, tensors=groups, most=1, jobs=1)
        return float(found.best[0]["step_time_s"])

    assert planned_s(0) == row["step_time_s"]
    assert planned_s(row["more_bytes"]) == row["more_step_time_s"]
    assert planned_s(row["more_bytes"] - 2**20) > row["more_step_time_s"]


@pytest.mark.sweep
def test_where_nothing_fits_it_is_told_what_is_missing_least() -> None:
    step = SMALL.replace(schedule="ulysses", gpus=2, seq="256K", set={HBM: int(4e9)})
    row = memory_prices(step, options=FEW)[0]
    assert row["elasticity"] is None
    more = memory_prices(step.replace(set={HBM: int(4e9) + row["more_bytes"]}), options=FEW)[0]
    assert more["step_time_s"] is not None
    assert more["options"] == row["more_options"]


def test_memory_has_a_price_in_steps_only() -> None:
    with pytest.raises(InputError, match="`scope` layer: memory has a price in training steps"):
        memory_prices(SMALL.replace(scope="layer"))
    with pytest.raises(InputError, match="`one_device` plays all ranks on one device"):
        memory_prices(SMALL.replace(one_device=True))
    with pytest.raises(InputError, match="no way of this schedule can be built"):
        memory_prices(SMALL.replace(set={"schedule.checkpoint": "nonsense"}), options={"checkpoint": ["nonsense"]})
