"""Abstract contents of a buffer: which part of which tensor, and what has been summed into it.

``check`` plays a schedule on these contents instead of numbers. A ``Piece`` is a box of a view with one ``Content``;
operands are lists of pieces, so packing, slicing and gathering need no rules of their own. Boxes and contents have the
same named axes: batch, tokens (of a weight its rows), heads, features (of a weight its columns).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import Span

ZERO = "zero"
"""The tensor of zeros, to which any part of any gradient can be added."""

BATCH, TOKENS, HEADS, FEATURES = range(4)
"""The axes, in the order of boxes and contents."""
AXIS_OF = {"b": BATCH, "s": TOKENS, "i": TOKENS, "h": HEADS, "e": FEATURES, "o": FEATURES}
"""Which axis a dimension of a buffer is along; others are never cut."""

FAR = 1 << 64
"""The number of the member of a class of ranks that stands for all of them, see ``members``."""


_STOP = attrgetter("stop")


OF_VOCABULARY = 1 << 60
"""Behind which rows of an embedding, or logits, are numbered where a tensor is a sum of a term for each of them."""

OF_GROUP = 1 << 59
"""Behind which query heads of a key/value head's group are numbered where a gradient has the terms of some of them."""
OF_GROUP_TOKENS, APART = 1 << 58, 1 << 40
"""Behind which tokens are numbered that a gradient of a weight of keys or values is a sum over, where it has the terms
of some query heads; and how far apart those of different ones are."""


class Unclassed(Exception):  # noqa: N818 - nothing went wrong
    """Ranks cannot be proved as one class: each has to be by itself."""


Interval = tuple[int, int]
Box = tuple[Interval, Interval, Interval, Interval]
"""Start and stop along every axis."""
Place = tuple[Span, Span, Span, Span]
"""Positions in the global tensor along every axis."""

Seen = tuple[tuple[Span, Span], ...]
"""Disjoint boxes (tokens, heads) of the other side that have been summed up: keys for out, lse and dq (heads are then
ONE); queries for dk and dv, with the query heads numbered within the group of their key/value head; tokens and
sequences of the batch for the gradient of a weight."""


class Content(NamedTuple):
    """Some part of one global tensor of one layer."""

    tensor: str
    layer: int
    at: Place
    seen: Seen = ()

    @property
    def batch(self) -> Span:
        """Sequences of the global batch."""
        return self.at[BATCH]

    @property
    def tokens(self) -> Span:
        """Tokens; of a weight rows."""
        return self.at[TOKENS]

    @property
    def heads(self) -> Span:
        """Heads, ONE where there are none."""
        return self.at[HEADS]


class Piece(NamedTuple):
    """A box of a view, and its contents."""

    box: Box
    content: Content

    def clipped(self, box: Box) -> Piece | None:
        """Return the part of this piece inside a box, None if there is none."""
        own, content = self
        (b0, b1), (s0, s1), (h0, h1), (f0, f1) = own
        (b2, b3), (s2, s3), (h2, h3), (f2, f3) = box
        if b2 <= b0 and b1 <= b3 and s2 <= s0 and s1 <= s3 and h2 <= h0 and h1 <= h3 and f2 <= f0 and f1 <= f3:
            return self  # most
        if b0 >= b3 or b2 >= b1 or s0 >= s3 or s2 >= s1 or h0 >= h3 or h2 >= h1 or f0 >= f3 or f2 >= f1:
            return None
        bounds, place = [], []
        for (start, stop), (low, high), span in zip(own, box, content.at, strict=True):
            begin, end = max(low, start), min(high, stop)
            bounds.append((begin, end))
            place.append(span.part(begin - start, end - start))
        return Piece(tuple(bounds), Content(content.tensor, content.layer, tuple(place), content.seen))  # type: ignore[arg-type]

    def between(self, axis: int, low: int, high: int, by: int) -> Piece:
        """Return the part of this piece between two bounds along one axis, which it has a share of, so much later."""
        box, (tensor, layer, at, seen) = self
        start, stop = box[axis]
        begin, end = max(low, start), min(high, stop)
        if begin == start and end == stop:
            return self.along(axis, by)
        place = (*at[:axis], at[axis].part(begin - start, end - start), *at[axis + 1 :])
        return Piece(replaced(box, axis, (begin + by, end + by)), Content(tensor, layer, place, seen))  # type: ignore[arg-type]

    def along(self, axis: int, by: int) -> Piece:
        """Return the same content so much later along one axis."""
        start, stop = self.box[axis]
        return Piece(replaced(self.box, axis, (start + by, stop + by)), self.content) if by else self

    def moved(self, by: tuple[int, int, int, int]) -> Piece:
        """Return the same content at another place."""
        if not any(by):
            return self
        (b0, b1), (s0, s1), (h0, h1), (f0, f1) = self.box
        b, s, h, f = by
        return Piece(((b0 + b, b1 + b), (s0 + s, s1 + s), (h0 + h, h1 + h), (f0 + f, f1 + f)), self.content)


def differs(content: Content) -> bool:
    """Return whether a content differs from member to member of a class of ranks."""
    _, _, at, seen = content
    return max(map(_STOP, at)) > FAR // 2 or any(max(a.stop, b.stop) > FAR // 2 for a, b in seen)


def is_of_vocabulary(content: Content) -> bool:
    """Return whether a content is a sum of terms of rows of an embedding, or of logits, alone."""
    return bool(content.seen) and OF_VOCABULARY <= content.seen[0][0].start < FAR // 2


def last_seen(content: Content) -> int:
    """Return where the last box begins that has been summed up; -1 where there is none, or that differs from member to
    member of a class of ranks.
    """
    start = content.seen[-1][0].start if content.seen else -1
    return start if start < FAR // 2 else -1


