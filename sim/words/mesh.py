"""The mesh of ranks: a grid with named axes. Placement and communication are stated by axis.

pp pipeline stages · dp replicas, each with sequences of its own · ring parts of a sequence · ulysses groups of heads,
which share a part of a sequence · tp parts of weights
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, get_args

import msgspec

from sim.base.errors import InputError

Axis = Literal["pp", "dp", "ring", "ulysses", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""The usual nesting, outermost first: neighbours share a node, so inner axes use its links."""
_LETTERS: dict[Axis, str] = {"tp": "TP", "ulysses": "U", "ring": "R", "pp": "PP", "dp": "DP"}
"""Of the axes that shipped schedules split, in the order in which they are named."""
MOST_RANKS = 2**14
"""That a schedule may have: as many as have trained one model (arXiv:2407.21783 §3.3)."""


class Mesh(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The degree of each axis, and how they are nested: ``Mesh(dp=2, ring=4)`` has ranks 0 to 3 in its first ring."""

    pp: int = 1
    dp: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    order: tuple[Axis, ...] = AXES
    """All axes, outermost first: with ``ulysses`` before ``ring`` rings are of neighbours (arXiv:2405.07719 §3)."""

    def __post_init__(self) -> None:
        """Raise InputError for a degree below 1, more ranks than any schedule has, and an order that is none of all
        axes.
        """
        if sorted(self.order) != sorted(AXES):
            raise InputError(f"order {self.order} of a mesh: expected each of {', '.join(AXES)} once")
        for axis, degree in self.degrees.items():
            if degree < 1:
                raise InputError(f"{axis} {degree}: expected a degree of 1 or more")
        require_ranks(self.size)

    @property
    def degrees(self) -> dict[Axis, int]:
        """The degree of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in self.order}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def sharing(self) -> int:
        """How many ranks share a sequence, in each stage of a pipeline."""
        return self.size // self.dp // self.pp // self.tp

    def named(self, axes: Sequence[Axis] = ()) -> str:
        """Return the degrees of what schedules split: of some axes in any case, of others where they are above 1.

        >>> Mesh(ulysses=4, ring=2).named(), Mesh(ulysses=8, dp=2).named(["ulysses", "ring"])
        ('U 4 R 2', 'U 8 R 1 DP 2')
        """
        degrees = {axis: getattr(self, axis) for axis in _LETTERS}
        shown = [f"{_LETTERS[axis]} {degree}" for axis, degree in degrees.items() if axis in axes or degree > 1]
        return " ".join(shown)

    def place(self, rank: int) -> dict[Axis, int]:
        """Return the index of a rank along each axis, innermost first."""
        found: dict[Axis, int] = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, found[axis] = divmod(rank, degree)
        return found

    @property
    def replica_stride(self) -> int:
        """By how much the numbers of a rank and of its equal in the next replica differ."""
        return self._stride("dp")

    def _stride(self, axis: Axis) -> int:
        """Return by how much the numbers of neighbours along an axis differ."""
        return math.prod(getattr(self, inside) for inside in self.order[self.order.index(axis) + 1 :])

    def replica(self, rank: int) -> int:
        """Return which replica a rank belongs to."""
        return rank // self.replica_stride % self.dp

    def role(self, rank: int) -> int:
        """Return the rank that has the same place in the first replica."""
        return rank - self.replica(rank) * self.replica_stride

    @property
    def roles(self) -> list[int]:
        """Of every rank the one that has the same place in the first replica."""
        stride, block = self.replica_stride, self.replica_stride * self.dp
        return [rank // block * block + rank % stride for rank in range(self.size)]

    def along(self, rank: int, axis: Axis, places: Iterable[int]) -> list[int]:
        """Return the ranks that differ from one in their places along an axis only."""
        first, stride = self.first(rank, axis), self._stride(axis)
        return [first + place * stride for place in places]

    def first(self, rank: int, *axes: Axis) -> int:
        """Return the first of the ranks that differ from one in their places along these axes only."""
        place = self.place(rank)
        return rank - sum(place[axis] * self._stride(axis) for axis in axes)

    @property
    def first_replica(self) -> list[int]:
        """The ranks of the first replica."""
        return self.at({"dp": [0]})

    def at(self, places: Mapping[Axis, Sequence[int]]) -> list[int]:
        """Return the ranks at some places along some axes, as these are given, and at all places along others."""
        found = [0]
        for axis, degree in self.degrees.items():
            steps = [place * self._stride(axis) for place in places.get(axis, range(degree))]
            found = [rank + step for rank in found for step in steps]
        return found

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all ranks in groups that differ in these axes only; each in the order of ranks, as the groups are."""
        return _groups(self, axes)

    def mirrored(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all ranks in groups that differ in these axes, and in that some are on the stage that mirrors the one
        of the others: as many stages before the last one as that is behind the first one, whose ranks come first.

        >>> Mesh(pp=4, ring=2).mirrored("ring")
        ((0, 1, 6, 7), (2, 3, 4, 5))
        """
        stride = self._stride("pp")

        def mirror(rank: int) -> int:
            return rank + (self.pp - 1 - 2 * self.place(rank)["pp"]) * stride

        halves = [group for group in self.groups(*axes) if 2 * self.place(group[0])["pp"] < self.pp]
        return tuple([(*group, *map(mirror, group)) for group in halves])

    def halves(self, group: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return those of a group that are in the first half of the stages, and in the second one."""
        of_second = {rank: 2 * self.place(rank)["pp"] >= self.pp for rank in group}
        first, second = (tuple([rank for rank in group if of_second[rank] == half]) for half in (False, True))
        return first, second

    def only(self, schedule: str, *axes: Axis) -> None:
        """Raise InputError where ranks lie along an axis that a schedule does not take. All take dp, copies of it, tp,
        shares of the weights of the layers around it, and pp, stages of these layers.
        """
        for axis, degree in self.degrees.items():
            if degree == 1 or axis in {"pp", "dp", "tp", *axes}:
                continue
            allowed = ", ".join(["pp", "dp", "tp", *axes])
            raise InputError(
                f"{axis} {degree}: schedule {schedule!r} has no such axis: allowed are {allowed}; set {axis} to 1"
            )


def require_ranks(ranks: int) -> None:
    """Raise InputError for more ranks than a schedule may have."""
    if ranks > MOST_RANKS:
        raise InputError(f"{ranks} ranks: expected at most {MOST_RANKS}; set `gpus` or `nodes`")


@lru_cache(maxsize=64)
def _groups(mesh: Mesh, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
    """See ``Mesh.groups``: of thousands of ranks, every program of a step asks for the same."""
    inside, first = [0], [0]
    for axis, degree in mesh.degrees.items():
        stride = mesh._stride(axis)  # noqa: SLF001 - a method that remembers would keep every mesh
        grown = inside if axis in axes else first
        grown[:] = [rank + stride * index for rank in grown for index in range(degree)]
    return tuple(tuple([start + rank for rank in inside]) for start in first)
