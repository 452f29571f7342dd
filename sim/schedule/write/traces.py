"""Calls of builders that have been written once, so that they are made again by binding buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.renaming import Renaming
from sim.schedule.ir.views import Buffer

Shape = tuple[Hashable, ...]
"""What tells calls apart: key, pass, form of sequences, and how the views that are given lie."""


class Traced(NamedTuple):
    """A call that can be made again, by binding buffers."""

    fragment: Fragment
    result: Any
    """What its function returned, on buffers of the fragment."""
    asked: tuple[tuple[int, bool], ...]
    """By place among those given, whether it is an input, where the function asked for that."""

    def renamed(self, ranks: int) -> Traced:
        """Return what the rank does that is so many later."""
        if not (ranks and self.fragment.peers):
            return self
        return self._replace(fragment=self.fragment.renamed(Renaming(ranks)))


class Traces:
    """Calls of ranks that do the same in a layer, with peers that are as much later as they are: the stages of a
    pipeline for the same tokens, with the same share of weights.
    """

    def __init__(self) -> None:
        self.alike: dict[Buffer, Buffer] = {}
        """The same object for all buffers that are alike."""
        self._known: dict[Shape, list[tuple[int, Traced]]] = {}
        """With the rank that each was written for."""

    def add(self, shape: Shape, rank: int, traced: Traced) -> None:
        """Remember a call that was written for a rank."""
        self._known.setdefault(shape, []).append((rank, traced))

    def of(self, shape: Shape, rank: int, is_input: Callable[[int], bool]) -> Traced | None:
        """Return a call as a rank makes it, None where it has yet to be written; ``is_input`` is asked for places among
        those given.
        """
        for writer, traced in self._known.get(shape, ()):
            if all(is_input(at) == flag for at, flag in traced.asked):
                return traced.renamed(rank - writer)
        return None
