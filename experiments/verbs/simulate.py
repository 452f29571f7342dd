"""``longstep simulate``: predict one step, or the same step by several schedules."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console

import longstep
from experiments.evidence.peaks import beside, spec_of
from experiments.verbs.cli import with_flags
from experiments.verbs.kinds import OptionalInt, OptionalText, Texts
from experiments.verbs.memory import print_memory
from experiments.verbs.selection import FileSelection
from experiments.verbs.terminal import (
    answered,
    critical_path_shown,
    elasticities_table,
    memory_prices_shown,
    neighbours_shown,
    print_json,
    progress,
    report_table,
    schedules_table,
    sweep_table,
    tell_assumed,
    tell_basis,
    ties,
)
from experiments.verbs.writes import Writes
from sim.errors import InputError
from sim.files import require_outputs
from sim.setup.answer import grounds, sentence
from sim.setup.prediction import write_trace
from sim.trace import CHROME_TRACE

_PRICES_S = 20.0
"""What the price of memory may take; steps of very many chunks and GPUs take longer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulate(Writes):
    """Predict step time and memory of a schedule on a cluster; --schedule ring,zigzag compares several."""

    selection: Annotated[FileSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=FileSelection)
    trace: OptionalText = None
    """Write a Chrome trace (Perfetto opens it) to this file."""
    json: bool = False
    """Print JSON instead of a table: one object, of several schedules a list of the main figures, of what-ifs the
    answer with its rows."""
    evidence: bool = False
    """Also print all that the answer rests on, not only its three lines, as a table."""
    sensitivity: bool = False
    """Also print how the step time depends on every figure of the machine, as elasticities, and what its critical path
    goes to over time, and what more memory would buy a training step; as JSON the elasticities alone."""
    memory: bool = False
    """Print instead what fills the memory of a training step; as JSON the same."""
    neighbours: bool = False
    """Print instead what one change of a degree or an option makes of the step; as JSON the same."""
    vary: Texts = ()
    """KEY=VALUE,VALUE of the cluster, as often as wanted: the step under all combinations, such as
    cluster.nvlink.bytes_per_s=/2,*1,*2."""
    processes: OptionalInt = None
    """Processes that play them; by default as many as there are cores."""


def simulate(command: Simulate, console: Console) -> None:
    """Predict one step, and print what came out."""
    schedules = [name.strip() for name in (command.selection.schedule or "").split(",")]
    several = [dataclasses.replace(command.selection, schedule=name) for name in schedules if len(schedules) > 1]
    selections = several or [command.selection]
    setups = [one.setup() for one in selections]
    setup = setups[0]
    trace = command.output(command.trace, CHROME_TRACE)
    require_outputs([trace])
    if len(setups) > 1 or command.vary:
        _require_several(len(setups), command)
    tell_assumed(setup, console, json=command.json)
    for told in () if command.json else selections[0].told():
        console.print(with_flags(told), markup=False)
    if command.neighbours:
        _neighbours(setup, command, console)
        return
    if command.vary:
        _varied(setup, command, console)
        return
    if len(setups) > 1:
        _several(setups, command, console)
        return
    predicted = setup.predicted()
    if trace:
        write_trace(trace, predicted.played, [predicted.trace])
    if command.memory:
        print_memory(predicted, console, json=command.json)
        return
    if command.json:
        found = {"assumed": setup.assumed} | predicted.to_dict()
        print_json(_elasticities(setup, predicted) if command.sensitivity else found, console)
        return
    console.print(predicted.answer, markup=False)
    console.print(report_table(predicted))
    if predicted.room and predicted.fits is False:
        helps = " + ".join(longstep.what_helps(setup))
        console.print(f"to make it fit, switch on: {helps or 'no technique is enough'}", markup=False)
    if command.sensitivity:
        console.print(elasticities_table("elasticities of the step time", predicted.elasticities()))
        for shown in critical_path_shown(predicted.critical_path()):
            console.print(shown)
        for told in memory_prices_shown(_prices(setup)):
            console.print(told, markup=False)
    tell_basis([predicted], console, everything=command.evidence)


