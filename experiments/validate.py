"""Holds predictions against executed steps on this machine: five interleaved repeats of every comparison.

``make validate`` prints the table that stands in the README. It uses the host's profile, and calibrates first if there
is none. The targets are the project's own; nothing is asserted, since machines differ and are noisy. A repeat before or
after which a kernel's time was off its calibration stands in brackets: the machine was not the one that was simulated.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rich.progress import Progress
from rich.table import Table

from experiments.calibrate import Calibrate, calibrate
from experiments.cli import guarded, open_console
from experiments.compare import Comparison, comparison
from experiments.diagnosis import DRIFT
from experiments.execute import WARM_UP, Execution, open_session
from experiments.selection import Selection, choose
from experiments.tables import percent, seconds
from sim.profile import profile_names

REPEATS = 5
ENOUGH = 0.8
"""Share of the repeats that has to meet the target."""


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
    heads = ("P", "S", "schedule", "simulated", "measured", f"errors of {REPEATS} repeats", "target", "quiet", "all")
    table = Table(*heads, title="tiny, attention forward and backward, fp32, causal", title_justify="left")
    for cell, results in found.items():
        table.add_row(*_row(cell, results))
    console.print(table)
    drifts = [drift for results in found.values() for result in results for drift in result.drift]
    spread = f"{percent(min(drifts))} to {percent(max(drifts))}"
    console.print(
        f"beside its calibration, a kernel took {spread} over all of this; in brackets: beyond {percent(DRIFT)}"
    )


def _row(cell: Cell, results: list[Comparison]) -> list[str]:
    """Return what the table says of one configuration."""
    last = results[-1].step
    met = [(abs(result.step.error) <= cell.target, _quiet(result)) for result in results]
    errors = [percent(r.step.error) if _quiet(r) else f"({percent(r.step.error)})" for r in results]
    return [
        str(cell.gpus),
        cell.seq,
        cell.schedule,
        seconds(last.simulated_s),
        seconds(last.median_s),
        ", ".join(errors),
        f"{100 * cell.target:g} %",
        _verdict([hit for hit, quiet in met if quiet]),
        _verdict([hit for hit, _ in met]),
    ]


def _quiet(result: Comparison) -> bool:
    return all(abs(drift) <= DRIFT for drift in result.drift)


def _verdict(met: list[bool]) -> str:
    """Return how many of some repeats met their target."""
    missed = ": missed" if sum(met) < ENOUGH * len(met) else ""
    return f"{sum(met)} of {len(met)}{missed}" if met else "none"


if __name__ == "__main__":
    guarded(main)
