"""What the doctor answers, in one sentence: whether what a run measured is possible, and what explains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.units import FEW, digits_within, number, seconds, seconds_between, size

if TYPE_CHECKING:
    from sim.setup.doctor import Diagnosis

_NAMED = 3
"""Explanations that are named; of more it is said how many there are."""


def of_diagnosis(found: Diagnosis) -> str:
    """Return the verdict with the figures that decide it, and which causes are consistent with what was measured."""
    return _verdict(found) + _explained(found)


def _verdict(found: Diagnosis) -> str:
    predicted = seconds(found.simulated_s, digits_within(found.low_s, found.high_s))
    within = f"{predicted} ({seconds_between(found.low_s, found.high_s)})"
    if found.verdict == "ranks differ":
        return "Ranks differ: beside each other their kernels do not take what is predicted"
    if found.verdict == "memory differs" or found.measured_s is None:
        held = f"{size(found.memory_bytes or 0, FEW)} of a GPU"
        between = " to ".join(size(end, FEW) for end in found.memory_within)
        if found.verdict == "memory differs":
            return f"Memory differs: {held}, predicted are {between}"
        said = f"{held} are within the predicted {between}" if found.memory_bytes else f"predicted are {within} a step"
        return f"Healthy: {said}"
    measured = f"{seconds(found.measured_s)} a step"
    if found.verdict == "impossible":
        by = "FLOPs at the peak" if found.floor_by == "compute" else f"bytes over {found.floor_by}"
        return f"Impossible: {measured} is below {seconds(found.floor_s, FEW)}, the floor by {by}"
    if found.verdict == "healthy":
        held = f"; so is the memory, {size(found.memory_bytes, FEW)} of a GPU" if found.memory_bytes else ""
        return f"Healthy: {measured} is as predicted, {within}{held}"
    times = f"{number(found.measured_s / found.simulated_s, FEW)} times the predicted {within}"
    alone = f", and less than its attention alone, {seconds(found.attention_s, FEW)}"
    return f"{found.verdict.capitalize()}: {measured} is {times}{alone * (found.measured_s < found.attention_s)}"


def _explained(found: Diagnosis) -> str:
    """Return which causes explain what was measured; empty where none was looked for."""
    names = [cause.name for cause in found.consistent]
    if not found.causes:
        return ""
    if not names:
        return "; nothing that was simulated explains it"
    others = f" or {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"; {' or '.join(names[:_NAMED])}{others} would explain it"
