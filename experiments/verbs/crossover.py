"""``longstep crossover``: where one schedule or stack overtakes another along an axis."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

import longstep
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import StepSelection
from experiments.verbs.shared.terminal import print_json, tell, tell_assumed, tell_padded
from sim.base.errors import InputError
from sim.base.units import length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossover:
    """Find where the faster of two schedules (--schedule ring,ulysses) or stacks changes along an axis, to 1 %."""

    selection: Annotated[StepSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StepSelection)
    along: OptionalText = None
    """KEY=LOW..HIGH: an option or a key of --set with numbers, such as seq=64K..4M or
    cluster.nic.bytes_per_s=5e9..200e9."""
    within: float = 0.01
    """How far a value may be off, as a share."""
    extend: bool = False
    """Tell each training step by few of its layers and micro-batches, as simulate --extend."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table: a is the first one that was named, b the second."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


def crossover(command: Crossover, console: Console) -> None:
    """Print where the faster one changes."""
    names, setups = _two(command.selection)
    key, equals, between = (command.along or "").partition("=")
    if not equals:
        raise InputError(f"`along` {command.along or ''}: expected KEY=LOW..HIGH such as seq=64K..4M")
    tell_assumed(setups[0], console, json=command.json)
    tell_padded(setups, console, json=command.json)
    found = longstep.crossover(*setups, key.strip(), between.strip(), within=command.within, extend=command.extend)
    if command.json:
        said = {"answer": found.answer, "rests_on": found.rests_on, "along": key, **names}
        print_json({**said, "crossings": found.rows, "points": found.points.rows}, console)
        return
    console.print(found.answer, markup=False)
    names |= {"": "neither fits"}
    table = Table("from", "to", "faster", "change known to be in", title=f"{names['a']} or {names['b']}, by {key}")
    below = between.partition("..")[0]
    for row in found:
        until = between.partition("..")[2] if row["value"] is None else _shown(key, row["value"])
        known = "" if row["low"] is None else f"{_shown(key, row['low'])} to {_shown(key, row['high'])}"
        known = "not known" if row["value"] is not None and not known else known
        table.add_row(below, until, names[row["below"]], known)
        below = until
    console.print(table)
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence)


def _two(selection: StepSelection) -> tuple[dict[str, str], tuple[longstep.Setup, longstep.Setup]]:
    """Return the two that are compared, and their names; raises InputError for other lists."""
    for field in ("schedule", "stack"):
        if len(selection.lists().get(field, ())) == 2:
            (a, first), (b, second) = selection.each(field)
            return {"a": a[field], "b": b[field]}, (first.setup(), second.setup())
    raise InputError("crossover compares two: name two with `schedule` ring,ulysses or with `stack` fsdp,alst")


def _shown(key: str, value: float) -> str:
    return length(int(value)) if key == "seq" else f"{value:.3g}"
