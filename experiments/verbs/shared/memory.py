"""``longstep simulate --memory``: what fills the memory of a training step."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

import longstep
from experiments.evidence.peaks import PEAK
from experiments.verbs.shared.terminal import print_json
from sim.base.units import size
from sim.setup.answers.memory import memory_terms, what_fills


def print_memory(predicted: longstep.Prediction, console: Console, *, json: bool) -> None:
    """Print what fills the memory in a sentence and as a table; as JSON both."""
    rows = memory_terms(predicted)
    if json:
        print_json({"answer": what_fills(predicted), "rows": rows.rows}, console)
        return
    console.print(what_fills(predicted), markup=False)
    table = Table("", "for", "size", "of the memory", title=predicted.title, title_justify="left")
    states = {"allocated": PEAK}
    before = ""
    for row in rows:
        state = states.get(row["is"], row["is"])
        table.add_row("" if state == before else state, row["what"], size(row["bytes"]), f"{100 * row['share']:.3g} %")
        before = state
    console.print(table)
