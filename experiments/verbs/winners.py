"""``longstep winners``: which schedule or stack is fastest, over two axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import longstep
from experiments.verbs.cli import with_flags
from experiments.verbs.shared.kinds import OptionalInt, OptionalText
from experiments.verbs.shared.selection import StepSelection, require_names, typed_schedule, typed_values
from experiments.verbs.shared.terminal import answered, print_json, progress, tell, tell_assumed, tell_padded
from sim.base.errors import InputError
from sim.base.units import length
from sim.compare.axes import field_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Winners:
    """Map which of several schedules (--schedule ring,ulysses) or stacks is fastest over axes or lists, and why."""

    selection: Annotated[StepSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StepSelection)
    across: OptionalText = None
    """KEY=VALUES: what columns are, as --vary of sweep has it: seq=64K..1M*2; left out: the last list of an option,
    such as --seq 64K,128K."""
    down: OptionalText = None
    """KEY=VALUES: what rows are, such as cluster.nic.bytes_per_s=25e9,50e9,100e9; left out: one row."""
    extend: bool = False
    """Tell each training step by few of its layers and micro-batches, as simulate --extend."""
    jobs: OptionalInt = None
    """Processes that play them; by default as many as there are cores."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table: the answer, and a list of all places."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


def winners(command: Winners, console: Console) -> None:
    """Print the winner of each place, and why it is."""
    lists = command.selection.lists()
    field, names = _competitors(lists)
    require_names(lists)
    axes = _axes(command, {key: values for key, values in lists.items() if key != field})
    base = command.selection.first(field).setup()
    tell_assumed(base, console, json=command.json)
    tell_padded([base.replace(**{field: name}) for name in names], console, json=command.json)
    with progress("simulating") as show:
        found = longstep.winners(base, {field: names}, axes, extend=command.extend, jobs=command.jobs, progress=show)
    if command.json:
        print_json(answered(found), console)
        return
    keys = [field_of(key) for key in axes]
    console.print(found.answer, markup=False)
    console.print(_map(found.rows, keys))
    for row in found.rows:
        console.print(f"{', '.join(f'{key} {_shown(key, row[key])}' for key in keys)}: {with_flags(row['why'])}")
    for refused in dict.fromkeys(row["refused"] for row in found.rows if row["refused"] and row["behind"]):
        console.print(f"- {with_flags(refused)}", markup=False)
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
        name = " ".join(_shown(key, row[key]) for key in down)
        won = f"{row['winner']} {row['degrees'] or ''}".strip()
        lines.setdefault(name, []).append(f"{won}{tie}{more}")
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _competitors(lists: Mapping[str, list[str]]) -> tuple[str, list[str]]:
    """Return who competes: schedules, or else stacks."""
    for field in ("schedule", "stack"):
        if len(lists.get(field, ())) > 1:
            return field, [typed_schedule(name) for name in lists[field]] if field == "schedule" else lists[field]
    raise InputError("winners compares several: name two or more with `schedule` ring,ulysses or `stack` fsdp,alst")


def _axes(command: Winners, lists: Mapping[str, list[str]]) -> dict[str, str | list[str]]:
    """Return the axes: those of ``down`` and ``across``, and other lists, the last of which is across where none is.

    Raises InputError for a key of two of them.
    """
    typed = [(option, getattr(command, option)) for option in ("down", "across")]
    pairs = [_axis(option, text) for option, text in typed if text is not None or (option == "across" and not lists)]
    found: dict[str, str | list[str]] = dict(lists)
    for key, values in pairs:
        if field_of(key) in map(field_of, found):
            raise InputError(f"{key} is varied twice: by a list, `down` or `across`; name another key")
        found[key] = values
    return found


def _axis(option: str, text: str | None) -> tuple[str, str | list[str]]:
    key, equals, values = (text or "").partition("=")
    if not equals:
        raise InputError(f"`{option}` {text or ''}: expected KEY=VALUES such as seq=64K..1M*2")
    return key.strip(), typed_values(key, values.strip())


def _shown(key: str, value: Any) -> str:
    return length(value) if key == "seq" else f"{value:.4g}" if isinstance(value, float) else str(value)
