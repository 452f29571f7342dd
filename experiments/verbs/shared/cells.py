"""What ``longstep validate`` compares, from what the user typed: all combinations of lengths, ranks and schedules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated

import tyro

from experiments.evidence.executed.cells import Cell
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import Selection, listed, typed_schedules
from longstep import Setup
from sim.base.errors import InputError
from sim.schedule.methods.catalog import SCHEDULES
from sim.setup.names import SCOPES, one_of
from sim.words.mesh import MOST_RANKS
from sim.words.workload import parse_length
from topology.host import host_facts

LENGTHS = "2K,4K,8K"
"""Of a sweep that names none."""
_BOTH = "both"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellSelection(Selection):
    """What to compare: all combinations of the lengths, ranks and schedules."""

    seq: str = ""
    """Global sequence lengths, such as 1K,2K,4K; by default 2K,4K,8K."""
    gpus: Annotated[str | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    ranks: Annotated[str, tyro.conf.arg(aliases=["--gpus"])] = ""
    """Numbers of processes, such as 2,4; by default the powers of two up to the cores."""
    schedule: Annotated[str, tyro.conf.arg(name="schedules", aliases=["--schedule"])] = ""
    """NAMEs, such as ring,ulysses, or my_module.py:build for schedules of your own; by default all that share work."""
    stack: OptionalText = None
    """Techniques of a training step that are used together, such as fsdp,alst: longstep list stacks shows them."""
    scope: str = _BOTH
    """What is played: attention of one layer, whole layers (layer), both of these, or training steps (step)."""
    target: float = 0.10
    """Largest error that counts as met, as a share."""

    def setup(self) -> Setup:
        """Return what all cells share; of what they combine it has the lists."""
        return self.one()

    @property
    def named(self) -> bool:
        """Whether the user named what to combine."""
        return bool(self.seq or self.ranks or self.schedule)


def cells_of(sweep: CellSelection) -> list[Cell]:
    """Return what a sweep asks for; raises InputError for a value that cannot be read."""
    one_of("scope", sweep.scope, (*SCOPES, _BOTH))
    scopes = ("attention", "layer") if sweep.scope == _BOTH else (sweep.scope,)
    layers = {"attention": 1, "layer": sweep.layers or 1}
    if sweep.scope == "step":
        layers["step"] = sweep.layers or sweep.setup().model_spec.num_layers
    if not 0 < sweep.target < 1:
        raise InputError(f"`target` {sweep.target:g}: expected a share between 0 and 1, such as 0.1")
    if sweep.documents:
        raise InputError(
            f"`documents` {sweep.documents}: sweeps go over lengths; leave it out, or use longstep compare"
        )
    lengths, ranks, schedules = _lengths(sweep), _ranks(sweep), _schedules(sweep)
    stacks = listed(sweep.stack, "`stack`", "fsdp,alst") if sweep.stack is not None else [""]
    return [
        Cell(gpus, scope, layers[scope], seq, schedule, sweep.target, stack)
        for gpus in ranks
        for scope in scopes
        for seq in lengths
        for schedule in schedules
        for stack in stacks
    ]


def _lengths(sweep: CellSelection) -> list[str]:
    lengths = listed(sweep.seq or LENGTHS, "`seq`", LENGTHS)
    for length in lengths:
        parse_length(length, "`seq`")
    return lengths


def _ranks(sweep: CellSelection) -> list[int]:
    if not sweep.ranks:
        cores = host_facts().cores
        return [2**power for power in range(1, max(1, cores.bit_length() - 1) + 1)]
    ranks = listed(sweep.ranks, "`ranks`", "2,4")
    for count in ranks:
        if not re.fullmatch("[0-9]{1,9}", count) or not 1 <= int(count) <= MOST_RANKS:
            raise InputError(f"`ranks` {count}: expected numbers of processes from 1 to {MOST_RANKS}, such as 2,4")
    return [int(count) for count in ranks]


def _schedules(sweep: CellSelection) -> list[str]:
    if not sweep.schedule:
        return [name for name, entry in SCHEDULES.items() if entry.degrees]
    return typed_schedules(sweep.schedule, ",".join(SCHEDULES))


def playable(cells: Sequence[Cell], sweep: CellSelection) -> tuple[list[Cell], dict[Cell, str]]:
    """Return the cells that can be played, and why others cannot: four heads do not split over eight ranks.

    Raises InputError for a value that the user named, none of whose cells can be played.
    """
    refused: dict[Cell, str] = {}
    for cell in cells:
        try:
            cell.setup(sweep.setup()).resolved().checked()
        except InputError as error:
            refused[cell] = str(error)
    named = [of for of, text in (("schedule", sweep.schedule), ("gpus", sweep.ranks), ("seq", sweep.seq)) if text]
    values = {(of, getattr(cell, of)) for cell in cells for of in named}
    for group in (cells, *([cell for cell in cells if getattr(cell, of) == value] for of, value in sorted(values))):
        if all(cell in refused for cell in group):
            raise InputError(refused[group[0]])
    return [cell for cell in cells if cell not in refused], refused
