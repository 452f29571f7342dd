"""A map of two axes: which of several questions is fastest in each cell, coarse cells first.

Cells are weighed as ``plan`` weighs steps: a few layers are played, without noise, and one rank's memory is walked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from experiments.serve.answering.question import Variant, Word, setup_of
from sim.base.errors import InputError
from sim.compare.axes import axes_of, changed
from sim.compare.winners import judged
from sim.engine.results.sensitivity import bound
from sim.plan.search.branches import least_limits
from sim.plan.search.steps import step_of
from sim.setup.answers.places import shown
from sim.setup.names import ONE_REPLICA, tokens
from sim.setup.setup import Setup

MOST_CELLS = 400


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is varied: values, or a range such as 64K..1M*2."""

    key: Annotated[
        str,
        Meta(
            max_length=60,
            pattern=r"\A(seq|gpus|global_batch|cluster\.[\w.]+)\Z",
            description="seq, gpus, global_batch or a figure of the cluster",
        ),
    ]
    values: Word


class Atlas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who competes, and over what."""

    competitors: Annotated[tuple[Variant, ...], Meta(min_length=1, max_length=8)]
    across: Axis
    down: Axis


def cells(asked: Atlas) -> Iterator[dict[str, Any]]:
    """Yield first what the axes are, then a cell at a time: every second one of each axis before those between."""
    across, down = (_values(axis) for axis in (asked.across, asked.down))
    if asked.across.key == asked.down.key:
        raise InputError(f"`across` and `down` are both {asked.across.key}: choose another one for one of them")
    if len(across) * len(down) > MOST_CELLS:
        raise InputError(f"a map of {len(across)} x {len(down)} cells: at most {MOST_CELLS} are drawn")
    names = [one.name for one in asked.competitors]
    if len({*names}) < len(names):
        raise InputError(f"`competitors` {', '.join(names)}: name each once")
    if "seq" in {asked.across.key, asked.down.key} and any(one.question.documents for one in asked.competitors):
        raise InputError("a map of lengths: the documents of a question say its length; choose other axes")
    setups = {one.name: setup_of(one.question).replace(pad=True) for one in asked.competitors}
    yield {"across": _shown(asked.across, across), "down": _shown(asked.down, down)}
    places = sorted(product(range(len(across)), range(len(down))), key=lambda at: -min(map(_evenness, at)))
    for x, y in places:
        there = {asked.across.key: across[x], asked.down.key: down[y]}
        found = judged([_row(name, setup, there) for name, setup in setups.items()], "name")
        yield {"x": x, "y": y, "there": there, **found}


def _values(axis: Axis) -> list[str]:
    ((*_, values),) = axes_of({axis.key: axis.values})
    return [value for (value,) in values]


def _shown(axis: Axis, values: list[str]) -> list[list[str]]:
    """Return the values of an axis, each with what it is for people."""
    return [[value, shown(axis.key, value)] for value in values]


def _evenness(number: int) -> int:
    """Return how often two divides a number; of 0 most."""
    return (number & -number).bit_length() if number else 99


def _row(name: str, setup: Setup, there: dict[str, str]) -> dict[str, Any]:
    """Return what ``judged`` compares of a competitor at a place."""
    row: dict[str, Any] = {"name": name, "error": "", "fits": "", "degrees": "", "bound_by": ""}
    try:
        moved = changed(_freed(setup) if "gpus" in there else setup, there)
        found = moved.resolved()
        step_s, played = step_of(moved)
        fits = [limit.fits for limit in least_limits(moved)] if found.workload.scope == "step" else []
        sequences = found.mesh.dp * found.workload.batch
        rate = sequences * _length(moved) / step_s / found.mesh.size
        return row | {
            "step_time_s": step_s, "tokens_per_s_per_gpu": rate, "bound_by": bound(played).by,
            "degrees": found.mesh.named(found.entry.degrees) or "1 GPU",
            "fits": "no" if False in fits else "at the limit" if None in fits else "yes",
        }  # fmt: skip
    except InputError as error:
        return row | {"error": str(error)}


def _length(setup: Setup) -> int:
    return setup.sequence_length if setup.documents is not None else tokens("seq", setup.seq)


def _freed(setup: Setup) -> Setup:
    """Return a setup whose degrees follow the number of GPUs."""
    found = setup.replace(ulysses_degree=None, ring_degree=None, nodes=None)
    return found if found.cp is not None else found.replace(dp_degree=ONE_REPLICA)
