"""Holds predictions against executed steps on this machine: five interleaved repeats of every comparison.

``make validate`` prints the table that stands in the README. It uses the host's profile, and calibrates first if there
is none. The targets are the project's own; nothing is asserted, since machines differ and are noisy.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rich.progress import Progress
from rich.table import Table

from experiments.calibrate import Calibrate, calibrate
from experiments.cli import guarded, open_console
from experiments.compare import Comparison, comparison, drift_line
from experiments.execute import WARM_UP, Execution, open_session
from experiments.selection import Selection, choose
from experiments.tables import percent, seconds
from sim.profile import profile_names

REPEATS = 5
ENOUGH = 4
"""Repeats that have to meet the target."""


class Cell(NamedTuple):
    """One configuration, and the largest error that it may have."""

    gpus: int
    seq: str
    schedule: str
    target: float

    def selection(self) -> Selection:
        """Return it as the command line would."""
        return dataclasses.replace(Selection(), gpus=self.gpus, seq=self.seq, schedule=self.schedule)


CELLS = [
    Cell(gpus, seq, schedule, target)
    for gpus, targets in ((2, {"2K": 0.10, "4K": 0.10, "8K": 0.05}), (4, {"2K": 0.20, "4K": 0.20, "8K": 0.20}))
    for seq, target in targets.items()
    for schedule in ("ring", "ulysses")
]


def main() -> None:
    """Compare every cell several times, and print how far the simulated steps are from the executed ones."""
    console = open_console()
    if "host" not in profile_names():
        calibrate(Calibrate(quick=True), console)
    found: dict[Cell, list[Comparison]] = {cell: [] for cell in CELLS}
    with Progress(console=type(console)(stderr=True), transient=True) as progress:
        task = progress.add_task("comparing", total=REPEATS * len(CELLS) * (Execution().repeats + WARM_UP))
        for _ in range(REPEATS):
            for gpus in sorted({cell.gpus for cell in CELLS}):
                cells = [cell for cell in CELLS if cell.gpus == gpus]
                first = choose(cells[0].selection())
                with open_session(first, first.checked(), Execution()) as session:
                    for cell in cells:
                        chosen = choose(cell.selection())
                        result, _ = comparison(
                            chosen, chosen.checked(), session, Execution().repeats, lambda: progress.advance(task)
                        )
                        found[cell].append(result)
    heads = ("P", "S", "schedule", "simulated", "measured", f"errors of {REPEATS} repeats", "target", "met")
    table = Table(*heads, title="tiny, attention forward and backward, fp32, causal", title_justify="left")
    for cell, results in found.items():
        last = results[-1].step
        errors = [result.step.error for result in results]
        met = sum(abs(error) <= cell.target for error in errors)
        verdict = f"{met} of {REPEATS}" + ("" if met >= ENOUGH else ": missed")
        table.add_row(
            str(cell.gpus),
            cell.seq,
            cell.schedule,
            seconds(last.simulated_s),
            seconds(last.median_s),
            ", ".join(map(percent, errors)),
            f"{100 * cell.target:g} %",
            verdict,
        )
    console.print(table)
    drifts = [result.drift for results in found.values() for result in results]
    console.print(drift_line([min(before for before, _ in drifts), max(after for _, after in drifts)]), markup=False)


if __name__ == "__main__":
    guarded(main)
