"""Why a prediction differs from what was executed: op kinds that carry the error, drift of the machine, order."""

from __future__ import annotations

from sim.accounts.trace import Row, Trace
from sim.base.units import percent, seconds

DRIFT = 0.05
"""Drift of a kernel beyond which the machine is not the one that was calibrated."""
_APART = 0.01
"""Share of the step that two events must be apart to count as ordered."""


def diagnosis(errors: dict[str, float], drift: list[float], simulated: Trace, executed: Trace) -> list[str]:
    """Return sentences; ``errors`` are seconds at work per rank, simulated minus measured, by op kind."""
    return [*_carriers(errors, executed.step_time_s), *_drifted(drift), *_reordered(simulated, executed)]


def _carriers(errors: dict[str, float], step_s: float) -> list[str]:
    """Return which op kinds are off by most, down to a hundredth of the step."""
    largest = sorted(errors.items(), key=lambda item: -abs(item[1]))[:3]
    said = [f"{kind} {percent(error / step_s)}" for kind, error in largest if abs(error) > _APART * step_s]
    carried = f"of the step, most of the error lies in {', '.join(said)}"
    return [carried if said else "no op kind is off by as much as 1 % of the step"]


def _drifted(drift: list[float]) -> list[str]:
    worst = max(drift, key=abs)
    if abs(worst) <= DRIFT:
        return []
    return [f"the machine is not the one that was calibrated: kernels take {percent(worst)}; run longstep calibrate"]


def _reordered(simulated: Trace, executed: Trace) -> list[str]:
    """Return how many begins and ends of a rank's ops came before one that was simulated earlier, and the worst of
    them.

    Each event is held against the latest one of all that were simulated at least a hundredth of the step before it.
    """
    apart_s = _APART * simulated.step_time_s
    total, turned = 0, []
    for rank in range(simulated.num_ranks):
        executed_at = {(row.op, what): at for row in executed.of_rank(rank) for what, at in _events(row)}
        events = sorted(
            (at, executed_at[row.op, what], f"the {what} of {row.label!r}")
            for row in simulated.of_rank(rank)
            for what, at in _events(row)
        )
        total += len(events)
        latest, earlier = (0.0, ""), 0
        for simulated_s, executed_s, name in events:
            while events[earlier][0] <= simulated_s - apart_s:
                latest = max(latest, events[earlier][1:])
                earlier += 1
            latest_s, latest_name = latest
            if latest_s - executed_s > apart_s:
                late_s = latest_s - executed_s
                turned.append((late_s, f"on rank {rank} {latest_name} came {seconds(late_s)} after {name}"))
    if not turned:
        return []
    return [f"{len(turned)} of {total} events came before one simulated earlier; {max(turned)[1]}"]


def _events(row: Row) -> tuple[tuple[str, float], tuple[str, float]]:
    return ("begin", row.begin_s), ("end", row.end_s)
