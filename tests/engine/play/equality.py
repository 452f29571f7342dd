"""Equal ranks played once, and all ranks; SimPy and the native engine: every op's times and all figures are the same.

    python -m tests.engine.play.equality --count 400 --seed 0

holds so many random cells to that (``drawn.setup``), and prints what they cover and how many were refused. A cell that
is unequal is named by its setup; cell N of a seed is made again by ``--first N --count 1``.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import pytest
import tyro
from rich.console import Console

from sim.base.errors import InputError, ScheduleError
from sim.engine.costs.cost import CostModel
from sim.engine.play import native, reference, simulate
from sim.engine.play.fold import Fold
from sim.engine.play.jitter import Jitter
from sim.engine.play.lowered import lowered
from sim.engine.play.simulate import Prepared, Simulation
from sim.engine.results.figures import HOST, figures_of
from sim.engine.results.sensitivity import played_s
from sim.engine.results.worlds import Change, worlds
from sim.schedule.proof.check import Checked
from sim.setup.configuration import Configuration
from sim.setup.played import PlayedStep
from sim.words.mesh import Axis
from sim.words.profile import Profile
from tests.engine.play.drawn import setup
from topology.cluster import Cluster

REPLICAS_INSIDE: tuple[Axis, ...] = ("pp", "ring", "ulysses", "tp", "dp")
"""Ranks of one place are neighbours, whichever replicas they are of: no setup says so, but a mesh of one's own may."""


class Cell(NamedTuple):
    """One schedule on one machine."""

    checked: Checked
    cluster: Cluster
    profile: Profile | None
    jitter: Jitter

    def played(self) -> Simulation:
        """Return a play in which ranks stand for their equals."""
        return Prepared(self.checked).play(self.cluster, self.profile, self.jitter)


class Drawn(NamedTuple):
    """A cell, what it was made from, and why the setups that were drawn before it were refused."""

    cell: Cell
    configuration: Configuration
    named: str
    refused: list[str]


def drawn(seed: int, number: int, most_ranks: int = 64) -> Drawn:
    """Return cell ``number`` of a seed: of the setups that it draws the first that is not refused. Any other error than
    a refusal of what was asked is one of the product.
    """
    draw, refused = Random(f"{seed} {number}"), list[str]()
    while True:
        asked, turned = setup(draw, most_ranks), draw.random() < 0.1
        try:
            found = asked.resolved()
            if turned:
                found = dataclasses.replace(found, mesh=msgspec.structs.replace(found.mesh, order=REPLICAS_INSIDE))
            cell = Cell(found.checked(), found.cluster, found.profile, found.jitter)
            cell.played()  # costs refuse machines that have no way
        except ScheduleError:
            raise
        except InputError as error:
            refused.append(str(error))
            continue
        return Drawn(cell, found, f"cell {number} of seed {seed}: {found.title}", refused)


def cells(seed: int, count: int, most_ranks: int = 64) -> Iterator[Cell]:
    """Yield so many random cells."""
    for number in range(count):
        yield drawn(seed, number, most_ranks).cell


def require_same_times(found: Simulation, meant: Simulation, what: str) -> None:
    """Assert that all ops of the ranks that one play has are posted, begin and end when those of the other do, and that
    steps are as long with each seed.
    """
    rows, starts = {rank: row for row, rank in enumerate(meant.trace.numbers)}, meant.trace.ops.starts
    of_ranks = [rows[rank] for rank in found.trace.numbers]
    ops = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in of_ranks])
    for name in ("posted_s", "begun_s", "ended_s"):
        np.testing.assert_array_equal(getattr(found.trace, name), getattr(meant.trace, name)[ops], what)
    assert found.step_times_s == meant.step_times_s, what


def require_equal_engines(cell: Cell, fold: Fold | None = None, what: str = "") -> None:
    """Hold the native engine to SimPy, with each seed: of all ranks, or of those that are played."""
    checked, cluster, *_ = fold or Fold(cell.checked, cell.cluster)
    cost = CostModel(cluster, cell.profile)
    stretches = [one.stretch(fold or Fold(checked, cluster), cost) for one in cell.jitter.each()]
    played = native.plays(lowered(checked), cluster, cost, stretches)
    for found, stretch in zip(played, stretches, strict=True):
        meant = reference.play(checked, cluster, cost, stretch)
        for times, expected in zip(found, meant, strict=True):
            np.testing.assert_array_equal(times, expected, what or str(checked.schedule.header))


@contextmanager
def all_ranks() -> Iterator[None]:
    """Let no rank stand for others, in what is played for intervals and other machines neither."""
    with mock.patch.object(simulate, "fold", lambda checked, cluster, **_: Fold(checked, cluster)):
        yield


