"""Steps of few layers and few micro-batches, by which those of many are told: what each further one adds is the same.

A step of many layers, or of many stages with many each, takes what one of few does, and for each further layer what the
last of these adds; so it is for micro-batches, and for bytes. Layers are added to all chunks of a pipeline at once, so
that differences between its stages stay.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.schedule.model.pipeline.stages import Stages
from sim.setup.configuration import Configuration
from sim.setup.setup import Setup

PLAYED = (3, 4)
"""Layers that are played of a step that has more, of each chunk of a pipeline: every further one takes what the last of
these adds. A step of 16 layers, played in full, takes the same within 1e-5 (``tests/plan/test_plan.py``).
"""
PLAYED_IN_STAGES, PLAYED_UNEVEN = (5, 6), (6, 8)
"""The same of stages of a pipeline, whose rings have only few layers between what they hand on: of (4, 5) layers the
last adds 2e-4 less than each behind it in a ring of 4 GPUs (``tests/plan/test_extended.py``); and where chunks have
unlike numbers of layers, or a stage several chunks: what decides how long micro-batches wait for each other changes
while a layer is short beside the head. Then within 0.6 % of what was tried, where (3, 4) are within 2 %.
"""
PLAYED_BY_TWO = (4, 6)
"""The same of a balanced ring, whose backward layers by turns take 0.8 % more and less: a gather of weights falls
beside attention in every second one (``tests/plan/test_plan.py``).
"""
WALKED = (5, 6)
"""Layers whose memory is walked of a branch that has more: each further one takes what the last of these adds. What
offloading has under way no longer grows by then; where another op than in few layers holds most, it is a little more.
"""
TURNS = (2, 3)
"""Micro-batches that are played of a step that has more, and whose memory is walked: each further one takes and holds
what the last of these adds (``tests/plan/test_plan.py``). The first is another: nothing was added up before it.
"""


class Few(NamedTuple):
    """Setups from which the figures of a larger one follow: one with few layers or micro-batches and one with more, or
    itself alone.
    """

    setups: list[Setup]
    between: int = 1
    """How many layers of a chunk, or micro-batches, the last has beyond the first."""
    further: int = 0
    """How many are left to come."""
    layers: int = 0
    """Of the setup in each chunk, where layers are left out."""

    def told(self, first: float, last: float) -> float:
        """Return a figure of the larger setup, by the figures of the first and the last of the few."""
        return last + (last - first) / self.between * self.further


def of_layers(setup: Setup, some: tuple[int, int]) -> Few:
    """Return setups with few layers, ``some`` in the smallest chunk, from which one with more follows. Where kinds of
    layers take turns, the layers that are left out are whole turns.
    """
    found = setup.resolved()
    split = stages_of(found).split if found.mesh.pp > 1 else (found.workload.layers,)
    least, period = min(split), len(found.workload.model.kinds or (None,))
    few = some[0] + (least - some[0]) % period
    more = few - (some[0] - some[1]) // period * period
    if least <= more:
        return Few([setup])
    setups = [_without(setup, found, split, least - size) for size in (few, more)]
    return Few(setups, more - few, least - more, least)


def of_played(setup: Setup, some: tuple[int, int] = PLAYED) -> Few:
    """Return the same for a play: stages of a pipeline need more layers than bounds do."""
    found = setup.resolved()
    if found.mesh.pp > 1:
        split = stages_of(found).split
        even = len(split) == found.mesh.pp and len({*split}) == 1
        few, more = PLAYED_IN_STAGES if even else PLAYED_UNEVEN
        some = max(some[0], few), max(some[1], more)
    elif found.schedule == "balanced-ring":
        some = max(some[0], PLAYED_BY_TWO[0]), max(some[1], PLAYED_BY_TWO[1])
    return of_layers(setup, some)


def of_turns(setup: Setup, *, steady: bool = True) -> Few:
    """Return setups with few micro-batches, from which one with more follows: as many as ``TURNS``. A pipeline that has
    to be ``steady`` has as many as fill it and more, so that the last one does not begin in the warm-up.
    """
    found = setup.resolved()
    turns, told = turns_of(found), _turns_told(found, steady=steady)
    if told is None or turns <= (more := told[1]) or found.workload.batch % turns:
        return Few([setup])
    return Few([at_most(setup, count) for count in told], more - told[0], turns - more)


def holds_as_much(setup: Setup, few: Few) -> bool:
    """Return whether stages keep no more in flight than with few micro-batches; one stage takes one after the other."""
    if setup.resolved().mesh.pp == 1:
        return True
    least, most = (stages_of(one.resolved()) for one in (few.setups[0], setup))
    stages = range(setup.resolved().mesh.pp)
    return all(least.layers_in_flight(stage) == most.layers_in_flight(stage) for stage in stages)


def at_most(setup: Setup, count: int) -> Setup:
    """Return a setup with at most so many micro-batches, each as large as before; the setup itself where they are
    unlike.
    """
    found = setup.resolved()
    turns = turns_of(found)
    if turns <= count or found.workload.batch % turns or found.workload.sequences:
        return setup
    each = found.workload.batch // turns
    return setup.spelled_out().replace(batch=each * count, set={"schedule.micro_batches": count})


def turns_of(found: Configuration) -> int:
    """Return the number of micro-batches of a step."""
    return int(getattr(found.options, "micro_batches", 1))


def stages_of(found: Configuration) -> Stages:
    """Return the stages of a pipeline."""
    return Stages(found.mesh, found.workload, found.options)


def _turns_told(found: Configuration, *, steady: bool) -> tuple[int, int] | None:
    """Return two numbers of micro-batches from which any larger one follows: of a pipeline one round and two behind
    those that fill it. None where only all of them will do.
    """
    if found.workload.sequences:
        return None  # each has documents of its own, so none adds what another does
    if found.mesh.pp == 1:
        return TURNS
    rounds = stages_of(found).rounds
    if rounds is None:
        return None
    if rounds == (found.mesh.pp, 1) and not steady:
        return TURNS
    before, each = rounds
    return before + each, before + 2 * each


def _without(setup: Setup, found: Configuration, split: tuple[int, ...], fewer: int) -> Setup:
    """Return a setup with so many fewer layers in each chunk."""
    short = setup.replace(layers=found.workload.layers - fewer * len(split))
    if not getattr(found.options, "pipeline_layers", ""):
        return short
    return short.replace(set={"schedule.pipeline_layers": ",".join(str(layers - fewer) for layers in split)})
