"""The diagnosis names what is off, and says nothing where nothing is."""

from __future__ import annotations

from experiments.evidence.executed.diagnosis import diagnosis
from sim.accounts.trace import Player, Row, Trace
from tests.helpers import trace_of


def trace(player: Player, *times: tuple[float, float]) -> Trace:
    """One rank whose op i runs from times[i][0] to times[i][1]."""
    rows = [Row(0, op, "compute", "Gemm", "forward", f"op{op}", a, a, b) for op, (a, b) in enumerate(times)]
    return trace_of(rows, player)


SIMULATED = trace("simulated", (0.0, 1.0), (1.0, 2.0), (2.0, 4.0))


def test_the_kinds_that_carry_the_error_largest_first() -> None:
    """Of a step of 4 s: -0.4 s is -10 %, +0.2 s is +5 %, 0.01 s is below 1 % and not worth a word."""
    errors = {"Copy forward": 0.01, "Gemm forward": 0.2, "Attend forward": -0.4}
    said = diagnosis(errors, [0.01, -0.04], SIMULATED, trace("executed", (0.0, 1.0), (1.0, 2.0), (2.0, 4.0)))
    assert said == ["of the step, most of the error lies in Attend forward -10.0 %, Gemm forward +5.0 %"]


def test_a_machine_that_drifted_is_named() -> None:
    said = diagnosis({}, [0.02, -0.08], SIMULATED, trace("executed", (0.0, 1.0), (1.0, 2.0), (2.0, 4.0)))
    assert said[0] == "no op kind is off by as much as 1 % of the step"
    assert "kernels take -8.0 %" in said[1]
    assert len(said) == 2


def test_events_in_another_order() -> None:
    """Simulated, op 1 begins a second before op 2; executed, half a second after it."""
    said = diagnosis({}, [0.0, 0.0], SIMULATED, trace("executed", (0.0, 1.0), (3.0, 3.2), (2.5, 4.0)))
    worst = "on rank 0 the begin of 'op1' came 500 ms after the begin of 'op2'"
    assert said[1:] == [f"1 of 6 events came before one simulated earlier; {worst}"]


def test_small_differences_are_no_order() -> None:
    """A hundredth of the step apart or less: 0.04 s."""
    said = diagnosis({}, [0.0, 0.0], SIMULATED, trace("executed", (0.0, 1.03), (1.0, 2.03), (2.0, 4.0)))
    assert len(said) == 1
