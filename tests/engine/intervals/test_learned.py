"""How wide steps that were measured make intervals: quantiles by hand, and what ships."""

from __future__ import annotations

import math
import tomllib
from operator import ge, gt
from pathlib import Path
from typing import get_args

import pytest

from experiments.evidence.executed.record import judged, kept_records
from experiments.evidence.headlines import steps_on
from experiments.evidence.papers.published import read_all
from sim.engine.intervals.learned import BEYOND, LEAST, NOTHING, Learned, StepErrors, shipped
from sim.engine.intervals.regime import Regime
from sim.setup.names import DATASHEET


def learned(**sets: list[float]) -> Learned:
    found = [StepErrors(title=title, of={"links": sorted(errors)}) for title, errors in sets.items()]
    return Learned(created="", command="", sets=found)


def test_a_twentieth_of_one_set_is_beyond_each_end() -> None:
    assert learned(one=[n / 100 for n in range(-29, 71)]).reach("links") == (0.24, 0.65)
    assert learned(one=[n / 20 for n in range(-9, 11)]).reach("links") == (0.4, 0.45)


def test_the_expected_time_stays_inside_where_all_steps_took_longer() -> None:
    assert learned(one=[n / 100 for n in range(1, 101)]).reach("links") == (0.0, 0.95)


def test_a_set_counts_as_much_as_one_with_ten_times_as_many_steps() -> None:
    """A twentieth of all weights are a tenth of either set's: 2 of its 20 steps, whatever the other's 200 say."""
    many = [0.0] * 200
    assert learned(many=many, few=[0.1] * 18 + [0.7] * 2).reach("links") == (0.0, 0.1)
    assert learned(many=many, few=[0.1] * 17 + [0.7] * 3).reach("links") == (0.0, 0.7)
    assert learned(many=many, few=[-0.7] * 3 + [0.1] * 17).reach("links") == (0.7, 0.1)


def test_few_steps_and_other_regimes_are_not_heard() -> None:
    assert learned(one=[0.1] * (LEAST - 1)).reach("links") is None
    assert learned(one=[0.1] * LEAST).reach("links") == (0.0, 0.1)
    assert learned(one=[0.1] * LEAST).reach("host") is None
    assert learned(one=[0.1] * LEAST, few=[9.0] * (LEAST - 1)).reach("links") == (0.0, 0.1)


def test_a_set_says_nothing_of_itself() -> None:
    both = learned(one=[0.1] * LEAST, other=[0.2] * LEAST)
    assert both.without("other").reach("links") == (0.0, 0.1)
    assert both.without("one").without("other").reach("links") is NOTHING.reach("links") is None


def test_every_case_file_has_been_heard() -> None:
    """As many steps as it says; the next test reads them, and records, as ``evaluate`` does."""
    counts = {one.title: sum(map(len, one.of.values())) for one in shipped().sets}
    for file in sorted(Path("experiments/published").glob("*.toml")):
        said = tomllib.loads(file.read_text())
        steps = [case for group in said.get("group", []) for case in group["cases"] if "measure" not in case]
        if said["profile"] != DATASHEET and steps:
            assert counts[said["title"]] == len(steps), file.name


@pytest.mark.slow
@pytest.mark.sweep
def test_what_ships_is_of_the_sets_that_ship() -> None:
    """Every case file but those at the rates of datasheets and of ops alone, and every record's cells that were
    executed on a quiet machine; no step more than they hold.
    """
    cases = {
        file.title: sum(not case.measure for case in of_file)
        for file, of_file in read_all(["all"])
        if file.profile != DATASHEET
    }
    for kept in kept_records("experiments/results"):
        what = steps_on(kept.record)
        cases[what] = cases.get(what, 0) + sum(any(cell.quiet) for cell in judged(kept.record))
    counts = {one.title: sum(map(len, one.of.values())) for one in shipped().sets}
    assert counts == {title: count for title, count in cases.items() if count}
    for regime in get_args(Regime):
        found = shipped().reach(regime)
        assert found is not None
        for sign, end in ((-1, found.below), (1, found.above)):
            weighed = [(sign * error, 1 / len(some)) for some in shipped().about(regime) for error in some]
            beyond, from_it_on = ([weight for error, weight in weighed if test(error, end)] for test in (gt, ge))
            allowed = BEYOND * len(shipped().about(regime))
            assert math.fsum(beyond) <= allowed + 1e-9
            assert end == 0 or math.fsum(from_it_on) > allowed - 1e-9, "no less would do"
        assert 0 <= found.below < 1
        assert 0.01 < found.above < 2
