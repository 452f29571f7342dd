"""``longstep evaluate``: predicts the steps of case files, published ones or your own, and says how far off it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from experiments.evidence.papers.cases import FOLDER, Case, HostFigures, fit_cases
from experiments.evidence.papers.host_fit import host_figures
from experiments.evidence.papers.memory_cases import memory_cases, memory_tables, predicted_memory
from experiments.evidence.papers.published import (
    HEADS,
    CasePrediction,
    Evidence,
    case_rows,
    fitted_from,
    judged_groups,
    predicted_twice,
    provenance,
    read_all,
)
from experiments.pages.drawn.render import PAGE_FILE
from experiments.pages.evidence_page import page
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.terminal import print_json, progress_bar
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError
from sim.base.files import require_outputs
from sim.base.presets import preset_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Writes):
    """Predict the steps of case files, and show how far predictions are from measurements. Nothing is executed."""

    cases: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Case files: NAMEs of published measurements, FILE.toml with your own, or all that ship."""
    json: bool = False
    """Print JSON instead of tables, a row for each case, which longstep report shows."""
    html: OptionalText = None
    """Write one HTML page to this file: a parity plot and all cases of every case file."""


def evaluate(command: Evaluate, console: Console) -> None:
    """Predict all cases, and show how far off the predictions are."""
    if not command.cases:
        known = ", ".join(preset_names(FOLDER))
        raise InputError(f"evaluate needs case files: name FILE.toml, all, or one or more of {known}")
    html = command.output(command.html, PAGE_FILE)
    require_outputs([html])
    found = show_cases(command.cases, console, quiet=command.json)
    if command.json:
        print_json([row for one in found for row in case_rows(one)], console)
    if html:
        html.write(page(found).encode())


def show_cases(names: Sequence[str], console: Console, *, quiet: bool = False) -> list[Evidence]:
    """Predict all cases of the files that are named (all: those that ship), and print how far off they are, unless
    ``quiet``.
    """
    shown = []
    read = [(file, cases, fit_cases(file), memory_cases(file)) for file, cases in read_all(names)]
    for file, cases, fitting, of_memory in read:
        host = host_figures(fitting)
        found, with_fit = tracked(cases, file.title, console, host)
        shown.append(Evidence(file, found, host, with_fit, predicted_memory(of_memory)))
        if quiet:
            continue
        for line in [*provenance(file), *(f"  {line}" for line in fitted_from(shown[-1]))]:
            console.print(line, markup=False)
        groups = [(HEADS, judged_groups(shown[-1]))] if file.group else []
        for heads, rows in [*groups, *memory_tables(shown[-1].memory)]:
            print_table(heads, rows, console)
    return shown


def tracked(
    cases: Sequence[Case], title: str, console: Console, host: HostFigures | None = None
) -> tuple[list[CasePrediction], list[CasePrediction]]:
    """Return what is predicted of a set of cases, and with other figures of the host."""
    with progress_bar(console) as progress:
        both = list(progress.track(predicted_twice(cases, title, host), len(cases), description="predicting"))
    return [found for found, _ in both], [fitted for _, fitted in both if fitted]


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print rows below their heads."""
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    console.print(table)