def require_equal(cell: Cell, what: str = "") -> Fold:
    """Hold a play in which ranks stand for their equals to one of all ranks, and the native engine to SimPy in both;
    return which ranks were played.
    """
    what = what or str((cell.checked.schedule.header, cell.cluster.spec))
    folded = cell.played()
    require_equal_engines(cell, folded.fold, what)
    found = PlayedStep(folded, "", "").report
    if not folded.fold.played:
        return folded.fold
    require_equal_engines(cell, what=what)
    with all_ranks():
        whole = cell.played()
        meant = PlayedStep(whole, "", "").report
    assert whole.trace.num_ranks == cell.checked.schedule.num_ranks
    require_same_times(folded, whole, what)
    assert {*found.evidence.notes} - {*folded.fold.notes} == {*meant.evidence.notes}, what
    if found.saves != pytest.approx(meant.saves, rel=1e-12):
        require_same_where_others_win(folded, whole, what)
    left: Any = {"evidence": msgspec.structs.replace(meant.evidence, notes=[]), "saves": {}}
    assert msgspec.structs.replace(found, **left) == msgspec.structs.replace(meant, **left), what
    return folded.fold


def require_same_where_others_win(folded: Simulation, whole: Simulation, what: str) -> None:
    """Assert that machines with a figure doubled, which worlds follow up to where SMs go to others, say that they stop
    there, and are alike to the last bit when they are played.
    """
    figures = figures_of(folded.cluster.spec, folded.profile)
    changes = [Change((figure,), 2.0) for figure in figures if figure not in HOST]
    apart = [
        change
        for change, one, other in zip(changes, worlds(folded, changes), worlds(whole, changes), strict=True)
        if one.step_time_s != pytest.approx(other.step_time_s, rel=1e-12)
        if one.turned and other.turned
    ]
    assert apart, what
    for change in apart:
        found_s = played_s(folded, change)
        with all_ranks():
            assert found_s == played_s(whole, change), what


def covered(one: Drawn, fold: Fold) -> list[str]:
    """Return what a cell has of what users combine."""
    cell, configuration = one.cell, one.configuration
    header, spec, jitter = cell.checked.schedule.header, cell.cluster.spec, cell.jitter
    workload, mesh, options = header.workload, header.mesh, header.options
    step = workload.scope == "step"
    has = {
        "cp": mesh.sharing > 1, "tp": mesh.tp > 1, "pp": mesh.pp > 1, "dp": mesh.dp > 1,
        "over 16 ranks": mesh.size > 16,
        "folded replicas": "dp" in fold.played, "folded members": "tp" in fold.played,
        f"ZeRO {options.get('zero_stage')}": step and mesh.dp > 1,
        f"pipeline {options.get('pipeline_schedule', '1f1b')}": mesh.pp > 1,
        "micro-batches": options.get("micro_batches", 1) > 1, "checkpoint": step and options["checkpoint"] != "none",
        "offload": {"host", "host-states", "pageable", "save-on-cpu"} & {*map(str, options.values())},
        "software": configuration.profile and configuration.profile.software,
        "documents": workload.documents, "documents of each": workload.sequences, "padding": workload.padding,
        "part of a mask": workload.pattern or workload.block_mask or workload.window,
        "a full mask": workload.mask == "full", "noise": jitter.share,
        "noise by rank": jitter.share and jitter.per_rank, "several seeds": jitter.share and jitter.seeds > 1,
        "slow GPUs": any(gpu.speed != 1 for gpu in spec.per_gpu.values()), "a slow link": spec.uneven,
        "shared NICs": spec.nodes > 1 and spec.ports_per_node < spec.gpus_per_node,
        "shared PCIe": spec.gpus_per_node > 1 and spec.pcie and not spec.nvlink, "bridges": spec.bridged_gpus,
        "a CPU host": spec.gpu.kind == "cpu", "a fabric": spec.fabric, type(spec.fabric).__name__: spec.fabric,
        "datasheet": cell.profile is None,
    }  # fmt: skip
    return [name for name, true in has.items() if true]


class Tally(NamedTuple):
    """What some cells covered, and why setups were refused."""

    covers: Counter[str]
    refused: Counter[str]

    def hold(self, seed: int, number: int, most_ranks: int) -> None:
        """Hold one cell to what is equal, and count it."""
        one = drawn(seed, number, most_ranks)
        self.covers.update(covered(one, require_equal(one.cell, one.named)))
        self.refused.update(one.refused)

    def __str__(self) -> str:
        counted = [*self.refused.most_common(), *self.covers.most_common()]
        return "\n".join([f"{times:5} {what}" for what, times in counted])


def main(count: int = 400, seed: int = 0, first: int = 0, ranks: int = 64) -> None:
    """Print which of so many cells of at most so many ranks, number ``first`` on, are unequal, or answered by a
    traceback; what all of them cover, and why setups were refused. Exits with 1 where there is such a cell.
    """
    say = partial(Console(soft_wrap=True).print, markup=False, highlight=False)
    begin_s, tally, wrong = time.process_time(), Tally(Counter(), Counter()), 0
    for number in range(first, first + count):
        try:
            tally.hold(seed, number, ranks)
        except Exception:  # noqa: BLE001 - whatever a user would see is printed, and the next one drawn
            wrong += 1
            say(f"cell {number} of seed {seed}\n{traceback.format_exc()}")
    spent_s = time.process_time() - begin_s
    say(f"{tally}\n{count} cells, {wrong} of them wrong, {tally.refused.total()} setups refused, {spent_s:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    tyro.cli(main)
