"""The configurations of a sweep, and how they are compared in turn."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from experiments.evidence.executed.comparison import Comparison, comparison
from experiments.evidence.executed.execution import WARM_UP, Execution, open_session
from sim.base.errors import LongstepError, RankError
from sim.setup.names import scope_title, texts
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

if TYPE_CHECKING:
    from runtime.processes.torchrun import Workers


class Cell(NamedTuple):
    """One configuration, and the largest error that it may have."""

    gpus: int
    scope: str
    layers: int
    seq: str
    schedule: str
    target: float
    stack: str = ""
    """Techniques of a training step, by name; empty: those of the setup."""
    options: tuple[str, ...] = ()
    """Options of its schedule beyond those of the setup, as ``set`` has them."""

    def setup(self, base: Setup) -> Setup:
        """Return it, with everything else as in ``base``."""
        layers = None if self.scope == "attention" else self.layers
        fields = {name: getattr(self, name) for name in ("gpus", "scope", "seq", "schedule")}
        own = (*texts(base.set), *self.options)
        return dataclasses.replace(base, layers=layers, stack=self.stack or None, set=own, **fields)

    @property
    def workload(self) -> tuple[int, str, int, str]:
        """What schedules are compared on."""
        return self[:4]

    @property
    def method(self) -> str:
        """The schedule, and the stack if there is one: ulysses, stack alst."""
        return f"{self.schedule}, stack {self.stack}" if self.stack else self.schedule

    @property
    def what(self) -> str:
        """What is played: attention, 1 layer, step of 2 layers."""
        return scope_title(self.scope, self.layers)

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.method}, {self.what}, S {self.seq}, P {self.gpus}"


class Repeated(NamedTuple):
    """A sweep to be executed."""

    cells: Sequence[Cell]
    base: Setup
    """What all cells have in common."""
    repeats: int
    """Comparisons of every cell."""
    execution: Execution
    had: Mapping[Cell, int] = MappingProxyType({})
    """How many of them there are of a cell already."""
    seconds: float = math.inf
    """No comparison begins after so long."""

    @property
    def left(self) -> int:
        """How many comparisons there are to make."""
        return sum(max(self.repeats - self.had.get(cell, 0), 0) for cell in self.cells)

    @property
    def num_steps(self) -> int:
        """How many steps all of it takes."""
        return self.left * (self.execution.repeats + WARM_UP)


def compared(
    sweep: Repeated, keep: Callable[[Cell, Comparison], None], advance: Callable[[], None], workers: Workers | None
) -> None:
    """Compare every cell and hand over each result. Cells take turns, so that a noisy minute does not hit one
    alone.

    ``advance`` is called after every step. A cell that fails is left out from then on, and the others go on in a new
    session, unless torchrun started the ranks. Raises RankError at the end for cells that failed, or for lack of time.
    """
    end_s = time.monotonic() + sweep.seconds
    predictions: dict[Cell, Prediction] = {}
    failed: dict[Cell, LongstepError] = {}
    left = sweep.left

    def compare(todo: list[Cell]) -> None:
        """Take cells from a list and compare them, until it is empty or one fails, or time is up."""
        nonlocal left
        first = predictions[todo[0]] = predictions.get(todo[0]) or todo[0].setup(sweep.base).predicted()
        with open_session(first.checked, first.cluster.spec, first.profile, sweep.execution, workers) as session:
            while todo and time.monotonic() < end_s:
                cell = todo[0]
                predictions[cell] = predictions.get(cell) or cell.setup(sweep.base).predicted()
                found, _ = comparison(predictions[cell], session, sweep.execution.repeats, advance)
                keep(todo.pop(0), found)
                left -= 1

    for number in range(sweep.repeats):
        cells = [cell for cell in sweep.cells if sweep.had.get(cell, 0) <= number]
        for gpus in sorted({cell.gpus for cell in cells}):
            todo = [cell for cell in cells if cell.gpus == gpus and cell not in failed]
            while todo and time.monotonic() < end_s:
                try:
                    compare(todo)
                except LongstepError as error:
                    if workers or not todo or len(sweep.cells) == 1:
                        raise
                    failed[todo.pop(0)] = error
    if failed:
        raise RankError(
            f"{len(failed)} of {len(sweep.cells)} cells failed: "
            f"{'; '.join(f'{cell.name}: {error}' for cell, error in failed.items())}"
        )
    if left:
        raise RankError(f"time was up after {sweep.seconds:g} s: {left} comparisons are left; --out and --go-on go on")
