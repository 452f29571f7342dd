"""A training step that is too large to play whole, by plays of few of its layers and micro-batches.

    few of both, one more of each ── what the last of these adds ── as often as there are further ones

That each further layer and micro-batch adds the same is what ``sim.plan.search.few`` says, with how near it comes. Of
a pipeline of many stages that is too large for that, few stages are played as well (``sim.plan.search.timed``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from sim.accounts.breakdown import PARTS, PartName, breakdown, critical_rank
from sim.base.errors import InputError
from sim.engine.intervals.interval import Interval
from sim.engine.results.report import mfu_of, peak_flops_per_s
from sim.engine.results.room import Room
from sim.engine.results.sensitivity import Bound
from sim.plan.search.few import turns_of
from sim.plan.search.steps import Steps, room_of_step, steps_of
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


class Extended:
    """A step that was told by few of its layers and micro-batches, without noise between kernels; not proved whole. The
    step time is there at once, what takes more plays when it is asked for.

    >>> from sim.plan.extended import extended
    >>> few = extended(Setup(model="llama3-8b", cluster="hgx-h100", schedule="ulysses", seq="16K", scope="step"))
    >>> few.fits, few.bound_by, few.answer.startswith("Ulysses takes ")
    (True, 'compute', True)
    """

    def __init__(self, setup: Setup, steps: Steps) -> None:
        self.setup = setup
        self.steps = steps
        """Its plays."""

    def replace(self, **changes: Any) -> Extended:
        """Return the step of a changed setup, as ``Setup.replace`` takes it. What the change leaves as it is, such as
        the schedules on another machine, is not built again.

        >>> few = extended(Setup(model="llama3-8b", cluster="hgx-h100", schedule="ulysses", seq="16K", scope="step"))
        >>> few.replace(set={"cluster.nvlink.bytes_per_s": "*2"}).step_time_s < few.step_time_s
        True
        """
        return extended(self.setup.replace(**changes), self)

    @property
    def step_time_s(self) -> float:
        """Seconds of the whole step."""
        return self.steps.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of all sequences, without padding."""
        found = self.setup.resolved()
        tokens = found.mesh.dp * found.workload.num_real_tokens
        return tokens / self.step_time_s / found.mesh.size

    @property
    def mfu(self) -> float | None:
        """The share of the peak of all GPUs that the FLOPs of the model take, as ``Report`` has it."""
        found = self.setup.resolved()
        peak = peak_flops_per_s(found.workload, self.steps.last.cluster, found.mesh.size)
        return mfu_of(found.workload, found.mesh.dp, peak, self.step_time_s)

    @property
    def breakdown(self) -> dict[PartName, float]:
        """Seconds of each part of the step for one rank: the one that waits least in the play of most layers and
        micro-batches. They sum to the step.
        """
        rank = critical_rank(self.steps.last.trace)

        def spent_at(part: PartName) -> float:
            return self.steps.told(lambda play: breakdown(play.trace, rank)[part])

        return {part: spent_at(part) for part in PARTS}

    @cached_property
    def room(self) -> Room:
        """Its memory, of all layers and micro-batches."""
        return room_of_step(self.setup, self.steps.last)

    @property
    def interval(self) -> Interval | None:
        """Of 90 %; None where nothing is known of how far costs may be off."""
        return self._rests[0]

    @property
    def grounds(self) -> Grounds:
        """What the step rests on."""
        return self._rests[1]

    @cached_property
    def _rests(self) -> tuple[Interval | None, Grounds]:
        return self.steps.rests

    @property
    def bound_by(self) -> str:
        """The figure of the machine whose doubling saves most."""
        return self._bound.by

    @property
    def saves(self) -> Mapping[str, float]:
        """By figure of the machine the share of the step that doubling it saves."""
        return self._bound.saves

    @cached_property
    def _bound(self) -> Bound:
        return self.steps.bound

    @property
    def played(self) -> str:
        """Of how many layers and micro-batches all is told."""
        return _played(self.setup.resolved(), [one.resolved() for one in self.steps.setups])

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


def extended(setup: Setup, like: Extended | None = None) -> Extended:
    """Return a training step by plays of few of its layers and micro-batches. Raises InputError for other scopes, and
    for ranks of one device. What it has in common with one that is ``like`` it, such as its schedules, is not built
    again.

    >>> few = extended(Setup(model="llama3-8b", cluster="hgx-h100", schedule="ulysses", seq="64K", scope="step"))
    >>> few.played
    'told by 3 and 4 of 32 layers'
    """
    if setup.scope != "step" or setup.one_device:
        what = "ranks share a device" if setup.one_device else f"scope is {setup.scope}"
        raise InputError(f"`extend` is of training steps whose ranks have GPUs of their own; {what}: set `scope` step")
    steady = setup.replace(jitter=0.0)  # as it is played, so that equal members are counted as one
    found = Extended(setup, steps_of(steady, like=like.steps if like else None))
    if like and "room" in vars(like) and _has_room_of(setup.resolved(), like.setup.resolved()):
        vars(found)["room"] = like.room
    return found


def _has_room_of(found: Configuration, other: Configuration) -> bool:
    """Return whether a step takes the memory that another one does, of as much."""

    def memories(one: Configuration) -> tuple[object, ...]:
        spec = one.spec
        return one.allocator, spec.hbm, spec.socket, spec.gpu.kind, spec.nodes, spec.gpus_per_node

    return found.has_schedule_of(other) and memories(found) == memories(other)


def _played(whole: Configuration, some: list[Configuration]) -> str:
    """Return what of a step was played."""
    last = some[-1]
    if last.mesh.pp < whole.mesh.pp:
        stages = f"{last.mesh.pp} of {whole.mesh.pp} stages"
        counted = ", as if every rank counted norms" if whole.mesh.tp > 1 else ""
        return f"told by passes of {stages}, and {turns_of(last)} of {turns_of(whole)} micro-batches{counted}"
    layers = sorted({one.workload.layers for one in some})
    turns = sorted({turns_of(one) for one in some})
    parts = []
    if layers != [whole.workload.layers]:
        parts.append(f"{' and '.join(map(str, layers))} of {whole.workload.layers} layers")
    if turns != [turns_of(whole)]:
        parts.append(f"{' and '.join(map(str, turns))} of {turns_of(whole)} micro-batches")
    return f"told by {', and '.join(parts)}" if parts else "played whole"