def _require_several(schedules: int, command: Simulate) -> None:
    """Raise InputError for what is asked of one step, where there are several."""
    if command.sensitivity:
        raise InputError("`sensitivity` is of one step: leave it out, or `vary` and all but one `schedule`")
    if command.memory:
        raise InputError("`memory` is of one step: leave it out, or `vary` and all but one `schedule`")
    if command.vary and schedules > 1:
        raise InputError("`vary` is of one schedule: leave it out, or all but one `schedule`")


def _prices(setup: longstep.Setup) -> longstep.Table:
    """Return what more memory would buy; of training steps only, whose ranks have devices of their own."""
    if setup.scope != "step" or setup.one_device:
        return longstep.Table([])
    return longstep.memory_prices(setup, limit_s=_PRICES_S)


def _elasticities(setup: longstep.Setup, predicted: longstep.Prediction) -> list[dict[str, Any]]:
    """Return the elasticities of rates and times, and those of capacities."""
    prices = [{"figure": f"{row['memory']} memory", "bound_changes_nearby": None, **row} for row in _prices(setup)]
    return [*predicted.elasticities().rows, *prices]


def _neighbours(setup: longstep.Setup, command: Simulate, console: Console) -> None:
    """Print what is one change away from a step."""
    if command.trace or command.sensitivity or command.vary or "," in (command.selection.schedule or ""):
        raise InputError(
            "`neighbours` are of one step: leave out `trace`, `sensitivity`, `vary`, all but one `schedule`"
        )
    found = longstep.neighbours(setup)
    if command.json:
        print_json(found.rows, console)
        return
    title = setup.resolved().title
    for shown in neighbours_shown(title, found, beside(spec_of(setup))):
        console.print(shown)


def _several(setups: list[longstep.Setup], command: Simulate, console: Console) -> None:
    """Predict the same step by several schedules, and print a line of each."""
    if command.trace:
        raise InputError("`trace` is of one schedule: leave it out, or name one `schedule`")
    found: list[longstep.Prediction] = []
    refused: dict[str, InputError] = {}
    for setup in setups:
        try:
            found.append(setup.predicted())
        except InputError as error:
            refused[str(setup.schedule)] = error
    if not found:
        raise next(iter(refused.values()))
    reasons = {name: str(error) for name, error in refused.items()}
    if command.json:
        rows = [
            {**row, "answer": one.answer, "error": ""}
            for one, row in zip(found, longstep.table(found).rows, strict=True)
        ]
        none = dict.fromkeys(rows[0])
        print_json([*rows, *({**none, "schedule": name, "error": why} for name, why in reasons.items())], console)
        return
    console.print(sentence(found), markup=False)
    console.print(schedules_table(found, reasons))
    if found[0].techniques:
        console.print(f"techniques: {', '.join(found[0].techniques)}", markup=False)
    if command.evidence:
        for line in ties(found):
            console.print(line, markup=False)
    tell_basis(found, console, everything=command.evidence)


def _varied(setup: longstep.Setup, command: Simulate, console: Console) -> None:
    """Predict the same step on varied machines, and print a line of each."""
    if command.trace:
        raise InputError("`trace` is of one step: leave it out, or `vary`")
    vary = dict(_values(text) for text in command.vary)
    predicted = setup.predicted()
    with progress("simulating") as show:
        seeds = 1 if setup.seeds is None else setup.seeds
        found = longstep.sweep(predicted, vary, seeds=seeds, processes=command.processes, progress=show)
    found.require_any()
    if command.json:
        print_json(answered(found.answering(found.answer, grounds(predicted))), console)
        return
    console.print(found.answer, markup=False)
    console.print(sweep_table(predicted.title, list(vary), found))
    tell_basis([predicted], console, everything=command.evidence)


def _values(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not all(value.strip() for value in values.split(",")):
        raise InputError(f"`vary` {text}: expected KEY=VALUE,VALUE such as cluster.nvlink.bytes_per_s=/2,*1,*2")
    return key.strip(), [value.strip() for value in values.split(",")]
