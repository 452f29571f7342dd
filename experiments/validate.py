"""Holds predictions against executed steps on this machine: five interleaved repeats of every comparison.

``make validate`` prints the table that stands in the README. It uses the host's profile, and calibrates first if there
is none. The targets are the project's own; nothing is asserted, since machines differ and are noisy. A repeat before or
after which kernels were off their calibration stands in brackets: the machine was not the one that was simulated.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.calibrate import Calibrate, calibrate
from experiments.cli import guarded, open_console
from experiments.compare import comparison
from experiments.comparison import Comparison, Measured
from experiments.diagnosis import DRIFT
from experiments.execute import WARM_UP, Execution, open_session
from experiments.selection import Selection, choose
from experiments.simulate import writable
from experiments.tables import percent, seconds
from sim.profile import Profile, load_profile, profile_names, write_whole

REPEATS = 5
ENOUGH = 0.8
"""Share of the repeats that has to meet the target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validate:
    """Compare executed and simulated steps of the tiny model on this machine."""

    scope: Literal["attention", "layer", "both"] = "both"
    """Which half to compare."""
    out: str | None = None
    """Write all comparisons, with the profile that they rest on, to this JSON file."""


class Cell(NamedTuple):
    """One configuration, and the largest error that it may have."""

    gpus: int
    scope: str
    layers: int
    seq: str
    schedule: str
    target: float

    def selection(self) -> Selection:
        """Return it as the command line would."""
        fields = {name: getattr(self, name) for name in ("gpus", "scope", "layers", "seq", "schedule")}
        return dataclasses.replace(Selection(), **fields)

    @property
    def workload(self) -> tuple[int, str, int, str]:
        """What schedules are compared on."""
        return self[:4]


_TARGETS: dict[tuple[int, str, int], dict[str, float]] = {
    (2, "attention", 1): {"2K": 0.10, "4K": 0.10, "8K": 0.05},
    (4, "attention", 1): {"2K": 0.20, "4K": 0.20, "8K": 0.20},
    (2, "layer", 1): {"1K": 0.10, "2K": 0.10, "4K": 0.05, "8K": 0.05},
    (2, "layer", 2): {"1K": 0.10, "4K": 0.05},
    (4, "layer", 1): {"2K": 0.15, "4K": 0.15},
}
CELLS = [
    Cell(*what, seq, schedule, target)
    for what, targets in _TARGETS.items()
    for seq, target in targets.items()
    for schedule in ("ring", "ulysses")
]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--out`` writes."""

    profile: Profile
    comparisons: list[tuple[Cell, list[Comparison]]]


def main() -> None:
    """Compare every cell several times, and print how far the simulated steps are from the executed ones."""
    command = tyro.cli(Validate, prog="python -m experiments.validate")
    if command.out:
        writable(command.out)
    console = open_console()
    if "host" not in profile_names():
        calibrate(Calibrate(quick=True), console)
    found = compared([cell for cell in CELLS if command.scope in {cell.scope, "both"}], console)
    heads = ("P", "what", "S", "schedule", "simulated", "measured", f"{REPEATS} errors", "target", "quiet", "all")
    table = Table(*heads, title="tiny, forward and backward, fp32, causal", title_justify="left")
    for cell, results in found.items():
        table.add_row(*_row(cell, results))
    console.print(table)
    drifts = [drift for results in found.values() for result in results for drift in result.drift]
    spread = f"{percent(min(drifts))} to {percent(max(drifts))}"
    console.print(
        f"beside its calibration, kernels took {spread} over all of this; in brackets: beyond {percent(DRIFT)}"
    )
    console.print(_order(found))
    if command.out:
        record = Record(profile=load_profile("host"), comparisons=list(found.items()))
        write_whole(Path(command.out), msgspec.json.encode(record))


def compared(cells: list[Cell], console: Console) -> dict[Cell, list[Comparison]]:
    """Return the comparisons of every cell; all cells take turns, so that a noisy minute does not hit one alone."""
    found: dict[Cell, list[Comparison]] = {cell: [] for cell in cells}
    with Progress(console=type(console)(stderr=True), transient=True) as progress:
        task = progress.add_task("comparing", total=REPEATS * len(cells) * (Execution().repeats + WARM_UP))
        for _ in range(REPEATS):
            for gpus in sorted({cell.gpus for cell in cells}):
                together = [cell for cell in cells if cell.gpus == gpus]
                first = choose(together[0].selection())
                with open_session(first, first.checked(), Execution()) as session:
                    for cell in together:
                        chosen = choose(cell.selection())
                        result, _ = comparison(
                            chosen, chosen.checked(), session, Execution().repeats, lambda: progress.advance(task)
                        )
                        found[cell].append(result)
    return found


def _order(found: dict[Cell, list[Comparison]]) -> str:
    """Return how often the faster schedule is the one that was predicted, where executed steps do not overlap."""
    right = clear = 0
    for repeat in range(REPEATS):
        steps: dict[tuple[int, str, int, str], list[Measured]] = {}
        for cell, results in found.items():
            steps.setdefault(cell.workload, []).append(results[repeat].step)
        for one, other in steps.values():
            if one.high_s < other.low_s or other.high_s < one.low_s:
                clear += 1
                right += (one.simulated_s < other.simulated_s) == (one.median_s < other.median_s)
    return f"which of ring and Ulysses is faster: predicted right in {right} of {clear} repeats where it is clear"


def _row(cell: Cell, results: list[Comparison]) -> list[str]:
    """Return what the table says of one configuration."""
    last = results[-1].step
    met = [(abs(result.step.error) <= cell.target, _quiet(result)) for result in results]
    errors = [percent(r.step.error) if _quiet(r) else f"({percent(r.step.error)})" for r in results]
    return [
        str(cell.gpus),
        cell.scope if cell.scope == "attention" else f"{cell.layers} layer" + "s" * (cell.layers > 1),
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