def volume(box: Box) -> int:
    """Return the number of cells of a box."""
    (b0, b1), (s0, s1), (h0, h1), (f0, f1) = box
    return (b1 - b0) * (s1 - s0) * (h1 - h0) * (f1 - f0)


def replaced(box: Box, axis: int, interval: Interval) -> Box:
    """Return a box with another extent along one axis."""
    return (*box[:axis], interval, *box[axis + 1 :])  # type: ignore[return-value]


def meet(a: Interval, b: Interval) -> Interval | None:
    """Return what two intervals share, None if nothing."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def without(piece: Piece, box: Box) -> list[Piece]:
    """Return what is left of a piece outside a box, in pieces."""
    inside = piece.clipped(box)
    if inside is None:
        return [piece]
    if inside is piece:
        return []
    left: list[Piece | None] = []
    rest = piece.box
    for axis, (low, high) in enumerate(box):
        start, stop = rest[axis]
        if start < low:
            left.append(piece.clipped(replaced(rest, axis, (start, low))))
        if high < stop:
            left.append(piece.clipped(replaced(rest, axis, (high, stop))))
        rest = replaced(rest, axis, (max(start, low), min(stop, high)))
    return [part for part in left if part is not None]


def coalesced(pieces: list[Piece]) -> list[Piece]:
    """Return the same contents in fewer pieces: neighbours along an axis that continue each other."""
    for axis in (BATCH, TOKENS, HEADS, FEATURES):
        if len(pieces) < 2:
            return pieces
        if len({piece.box[axis] for piece in pieces}) == 1:  # nothing continues along it
            continue
        joined: list[Piece] = []
        in_order = sorted(pieces, key=lambda piece: (*piece.box[:axis], *piece.box[axis + 1 :], piece.box[axis]))
        first = last = in_order[0]
        for piece in in_order[1:]:
            if not _continues(last, piece, axis):
                joined.append(_together(first, last, axis))
                first = piece
            last = piece
        pieces = [*joined, _together(first, last, axis)]
    return pieces


def _continues(a: Piece, b: Piece, axis: int) -> bool:
    """Return whether the second piece continues the first along an axis."""
    (box, (tensor, layer, at, seen)), (next_box, (next_tensor, next_layer, next_at, next_seen)) = a, b
    if box[axis][1] != next_box[axis][0] or tensor != next_tensor or layer != next_layer or seen != next_seen:
        return False
    (_, stop, step), (start, _, next_step), behind = at[axis], next_at[axis], axis + 1
    if step != next_step or stop != start or at[:axis] != next_at[:axis] or at[behind:] != next_at[behind:]:
        return False
    return box[:axis] == next_box[:axis] and box[behind:] == next_box[behind:]


def _together(first: Piece, last: Piece, axis: int) -> Piece:
    """Return pieces that continue each other along an axis, from the first to the last one, as one."""
    if first is last:
        return first
    (box, (tensor, layer, at, seen)), (last_box, last_content) = first, last
    span = Span(at[axis].start, last_content.at[axis].stop, at[axis].step)
    place = (*at[:axis], span, *at[axis + 1 :])
    return Piece(replaced(box, axis, (box[axis][0], last_box[axis][1])), Content(tensor, layer, place, seen))  # type: ignore[arg-type]


def _continued(a: Span, b: Span) -> Span | None:
    """Return a followed by b as one span, None if b does not continue a."""
    return Span(a.start, b.stop, a.step) if a.step == b.step and a.stop == b.start else None


def common(a: list[Piece], b: list[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Return the parts of two operands that lie at the same place."""
    if [box for box, _ in a] == [box for box, _ in b]:  # most; pieces of one operand share nothing
        return zip(a, b, strict=True)
    return _crossing(a, b)


def _crossing(a: list[Piece], b: list[Piece]) -> Iterator[tuple[Piece, Piece]]:
    for x in a:
        for y in b:
            left, right = x.clipped(y.box), y.clipped(x.box)
            if left is not None and right is not None:
                yield left, right


def union(a: Content, b: Content) -> Content:
    """Return the sum of two partial results for the same part of a tensor; raises if anything would count twice."""
    if a.tensor == ZERO:
        return b
    if b.tensor == ZERO:
        return a
    if a[:3] != b[:3]:
        raise ScheduleError(f"cannot add {brief(b)} to {brief(a)}: they are different parts of the global tensors")
    seen, twice = _added(a.seen, b.seen)
    if twice:
        raise _counts_twice(a, twice)
    return Content(a.tensor, a.layer, a.at, seen)


def seeing(content: Content, tokens: Span, heads: Span) -> Content:
    """Return a content with one more box summed up; raises if it would count twice."""
    seen, twice = _added(content.seen, ((tokens, heads),))
    if twice:
        raise _counts_twice(content, twice)
    return Content(content.tensor, content.layer, content.at, seen)


def _counts_twice(content: Content, tokens: Span) -> ScheduleError:
    return ScheduleError(f"{brief(content)} would count tokens {spell(tokens)} twice")


@lru_cache(maxsize=65536)
def _added(a: Seen, b: Seen) -> tuple[Seen, Span | None]:
    """Return the boxes of both, and the tokens of a box that would count twice, None if none would."""
    for box in b:
        for other in a:
            if _overlap(box[0], other[0]) and _overlap(box[1], other[1]):
                return a, box[0]
    return _merged(a, b), None


def _overlap(a: Span, b: Span) -> bool:
    """Return whether two spans share a position; raises Unclassed where that depends on the member of a class."""
    if abs(a.start - b.start) > FAR // 2:
        raise Unclassed
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
