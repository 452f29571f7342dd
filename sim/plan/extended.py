"""A training step that is too large to play whole, by plays of few of its layers and micro-batches.

    few of both, one more of each ── what the last of these adds ── as often as there are further ones

That each further layer and micro-batch adds the same is what ``sim.plan.search.few`` says, with how near it comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.base.errors import InputError
from sim.engine.intervals.interval import Interval
from sim.engine.results.room import Room
from sim.plan.search.few import turns_of
from sim.plan.search.steps import room_of_step, steps_of
from sim.setup.answers.answer import (
    Grounds,
    as_html,
    as_text,
    figures_of,
    fits_said,
    interval_said,
    name_on,
    takes,
    time_within,
)
from sim.setup.answers.table import Table
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup


class Extended(NamedTuple):
    """A step that was told by few of its layers and micro-batches, without noise between kernels; not proved whole.

    >>> from sim.plan.extended import extended
    >>> few = extended(Setup(model="llama3-8b", cluster="hgx-h100", schedule="ulysses", seq="16K", scope="step"))
    >>> few.fits, few.bound_by, few.answer.startswith("Ulysses takes ")
    (True, 'compute', True)
    """

    setup: Setup
    step_time_s: float
    interval: Interval | None
    """Of 90 %; None where nothing is known of how far costs may be off."""
    tokens_per_s_per_gpu: float
    room: Room
    """Its memory, of all layers and micro-batches."""
    bound_by: str
    saves: Mapping[str, float]
    """By figure of the machine the share of the step that doubling it saves."""
    played: str
    """Of how many layers and micro-batches all is told."""
    grounds: Grounds

    @property
    def fits(self) -> bool | None:
        """Whether the memory is enough; None where it is at the limit."""
        return self.room.fits

    @property
    def answer(self) -> str:
        """What it says in one sentence, as predictions do."""
        found, within = self.setup.resolved(), self.interval
        taken, known = time_within(self.step_time_s, within), interval_said(found.profile, within)
        figures = figures_of(found.mesh, found.workload, taken, known, self.tokens_per_s_per_gpu)
        return takes(name_on(found.schedule, found.mesh), figures + fits_said(self.room))

    @property
    def rests_on(self) -> list[str]:
        """What that rests on: what was played, then as of every prediction."""
        return [self.played, *self.grounds.lines]

    def to_dict(self) -> dict[str, Any]:
        """Return the answer and its figures as plain data, as ``longstep simulate --extend --json`` prints them."""
        return {
            "answer": self.answer,
            "rests_on": self.rests_on,
            "step_time_s": self.step_time_s,
            "interval_s": self.interval,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "peak_hbm_bytes": sum(self.room.terms.values()),
            "free_bytes": self.room.free_bytes,
            "fits": self.fits,
            "bound_by": self.bound_by,
            "saves": dict(self.saves),
        }

    @property
    def table(self) -> Table:
        """Its figures, a row each."""
        return Table([{"figure": name, "value": value} for name, value in self.to_dict().items() if name != "answer"])

    def __repr__(self) -> str:
        return as_text(self.answer, "", self.rests_on)

    def _repr_html_(self) -> str:
        return as_html(self.answer, self.table._repr_html_(), self.rests_on)


def extended(setup: Setup) -> Extended:
    """Return a training step by plays of few of its layers and micro-batches. Raises InputError for other scopes, and
    for ranks of one device.

    >>> few = extended(Setup(model="llama3-8b", cluster="hgx-h100", schedule="ulysses", seq="64K", scope="step"))
    >>> few.played
    'told by 3 and 4 of 32 layers'
    """
    if setup.scope != "step" or setup.one_device:
        what = "ranks share a device" if setup.one_device else f"scope is {setup.scope}"
        raise InputError(f"`extend` is of training steps whose ranks have GPUs of their own; {what}: set `scope` step")
    found, steps = setup.resolved(), steps_of(setup)
    within, grounds = steps.rests
    bounded, room = steps.bound, room_of_step(setup, steps.last)
    tokens = found.mesh.dp * found.workload.num_real_tokens
    return Extended(
        setup, steps.step_s, within, tokens / steps.step_s / found.mesh.size, room, bounded.by, bounded.saves,
        _played(found, [one.resolved() for one in steps.setups]), grounds,
    )  # fmt: skip


def _played(whole: Configuration, some: list[Configuration]) -> str:
    """Return what of a step was played."""
    layers = sorted({one.workload.layers for one in some})
    turns = sorted({turns_of(one) for one in some})
    parts = []
    if layers != [whole.workload.layers]:
        parts.append(f"{' and '.join(map(str, layers))} of {whole.workload.layers} layers")
    if turns != [turns_of(whole)]:
        parts.append(f"{' and '.join(map(str, turns))} of {turns_of(whole)} micro-batches")
    return f"told by {', and '.join(parts)}" if parts else "played whole"
