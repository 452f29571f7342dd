"""Schedules that play what planners make of the documents of a setup, for plans to choose among."""

from __future__ import annotations

import dataclasses
from functools import partial

from sim.balance.planners import MOST_TASKS, PLANNERS, Asked, asked_of, playing, playing_each
from sim.base.errors import InputError
from sim.batches.batch import Batch, batch
from sim.batches.planned import Planned
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import Build
from sim.schedule.methods.planned import PlannedOptions
from sim.setup.effort import require_few
from sim.setup.names import kept, lengths_of, micro_batches_of, texts
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.workload import Workload

BY_BLOCKS = ("wlb-llm", "dcp", "fcp-style", "groups")
"""Planners whose plans are no schedule of the catalog."""


def planned_schedules(setup: Setup, ranks: int) -> list[Build]:
    """Return builders of schedules, one for each planner, of the documents of a setup on so many ranks; none where
    there are no documents. What a planner refuses, as WLB-LLM does patterns, its builder does.
    """
    if setup.documents is None:
        return []
    packed, asked = _asked(setup, ranks)
    found: list[Build] = []
    for name in BY_BLOCKS:
        try:
            require_few([name], len(packed.documents), ranks, yes=setup.yes)
            made = PLANNERS[name](packed, asked)
            tasks = sum(map(len, made.plan.tasks))
            if tasks > MOST_TASKS:
                raise InputError(
                    f"{name} has {tasks} tasks: at most {MOST_TASKS} are simulated; choose fewer `documents`"
                )
            found.append(playing(made._replace(planner=name)))
        except InputError as refused:
            found.append(_refusing(name, str(refused)))
    return found


def planned_by(setup: Setup) -> Setup:
    """Return a setup whose schedule plays what the planner of that name makes of the documents; where each micro-batch
    has its own, of each of them. Raises InputError without documents, and where the planner refuses.
    """
    name = str(setup.schedule)
    if setup.documents is None:
        raise InputError(f"`schedule` {name} plans documents: set `documents`")
    ranks = setup.replace(schedule="ring").resolved().mesh.ring
    each = dict.fromkeys(micro_batches_of(setup.documents) or (lengths_of(setup.documents),))
    made: dict[tuple[int, ...], Planned] = {}
    for documents in each:
        require_few([name], len(documents), ranks, yes=setup.yes)
        made[documents] = PLANNERS[name](*_asked(setup.replace(documents=documents), ranks))._replace(planner=name)
    if len(made) == 1:
        return setup.replace(schedule=playing(*made.values()))
    return setup.replace(schedule=playing_each(made))


def _asked(setup: Setup, ranks: int) -> tuple[Batch, Asked]:
    """Return the documents of a setup, and what planners may ask about them on so many ranks."""
    assert setup.documents is not None, "planners plan documents"
    packed = batch(list(lengths_of(setup.documents)), kept(setup.mask, setup.window).keeps)
    beside = [text for text in texts(setup.set) if not text.startswith("schedule.")]
    alone = setup.replace(
        gpus=ranks, nodes=None, dp_degree=1, pp_degree=1, tp_degree=1, ulysses_degree=None, ring_degree=None,
        cp=None, layers=None, schedule="ring", global_batch=None, batch=1,
    )  # fmt: skip
    return packed, asked_of(dataclasses.replace(alone, set=beside), packed)


def _refusing(name: str, why: str) -> Build:
    builder = partial(_refuse, why)
    builder.__qualname__ = name  # type: ignore[attr-defined]  # what setups call it
    return builder


_DEFAULT = PlannedOptions()


def _refuse(why: str, workload: Workload, mesh: Mesh, options: PlannedOptions = _DEFAULT) -> Schedule:
    del workload, mesh, options
    raise InputError(why)
