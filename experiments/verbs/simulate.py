"""``longstep simulate``: predict one step."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console

from experiments.evidence.provenance import evidence_lines
from experiments.verbs.selection import PLACEMENTS, Chosen, Selection, choose
from experiments.verbs.terminal import report_table
from sim.engine.report import report
from sim.errors import InputError
from sim.memory import walk
from sim.mesh import AXES
from sim.profile import write_whole
from sim.schedule.proof.check import Checked
from sim.trace import Counter, Player, Trace, to_chrome


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulate:
    """Predict step time and memory of a schedule on a cluster."""

    selection: Annotated[Selection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Selection)
    trace: str | None = None
    """Write a Chrome trace (Perfetto opens it) to this file."""
    json: bool = False
    """Print one JSON object instead of a table."""


def simulate(command: Simulate, console: Console) -> None:
    """Predict one step, and print what came out."""
    chosen = choose(command.selection)
    if command.trace:
        writable(command.trace)
    checked = chosen.checked()
    simulation = chosen.simulated(checked)
    found = report(simulation, with_interval=True)
    if command.trace:
        write_trace(command.trace, checked, [simulation.trace])
    if command.json:
        console.print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode(), markup=False)
        return
    console.print(report_table(title(chosen, checked), found))
    for line in evidence_lines(found.evidence):
        console.print(line, markup=False)


def title(chosen: Chosen, checked: Checked) -> str:
    """Return one line that names what was played."""
    w, ranks = chosen.workload, f"{checked.schedule.num_ranks} x"
    if chosen.one_device:
        ranks = f"{chosen.mesh.size} ranks on one"
    scope = "attention" if w.scope == "attention" else f"{w.layers} layer" + "s" * (w.layers > 1)
    length = f"S {w.seq}" + (f" ({w.padding} of them padding)" if w.padding else "")
    mask = w.mask + (f" with a window of {w.window}" if w.window else "")
    return (
        f"{_schedule_name(chosen)}, {scope} of {w.model.name}, {w.passes}: {length}, B {w.batch}, {w.dtype}, {mask}, "
        f"{ranks} {chosen.spec.gpu.name} ({chosen.spec.name})"
    )


def _schedule_name(chosen: Chosen) -> str:
    """Return the schedule with what was chosen of it: degrees where there are two, options that are not the default,
    and how often key/value heads are replicated.
    """
    mesh, kv_heads = chosen.mesh, chosen.workload.model.num_kv_heads
    said = []
    if mesh.ulysses > 1 and mesh.ring > 1:
        said.append(f"U {mesh.ulysses} x R {mesh.ring}")
    said += [f"placement {name}" for name, order in PLACEMENTS.items() if order == mesh.order != AXES]
    for name, value in msgspec.to_builtins(chosen.options or {}).items():
        if value != getattr(chosen.entry.declared, name):
            said.append(f"{name} {str(value).lower() if isinstance(value, bool) else value}")
    if mesh.ulysses > kv_heads:
        said.append(f"each of {kv_heads} key/value heads on {mesh.ulysses // kv_heads} ranks")
    return chosen.schedule + (f" ({', '.join(said)})" if said else "")


def writable(path: str) -> None:
    """Raise InputError before any work is done if a file cannot be written there."""
    folder, wrong = Path(path).parent, ""
    if not folder.is_dir():
        wrong = f"there is no folder {str(folder)!r}"
    elif Path(path).is_dir():
        wrong = "it is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = f"you may not write to {str(folder)!r}"
    if wrong:
        raise InputError(f"{path!r} cannot be written: {wrong}; choose another file")


def write_trace(path: str, checked: Checked, traces: list[Trace]) -> None:
    """Write traces of one schedule side by side, with the memory that its buffers take."""
    counters: dict[Player, list[Counter]] = {trace.player: memory_counters(checked, trace) for trace in traces}
    write_whole(Path(path), to_chrome(traces, counters))


def memory_counters(checked: Checked, trace: Trace) -> list[Counter]:
    """Return the bytes in use over the time of a trace: the walk knows the order, the trace the seconds."""
    walks = [walk(p, d) for p, d in zip(checked.schedule.programs, checked.dependencies, strict=True)]
    return [Counter(row.rank, row.begin_s, walks[row.rank].in_use[row.op]) for row in trace.rows]
