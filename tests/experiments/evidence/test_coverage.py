"""Coverage by regime, and what is learned from steps: of predictions whose errors are known."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from experiments.evidence.executed.executed_cases import executed_cases
from experiments.evidence.papers.cases import Case
from experiments.evidence.papers.coverage import REGIME_HEADS, StepSet, learned_from, regime_rows
from experiments.evidence.papers.published import CasePrediction, Reaches
from experiments.verbs.shared.cells import CellSelection
from sim.engine.intervals.learned import LEAST, NOTHING, Learned, Reach, StepErrors
from sim.engine.intervals.regime import Regime
from sim.setup.setup import Setup
from tests.experiments.evidence.test_executed_cases import on_h100
from tests.experiments.pages.test_sweep_page import RING, ULYSSES, make_found

SOURCES, POINTS = Reach(0.0, 0.05), Reach(0.1, 0.1)


def step(error: float, regime: Regime = "links", measure: str = "") -> CasePrediction:
    """A second was measured; ``error`` is the logarithm of measured over predicted time."""
    predicted_s = math.exp(-error)
    case, reaches = Case("group", Setup(scope="attention"), 1.0, measure), Reaches(regime, SOURCES, POINTS)
    return CasePrediction(case, predicted_s, predicted_s, predicted_s, "", 2, reaches)


def shown(sets: list[StepSet], learned: Learned) -> list[dict[str, str]]:
    judged = [one._replace(found=[found.within(learned.without(one.title)) for found in one.found]) for one in sets]
    return [dict(zip(REGIME_HEADS, row, strict=True)) for row in regime_rows(judged, learned)]


def test_errors_are_those_of_steps_with_costs_that_have_sources() -> None:
    op, blind = step(0.3, measure="Attend"), step(0.3)._replace(reaches=None)
    sets = [StepSet("a", [step(0.2), step(-0.1), step(0.4, "host"), op, blind]), StepSet("b", [blind])]
    found = learned_from(sets, "by hand")
    assert found.command == "by hand"
    (one,) = found.sets
    assert (one.title, one.of) == ("a", {"host": [0.4], "links": [-0.1, 0.2]})


def test_errors_of_ratios_are_those_of_pairs_that_differ_in_their_schedule() -> None:
    """Of errors 0.2, -0.1 and 0.4 two pairs' slower one is the second, which is predicted to take longest."""
    longer = step(0.2)._replace(case=Case("group", Setup(scope="attention", seq=1024), 1.0))
    sets = [StepSet("a", [step(0.2), step(-0.1), step(0.4, "host"), longer])]
    (one,) = learned_from(sets, "").sets
    assert one.apart == {"links": [0.2, 0.3, 0.5]}


def test_a_set_is_judged_by_the_others() -> None:
    """Steps of one set are 0.3 off, those of the other 0.2: the second is held by the first, and not the reverse."""
    far, near = (StepSet(title, [step(error)] * LEAST) for title, error in (("far", 0.3), ("near", 0.2)))
    of_far, of_near, both = shown([far, near], learned_from([far, near], ""))
    assert [row["in the 90 % interval"] for row in (of_far, of_near, both)] == ["0 %", "100 %", "50 %"]
    assert of_near["half-width"] == f"{100 * (1 - math.exp(-0.3)) / 2:.1f} %"
    assert of_near["reach from"] == "20 steps of 1 other set"
    assert (both["measured"], both["cases"], both["80 to 97 %"]) == ("all", "40", "missed")


def test_points_stand_in_for_steps_that_nobody_measured() -> None:
    """A twelfth is outside of what points say, 0.1, which is more than 2.5 times a median error of 0.01."""
    (row, both) = shown([StepSet("one", [step(0.01)] * 22 + [step(0.2)] * 2)], NOTHING)
    assert (row["reach from"], row["in the 90 % interval"], row["80 to 97 %"]) == ("points of the profile", "92 %", "")
    assert (both["80 to 97 %"], both["at most 2.5"]) == ("met", "missed")
    wide = shown([StepSet("one", [step(0.05)] * 23 + [step(0.2)] * 2)], NOTHING)[1]
    assert (wide["80 to 97 %"], wide["at most 2.5"]) == ("met", "met")
    assert shown([StepSet("one", [step(0.01)] * (LEAST - 1))], NOTHING)[1]["80 to 97 %"] == "too few"


def test_an_interval_reaches_as_far_as_sources_and_steps() -> None:
    learned = Learned(created="", command="", sets=[StepErrors(title="a", of={"links": [-0.2] * 10 + [0.01] * 10})])
    found = step(0.0).within(learned)
    assert (found.low_s, found.high_s) == pytest.approx((math.exp(-0.2), math.exp(0.05)))
    assert step(0.0)._replace(reaches=None).within(learned).bounded is False


def test_cells_of_a_record_are_cases_of_its_own_profile() -> None:
    sweep = CellSelection(
        cluster="hgx-h100", set=("schedule.activations=host", "model.num_kv_heads=4"), model="llama3-8b"
    )
    record = on_h100(sweep, cells := [RING._replace(scope="layer", layers=3), RING._replace(schedule="zigzag")])
    found = executed_cases(record)
    assert [case.setup for case in found] == [
        cell.setup(dataclasses.replace(sweep.setup(), profile=record.profile)) for cell in cells
    ]
    assert [case.measured_s for case in found] == [1.0, 2.0]


def test_repeats_that_were_not_quiet_teach_no_interval() -> None:
    """Of a cell with one quiet repeat that one counts; of a cell without there is no case."""
    found = {RING: make_found(1.0, [(1.0, 0.0), (1.25, 0.2)]), ULYSSES: make_found(1.0, [(1.25, 0.2)])}
    record = on_h100(CellSelection(cluster="hgx-h100"), [])
    (case,) = executed_cases(msgspec.structs.replace(record, comparisons=list(found.items())))
    assert case.measured_s == 1.0
