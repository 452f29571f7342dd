"""What kernels of tokens make of some heads of q, k and v: what they make of all, less what is not of these.

Heads of tokens are columns of the weight that makes them. A matrix product over heads is a sum of a term for each.
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.scope import tensor_of
from sim.schedule.proof.contents import (
    FAR,
    FEATURES,
    HEADS,
    TOKENS,
    Interval,
    Piece,
    Unclassed,
    common,
    replaced,
    spell,
    union,
)
from sim.words.workload import ModelSpec


class _Axis(NamedTuple):
    """Along which axis the heads of a tensor lie, and how many places each takes."""

    axis: int
    width: int
    heads: int


class Heads(NamedTuple):
    """Some heads of the operands of a kernel: where all of them have these, and which they are."""

    place: Interval
    heads: Span

    def lifted(self, pieces: list[Piece], model: ModelSpec) -> list[Piece]:
        """Return an operand with these heads alone as if they were all."""
        found = axis_of(tensor_of(pieces[0].content.tensor, model), model)
        if found is None:
            return pieces
        axis, width, count = found
        low, high = (place * width for place in self.place)
        cut = [piece.clipped(replaced(piece.box, axis, (low, high))) for piece in pieces]
        return [_at(piece, axis, (0, count * width), Span(0, count * width)) for piece in cut if piece]

    def lowered(self, pieces: list[Piece], model: ModelSpec) -> list[Piece]:
        """Return a result of all heads as one of these: its part of them, or its terms of them."""
        tensor = tensor_of(pieces[0].content.tensor, model)
        found = axis_of(tensor, model)
        if found is not None:
            axis, width, _ = found
            low, high = (place * width for place in self.place)
            span = Span(self.heads.start * width, self.heads.stop * width)
            return [_at(piece, axis, (low, high), span) for piece in pieces]
        if tensor.of_weight:
            raise ScheduleError(f"{tensor.name} of heads {spell(self.heads)}, where all of them are needed")
        return [piece._replace(content=piece.content._replace(seen=self._terms(piece))) for piece in pieces]

    def _terms(self, piece: Piece) -> tuple[tuple[Span, Span], ...]:
        ((terms, _),) = piece.content.seen
        return ((Span(terms.start + self.heads.start, terms.start + self.heads.stop), ONE),)


def parts_by_heads(operands: list[list[Piece]], model: ModelSpec) -> list[Heads]:
    """Return the heads that the operands of a kernel have, cut so that each operand has neighbouring ones; empty where
    all have all, or where heads are rows of a weight. Raises ScheduleError where operands have other heads.
    """
    tensors = [tensor_of(pieces[0].content.tensor, model) for pieces in operands]
    if any(tensor.of_weight and len(tensor.axes) > 1 and tensor.axes[0] in _OF_HEADS for tensor in tensors):
        return []
    edges: set[int] = set()
    known: list[tuple[Interval, Interval]] = []
    whole = True
    for tensor, pieces in zip(tensors, operands, strict=True):
        found = axis_of(tensor, model)
        if found is None:
            continue
        axis, width, count = found
        for piece in pieces:
            (low, high), span = piece.box[axis], piece.content.at[axis]
            if span.stop > FAR // 2:
                raise Unclassed
            bounds = (low, high, span.start, span.stop)
            if span.step != 1 or any(bound % width for bound in bounds):
                return []
            low, high, start, stop = (bound // width for bound in bounds)
            whole = whole and (low, high, start, stop) == (0, count, 0, count)
            edges |= {low, high}
            known.append(((low, high), (start, stop)))
    if whole:
        return []
    parts = []
    for low, high in pairwise(sorted(edges)):
        heads = {
            (start + low - begin, start + high - begin) for (begin, end), (start, _) in known if begin <= low < end
        }
        if len(heads) > 1:
            spelled = " and ".join(spell(Span(*one)) for one in sorted(heads))
            raise ScheduleError(f"heads {spelled} of {', '.join(tensor.name for tensor in tensors)} meet")
        parts += [Heads((low, high), Span(*one)) for one in heads]
    return parts


def joined(of_parts: list[list[Piece]], model: ModelSpec) -> list[Piece]:
    """Return a result of all parts: heads side by side, sums over heads summed up."""
    if axis_of(tensor_of(of_parts[0][0].content.tensor, model), model):
        return [piece for pieces in of_parts for piece in pieces]
    return reduce(_summed, of_parts)


def _summed(a: list[Piece], b: list[Piece]) -> list[Piece]:
    return [x._replace(content=union(x.content, y.content)) for x, y in common(a, b)]


_OF_HEADS = ("heads", "kv_heads")


def axis_of(tensor: Tensor, model: ModelSpec) -> _Axis | None:
    """Return where a tensor has heads: a weight, or its gradient, as columns; a bias as its elements."""
    count = tensor.heads(model)
    if count is not None:
        return _Axis(HEADS, 1, count)
    if tensor.of_weight and tensor.axes and tensor.axes[-1] in _OF_HEADS:
        axis = FEATURES if len(tensor.axes) == 2 else TOKENS
        return _Axis(axis, model.head_dim, tensor.shape(model)[-1] // model.head_dim)
    return None


def _at(piece: Piece, axis: int, place: Interval, span: Span) -> Piece:
    """Return a piece elsewhere along an axis, with other heads there."""
    at = piece.content.at
    return Piece(
        replaced(piece.box, axis, place),
        piece.content._replace(at=(*at[:axis], span, *at[axis + 1 :])),  # type: ignore[arg-type]
    )
