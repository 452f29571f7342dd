"""What lies in a buffer, abstractly: which tokens and heads of which tensor, and what has been summed into them.

``check`` plays a schedule on these contents instead of numbers. A ``Piece`` is a box of a view with one ``Content``;
operands are lists of pieces, so packing, slicing and gathering need no rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from sim.errors import ScheduleError
from sim.schedule.ir.masks import Span

ZERO = "zero"
"""The tensor of zeros, to which any part of any gradient can be added."""

Seen = tuple[tuple[Span, Span], ...]
"""Disjoint boxes (tokens, heads) of the other side that have been summed up: keys for out, lse and dq (heads are then
ONE); queries for dk and dv, with the query heads numbered within the group of their key/value head; tokens and
sequences of the batch for the gradient of a weight."""


class Content(NamedTuple):
    """Some tokens and heads of one global tensor of one layer; of a weight (or its gradient) rows instead of tokens."""

    tensor: str
    layer: int
    batch: int
    tokens: Span
    heads: Span
    seen: Seen = ()


class Piece(NamedTuple):
    """A box of a view (batch, tokens, heads; each start and stop) and what lies in it."""

    b: tuple[int, int]
    s: tuple[int, int]
    h: tuple[int, int]
    content: Content

    def clipped(self, b: tuple[int, int], s: tuple[int, int], h: tuple[int, int]) -> Piece | None:
        """Return the part of this piece inside a box, None if there is none."""
        if _inside(self.b, b) and _inside(self.s, s) and _inside(self.h, h):
            return self
        nb, ns, nh = meet(self.b, b), meet(self.s, s), meet(self.h, h)
        if nb is None or ns is None or nh is None:
            return None
        c = self.content
        tokens = c.tokens if ns == self.s else c.tokens.part(ns[0] - self.s[0], ns[1] - self.s[0])
        heads = c.heads if nh == self.h else c.heads.part(nh[0] - self.h[0], nh[1] - self.h[0])
        return Piece(nb, ns, nh, Content(c.tensor, c.layer, c.batch + nb[0] - self.b[0], tokens, heads, c.seen))

    def moved(self, b: int, s: int, h: int) -> Piece:
        """Return the same content at another place."""
        if not (b or s or h):
            return self
        (b0, b1), (s0, s1), (h0, h1), content = self
        return Piece((b0 + b, b1 + b), (s0 + s, s1 + s), (h0 + h, h1 + h), content)

    @property
    def volume(self) -> int:
        """Number of (sequence, token, head) cells."""
        return (self.b[1] - self.b[0]) * (self.s[1] - self.s[0]) * (self.h[1] - self.h[0])


def _inside(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return b[0] <= a[0] and a[1] <= b[1]


def meet(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    """Return what two intervals share, None if nothing."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def without(piece: Piece, b: tuple[int, int], s: tuple[int, int], h: tuple[int, int]) -> list[Piece]:
    """Return what is left of a piece outside a box, in pieces."""
    left: list[Piece | None] = []
    (b0, b1), (s0, s1), (h0, h1) = piece.b, piece.s, piece.h
    cb, cs = (max(b0, b[0]), min(b1, b[1])), (max(s0, s[0]), min(s1, s[1]))
    if cb[0] >= cb[1] or cs[0] >= cs[1] or meet(piece.h, h) is None:
        return [piece]
    left += [piece.clipped((b0, cb[0]), piece.s, piece.h), piece.clipped((cb[1], b1), piece.s, piece.h)]
    left += [piece.clipped(cb, (s0, cs[0]), piece.h), piece.clipped(cb, (cs[1], s1), piece.h)]
    left += [piece.clipped(cb, cs, (h0, max(h0, h[0]))), piece.clipped(cb, cs, (min(h1, h[1]), h1))]
    return [part for part in left if part is not None]


