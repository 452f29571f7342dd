"""What the buffers of one rank hold while a schedule is played on abstract contents."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.masks import Span
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import Buffer, Slices, Split, View
from sim.schedule.proof.contents import (
    AXIS_OF,
    FEATURES,
    TOKENS,
    ZERO,
    Box,
    Content,
    Piece,
    brief,
    coalesced,
    replaced,
    volume,
    without,
)
from sim.schedule.proof.rules.attention import AttentionRules

_CUT = ", ".join(AXIS_OF)


class Held(NamedTuple):
    """What a buffer holds."""

    pieces: tuple[Piece, ...]
    complete: bool
    """Whether they are known to fill it."""


class AbstractMemory:
    """The contents of all buffers of one rank. Most views are whole buffers, so those take a short way."""

    def __init__(self, program: Program, rules: AttentionRules) -> None:
        self.program = program
        self._buffers = program.buffers
        self._whole = [tuple([(0, extent) for extent in buffer.shape]) for buffer in program.buffers]
        self._box = [_box(buffer, whole) for buffer, whole in zip(program.buffers, self._whole, strict=True)]
        self._pieces: list[list[Piece]] = [[] for _ in program.buffers]
        """Coalesced."""
        self._full = [False] * len(program.buffers)
        self._read: list[dict[Slices, list[Piece]]] = [{} for _ in program.buffers]
        """What was read of parts since they were written."""
        for port in program.inputs:
            self.write(port.view, given_pieces(port, program, rules))

    def hold(self, number: int, held: Held) -> None:
        """Put contents in place of what a buffer held."""
        self._put(number, list(held.pieces), full=held.complete)

    def held(self) -> list[Held]:
        """Return what every buffer holds."""
        return [Held(tuple(pieces), full) for pieces, full in zip(self._pieces, self._full, strict=True)]

    def read(self, view: View) -> list[Piece]:
        """Return the pieces of a view, in its own coordinates; raises where part of it was never written."""
        number, slices = view.buffer, view.slices
        if self._full[number] and slices == self._whole[number]:
            return self._pieces[number]
        known = self._read[number]
        if slices not in known:
            known[slices] = self._found(number, slices)
        return known[slices]

    def _found(self, number: int, slices: Slices) -> list[Piece]:
        box = _box(self._buffers[number], slices)
        back = tuple([-start for start, _ in box])
        for piece in self._pieces[number]:
            if piece.box == box:  # most; pieces share nothing
                return [piece.moved(back)]  # type: ignore[arg-type]
        found = [piece.clipped(box) for piece in self._pieces[number]]
        pieces = [piece.moved(back) for piece in found if piece is not None]  # type: ignore[arg-type]
        if sum([volume(piece.box) for piece in pieces]) != volume(box):
            raise ScheduleError(f"reads {slices} of buffer {self._buffers[number].name!r} before all of it is written")
        return coalesced(pieces)

    def read_parts(self, split: Split) -> list[list[Piece]]:
        """Return the pieces of each part, in its own coordinates."""
        return self.parts_of(split, self.read(split.view))

    def parts_of(self, split: Split, pieces: list[Piece]) -> list[list[Piece]]:
        """Return pieces of the view that is split by its parts, in the coordinates of each."""
        return _cut(pieces, self._axis(split), split.starts)

    def copy_parts(self, source: Split, target: Split, order: Sequence[int]) -> None:
        """Put parts of a view, by their numbers in an order, in place of those of another one."""
        places = ((self._axis(split), tuple(split.starts)) for split in (source, target))
        self.write(target.view, [*_in_order(tuple(self.read(source.view)), *places, tuple(order))])

    def write_parts(self, split: Split, parts: list[list[Piece]]) -> None:
        """Put pieces, in the coordinates of each part, in place of what was there."""
        self.write(split.view, self.side_by_side(split, parts))

    def side_by_side(self, split: Split, parts: list[list[Piece]]) -> list[Piece]:
        """Return pieces, in the coordinates of each part, in those of the view that is split."""
        return _joined(parts, self._axis(split), split.starts)

    def _axis(self, split: Split) -> int:
        """Return which axis a split cuts; raises where it cuts a dimension that is along none."""
        buffer = self._buffers[split.view.buffer]
        dim = buffer.dims[split.dim]
        if dim not in AXIS_OF:
            raise ScheduleError(f"a split cuts dimension {dim!r} of buffer {buffer.name!r}; splits cut {_CUT}")
        return AXIS_OF[dim]

    def zero(self, view: View) -> None:
        """Put zeros in place of what was there."""
        extents = [stop - start for start, stop in _box(self._buffers[view.buffer], view.slices)]
        b, s, h, f = (Span(0, extent) for extent in extents)
        self.write(view, [Piece(((0, b.stop), (0, s.stop), (0, h.stop), (0, f.stop)), Content(ZERO, 0, (b, s, h, f)))])

    def write(self, view: View, pieces: list[Piece]) -> None:
        """Put pieces, in the view's coordinates, in place of what was there; raises where they do not fill the view."""
        number, buffer = view.buffer, self._buffers[view.buffer]
        whole = view.slices == self._whole[number]
        if whole and len(pieces) == 1 and pieces[0].box == self._box[number]:
            self._put(number, pieces, full=True)
            return
        box = self._box[number] if whole else _box(buffer, view.slices)
        if not whole and len(pieces) == 1 and self._replaced(number, box, pieces[0]):
            return
        if not _fill(tuple([piece.box for piece in pieces]), box):
            raise ScheduleError(
                f"writes {brief(pieces[0].content)} to buffer {buffer.name!r} of dims {buffer.dims!r} and shape "
                f"{buffer.shape}"
            )
        if whole:
            self._put(number, coalesced(pieces), full=True)
            return
        by = tuple([start for start, _ in box])
        kept = [part for piece in self._pieces[number] for part in without(piece, box)]
        written = coalesced(kept + [piece.moved(by) for piece in pieces])  # type: ignore[arg-type]
        full = self._full[number] or sum([volume(piece.box) for piece in written]) == volume(self._box[number])
        self._put(number, written, full=full)

    def _replaced(self, number: int, box: Box, piece: Piece) -> bool:
        """Put a piece in place of the one that has filled a box, if one has: what else there is stays where it is."""
        held = self._pieces[number]
        for at, other in enumerate(held):
            if other.box == box:
                moved = piece.moved(tuple([start for start, _ in box]))  # type: ignore[arg-type]
                if moved.box != box:
                    return False
                self._put(number, coalesced([*held[:at], moved, *held[at + 1 :]]), full=self._full[number])
                return True
        return False

    def copy(self, target: View, other: AbstractMemory, source: View) -> None:
        """Put what a view of another memory, or of this one, holds in place of what was there."""
        number, of_other = target.buffer, source.buffer
        alike = self._box[number] == other._box[of_other] and other._full[of_other]
        if alike and target.slices == self._whole[number] and source.slices == other._whole[of_other]:
            self._put(number, other._pieces[of_other], full=True)
        else:
            self.write(target, other.read(source))

    def _put(self, number: int, pieces: list[Piece], *, full: bool) -> None:
        self._pieces[number], self._full[number] = pieces, full
        if self._read[number]:
            self._read[number] = {}


