"""One step on machines that differ in some figures, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.base.units import FEW, number, seconds

SAME = 1e-3
"""Which share of a step is no change that one would notice."""


def what_if(found: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Return what the rows of a sweep over some keys say in a sentence. Of two steps it is how much longer or shorter
    the second one is; of more, the range of their times; of fewer nothing.

    >>> rows = [{"nic": "*1", "step_time_s": 2.0, "error": ""}, {"nic": "*2", "step_time_s": 1.9, "error": ""}]
    >>> print(what_if(rows, ["nic"]))
    With nic=*2 a step takes 1.9 s, 5 % less than with nic=*1 (2 s)
    >>> print(what_if([*rows, {**rows[0], "nic": "*4", "step_time_s": 1.6}], ["nic"]))
    A step takes from 1.6 s with nic=*4 to 2 s with nic=*1, 1.25 times as long
    """
    played = [row for row in found if not row["error"]]
    if len(played) < 2:
        return ""
    if len(played) > 2:
        low, *_, high = sorted(played, key=_step_s)
        times = number(_step_s(high) / _step_s(low), FEW)
        ends = f"from {_time(low)} with {_named(low, keys)} to {_time(high)} with {_named(high, keys)}"
        return f"A step takes {ends}, {times} times as long"
    before, after = played
    more = _step_s(after) / _step_s(before) - 1
    if abs(more) < SAME:
        return f"With {_named(after, keys)} a step takes {_time(after)}, as long as with {_named(before, keys)}"
    changed = f"{number(100 * abs(more), 2)} % {'more' if more > 0 else 'less'}"
    return (
        f"With {_named(after, keys)} a step takes {_time(after)}, {changed} than with {_named(before, keys)} "
        f"({_time(before)})"
    )


def _step_s(row: Mapping[str, Any]) -> float:
    return float(row["step_time_s"])


def _time(row: Mapping[str, Any]) -> str:
    return seconds(_step_s(row), FEW)


def _named(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key.removeprefix('cluster.')}={row[key]}" for key in keys)
