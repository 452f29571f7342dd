"""The map of winners: who is fastest at each place, against single predictions."""

from __future__ import annotations

import pytest

import longstep
from longstep import Setup
from sim.base.errors import InputError

LAYER = Setup(model="llama3-8b", cluster="hgx-h100", scope="layer", layers=1, gpus=2, jitter=0.0)


@pytest.mark.sweep
def test_each_place_has_the_fastest_and_the_one_behind_it() -> None:
    names = ["ring", "zigzag", "striped"]
    found = longstep.winners(LAYER, {"schedule": names}, {"seq": "32K,64K"}, jobs=1)
    for row in found:
        setup = LAYER.replace(seq=row["seq"])
        times = {name: setup.replace(schedule=name).predicted().step_time_s for name in names}
        first, second, _ = sorted(names, key=lambda name: times[name])
        assert (row["winner"], row["behind"]) == (first, second)
        assert row["ratio"] == pytest.approx(times[second] / times[first])
        assert row["why"].startswith(f"{second} takes {100 * (row['ratio'] - 1):.2g} % longer, bound by ")


@pytest.mark.sweep
def test_steps_that_are_told_by_few_compete() -> None:
    step, names = LAYER.replace(scope="step", layers=8), ["ring", "ulysses"]
    found = longstep.winners(step, {"schedule": names}, {"seq": "16K"}, extend=True, jobs=1)
    first, second = (longstep.extended(step.replace(schedule=name, seq="16K")) for name in reversed(names))
    assert (found[0]["winner"], found[0]["step_time_s"]) == ("ulysses", first.step_time_s)
    assert found[0]["ratio"] == pytest.approx(second.step_time_s / first.step_time_s)
    assert found.rests_on == first.grounds.lines


@pytest.mark.sweep
def test_what_cannot_be_built_or_does_not_fit_has_lost() -> None:
    (alone,) = longstep.winners(LAYER.replace(gpus=3), {"schedule": ["ulysses", "ring"]}, {"seq": "48K"}, jobs=1)
    assert (alone["winner"], alone["behind"]) == ("ring", None)
    assert alone["why"].startswith("ring alone: ulysses: ")
    step = LAYER.replace(scope="step", set={"cluster.hbm.capacity_bytes": 1e9})
    (nobody,) = longstep.winners(step, {"schedule": ["ring", "zigzag"]}, {"seq": "64K"}, jobs=1)
    assert (nobody["winner"], nobody["why"]) == ("", "ring: does not fit")


@pytest.mark.parametrize(
    ("competitors", "across"),
    [({"schedule": ["ring"]}, {"seq": "8K"}), ({"seq": ["8K", "16K"]}, {"gpus": "2"}), ({}, {"seq": "8K"}),
     ({"schedule": ["ring", "zigzag"]}, {}), ({"schedule": ["ring", "zigzag"]}, {"schedule": "ring"})],
)  # fmt: skip
def test_bad_maps_are_refused(competitors: dict[str, list[str]], across: dict[str, str]) -> None:
    with pytest.raises(InputError, match="`competitors`|`across`"):
        longstep.winners(LAYER, competitors, across)
