"""A training step as questions over many of them take it: played whole, or told by few layers and micro-batches."""

from __future__ import annotations

from sim.plan.extended import Extended, extended
from sim.setup.answers.answer import Grounds, grounds
from sim.setup.prediction import Prediction
from sim.setup.setup import Setup

Step = Prediction | Extended


def asked_step(setup: Setup, *, extend: bool) -> Step:
    """Return the step of a setup. Raises InputError for one that is not to be played, or not to be told by few."""
    return extended(setup) if extend else setup.predicted()


def grounds_of(step: Step) -> Grounds:
    """Return what it rests on."""
    return step.grounds if isinstance(step, Extended) else grounds(step)
