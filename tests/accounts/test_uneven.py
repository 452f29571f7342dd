"""What uneven micro-batches cost a pipeline: passes played again, against closed forms and against the simulation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from sim.accounts.uneven import Passes, ends_s, equal, passes_of
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.setup.predict import predict
from sim.setup.prediction import Prediction
from tests.helpers import slow_but

ALIKE, HEAVY = (4096,) * 64, (2**18,)


def passes(name: str, forward: list[float], backward: list[float], stages: int) -> Passes:
    """Return what stages do of micro-batches that take so long; W takes half of a backward pass."""
    chunks = PIPELINES[name].chunks or 1
    items = [PIPELINES[name].timetable(stage, stages, len(forward), chunks) for stage in range(stages)]
    by_kind = {"F": forward, "BW": backward, "B": [b / 2 for b in backward], "W": [b / 2 for b in backward]}
    took = [[by_kind[item.kind][item.micro] for item in of_stage] for of_stage in items]
    return Passes(items, [[0.0] * len(some) for some in took], took, took)


@pytest.mark.parametrize(("stages", "micros"), [(1, 3), (2, 1), (4, 8), (8, 16)])
def test_equal_passes_end_by_the_closed_form(stages: int, micros: int) -> None:
    """(m + p - 1)(f + b) of 1F1B and GPipe (arXiv:2104.04473 §2.2); ZB-H1 waits (p - 1)(F + B - W) beside its work."""
    f, b = 1.0, 2.0
    for name in ("1f1b", "gpipe"):
        found = passes(name, [f] * micros, [b] * micros, stages)
        assert ends_s(found) == pytest.approx((micros + stages - 1) * (f + b))
        assert ends_s(equal(found)) == ends_s(found)
    if micros >= stages:  # bubble (p - 1)(F + B - W), arXiv:2401.10241 §2.1
        assert ends_s(passes("zb-h1", [f] * micros, [b] * micros, stages)) == pytest.approx(micros * 3 + stages - 1)


def one_f_one_b(forward: list[float], backward: list[float], stages: int) -> float:
    """Play 1F1B: stage s runs min(m, stages - s) forwards ahead, then alternates."""
    number = len(forward)
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    orders = []
    for stage in range(stages):
        ahead = min(number, stages - stage)
        order = [("F", i) for i in range(ahead)]
        for i in range(number):
            order += [("B", i)] + ([("F", i + ahead)] if i + ahead < number else [])
        orders.append(order)
    at = [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            if at[stage] == len(orders[stage]):
                continue
            kind, i = orders[stage][at[stage]]
            needs = ("F", i, stage - 1) if kind == "F" else ("B", i, stage + 1)
            if 0 <= needs[2] < stages and needs not in done:
                continue
            begin = max(free[stage], done.get(needs, 0.0))
            free[stage] = begin + (forward[i] if kind == "F" else backward[i])
            done[kind, i, stage] = free[stage]
            at[stage] += 1
    return max(free)


@given(
    st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=7),
    st.integers(1, 5),
)
def test_unlike_passes_end_as_1f1b_played_by_hand(times: list[tuple[float, float]], stages: int) -> None:
    forward, backward = [f for f, _ in times], [b for _, b in times]
    assert ends_s(passes("1f1b", forward, backward, stages)) == pytest.approx(one_f_one_b(forward, backward, stages))


def test_one_long_micro_batch_holds_up_two_stages() -> None:
    """By hand: 1 forward before it, it goes 2 stages forwards and back, 2 * (4 + 8), and 2 backward behind it."""
    found = passes("1f1b", [1.0, 4.0, 1.0], [2.0, 8.0, 2.0], 2)
    assert ends_s(found) == 1 + 2 * (4 + 8) + 2
    assert ends_s(equal(found)) == pytest.approx((3 + 1) * (2 + 4))


def test_what_is_handed_on_early_and_taken_late_hides_in_the_pass() -> None:
    """Two stages, one micro-batch: the second half of a pass of the first one runs beside the second one."""
    items = [PIPELINES["1f1b"].timetable(stage, 2, 1, 1) for stage in range(2)]
    found = Passes(items, [[0.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[2.0, 2.0], [1.0, 2.0]])
    # Stage 1 begins at 1, hands its gradient on at 3; stage 0 is at its need at 2 + 1 = 3, and ends 1 later.
    assert ends_s(found) == 4.0


def played(documents: tuple[tuple[int, ...], ...], schedule: str = "single", **fields: Any) -> Prediction:
    given: dict[str, Any] = {"model": "llama3-8b", "cluster": "hgx-h100", "layers": 8, "pp_degree": 4, "jitter": 0}
    return predict(schedule, documents=documents, **given | fields)


PLACES = {"first": 0, "in the middle": 4, "last": 7}


@pytest.mark.sweep
@pytest.mark.parametrize("pipeline", slow_but({"zb-v"}, ["1f1b", "gpipe", "zb-h1", "zb-v"]))
def test_passes_of_a_step_end_when_it_does(pipeline: str) -> None:
    """All but what is behind them: the update, some 1 % here. Equal passes take what a step of equal documents does."""
    set_ = {"schedule.pipeline_schedule": pipeline}
    for place in PLACES.values():
        documents = (ALIKE,) * place + (HEAVY,) + (ALIKE,) * (7 - place)
        p = played(documents, set=set_)
        found = passes_of(p.trace, p.played.schedule)
        assert found is not None
        assert 0 <= p.step_time_s - ends_s(found) < 0.01 * p.step_time_s
        assert p.report.uneven == pytest.approx((ends_s(found) - ends_s(equal(found))) / p.step_time_s)


@pytest.mark.sweep
def test_a_heavy_one_in_the_middle_stalls_the_pipe_and_equal_ones_do_not() -> None:
    alike = played((ALIKE,) * 8)
    assert alike.report.uneven == pytest.approx(0.0, abs=2e-3)
    stalled = played((ALIKE,) * 4 + (HEAVY,) + (ALIKE,) * 3)
    bubbles = [stage.bubbles for stage in stalled.report.stages]
    assert isinstance(stalled.report.uneven, float)
    assert 0.05 < stalled.report.uneven < sum(bubbles) / len(bubbles)


@pytest.mark.sweep
def test_others_have_none() -> None:
    for p in (played((ALIKE,) * 2, pp_degree=1), played((1024, 1024), batch=4, pp_degree=2)):  # type: ignore[arg-type]
        assert p.report.uneven is UNSET
        assert "uneven" not in p.to_dict()
