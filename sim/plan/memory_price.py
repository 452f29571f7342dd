"""What more memory would buy: time, unless the fastest way to keep, offload and recompute tensors fits already.

A larger memory makes no step faster, but lets faster ways of it fit. So the least time that fits falls with the
capacity, in jumps. The price is that of the jump that saves most time for each byte that it takes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.engine.results.room import Limit
from sim.plan.search.branches import least_limits, least_of
from sim.plan.search.space import OPTIONS, Branch, Family
from sim.plan.search.steps import room_of_step, step_of
from sim.plan.search.tensors import DECIDED, grid_of, require_tensors
from sim.setup import names
from sim.setup.answers.table import Table
from sim.setup.setup import Setup

_PLACED = ("schedule.placement",)
"""What is set of a schedule and is none of its options."""
_COLUMNS = (
    "memory", "capacity_bytes", "elasticity", "step_time_s", "options", "free_bytes", "more_bytes", "more_step_time_s",
    "more_options", "sure",
)  # fmt: skip


class _Way(NamedTuple):
    """A configuration of the schedule: what it takes, or takes at least."""

    branch: Branch
    step_s: float
    limits: Mapping[str, Limit]
    """By memory."""

    @property
    def fits(self) -> bool:
        """Whether it lacks nothing."""
        return all(limit.free_bytes >= 0 for limit in self.limits.values())

    def missing(self, memory: str) -> int | None:
        """Return the bytes that it lacks of one memory; None where others lack some, too."""
        if any(limit.free_bytes < 0 for name, limit in self.limits.items() if name != memory):
            return None
        return -self.limits[memory].free_bytes if memory in self.limits else 0


def memory_prices(
    setup: Setup,
    *,
    options: Mapping[str, Sequence[str]] = OPTIONS,
    tensors: Sequence[str] | None = None,
    limit_s: float | None = None,
) -> Table:
    """Return what more of each memory would buy a training step of the setup's schedule and degrees, a row each.

    ``options`` are varied, beside what the setup has of them; with ``tensors`` it is decided of each group what becomes
    of it, as in ``plan``. A row has the fastest way that fits now (``options``, ``step_time_s``), what it leaves of the
    memory (``free_bytes``), and the ``elasticity``, d ln(step time) / d ln(capacity), by the ``more_bytes`` that win
    most for each byte, with what the step then takes: 0 where the memory does not bind, since no faster way needs more
    of it alone. Where nothing fits, times and elasticity are None, and ``more_bytes`` are what is missing least.
    Kernels take their median times. After ``limit_s`` seconds of CPU time rows are not ``sure``: more may be
    bought. Raises InputError below the scope of a step, on one device, and where no way can be built.

    >>> small = Setup("ulysses", model="tiny", cluster="hgx-h100", gpus=2, layers=2, seq="8K")
    >>> found = memory_prices(small, options={"optimiser": ["gpu", "host"]})
    >>> [(row["memory"], row["elasticity"], row["more_bytes"]) for row in found]
    [('GPU', 0.0, None), ('host', 0.0, None)]
    """
    ways = [_least(branch) for branch in _branches(setup, options, tensors)]
    able = [way for way in ways if isinstance(way, _Way)]
    if not able:
        raise InputError(f"no way of this schedule can be built; the first: {ways[0]}")
    asked = _Asked(able, math.inf if limit_s is None else time.process_time() + limit_s)
    now = asked.fastest()
    memories = dict.fromkeys(name for way in able for name in way.limits)
    return Table([asked.price(memory, now) for memory in memories])


def _branches(setup: Setup, options: Mapping[str, Sequence[str]], tensors: Sequence[str] | None) -> list[Branch]:
    """Return all ways of a setup's schedule, with its degrees and placement."""
    setup = _priced(setup)
    if tensors is not None:
        require_tensors(tensors, setup.model_spec)
    found = setup.resolved()
    own, usual = (msgspec.to_builtins(some or {}) for some in (found.options, found.entry.options))
    decided = {*DECIDED} if tensors else set()
    varied = {
        key: [*dict.fromkeys([*values, names.text_of(own[key])])]
        for key, values in options.items()
        if key in {*own} - decided
    }
    fixed = {key for key, value in own.items() if value != usual[key]} - {*varied} - decided
    kept = [
        f"{key}={value}" for key, value in names.pairs(setup.set) if key in _PLACED or not key.startswith("schedule.")
    ]
    kept += [f"schedule.{key}={names.text_of(own[key])}" for key in own if key in fixed]
    base = dataclasses.replace(setup, schedule=setup.played, stack=None, pad=True, jitter=0.0, set=kept)
    if not tensors:
        return [*Branch(Family(base, found.schedule, varied)).leaves]
    ways = []
    for mlp in varied.pop("mlp", [""]):  # whose blocks have other tensors
        one = base.replace(set={"schedule.mlp": mlp}) if mlp else base
        groups = grid_of(one, tensors)
        grid = {**groups, **({"mlp": [mlp]} if mlp else {}), **varied}
        ways += [*Branch(Family(one, found.schedule, grid, tensors=[*groups])).leaves]
    return ways


