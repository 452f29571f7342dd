"""``longstep simulate``: predict one step, or the same step by several schedules."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console

import longstep
from experiments.evidence.peaks import beside_of
from experiments.verbs.cli import with_flags
from experiments.verbs.several import Asked, answer, decisive, json_rows, played, require_any, rows_table, set_up
from experiments.verbs.shared.kinds import OptionalInt, OptionalText, Texts
from experiments.verbs.shared.memory import print_memory
from experiments.verbs.shared.selection import FileSelection
from experiments.verbs.shared.terminal import (
    answered,
    critical_path_shown,
    elasticities_table,
    memory_prices_shown,
    neighbours_shown,
    print_json,
    progress,
    report_table,
    sweep_table,
    tell,
    tell_assumed,
    tell_basis,
    tell_padded,
    ties,
)
from experiments.verbs.shared.writes import Writes
from sim.accounts.trace import CHROME_TRACE
from sim.base.errors import InputError, TooLargeError
from sim.base.files import require_outputs
from sim.setup.answers.answer import grounds
from sim.setup.prediction import write_trace

_PRICES_S = 20.0
"""What the price of memory may take; steps of very many chunks and GPUs take longer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulate(Writes):
    """Predict step time and memory of a schedule on a cluster; lists, as --schedule ring,zigzag --seq 8K,64K, are a row
    each.
    """

    selection: Annotated[FileSelection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=FileSelection)
    trace: OptionalText = None
    """Write a Chrome trace (Perfetto opens it) to this file."""
    json: bool = False
    """Print JSON instead of a table: one object, of several rows or what-ifs the answer and their main figures."""
    evidence: bool = False
    """Also print all that the answer rests on, not only its three lines, as a table."""
    sensitivity: bool = False
    """Also print how the step time depends on every figure of the machine, as elasticities, and what its critical path
    goes to over time, and what more memory would buy a training step; as JSON the elasticities alone."""
    memory: bool = False
    """Print instead what fills the memory of a training step; as JSON the same."""
    neighbours: bool = False
    """Print instead what one change of a degree or an option makes of the step; as JSON the same."""
    extend: bool = False
    """Play few layers and micro-batches of a training step, each further one of which adds what the last of these does:
    for steps that are too large to play whole. As JSON the same."""
    vary: Texts = ()
    """KEY=VALUE,VALUE of the cluster, as often as wanted: the step under all combinations, such as
    cluster.nvlink.bytes_per_s=/2,*1,*2."""
    processes: OptionalInt = None
    """Processes that play them; by default as many as there are cores."""


def simulate(command: Simulate, console: Console) -> None:
    """Predict one step, and print what came out."""
    rows = command.selection.each()
    trace = command.output(command.trace, CHROME_TRACE)
    require_outputs([trace])
    if len(rows) > 1 or command.vary:
        _require_several(list(rows[0][0]), command)
    if len(rows) > 1:
        _several(rows, command, console)
        return
    setup = rows[0][1].setup()
    tell_assumed(setup, console, json=command.json)
    tell_padded([setup], console, json=command.json)
    for told in () if command.json else rows[0][1].told():
        console.print(with_flags(told), markup=False)
    if command.neighbours:
        _neighbours(setup, command, console)
        return
    if command.extend:
        _extended(setup, command, console)
        return
    if command.vary:
        _varied(setup, command, console)
        return
    predicted = _whole(setup)
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


def _whole(setup: longstep.Setup) -> longstep.Prediction:
    """Return the prediction of a step that is played whole."""
    try:
        return setup.predicted()
    except TooLargeError as error:
        if setup.scope != "step" or setup.one_device:
            raise
        raise TooLargeError(f"{error}, or `extend` what few layers and micro-batches take") from None


def _extended(setup: longstep.Setup, command: Simulate, console: Console) -> None:
    """Print what a step takes by few of its layers and micro-batches."""
    if command.trace or command.sensitivity or command.vary or command.memory:
        raise InputError("`extend` plays no step whole: leave out `trace`, `sensitivity`, `memory`, `vary`")
    found = longstep.extended(setup)
    if command.json:
        print_json({"assumed": setup.assumed} | found.to_dict(), console)
        return
    console.print(found.answer, markup=False)
    saves = [f"{name} {100 * share:.2g} %" for name, share in found.saves.items()]
    console.print(f"bound by {found.bound_by}; doubling saves {', '.join(saves)}", markup=False)
    console.print(found.played, markup=False)
    tell([found.grounds], console, everything=command.evidence)


def _require_several(lists: list[str], command: Simulate) -> None:
    """Raise InputError for what is asked of one step, where there are several."""
    fields = " ".join(f"all but one `{field}`" for field in lists)
    if command.sensitivity:
        raise InputError(f"`sensitivity` is of one step: leave it out, or {fields or '`vary`'}")
    if command.memory:
        raise InputError(f"`memory` is of one step: leave it out, or {fields or '`vary`'}")
    if not lists:
        return
    if command.vary:
        raise InputError(f"`vary` is of one step: leave it out, or {fields}; longstep sweep varies several")
    if command.neighbours:
        raise InputError(f"`neighbours` are of one step: leave them out, or {fields}")
    if command.extend:
        raise InputError(f"`extend` is of one step: leave it out, or {fields}")
    if command.trace:
        raise InputError(f"`trace` is of one step: leave it out, or {fields}")


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
    if command.trace or command.sensitivity or command.vary:
        raise InputError("`neighbours` are of one step: leave out `trace`, `sensitivity`, `vary`")
    found = longstep.neighbours(setup)
    if command.json:
        print_json(found.rows, console)
        return
    title = setup.resolved().title
    for shown in neighbours_shown(title, found, beside_of(setup)):
        console.print(shown)


def _several(rows: list[tuple[dict[str, str], FileSelection]], command: Simulate, console: Console) -> None:
    """Predict a step of each row, and print a line of each."""
    setups = [set_up(selection) for _, selection in rows]
    able = [setup for setup in setups if isinstance(setup, longstep.Setup)]
    if able:
        tell_assumed(able[0], console, json=command.json)
        tell_padded(able, console, json=command.json)
        for told in () if command.json else rows[setups.index(able[0])][1].told():
            console.print(with_flags(told), markup=False)
    asked: list[Asked] = []
    with progress("predicting") as show:
        for (varied, selection), setup in zip(rows, setups, strict=True):
            asked.append(played(varied, selection.schedule or "", setup))
            show(len(asked), len(rows))
    require_any(asked)
    figures = json_rows(asked)
    said = answer(asked, figures)
    if command.json:
        rests_on = decisive(asked, figures).rests_on
        print_json({"assumed": able[0].assumed, "answer": said, "rests_on": rests_on, "rows": figures}, console)
        return
    console.print(said, markup=False)
    console.print(rows_table(asked))
    found = [row.found for row in asked if row.found]
    if found[0].techniques and "stack" not in asked[0].varied:
        console.print(f"techniques: {', '.join(found[0].techniques)}", markup=False)
    if command.evidence and [*asked[0].varied] == ["schedule"]:
        for line in ties(found):
            console.print(line, markup=False)
    tell_basis(found, console, everything=command.evidence, of=decisive(asked, figures))


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
