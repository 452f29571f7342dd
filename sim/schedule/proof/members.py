"""Contents of all members of a class of ranks as one: positions that differ from member to member.

Member u holds positions from ``a + by[u]`` on, where ``by`` is a table that begins with 0. Written down is
``a + n FAR``, with the number n of that table and an a far smaller than FAR. So two positions are equal just if they
are for every member, and what is added to one is added to those of all. What compares positions by order, multiplies
or divides them has to look at each member (``content_of_member``), or to refuse (``Unclassed``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

from sim.schedule.ir.masks import ONE, Span
from sim.schedule.proof.contents import FAR, Content, Piece, Seen, Unclassed, differs


def of_all(of_members: list[list[Piece]]) -> list[Piece]:
    """Return the pieces of all members as one; raises Unclassed where they differ in more than positions and in
    what they have seen.
    """
    first = of_members[0]
    if all(pieces is first or pieces == first for pieces in of_members[1:]):
        return first
    if len({len(pieces) for pieces in of_members}) > 1:
        raise Unclassed
    return [_piece(pieces) for pieces in zip(*of_members, strict=True)]


def of_member(pieces: list[Piece], member: int) -> list[Piece]:
    """Return what one member has of pieces of all; the same list where that is what all have."""
    found = [content_of_member(piece.content, member) for piece in pieces]
    if all(own is piece.content for own, piece in zip(found, pieces, strict=True)):
        return pieces
    return [Piece(piece.box, own) for own, piece in zip(found, pieces, strict=True)]


def of_each_member(piece: Piece, members: int) -> list[Piece]:
    """Return what each of so many members has of a piece that has seen nothing; raises Unclassed where it is one of
    more or fewer.
    """
    box, (tensor, layer, at, seen) = piece
    assert not seen
    if not differs(piece.content):
        return [piece] * members
    b, s, h, f = (_spans_of_members(span, members) for span in at)
    return [Piece(box, Content(tensor, layer, place)) for place in zip(b, s, h, f, strict=True)]


Moves = tuple[int, int, int, int]
"""By how much later a position of every axis is, of all members: a multiple of FAR, by the number of a table."""


def moving(of_members: list[list[Piece]]) -> tuple[list[Piece], list[Moves]] | None:
    """Return the pieces of the first of some lists, one for each member, and for each piece by how much later its
    positions are in all lists; None where they differ in more.

    Pieces may themselves be of all members of another class, as what its members send is: then they differ from list to
    list as much for each of these.
    """
    first, others = of_members[0], [pieces for pieces in of_members if pieces is not of_members[0]]
    if any(len(pieces) != len(first) for pieces in others):
        return None
    if not others:
        return first, [(0, 0, 0, 0)] * len(first)
    by: list[Moves] = []
    for at, (box, (tensor, layer, place, seen)) in enumerate(first):
        tables: list[list[int]] = [[] for _ in place]
        for pieces in of_members:
            other = pieces[at].content
            if pieces[at].box != box or other[:2] != (tensor, layer) or other.seen != seen:
                return None
            for table, here, there in zip(tables, place, other.at, strict=True):
                if here == there:  # most
                    table.append(0)
                    continue
                later = there.start - here.start
                if there.stop - here.stop != later or there.step != here.step or abs(later) > FAR // 2:
                    return None
                table.append(later)
        by.append(tuple(map(position, tables)))  # type: ignore[arg-type]
    return first, by


def moved(pieces: list[Piece], by: list[Moves]) -> list[Piece]:
    """Return pieces of one rank as those of all members, by what ``moving`` found."""
    return [_moved(piece, of) if any(of) else piece for piece, of in zip(pieces, by, strict=True)]


def _moved(piece: Piece, by: Moves) -> Piece:
    at = tuple([span.moved(later) for span, later in zip(piece.content.at, by, strict=True)])
    return Piece(piece.box, piece.content._replace(at=at))  # type: ignore[arg-type]


def _piece(pieces: tuple[Piece, ...]) -> Piece:
    contents = [piece.content for piece in pieces]
    first = contents[0]
    if any(
        piece.box != pieces[0].box or content[:2] != first[:2] for piece, content in zip(pieces, contents, strict=True)
    ):
        raise Unclassed
    at = [_span(spans) for spans in zip(*(content.at for content in contents), strict=True)]
    seen = seen_of_all(tuple([content.seen for content in contents]))
    return Piece(pieces[0].box, Content(first.tensor, first.layer, tuple(at), seen))  # type: ignore[arg-type]


_TABLES: list[tuple[int, ...] | tuple[Seen, ...]] = []
"""By how much positions are later of each member than of the first; none is of zeros. Or what each has seen, where one
has seen more than another.
"""
_NUMBERS: dict[tuple[int, ...] | tuple[Seen, ...], int] = {}
"""Of these, from 1 on."""
_LOCK = Lock()


def _number(table: tuple[int, ...] | tuple[Seen, ...]) -> int:
    with _LOCK:
        if table not in _NUMBERS:
            _TABLES.append(table)
            _NUMBERS[table] = len(_TABLES)
        return _NUMBERS[table]


def position(of_members: Sequence[int]) -> int:
    """Return positions of all members as one."""
    first = of_members[0]
    by = tuple([at - first for at in of_members])
    return first + _number(by) * FAR if any(by) else first


def _span(spans: tuple[Span, ...]) -> Span:
    """Return spans of all members as one; raises Unclassed where they differ in more than positions."""
    first = spans[0]
    size, step = first.stop - first.start, first.step
    if any(stop - start != size or by != step for start, stop, by in spans):
        raise Unclassed
    at = position([span.start for span in spans])
    return Span(at, at + size, step)


@lru_cache(maxsize=65536)
def seen_of_all(of_members: tuple[Seen, ...]) -> Seen:
    """Return what all members have seen as one: as one box that is nowhere where one has seen more than another."""
    if len({len(seen) for seen in of_members}) == 1:
        with contextlib.suppress(Unclassed):
            sides = [zip(*boxes, strict=True) for boxes in zip(*of_members, strict=True)]
            return tuple([(_span(a), _span(b)) for a, b in sides])
    return _nowhere(_number(of_members))


def _nowhere(number: int) -> Seen:
    """Return the box that stands for what members have seen by a table."""
    return ((Span(number * FAR, number * FAR + 1), ONE),)


@lru_cache(maxsize=65536)
def content_of_member(content: Content, member: int) -> Content:
    """Return what one member has of a content of all; the same where that is what all have."""
    if not differs(content):
        return content
    tensor, layer, at, seen = content
    place = tuple([span_of_member(span, member) for span in at])
    return Content(tensor, layer, place, _seen_by_member(seen, member, tensor))  # type: ignore[arg-type]


def _seen_by_member(seen: Seen, member: int, tensor: str) -> Seen:
    number = seen[0][0].start // FAR if len(seen) == 1 else 0
    if number and seen == _nowhere(number) and isinstance(own := _TABLES[number - 1][member], tuple):
        return own
    boxes = [(span_of_member(a, member), span_of_member(b, member)) for a, b in seen]
    return tuple(boxes if tensor == "probs" else sorted(boxes))  # keys of probs are in the order of memory


def span_of_member(span: Span, member: int) -> Span:
    """Return what one member has of a span of all."""
    number, start = divmod(span.start, FAR)
    return span.moved(_later(number, start)[member] - number * FAR) if number else span


def _spans_of_members(span: Span, members: int) -> list[Span]:
    """Return what each of so many members has of a span of all."""
    number, start = divmod(span.start, FAR)
    if number == 0:
        return [span] * members
    later, size, step = _later(number, start), span.stop - span.start, span.step
    if len(later) != members:
        raise Unclassed
    return [Span(start + by, start + by + size, step) for by in later]


def _later(number: int, start: int) -> tuple[int, ...]:
    """Return by how much positions are later of each member, by the number of their table; raises Unclassed where there
    is none.
    """
    table = _TABLES[number - 1] if 0 < number <= len(_TABLES) else ()
    if start >= FAR // 2 or not table or not isinstance(table[0], int):
        raise Unclassed
    return table
