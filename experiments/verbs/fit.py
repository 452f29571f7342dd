"""``longstep fit`` and ``longstep ladder``: what fits, how long a context may be, and what fitting costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import longstep
from experiments.evidence.peaks import PEAK, beside_of, spec_of
from experiments.pages.drawn.render import PAGE_FILE
from experiments.pages.ladder_page import page
from experiments.verbs.cli import with_flags
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import COUNTS, FileSelection, StepSelection, listed, require_names
from experiments.verbs.shared.terminal import answered, print_json, progress, tell, tell_assumed
from experiments.verbs.shared.writes import Writes
from sim.accounts.memory import TERMS
from sim.base.errors import InputError, unknown
from sim.base.files import require_outputs
from sim.base.units import FEW, length, seconds, size
from sim.compare.axes import values_of
from sim.schedule.methods.catalog import SCHEDULES
from sim.setup.answers.answer import what_fits
from sim.setup.names import schedule_name
from sim.setup.stacks import STACKS, TECHNIQUES, stack_of

ROWS = ("zigzag", "ulysses", "usp", "upipe")
"""Of ``fit`` where none is named: one of each family, beside all stacks."""
LENGTHS = "32K,64K,128K,256K,512K,1M,2M,4M,8M"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit(FileSelection):
    """Show which schedules and stacks fit at which length: the seconds of a training step, or what to switch on."""

    seq: str = LENGTHS
    """Global sequence lengths, such as 128K,1M,4M; lists of --gpus, --nodes, --cp, --model and --cluster are rows."""
    schedule: OptionalText = None
    """NAMEs, such as ring,ulysses; by default one of each family."""
    stack: OptionalText = None
    """Stacks, such as fsdp,alst; by default all, unless schedules are named."""
    scope: str = "step"
    """What fits is known of training steps only."""
    json: bool = False
    """Print JSON instead of a table: the answer, and a list of all cells."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder(Writes):
    """Show what each technique saves and costs: one more switched on each, then all but each."""

    selection: Annotated[StepSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StepSelection)
    most: str = "16M"
    """Longest context that is tried."""
    techniques: OptionalText = None
    """Techniques, such as FSDP,checkpointing, in the order in which they are switched on; by default all."""
    page: OptionalText = None
    """Write an HTML page with bars of the memory to this file."""
    json: bool = False
    """Print JSON instead of a table: the answer, and a list of all rows."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


def fit(command: Fit, console: Console) -> None:
    """Print what fits where, and what to switch on where nothing does."""
    if command.scope != "step":
        raise InputError(f"`scope` {command.scope}: what fits is known of training steps: set `scope` step")
    if command.documents:
        raise InputError(f"`documents` {command.documents}: `fit` goes over lengths; leave it out, or use simulate")
    lengths = values_of("seq", command.seq)
    require_names({"seq": lengths})
    plain = dataclasses.replace(command, seq=lengths[0], schedule=None, stack=None)
    places = plain.each()
    base = plain.first().setup().replace(schedule=None)
    tell_assumed(base, console, json=command.json)
    with progress("predicting") as show:
        tables = [
            (varied, longstep.fit(setup, rows, lengths, progress=show))
            for varied, there in places
            for setup, rows in _asked(there, command)
        ]
    found = longstep.Table([{**_counted(varied), **row} for varied, table in tables for row in table])
    found.require_any()
    longest = max((table for _, table in tables), key=_longest)
    found.answering(what_fits(found), longest.grounds)
    if command.json:
        print_json(answered(found), console)
        return
    for told in plain.first().told():
        console.print(with_flags(told), markup=False)
    console.print(found.answer, markup=False)
    keys = list(places[0][0])
    about = [f"of {base.model}" if "model" not in keys else "", f"on {base.cluster}" if "cluster" not in keys else ""]
    title = " ".join(["training steps", *filter(None, about)])
    table = Table(
        *keys, "", *map(length, dict.fromkeys(row["seq"] for row in found)), title=title, title_justify="left"
    )
    for start in range(0, len(found.rows), len(lengths)):
        cells = found.rows[start : start + len(lengths)]
        degrees = next((cell["degrees"] for cell in cells if cell["degrees"]), "")
        table.add_row(*(str(cells[0][key]) for key in keys), f"{cells[0]['row']} {degrees}".strip(), *map(_cell, cells))
    console.print(table)
    for error in dict.fromkeys(f"{row['row']}: {row['error']}" for row in found.rows if row["error"]):
        console.print(f"- {with_flags(error)}", markup=False)
    console.print("~ at the limit. What is missing stands with a minus, and below it what to switch on.", markup=False)
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence)


def _longest(table: longstep.Table) -> tuple[int, float]:
    """Return the longest length of a table that fits, with how soon its fastest step is done."""
    return max(((row["seq"], -row["step_time_s"]) for row in table if row["step_time_s"] is not None), default=(0, 0.0))


def _counted(varied: Mapping[str, str]) -> dict[str, str | int]:
    """Return what a place has of each list, numbers as such."""
    return {key: int(value) if key in COUNTS else value for key, value in varied.items()}


def _asked(plain: Fit, command: Fit) -> Iterator[tuple[longstep.Setup, list[str]]]:
    """Yield setups with the rows that are asked of each. It is one setup, but where files say options one for each row;
    the row is then by default the file's own schedule.
    """
    if not command.from_file:
        yield plain.setup(), _rows(command)
        return
    if command.schedule is None and command.stack is None:
        own = plain.setup()
        yield own.replace(schedule=None), [schedule_name(own.played)]
        return
    for row in _rows(command):
        by_stack = row in STACKS
        one = dataclasses.replace(plain, stack=row if by_stack else None, schedule=None if by_stack else row)
        yield one.setup().replace(schedule=None, stack=None), [row]


def _rows(command: Fit) -> list[str]:
    """Return the schedules and stacks that were named; where none was, some of the one and all of the others."""
    schedules = [] if command.schedule is None else values_of("schedule", command.schedule)
    stacks = [] if command.stack is None else values_of("stack", command.stack)
    for name in schedules:
        if name not in SCHEDULES:
            raise unknown("schedule", name, SCHEDULES, "`schedule`")
    for name in stacks:
        stack_of(name)
    return [*schedules, *stacks] or [*ROWS, *STACKS]


def _cell(row: dict[str, Any]) -> str:
    """Return the seconds of a step, or what is missing and what helps."""
    if row["error"]:
        return "-"
    if row["step_time_s"] is not None:
        return f"{'~' if row['fits'] is None else ''}{seconds(row['step_time_s'], FEW)}"
    return f"-{size(-row['free_bytes'])}\n{row['helps'] or 'nothing helps'}"


def ladder(command: Ladder, console: Console) -> None:
    """Print what each technique saves and costs."""
    out = command.output(command.page, PAGE_FILE)
    require_outputs([out])
    setup = command.selection.setup()
    chosen = TECHNIQUES if command.techniques is None else listed(command.techniques, "`techniques`", "FSDP,offload")
    tell_assumed(setup, console, json=command.json)
    with progress("predicting") as show:
        found = longstep.ladder(setup, most=command.most, techniques=list(chosen), progress=show)
    title = f"techniques of training {command.selection.model} on {command.selection.cluster}"
    if out:
        out.write(page(title, found.rows, spec_of(setup)).encode())
    if command.json:
        print_json(answered(found), console)
        return
    console.print(found.answer, markup=False)
    console.print(_ladder_table(f"{title}; memory and time at {length(found.rows[0]['seq'])}", found, beside_of(setup)))
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence)


def _ladder_table(title: str, found: longstep.Table, memory: str) -> Table:
    heads = ("techniques", "longest", "step", PEAK, "left", "host", "most of the peak")
    table = Table(*heads, title=title, title_justify="left", caption=memory, caption_justify="left")
    for row in found.rows:
        largest = sorted(TERMS, key=lambda term: -row[term])[:2]
        table.add_row(
            row["techniques"],
            length(row["longest"]) if row["longest"] else "none",
            seconds(row["step_time_s"], FEW),
            size(row["peak_hbm_bytes"]),
            f"{'-' if row['free_bytes'] < 0 else ''}{size(abs(row['free_bytes']))}",
            size(row["peak_host_bytes"]),
            ", ".join(f"{term} {size(row[term])}" for term in largest),
        )
    return table
