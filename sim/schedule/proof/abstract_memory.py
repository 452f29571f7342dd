"""What the buffers of one rank hold while a schedule is played on abstract contents."""

from __future__ import annotations

import math
from functools import lru_cache

from sim.errors import ScheduleError
from sim.schedule.ir.masks import Span
from sim.schedule.ir.program import Port, Program
from sim.schedule.ir.views import Buffer, Split, View
from sim.schedule.proof.attention_rules import AttentionRules
from sim.schedule.proof.contents import ZERO, Content, Piece, brief, coalesced, without

_AXES = {"b": 0, "s": 1, "i": 1, "h": 2}
"""Which of (batch, tokens, heads) a dimension is."""


class Held:
    """The contents of all buffers of one rank. Most views are whole buffers, so those take a short way."""

    def __init__(self, program: Program, rules: AttentionRules) -> None:
        self._buffers = program.buffers
        self._whole = [tuple((0, extent) for extent in buffer.shape) for buffer in program.buffers]
        self._volume = [_volume(buffer, buffer.shape) for buffer in program.buffers]
        self._pieces: list[list[Piece]] = [[] for _ in program.buffers]
        self._full = [False] * len(program.buffers)
        for port in program.inputs:
            pieces = port_pieces(port, program)
            self.write(port.view, [piece._replace(content=rules.completed(piece.content)) for piece in pieces])

    def read(self, view: View) -> list[Piece]:
        """Return the pieces of a view, in its own coordinates; raises where part of it was never written."""
        number, slices = view.buffer, view.slices
        if self._full[number] and slices == self._whole[number]:
            return self._pieces[number]
        b, s, h = _box(self._buffers[number], slices)
        found = [piece.clipped(b, s, h) for piece in self._pieces[number]]
        pieces = [piece.moved(-b[0], -s[0], -h[0]) for piece in found if piece is not None]
        if sum([piece.volume for piece in pieces]) != (b[1] - b[0]) * (s[1] - s[0]) * (h[1] - h[0]):
            raise ScheduleError(f"reads {slices} of buffer {self._buffers[number].name!r} before all of it is written")
        return coalesced(pieces)

    def read_parts(self, split: Split) -> list[list[Piece]]:
        """Return the pieces of each part, in its own coordinates."""
        axis = self._axis(split)
        size = split.part_shape[split.dim]
        parts: list[list[Piece]] = [[] for _ in range(split.parts)]
        for piece in self.read(split.view):
            low, high = piece[:3][axis]
            for number in range(low // size, -(-high // size)):
                start = number * size
                bounds = [piece.b, piece.s, piece.h]
                bounds[axis] = (start, start + size)
                part = piece.clipped(*bounds)
                assert part is not None
                parts[number].append(part.moved(*_along(axis, -start)))
        return parts

    def write_parts(self, split: Split, parts: list[list[Piece]]) -> None:
        """Put pieces, in the coordinates of each part, in place of what was there."""
        axis, size = self._axis(split), split.part_shape[split.dim]
        moved: list[Piece] = []
        for number, pieces in enumerate(parts):
            by = _along(axis, number * size)
            moved += [piece.moved(*by) for piece in pieces]
        self.write(split.view, moved)

    def _axis(self, split: Split) -> int:
        """Return which of (batch, tokens, heads) a split cuts; raises where it cuts another dimension."""
        buffer = self._buffers[split.view.buffer]
        dim = buffer.dims[split.dim]
        if dim not in _AXES:
            raise ScheduleError(f"a split cuts dimension {dim!r} of buffer {buffer.name!r}; splits cut b, s, i and h")
        return _AXES[dim]

    def zero(self, view: View) -> None:
        """Put zeros in place of what was there."""
        b, s, h = _box(self._buffers[view.buffer], view.slices)
        tokens, heads = Span(0, s[1] - s[0]), Span(0, h[1] - h[0])
        content = Content(ZERO, 0, 0, tokens, heads)
        self.write(view, [Piece((0, b[1] - b[0]), (0, tokens.size), (0, heads.size), content)])

    def write(self, view: View, pieces: list[Piece]) -> None:
        """Put pieces, in the view's coordinates, in place of what was there; raises where they do not fill the view."""
        number, buffer = view.buffer, self._buffers[view.buffer]
        whole = view.slices == self._whole[number]
        cells = self._volume[number] if whole else _volume(buffer, view.shape)
        if cells != (pieces[0].volume if len(pieces) == 1 else sum([piece.volume for piece in pieces])):
            raise ScheduleError(f"writes {brief(pieces[0].content)} to buffer {buffer.name!r} of dims {buffer.dims!r}")
        if whole:
            self._pieces[number] = coalesced(pieces)
            self._full[number] = True
            return
        b, s, h = _box(buffer, view.slices)
        kept = [part for piece in self._pieces[number] for part in without(piece, b, s, h)]
        self._pieces[number] = kept + [piece.moved(b[0], s[0], h[0]) for piece in pieces]
        self._full[number] = False


def _along(axis: int, by: int) -> tuple[int, int, int]:
    """Return a move along one of (batch, tokens, heads)."""
    return (by if axis == 0 else 0, by if axis == 1 else 0, by if axis == 2 else 0)


def _volume(buffer: Buffer, shape: tuple[int, ...]) -> int:
    """Return the number of (sequence, token, head) cells of a view of this shape."""
    return math.prod([extent for dim, extent in zip(buffer.dims, shape, strict=True) if dim in _AXES])


@lru_cache(maxsize=65536)
def _box(
    buffer: Buffer, slices: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the batch, token and head bounds of a view; raises where it cuts through another dimension."""
    bounds = dict(zip(buffer.dims, slices, strict=True))
    for dim, extent in zip(buffer.dims, buffer.shape, strict=True):
        if dim not in "bsih" and bounds[dim] != (0, extent):
            raise ScheduleError(f"a view cuts dimension {dim!r} of buffer {buffer.name!r}; views cut b, s, i and h")
    return bounds.get("b", (0, 1)), bounds["s" if "s" in bounds else "i"], bounds.get("h", (0, 1))


def port_pieces(port: Port, program: Program) -> list[Piece]:
    """Return what a port says that its view holds, in the view's coordinates."""
    dims = program.buffers[port.view.buffer].dims
    batch = port.view.shape[0] if dims.startswith("b") else 1
    pieces, at = [], 0
    for span in port.tokens:
        content = Content(port.tensor, port.layer, 0, span, port.heads)
        pieces.append(Piece((0, batch), (at, at + span.size), (0, port.heads.size), content))
        at += span.size
    return pieces
