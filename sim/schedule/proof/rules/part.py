"""What kernels of tokens make of parts of tensors: what they make of all, less what is not of these.

A part is some heads of q, k and v, or some features between the products of an MLP (``Tensor.divided``). Of a weight it
is columns or rows, of a bias its elements. A matrix product over heads or such features is a sum of a term for each.
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.model.block import norm_k, norm_q
from sim.schedule.model.scope import tensor_of, terms_of_each
from sim.schedule.proof.contents import (
    APART,
    FAR,
    FEATURES,
    HEADS,
    OF_GROUP,
    OF_GROUP_TOKENS,
    OF_VOCABULARY,
    TOKENS,
    Content,
    Interval,
    Piece,
    Seen,
    Unclassed,
    brief,
    common,
    replaced,
    spell,
    union,
)
from sim.words.workload import ModelSpec

OF_EACH_HEAD = {d(norm_q).name: "num_heads", d(norm_k).name: "num_kv_heads"}
"""Gradients of weights that are sums over heads, too: of how many, by name in the model."""


def num_apart(tensor: str, model: ModelSpec) -> int:
    """Return of how many heads the terms of a gradient are told apart: of a weight for all heads all of these, else the
    query heads of one key/value head.
    """
    if tensor in OF_EACH_HEAD:
        return int(getattr(model, OF_EACH_HEAD[tensor]))
    return model.num_heads // model.num_kv_heads


def has_all_heads(content: Content, model: ModelSpec, cells: int) -> bool:
    """Return whether what has terms of some heads, told apart, has those of all: of a weight of so many tokens of all
    sequences each.
    """
    of_weight = content.seen[-1][0].start < OF_GROUP
    wanted = num_apart(content.tensor, model) * (cells if of_weight else 1)
    seen = sum(tokens.size * batch.size for tokens, batch in content.seen)
    return content.seen[0][0].start >= (OF_GROUP_TOKENS if of_weight else OF_GROUP) and seen == wanted


class _Axis(NamedTuple):
    """Along which axis of a box a tensor is divided, into how many, and how many places each takes."""

    axis: int
    width: int
    into: int


class Part(NamedTuple):
    """Some heads or features of the operands of a kernel: where all operands have these, and which they are."""

    place: Interval
    which: Span
    terms: int = 1
    """How many terms a sum over them has for each: of key/value heads one for each query head."""

    def lifted(self, pieces: list[Piece], model: ModelSpec) -> list[Piece]:
        """Return an operand with this part alone as if it were all."""
        found = _axis_of(tensor_of(pieces[0].content.tensor, model), model)
        if found is None:
            return pieces
        axis, width, into = found
        low, high = (place * width for place in self.place)
        cut = [piece.clipped(replaced(piece.box, axis, (low, high))) for piece in pieces]
        return [_at(piece, axis, (0, into * width), Span(0, into * width)) for piece in cut if piece]

    def lowered(self, pieces: list[Piece], model: ModelSpec) -> list[Piece]:
        """Return a result of all as one of this part: its own part, or its terms of them."""
        tensor = tensor_of(pieces[0].content.tensor, model)
        found = _axis_of(tensor, model)
        if found is not None:
            axis, width, _ = found
            low, high = (place * width for place in self.place)
            span = Span(self.which.start * width, self.which.stop * width)
            return [_at(piece, axis, (low, high), span) for piece in pieces]
        if tensor.name in OF_EACH_HEAD:
            return [piece._replace(content=piece.content._replace(seen=self._of_each(piece))) for piece in pieces]
        if tensor.of_weight:
            raise ScheduleError(f"{tensor.name} of parts {spell(self.which)}, where all of them are needed")
        return [piece._replace(content=piece.content._replace(seen=self._terms(piece))) for piece in pieces]

    def _of_each(self, piece: Piece) -> Seen:
        """Return the tokens of each of these heads that the gradient of a weight for all heads is a sum over."""
        return tuple(
            [
                (tokens.moved(OF_GROUP_TOKENS + head * APART), batch)
                for head in range(*self.which)
                for tokens, batch in piece.content.seen
            ]
        )

    def of_vocabulary(self, pieces: list[Piece]) -> list[Piece]:
        """Return a result of all of the vocabulary as a sum of a term for each of these rows or logits."""
        rows = self.which.moved(OF_VOCABULARY)
        return [piece._replace(content=piece.content._replace(seen=((rows, ONE),))) for piece in pieces]

    def _terms(self, piece: Piece) -> tuple[tuple[Span, Span], ...]:
        if not piece.content.seen:
            raise ScheduleError(f"{brief(piece.content)} of parts {spell(self.which)} is no sum: all are needed")
        ((terms, _),) = piece.content.seen
        first, last = self.which.start * self.terms, self.which.stop * self.terms
        return ((Span(terms.start + first, terms.start + last), ONE),)


def parts_of(operands: list[list[Piece]], model: ModelSpec) -> list[Part]:
    """Return the parts that the operands of a kernel have, cut so that each operand has neighbouring ones; empty where
    all have all. Raises ScheduleError where operands have different parts.
    """
    tensors = [tensor_of(pieces[0].content.tensor, model) for pieces in operands]
    edges: set[int] = set()
    terms = max(terms_of_each(tensor, model) for tensor in tensors)
    known: list[tuple[Interval, Interval]] = []
    whole = True
    for tensor, pieces in zip(tensors, operands, strict=True):
        found = _axis_of(tensor, model)
        if found is None:
            continue
        axis, width, into = found
        for piece in pieces:
            (low, high), span = piece.box[axis], piece.content.at[axis]
            if span.stop > FAR // 2:
                raise Unclassed
            bounds = (low, high, span.start, span.stop)
            if span.step != 1 or any(bound % width for bound in bounds):
                return []
            low, high, start, stop = (bound // width for bound in bounds)
            whole = whole and (low, high, start, stop) == (0, into, 0, into)
            edges |= {low, high}
            known.append(((low, high), (start, stop)))
    if whole:
        return []
    parts = []
    for low, high in pairwise(sorted(edges)):
        which = {
            (start + low - begin, start + high - begin) for (begin, end), (start, _) in known if begin <= low < end
        }
        if len(which) > 1:
            spelled = " and ".join(spell(Span(*one)) for one in sorted(which))
            raise ScheduleError(f"parts {spelled} of {', '.join(tensor.name for tensor in tensors)} meet")
        parts += [Part((low, high), Span(*one), terms) for one in which]
    return parts


def joined(of_parts: list[list[Piece]], model: ModelSpec) -> list[Piece]:
    """Return a result of all parts: side by side, or summed up."""
    if _axis_of(tensor_of(of_parts[0][0].content.tensor, model), model):
        return [piece for pieces in of_parts for piece in pieces]
    return reduce(_summed, of_parts)


def _summed(a: list[Piece], b: list[Piece]) -> list[Piece]:
    return [x._replace(content=union(x.content, y.content)) for x, y in common(a, b)]


def _axis_of(tensor: Tensor, model: ModelSpec) -> _Axis | None:
    """Return where in a box a tensor is divided."""
    divided = tensor.divided(model)
    if divided is None:
        return None
    inner = (TOKENS, FEATURES)[divided.axis] if tensor.of_weight else FEATURES
    return _Axis(HEADS if tensor.heads(model) else inner, divided.width, divided.into)


def _at(piece: Piece, axis: int, place: Interval, span: Span) -> Piece:
    """Return a piece elsewhere along an axis, with another part there."""
    at = piece.content.at
    return Piece(
        replaced(piece.box, axis, place),
        piece.content._replace(at=(*at[:axis], span, *at[axis + 1 :])),  # type: ignore[arg-type]
    )