def _priced(setup: Setup) -> Setup:
    """Return a setup spelled out; raises InputError for one whose memory has no price."""
    if setup.scope != "step":
        raise InputError(f"`scope` {setup.scope}: memory has a price in training steps: set `scope` step")
    setup = setup.spelled_out()
    if setup.one_device:
        raise InputError("`one_device` plays all ranks on one device: memory has a price where each has its own")
    return setup


def _least(branch: Branch) -> _Way | str:
    """Return what a way takes at least, or why it cannot be built."""
    try:
        limits = {limit.memory: limit for limit in least_limits(branch.setup)}
        return _Way(branch, least_of(branch.setup).step_s, limits)
    except InputError as error:
        return str(error)


class _Asked:
    """Ways of which some were played."""

    def __init__(self, ways: Sequence[_Way], ends: float) -> None:
        self._ways, self._ends = sorted(ways, key=lambda way: way.step_s), ends
        self._known: dict[int, _Way | None] = {}
        self.sure = True
        """Whether all were played that had to be."""

    def _played(self, way: _Way) -> _Way | None:
        """Return a way with what its step takes; None where builders refuse it, or the time is over."""
        if id(way) not in self._known:
            if time.process_time() > self._ends:
                self.sure = False
                return None
            try:
                step_s, last = step_of(way.branch.setup)
                limits = {limit.memory: limit for limit in room_of_step(way.branch.setup, last).limits}
                self._known[id(way)] = _Way(way.branch, step_s, limits)
            except InputError:
                self._known[id(way)] = None
        return self._known[id(way)]

    def fastest(self) -> _Way | None:
        """Return the fastest way that fits."""
        best = None
        for way in self._ways:
            if best and way.step_s >= best.step_s:
                break
            if way.fits and (played := self._played(way)) and played.fits and (not best or played.step_s < best.step_s):
                best = played
        return best

    def price(self, memory: str, now: _Way | None) -> dict[str, Any]:
        """Return what more of a memory would buy, beside the fastest way that fits now."""
        capacity = next(way.limits[memory].capacity_bytes for way in self._ways if memory in way.limits)
        row = dict.fromkeys(_COLUMNS) | {
            "memory": memory,
            "capacity_bytes": capacity,
            "options": "",
            "more_options": "",
        }
        found = self._missing_least(memory) if now is None else self._bought(memory, capacity, now)
        return row | found | {"sure": self.sure}

    def _missing_least(self, memory: str) -> dict[str, Any]:
        """Return the least that is missing of a memory for any way to fit."""
        short = [(missing, way) for way in self._ways if (missing := way.missing(memory) or 0) > 0]
        if not short:
            return {}
        missing, way = min(short, key=lambda one: one[0])
        return {"more_bytes": missing, "more_options": way.branch.named}

    def _bought(self, memory: str, capacity: int, now: _Way) -> dict[str, Any]:
        """Return what the fastest way takes now, and the way that more memory would buy: the one that wins most for
        each byte.
        """
        limit = now.limits.get(memory)
        found: dict[str, Any] = {
            "elasticity": 0.0, "step_time_s": now.step_s, "options": now.branch.named,
            "free_bytes": limit.free_bytes if limit else capacity,
        }  # fmt: skip
        slope = partial(_slope, now=now, memory=memory, capacity=capacity)  # of ways by their bounds, and as played
        for way in sorted(self._ways, key=slope):
            if slope(way) >= found["elasticity"]:
                break
            if (played := self._played(way)) and -math.inf < slope(played) < found["elasticity"]:
                found |= {
                    "elasticity": slope(played), "more_bytes": played.missing(memory),
                    "more_step_time_s": played.step_s, "more_options": played.branch.named,
                }  # fmt: skip
        return found


def _slope(way: _Way, now: _Way, memory: str, capacity: int) -> float:
    """Return the elasticity from now to a way that fits with more of one memory. It is 0 for a way that is no faster or
    lacks another memory, and minus infinity for one that may fit already.
    """
    missing = way.missing(memory)
    if missing is None or way.step_s >= now.step_s:
        return 0.0
    return math.log(way.step_s / now.step_s) / math.log1p(missing / capacity) if missing > 0 else -math.inf
