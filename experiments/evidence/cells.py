"""The configurations of a sweep, and how they are compared in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from experiments.evidence.comparison import Comparison, comparison
from experiments.evidence.execution import WARM_UP, Execution, open_session
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
        """All of it, in words."""
        return f"{self.method}, {self.what}, S {self.seq}, P {self.gpus}"


class Repeated(NamedTuple):
    """A sweep to be executed."""

    cells: Sequence[Cell]
    base: Setup
    """What all cells have in common."""
    repeats: int
    """Comparisons of every cell."""
    execution: Execution

    @property
    def num_steps(self) -> int:
        """How many steps all of it takes."""
        return self.repeats * len(self.cells) * (self.execution.repeats + WARM_UP)


def compared(
    sweep: Repeated, keep: Callable[[Cell, Comparison], None], advance: Callable[[], None], workers: Workers | None
) -> None:
    """Compare every cell, and hand over each result; all take turns, so that a noisy minute does not hit one alone.

    ``advance`` is called after every step.
    """
    predictions: dict[Cell, Prediction] = {}
    for _ in range(sweep.repeats):
        for gpus in sorted({cell.gpus for cell in sweep.cells}):
            together = [cell for cell in sweep.cells if cell.gpus == gpus]
            predictions |= {cell: cell.setup(sweep.base).predicted() for cell in together if cell not in predictions}
            first = predictions[together[0]]
            spec, profile = first.cluster.spec, first.profile
            with open_session(first.checked, spec, profile, sweep.execution, workers) as session:
                for cell in together:
                    found, _ = comparison(predictions[cell], session, sweep.execution.repeats, advance)
                    keep(cell, found)
