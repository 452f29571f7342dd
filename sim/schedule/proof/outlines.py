"""Contents of buffers as rows of numbers: those that differ in positions only are rows of one table.

    what a buffer holds ── its outline: all but where tokens begin and end ──> a table, and a row of it

A row is never changed, so a buffer that is sent on is two numbers that are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.schedule.ir.masks import Span
from sim.schedule.proof.abstract_memory import Held
from sim.schedule.proof.contents import Content, Piece, Unclassed
from sim.schedule.proof.many import ROOM, Ints, Many, Number


class _Part(NamedTuple):
    """What a piece is but for where its tokens, and those that it has seen, begin and end."""

    piece: Piece
    """With no positions."""
    steps: tuple[int, ...]
    """Of its tokens, and of those that it has seen."""
    others: tuple[Span, ...]
    """The other side of each box that it has seen."""


Outline = tuple[bool, tuple[_Part, ...]]
"""Of what a buffer holds: whether it is known to fill it, and its pieces."""

NOTHING = 0
"""The number of the outline of what is not written yet, or does not matter."""
_NOTHING = Held((), complete=False)
_KEPT = 1 << 17
"""Rows that were put together as contents, as the operands of many kernels are, are kept while there are fewer."""


class Contents:
    """All contents, of however many ranks: by outline and row."""

    def __init__(self) -> None:
        nothing: Outline = (False, ())
        self._numbers = {nothing: NOTHING}
        self._outlines = [nothing]
        self._tables: list[_Table] = [_Table(0)]
        self._known: dict[tuple[int, bytes], Held] = {}
        self._num_kept = 0

    def put(self, held: Held, count: int) -> tuple[int, Ints]:
        """Return the outline, and the rows, of what so many ranks hold."""
        outline, values = _apart(held)
        if outline not in self._numbers:
            self._numbers[outline] = len(self._outlines)
            self._outlines.append(outline)
            self._tables.append(_Table(len(values)))
        number = self._numbers[outline]
        rows = self._tables[number].added(values, count)
        self._keep((number, rows.tobytes()), held)
        return number, rows

    def taken(self, outline: int, rows: Ints) -> Held:
        """Return what ranks hold whose contents are these rows; of NOTHING any."""
        if outline == NOTHING:
            return _NOTHING
        key = outline, rows.tobytes()
        if key not in self._known:
            self._keep(key, _together(self._outlines[outline], self._tables[outline].numbers(rows)))
        return self._known[key]

    def _keep(self, key: tuple[int, bytes], held: Held) -> None:
        if self._num_kept >= _KEPT:
            self._known.clear()
            self._num_kept = 0
        self._known[key] = held
        self._num_kept += len(key[1]) // 8

    def is_full(self, outlines: Ints) -> bool:
        """Return whether contents of each of these outlines are known to fill their buffer."""
        return all(self._outlines[number][0] for number in np.unique(outlines).tolist())


class _Table:
    """Rows of as many numbers; more are added at its end."""

    def __init__(self, width: int) -> None:
        self._rows = np.empty((width, 64), np.int64)
        self._count = 0
        self._low = self._high = 0
        """Between these all numbers lie."""

    def added(self, values: Sequence[Number], count: int) -> Ints:
        """Return the numbers of so many new rows."""
        begin, end = self._count, self._count + count
        while end > self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)], axis=1)
        for column, value in zip(self._rows, values, strict=True):
            column[begin:end] = value.each if isinstance(value, Many) else value
        self._count, new = end, self._rows[:, begin:end]
        self._low, self._high = min(self._low, int(new.min(initial=0))), max(self._high, int(new.max(initial=0)))
        return np.arange(begin, end)

    def numbers(self, rows: Ints) -> list[Number]:
        """Return what stands in some rows, column by column."""
        found = self._rows[:, rows]
        alike = (found == found[:, :1]).all(axis=1).tolist()
        return [
            int(each[0]) if same else Many(each, self._low, self._high) for each, same in zip(found, alike, strict=True)
        ]


def _apart(held: Held) -> tuple[Outline, list[Number]]:
    """Return the outline of contents, and the positions in them; raises Unclassed where ranks differ in more."""
    parts: list[_Part] = []
    values: list[Number] = []
    for box, (tensor, layer, (batch, tokens, heads, features), seen) in held.pieces:
        spans, others = (tokens, *(a for a, _ in seen)), tuple([b for _, b in seen])
        values += [edge for start, stop, _ in spans for edge in (start, stop)]
        steps = tuple([step for _, _, step in spans])
        same = (*batch, *heads, *features, *steps, *(number for span in others for number in span))
        if not set(map(type, same)) <= {int}:
            raise Unclassed
        place = (batch, _NOWHERE, heads, features)
        parts.append(_Part(Piece(box, Content(tensor, layer, place)), steps, others))
    plain = [value for value in values if type(value) is int]
    if plain and not -ROOM < min(plain) <= max(plain) < ROOM:
        raise Unclassed
    return (held.complete, tuple(parts)), values


_NOWHERE = Span(0, 0)


def _together(outline: Outline, values: Sequence[Number]) -> Held:
    """Return contents by their outline and positions."""
    complete, parts = outline
    edges = iter(values)
    pieces = []
    for (box, content), steps, others in parts:
        tokens, *seen = [Span(next(edges), next(edges), step) for step in steps]  # type: ignore[arg-type]
        batch, _, heads, features = content.at
        at = (batch, tokens, heads, features)
        pieces.append(Piece(box, content._replace(at=at, seen=tuple(zip(seen, others, strict=True)))))
    return Held(tuple(pieces), complete)
