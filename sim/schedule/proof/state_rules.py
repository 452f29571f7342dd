"""What kernels of weights and of an optimiser make of abstract contents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, assert_never

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.ops import AdamW, HostAdamW, Pack, SquareSum, StateKernel, Unpack
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.model.ends import w_embed
from sim.schedule.model.scope import BY_NAME, ROOT, Unit, tensor_of, trained, unit_kinds, updated
from sim.schedule.proof.attention_rules import AttentionRules
from sim.schedule.proof.contents import (
    TOKENS,
    ZERO,
    Box,
    Content,
    Piece,
    Unclassed,
    brief,
    coalesced,
    differs,
    replaced,
    union,
    volume,
)
from sim.schedule.proof.token_rules import behind
from sim.words.workload import ModelSpec, Workload


class StateRules(NamedTuple):
    """How a workload's weights, their gradients and moments are packed, summed up and updated."""

    workload: Workload
    attention: AttentionRules

    def apply(self, op: StateKernel | HostAdamW, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return the pieces of each result; raises ScheduleError where operands do not belong together."""
        if isinstance(op, Unpack):
            return self._unpacked(_only(operands[0]))
        if isinstance(op, Pack):
            return [self._packed([_only(pieces) for pieces in operands])]
        if isinstance(op, SquareSum):
            return [self._square(operands[0])]
        if isinstance(op, AdamW):
            return self._updated(operands)
        if isinstance(op, HostAdamW):
            return self._updated_by_host(operands)[: None if op.cast else -1]
        assert_never(op)

    @property
    def _model(self) -> ModelSpec:
        return self.workload.model

    def _unpacked(self, piece: Piece) -> list[list[Piece]]:
        """Return the weights that a flat tensor consists of."""
        content, flat = piece.content, tensor_of(piece.content.tensor, self._model)
        if content.tensor not in _FLAT_WEIGHTS or piece.content.tokens != _rows(flat, self._model):
            raise ScheduleError(f"unpacks {brief(content)}: all elements of a unit's weights are needed")
        return [[_whole(part, self._model, content.layer)] for part in flat.parts]

    def _packed(self, pieces: list[Piece]) -> list[Piece]:
        """Return a flat gradient of those of a unit's weights, in their order: one piece, or of a unit that has weights
        of both ends of the model one for each of these. One stage of a pipeline may have none of the latter, but zeros.
        """
        layer = next((piece.content.layer for piece in pieces if piece.content.tensor != ZERO), 0)
        for unit in unit_kinds(self._model):
            parts = [_whole(part, self._model, layer) for part in d(unit.flat).parts]
            same = [_is_of(part, piece, zeros=unit == ROOT) for part, piece in zip(parts, pieces, strict=False)]
            if not unit.frozen and len(parts) == len(pieces) and all(same):
                break
        else:
            spelled = ", ".join(brief(piece.content) for piece in pieces)
            raise ScheduleError(
                f"packs {spelled}: these are not the gradients of a layer, or of an end, in their order"
            )
        flat = _whole(d(unit.flat), self._model, layer)
        seen, *others = [piece.content.seen for piece in pieces]
        if unit == ROOT:
            return self._in_parts(flat, pieces)
        if any(other != seen for other in others):
            raise ScheduleError("packs gradients that are sums over different tokens")
        return [flat._replace(content=flat.content._replace(seen=seen))]

    def _in_parts(self, flat: Piece, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces of a flat gradient, each of which keeps what it is a sum over."""
        found, stop = [], 0
        for piece in pieces:
            start, stop = stop, stop + volume(piece.box)
            part = flat.clipped(replaced(flat.box, TOKENS, (start, stop)))
            assert part is not None
            is_zero = piece.content.tensor == ZERO
            content = piece.content if is_zero else part.content._replace(seen=piece.content.seen)
            found.append(part._replace(content=content))
        return found

    def _complete(self, content: Content) -> bool:
        """Return whether a flat gradient is one of all tokens: of a weight at both ends of those of each, see
        ``TokenRules``.
        """
        if content.tensor != d(ROOT.flat).name:
            return self.attention.complete(content)
        if differs(content):
            raise Unclassed
        of_table, later = math.prod(w_embed.shape(self._model)), behind(self.workload.seq)
        ends = [content.seen]
        if content.tokens.start < of_table:
            head = tuple([(tokens.moved(-later), batch) for tokens, batch in content.seen if tokens.start >= later])
            ends = [head, tuple([box for box in content.seen if box[0].start < later])]
        one_weight = content.tokens.stop <= of_table or content.tokens.start >= of_table
        return one_weight and all(self.attention.complete(content._replace(seen=seen)) for seen in ends)

    def _square(self, pieces: list[Piece]) -> list[Piece]:
        """Return the sum of squares of some rows of a flat gradient."""
        square: Content | None = None
        for piece in pieces:
            content = piece.content
            unit = _unit(content, self._model)
            if content.tensor != d(unit.flat).name or not self._complete(content):
                raise ScheduleError(f"squares {brief(content)}, which is no flat gradient or not complete yet")
            part = Content(unit.square.name, content.layer, (ONE, ONE, ONE, ONE), ((content.tokens, ONE),))
            square = part if square is None else union(square, part)
        assert square is not None
        return [Piece(((0, 1), (0, 1), (0, 1), (0, 1)), square)]

    def _updated(self, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return weights and moments after a step of the optimiser."""
        own, gradients, *moments, squares = operands
        weights, first, second = (_only(pieces) for pieces in (own, *moments))
        gradient = _joined(gradients)
        unit = _unit(weights.content, self._model)
        named = (unit.flat, d(unit.flat), *unit.moments)
        for tensor, piece in zip(named, (weights, gradient, first, second), strict=True):
            if piece.content[:3] != (tensor.name, *weights.content[1:3]):
                raise ScheduleError(f"updates {brief(weights.content)} with {brief(piece.content)}")
        for piece in gradients:
            if not self._complete(piece.content):
                raise ScheduleError(f"updates with {brief(piece.content)}, which is not complete yet")
        if any(differs(piece.content) for piece in squares):
            raise Unclassed
        _check_norm(self.workload, tuple([piece.content for piece in squares]))
        return [
            [_named(piece, updated(tensor).name)]
            for tensor, piece in zip(unit.states, (weights, first, second), strict=True)
        ]

    def _updated_by_host(self, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return the same, with the gradient, which is none any more, and the new weights as passes use them, where
        these are others.
        """
        weights, *moments = self._updated(operands)
        working = updated(_unit(_only(operands[0]).content, self._model).working).name
        gradient = _joined(operands[1])
        scaled = _named(gradient, f"scaled {gradient.content.tensor}")
        return [weights, [scaled], *moments, [_named(_only(weights), working)]]


_FLAT_WEIGHTS = {one.name for unit in BY_NAME for flat in (unit.flat, unit.working) for one in (flat, updated(flat))}


@lru_cache(maxsize=16)
def _squares(workload: Workload) -> dict[tuple[str, int], int]:
    """Return how many elements the sums of squares of a step are of, by name and layer, in order."""
    found = {(unit.square.name, unit.layer): _rows(unit.flat, workload.model).size for unit in trained(workload)}
    return dict(sorted(found.items()))


@lru_cache(maxsize=64)
def _check_norm(workload: Workload, squares: tuple[Content, ...]) -> None:
    """Raise where squares are not those of all gradients, each once and complete; layers count from any."""
    first = min(square.layer for square in squares)
    found = sorted((square.tensor, square.layer - first) for square in squares)
    wanted = _squares(workload)
    if found != list(wanted):
        lacking = sorted(wanted.keys() - set(found)) or [("none", 0)]
        raise ScheduleError(f"updates by a norm that lacks {lacking[0][0]} of layer {lacking[0][1]}, or has others")
    for square in squares:
        if sum(rows.size for rows, _ in square.seen) != wanted[square.tensor, square.layer - first]:
            raise ScheduleError(f"updates by a norm in which {square.tensor} lacks elements")


def _unit(content: Content, model: ModelSpec) -> Unit:
    """Return the kind of unit that a content is of."""
    for unit in unit_kinds(model):
        if content.tensor in {unit.flat.name, d(unit.flat).name}:
            return unit
    raise ScheduleError(f"{brief(content)} where the weights of a layer or of an end, or their gradient, are needed")


def _only(pieces: Sequence[Piece]) -> Piece:
    """Return the one piece of an operand."""
    if len(pieces) > 1:
        raise ScheduleError(f"{', '.join(brief(piece.content) for piece in pieces)} where one tensor is needed")
    return pieces[0]


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Return a gradient as one piece, whatever its parts are sums over."""
    return _only(coalesced([piece._replace(content=piece.content._replace(seen=())) for piece in pieces]))


def _is_of(part: Piece, given: Piece, *, zeros: bool) -> bool:
    """Return whether a gradient is that of a weight, or may be zeros in its place."""
    if given.content.tensor == ZERO:
        return zeros and given.box == part.box
    return given.content._replace(seen=()) == part.content


def _named(piece: Piece, tensor: str) -> Piece:
    """Return the same part of another tensor."""
    return piece._replace(content=piece.content._replace(tensor=tensor))


def _rows(tensor: Tensor, model: ModelSpec) -> Span:
    (rows,) = tensor.rows(model)
    return rows


@lru_cache(maxsize=4096)
def _whole(tensor: Tensor, model: ModelSpec, layer: int) -> Piece:
    """Return all of a weight or of its gradient, of a layer."""
    rows, columns = _rows(tensor, model), Span(0, tensor.features(model))
    box: Box = ((0, 1), (0, rows.size), (0, 1), (0, columns.size))
    return Piece(box, Content(tensor.name, layer, (ONE, rows, ONE, columns)))
