"""``longstep winners``: which schedule or stack is fastest, over two axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import longstep
from experiments.verbs.kinds import OptionalInt, OptionalText
from experiments.verbs.selection import StepSelection, listed, typed_schedules, typed_values
from experiments.verbs.terminal import answered, print_json, progress, tell, tell_assumed
from sim.errors import InputError
from sim.setup.axes import field_of
from sim.units import length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Winners:
    """Map which of several schedules (--schedule ring,ulysses) or stacks is fastest over two axes, and why."""

    selection: Annotated[StepSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StepSelection)
    across: OptionalText = None
    """KEY=VALUES: what columns are, as --vary of sweep has it: seq=64K..1M*2."""
    down: OptionalText = None
    """KEY=VALUES: what rows are, such as cluster.nic.bytes_per_s=25e9,50e9,100e9; left out: one row."""
    jobs: OptionalInt = None
    """Processes that play them; by default as many as there are cores."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table: the answer, and a list of all places."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


def winners(command: Winners, console: Console) -> None:
    """Print the winner of each place, and why it is."""
    setup = command.selection.setup()
    field, names = _competitors(setup)
    axes = dict([_axis("down", command.down)] if command.down else []) | dict([_axis("across", command.across)])
    if len(axes) < 1 + bool(command.down):
        raise InputError(f"`down` {command.down}: is what `across` has too; name another key")
    base = setup.replace(**{field: None})
    tell_assumed(setup, console, json=command.json)
    with progress("simulating") as show:
        found = longstep.winners(base, {field: names}, axes, jobs=command.jobs, progress=show)
    if command.json:
        print_json(answered(found), console)
        return
    keys = [field_of(key) for key in axes]
    console.print(found.answer, markup=False)
    console.print(_map(found.rows, keys))
    for row in found.rows:
        console.print(f"{', '.join(f'{key} {_shown(key, row[key])}' for key in keys)}: {row['why']}")
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence)


def _map(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Table:
    """Return a cell for each place: the winner, and by how much."""
    *down, across = keys
    columns = list(dict.fromkeys(row[across] for row in rows))
    table = Table(
        " ".join(down), *(_shown(across, value) for value in columns), title=f"fastest by {' and '.join(keys)}"
    )
    lines: dict[str, list[str]] = {}
    for row in rows:
        tie = f" = {row['behind']}" if row["tied"] else ""
        more = f" +{100 * (row['ratio'] - 1):.3g} %" if row["ratio"] else ""
        lines.setdefault("".join(_shown(key, row[key]) for key in down), []).append(f"{row['winner']}{tie}{more}")
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _competitors(setup: longstep.Setup) -> tuple[str, list[str]]:
    if setup.stack is not None and "," in setup.stack:
        return "stack", listed(setup.stack, "`stack`", "fsdp,alst")
    if isinstance(setup.schedule, str) and "," in setup.schedule:
        return "schedule", typed_schedules(setup.schedule)
    raise InputError("winners compares several: name two or more with `schedule` ring,ulysses or `stack` fsdp,alst")


def _axis(option: str, text: str | None) -> tuple[str, str | list[str]]:
    key, equals, values = (text or "").partition("=")
    if not equals:
        raise InputError(f"`{option}` {text or ''}: expected KEY=VALUES such as seq=64K..1M*2")
    return key.strip(), typed_values(key, values.strip())


def _shown(key: str, value: Any) -> str:
    return length(value) if key == "seq" else f"{value:.4g}" if isinstance(value, float) else str(value)
