"""``longstep doctor``: whether what a run measured is possible, and what it points to."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table as RichTable

import longstep
from experiments.verbs.cli import with_flags
from experiments.verbs.shared.kinds import OptionalFloat, OptionalText, Texts
from experiments.verbs.shared.quantities import read_bytes, read_seconds, read_share
from experiments.verbs.shared.selection import FileSelection, listed
from experiments.verbs.shared.terminal import print_json, progress, tell, tell_assumed, tell_padded
from longstep import Diagnosis, Measured, Setup
from sim.base.errors import InputError, none_of
from sim.base.units import FEW, percent, seconds, seconds_between, size
from sim.diagnose.profiled import read_traces
from sim.diagnose.traced import Traced

_COUNTS = ("gpus", "nodes", "ulysses_degree", "ring_degree", "tp_degree", "pp_degree", "dp_degree", "batch")
_SHOWN = 6
"""Causes that do not explain what was measured, and are shown for how far they are off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say whether what a run measured is possible with its configuration, and what it points to."""

    selection: Annotated[FileSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=FileSelection)
    step_time: OptionalText = None
    """Measured seconds of a step: 41s, 350ms."""
    tokens_per_s: OptionalFloat = None
    """Measured tokens/s of the whole job."""
    tokens_per_s_per_gpu: OptionalFloat = None
    """Measured tokens/s of each GPU."""
    memory: OptionalText = None
    """Measured peak of a GPU: 61GiB, 65GB; by the allocator or nvidia-smi."""
    mfu: OptionalText = None
    """MFU as it was printed: 41% or 0.41."""
    rank_times: OptionalText = None
    """Measured kernel seconds of a step on each rank: 1.2,1.2,2.4,1.2."""
    also: Texts = ()
    """Another run of the same job, such as gpus=16,memory=60GiB, whose memory is compared; as often as wanted."""
    trace: Texts = ()
    """Chrome trace of the torch profiler (.json, .json.gz) or of longstep run --trace; of several ranks, as often."""
    json: bool = False
    """Print one JSON object."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


def doctor(command: Doctor, console: Console) -> None:
    """Print what a run points to."""
    setup = command.selection.setup()
    measured = _measured(command)
    traces = read_traces(command.trace)
    if not traces:
        measured.require()
    also = [_other(setup, text) for text in command.also]
    tell_assumed(setup, console, json=command.json)
    tell_padded([setup], console, json=command.json)
    with progress("simulating causes") as show:
        found = longstep.doctor(setup, measured, also, show, traces)
    if command.json:
        print_json(_json(found), console)
        return
    for told in command.selection.told():
        console.print(with_flags(told), markup=False)
    console.print(found.answer, markup=False)
    console.print(_figures_table(found))
    if found.traced:
        console.print(_kinds_table(found.traced))
    for line in lines(found):
        console.print(line, markup=False)
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence)


def _json(found: Diagnosis) -> dict[str, Any]:
    """Return what was found, with rows by their fields."""
    beside = found.traced and found.traced._asdict() | {
        "kinds": [row._asdict() for row in found.traced.kinds],
        "ranks": [row._asdict() for row in found.traced.ranks],
    }
    figures = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "grounds"}
    said = {"answer": found.answer, "rests_on": found.rests_on}
    return {**said, **figures, "causes": found.table().rows, "traced": beside}


def _figures_table(found: Diagnosis) -> RichTable:
    """Return what was measured beside what is predicted."""
    floor = f"FLOPs at the peak and bytes at link rates take {seconds(found.floor_s, FEW)}" if found.floor_s else ""
    alone = f"attention kernels alone {seconds(found.attention_s, FEW)}" if found.attention_s else ""
    caption = ", ".join(filter(None, (floor, alone)))
    table = RichTable("figure", "measured", "predicted", "of healthy runs", caption=caption, caption_justify="left")
    of_time = seconds(found.simulated_s), seconds_between(found.low_s, found.high_s)
    table.add_row("step", "" if found.measured_s is None else seconds(found.measured_s), *of_time)
    held = "" if found.memory_bytes is None else size(found.memory_bytes)
    between = " to ".join(size(end, FEW) for end in found.memory_within)
    table.add_row("memory of a GPU", held, f"{size(found.peak_hbm_bytes)} allocated", between)
    return table


def _kinds_table(found: Traced) -> RichTable:
    """Return seconds by kind of work beside those simulated."""
    of = f"seconds of a step, mean of {len(found.ranks)} traced rank{'s' if len(found.ranks) > 1 else ''}"
    table = RichTable("work", "trace", "simulated", "difference", title=of, title_justify="left")
    for row in found.kinds:
        both = row.measured_s and row.simulated_s
        apart = percent(row.measured_s / row.simulated_s - 1) if both else ""
        table.add_row(row.kind, seconds(row.measured_s), seconds(row.simulated_s), apart)
    return table


def _measured(command: Doctor) -> Measured:
    """Return what was typed as numbers."""
    ranks: tuple[float, ...] = ()
    if command.rank_times is not None:
        ranks = tuple(read_seconds("rank_times", one) for one in command.rank_times.split(","))
    return Measured(
        step_time_s=None if command.step_time is None else read_seconds("step_time", command.step_time),
        tokens_per_s=command.tokens_per_s,
        tokens_per_s_per_gpu=command.tokens_per_s_per_gpu,
        memory_bytes=None if command.memory is None else read_bytes("memory", command.memory),
        mfu=None if command.mfu is None else read_share("mfu", command.mfu),
        rank_s=ranks,
    )


def _other(setup: Setup, text: str) -> tuple[Setup, Measured]:
    """Return another run: what differs in its configuration, and its memory."""
    changes: dict[str, Any] = {}
    memory = None
    for pair in listed(text, "`also`", "gpus=16,memory=60GiB"):
        key, _, value = pair.partition("=")
        name = key.strip().replace("-", "_")
        if name == "memory":
            memory = read_bytes("also", value)
        elif name == "seq":
            changes[name] = value
        elif name not in _COUNTS:
            raise InputError(f"`also` {text}: {none_of('key', key, ['memory', 'seq', *_COUNTS])}")
        elif not value.strip().isdecimal():
            raise InputError(f"`also` {text}: {key} {value!r}: expected a whole number")
        else:
            changes[name] = int(value)
    return setup.replace(**changes), Measured(memory_bytes=memory)


def lines(found: Diagnosis) -> list[str]:
    """Return what was found as lines of text: contradictions, and causes."""
    said = [f"- {finding}" for finding in found.findings]
    if found.consistent:
        names = [cause.name for cause in found.consistent]
        said += ["", "consistent with what was measured, the best explanation first:"]
        if len(names) > 1:
            said += [f"  {', '.join(names)}: these cannot be told apart by what was given, see how to check each"]
    elif found.causes:
        said += ["", "nothing that was simulated explains all that was measured; how far each is off:"]
    shown = found.consistent or found.causes[:_SHOWN]
    for cause in shown:
        said += [
            f"- {cause.name}: {cause.says}",
            f"    simulated: {seconds(cause.step_time_s)}, {size(cause.peak_hbm_bytes)}"
            + ("" if cause.consistent else f"; off by {cause.off:.3g} times what is not known"),
            f"    to check: {cause.check}",
        ]
    others = [cause.name for cause in found.causes if cause not in shown]
    said += [f"not so: {', '.join(others)}"] if others else []
    said += [f"not seen in what was measured: {', '.join(found.untold)}"] if found.untold else []
    return said + [f"not simulated: {line}" for line in found.skipped]
