"""``longstep report``: results of any verbs as one HTML page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments.evidence.results import read_result
from experiments.pages.drawn.render import PAGE_FILE
from experiments.pages.report.report_page import page, plotly_js
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError
from sim.base.files import require_outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Writes):
    """Show results of any verbs as one HTML page that works offline: charts, tables, timelines, evidence."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional]
    """FILEs: what verbs printed with --json, tables of sweep, records of validate and lab, traces of --trace."""
    out: str = "report.html"
    """Write the page to this file."""
    title: OptionalText = None
    """Title of the page; by default the names of the files."""


def report(command: Report, console: Console) -> None:
    """Write the page of some results."""
    if not command.files:
        raise InputError("report needs results: name one file or more, such as rows.parquet plan.json")
    out = PAGE_FILE.at(command.out, force=command.force)
    require_outputs([out])
    plotly_js()
    found = [read_result(path) for path in command.files]
    title = command.title or ", ".join(Path(path).name for path in command.files)
    out.write(page(title, found).encode())
    console.print(f"{len(found)} result{'s' * (len(found) > 1)} in {command.out}", markup=False)