def _cut(pieces: Iterable[Piece], axis: int, starts: Sequence[int]) -> list[list[Piece]]:
    """Return pieces by the parts that begin along an axis, in the coordinates of each; the last start is the end."""
    parts: list[list[Piece]] = [[] for _ in starts[1:]]
    for piece in pieces:
        low, high = piece.box[axis]
        for number in range(bisect_right(starts, low) - 1, bisect_left(starts, high)):
            start, stop = starts[number], starts[number + 1]
            parts[number].append(piece.between(axis, start, stop, -start))
    return parts


def _joined(parts: Iterable[list[Piece]], axis: int, starts: Sequence[int]) -> list[Piece]:
    """Return pieces, in the coordinates of each part, side by side along an axis."""
    return [piece.along(axis, start) for start, pieces in zip(starts, parts, strict=False) for piece in pieces]


@lru_cache(maxsize=256)
def _in_order(
    pieces: tuple[Piece, ...],
    cut: tuple[int, tuple[int, ...]],
    put: tuple[int, tuple[int, ...]],
    order: tuple[int, ...],
) -> list[Piece]:
    """Return pieces, of parts that begin along an axis, in another order along another one. Ranks that gather the same
    put it into the same order.
    """
    parts = _cut(pieces, *cut)
    return coalesced(_joined([parts[part] for part in order], *put))


@lru_cache(maxsize=4096)
def _fill(boxes: tuple[Box, ...], box: Box) -> bool:
    """Return whether boxes that share nothing, in coordinates of another one, are all of that."""
    extents = [stop - start for start, stop in box]
    inside = all(low >= 0 and high <= extent for one in boxes for (low, high), extent in zip(one, extents, strict=True))
    return inside and sum(map(volume, boxes)) == volume(box)


@lru_cache(maxsize=65536)
def _box(buffer: Buffer, slices: Slices) -> Box:
    """Return the bounds of a view along every axis; raises where it cuts through another dimension."""
    box = [(0, 1)] * 4
    for dim, bounds, extent in zip(buffer.dims, slices, buffer.shape, strict=True):
        if dim in AXIS_OF:
            box[AXIS_OF[dim]] = bounds
        elif bounds != (0, extent):
            raise ScheduleError(f"a view cuts dimension {dim!r} of buffer {buffer.name!r}; views cut {_CUT}")
    return tuple(box)  # type: ignore[return-value]


def given_pieces(port: Port, program: Program, rules: AttentionRules) -> list[Piece]:
    """Return what the view of an input holds when the program starts, in the view's coordinates."""
    return [piece._replace(content=rules.completed(piece.content)) for piece in port_pieces(port, program, rules)]


def port_pieces(port: Port, program: Program, rules: AttentionRules) -> list[Piece]:
    """Return what a port says that its view holds, in the view's coordinates; on all ranks that its one stands for."""
    buffer = program.buffers[port.view.buffer]
    box = _box(buffer, tuple((0, extent) for extent in port.view.shape))
    features = port.features or Span(*box[FEATURES])
    moves = "b" not in buffer.dims and program.rank not in rules.alone
    later = rules.rows_later.get(port.tensor, 0) if moves else 0
    pieces, at = [], 0
    for span in port.tokens:
        part = replaced(box, TOKENS, (at, at + span.size))
        pieces.append(
            Piece(part, Content(port.tensor, port.layer, (port.batch, span.moved(later), port.heads, features)))
        )
        at += span.size
    return pieces