def coalesced(pieces: list[Piece]) -> list[Piece]:
    """Return the same contents in fewer pieces: neighbours along tokens, then along heads, that continue each other."""
    if len(pieces) == 1:
        return pieces
    joined: list[Piece] = []
    for piece in sorted(pieces, key=itemgetter(0, 2, 1)):
        if joined and joined[-1].b == piece.b and joined[-1].h == piece.h and joined[-1].s[1] == piece.s[0]:
            last, new = joined[-1].content, piece.content
            tokens = _continued(last.tokens, new.tokens)
            if tokens and last[:3] == new[:3] and last[4:] == new[4:]:
                content = Content(*new[:3], tokens, *new[4:])
                joined[-1] = Piece(piece.b, (joined[-1].s[0], piece.s[1]), piece.h, content)
                continue
        joined.append(piece)
    wide: list[Piece] = []
    for piece in sorted(joined, key=itemgetter(0, 1, 2)):
        if wide and wide[-1].b == piece.b and wide[-1].s == piece.s and wide[-1].h[1] == piece.h[0]:
            last, new = wide[-1].content, piece.content
            heads = _continued(last.heads, new.heads)
            if heads and last[:4] == new[:4] and last.seen == new.seen:
                wide[-1] = Piece(piece.b, piece.s, (wide[-1].h[0], piece.h[1]), Content(*new[:4], heads, new.seen))
                continue
        wide.append(piece)
    return wide


def _continued(a: Span, b: Span) -> Span | None:
    """Return a followed by b as one span, None if b does not continue a."""
    return Span(a.start, b.stop, a.step) if a.step == b.step and a.stop == b.start else None


def common(a: list[Piece], b: list[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Yield the parts of two operands that lie at the same place."""
    if len(a) == len(b) == 1 and a[0][:3] == b[0][:3]:
        yield a[0], b[0]
        return
    for x in a:
        for y in b:
            left, right = x.clipped(y.b, y.s, y.h), y.clipped(x.b, x.s, x.h)
            if left is not None and right is not None:
                yield left, right


def union(a: Content, b: Content) -> Content:
    """Return the sum of two partial results for the same tokens and heads; raises if anything would count twice."""
    if a.tensor == ZERO:
        return b
    if b.tensor == ZERO:
        return a
    if a[:5] != b[:5]:
        raise ScheduleError(f"cannot add {brief(b)} to {brief(a)}: they are different parts of the global tensors")
    for box in b.seen:
        for other in a.seen:
            if _overlap(box[0], other[0]) and _overlap(box[1], other[1]):
                raise ScheduleError(f"{brief(a)} would count tokens {spell(box[0])} twice")
    return Content(*a[:5], _merged(a.seen, b.seen))


def _overlap(a: Span, b: Span) -> bool:
    """Return whether two spans share a position."""
    if a.start >= b.stop or b.start >= a.stop:
        return False
    if a.step == 1 or b.step == 1:
        wide, fine = (a, b) if a.step == 1 else (b, a)
        first = fine.start + max(0, -(-(wide.start - fine.start) // fine.step)) * fine.step
        return first < min(fine.stop, wide.stop)
    if a.step == b.step:
        return (a.start - b.start) % a.step == 0
    return not set(range(*a)).isdisjoint(range(*b))


def _merged(a: Seen, b: Seen) -> Seen:
    """Return the boxes of both, neighbours joined."""
    if not a:
        return b
    boxes = list(a)
    for box in b:
        new = box
        joined = True
        while joined:
            joined = False
            for other in boxes:
                wide = _joined(other, new) or _joined(new, other)
                if wide:
                    boxes.remove(other)
                    new, joined = wide, True
                    break
        boxes.append(new)
    return tuple(sorted(boxes))


def _joined(a: tuple[Span, Span], b: tuple[Span, Span]) -> tuple[Span, Span] | None:
    if a[1] == b[1]:
        tokens = _continued(a[0], b[0])
        return (tokens, a[1]) if tokens else None
    if a[0] == b[0]:
        heads = _continued(a[1], b[1])
        return (a[0], heads) if heads else None
    return None


def brief(content: Content) -> str:
    """Return how errors name a content."""
    return f"{content.tensor}[tokens {spell(content.tokens)}, heads {spell(content.heads)}]"


def spell(span: Span) -> str:
    """Return how errors write a span."""
    return f"{span.start}..{span.stop}" + (f" by {span.step}" if span.step != 1 else "")
