"""What the kernels of a layer make of abstract contents: each token by itself, weights' gradients summed."""

from __future__ import annotations

from typing import NamedTuple

from sim.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span, Tokens
from sim.schedule.ir.ops import Gemm, Rope, TokenKernel
from sim.schedule.model.equations import EQUATIONS, heads_of, is_weight_gradient, weight_shapes, width_of
from sim.schedule.proof.attention_rules import AttentionRules
from sim.schedule.proof.contents import HEADS, TOKENS, Box, Content, Piece, Place, brief, meet, spell, union
from sim.workload import ModelSpec


class TokenRules(NamedTuple):
    """How a layer's kernels combine contents, by the table of equations."""

    model: ModelSpec
    attention: AttentionRules

    def apply(self, kind: str, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return the pieces of each result; raises ScheduleError where the operands make no equation of the layer, or
        are different tokens.
        """
        weights = {i: self._whole(pieces) for i, pieces in enumerate(operands) if self._is_weight(pieces[0])}
        tokens = [self._rows(pieces) for i, pieces in enumerate(operands) if i not in weights]
        if not tokens:
            raise ScheduleError(f"{kind} of weights alone is no equation of the layer")
        results: list[list[Piece]] | None = None
        for group in _aligned(tokens):
            rest = iter(group)
            found = self._combined(kind, [weights[i] if i in weights else next(rest) for i in range(len(operands))])
            results = found if results is None else [self._joined(a, b) for a, b in zip(results, found, strict=True)]
        assert results is not None
        return results

    def _is_weight(self, piece: Piece) -> bool:
        return piece.content.tensor in weight_shapes(self.model)

    def _whole(self, pieces: list[Piece]) -> Piece:
        """Return the one piece of a weight, all of which is needed."""
        if len(pieces) > 1 or pieces[0].content.at != whole_weight(pieces[0].content.tensor, self.model):
            raise ScheduleError(f"{brief(pieces[0].content)} where all of the weight is needed")
        return pieces[0]

    def _rows(self, pieces: list[Piece]) -> list[Piece]:
        """Return pieces of whole tokens: all heads and features of a tensor, in their order, as one."""
        rows = []
        for piece in pieces:
            batch, tokens, *inner = piece.content.at
            wanted = row_of(piece.content.tensor, self.model)
            if tuple(inner) != wanted or piece.box[HEADS:] != tuple((0, span.size) for span in wanted):
                heads, width = (span.size for span in wanted)
                raise ScheduleError(
                    f"{brief(piece.content)} where all {heads} heads in their order and {width} features are needed"
                )
            if not self.attention.complete(piece.content):
                raise ScheduleError(f"{brief(piece.content)} is not complete yet")
            b, s, *_ = piece.box
            rows.append(Piece((b, s, (0, 1), (0, 1)), piece.content._replace(at=(batch, tokens, ONE, ONE), seen=())))
        return rows

    def _combined(self, kind: str, operands: list[Piece]) -> list[list[Piece]]:
        """Return the results of one kernel on the same tokens of each operand."""
        base = min(piece.content.layer for piece in operands)
        names = [piece.content.tensor + "+" * (piece.content.layer - base) for piece in operands]
        results = EQUATIONS.get((kind, *names))
        if results is None:
            spelled = ", ".join(f"{piece.content.tensor} of layer {piece.content.layer}" for piece in operands)
            raise ScheduleError(f"{kind} of {spelled} is no equation of the layer")
        tokens = [piece for piece in operands if not self._is_weight(piece)]
        first = tokens[0]
        for piece in tokens:
            if piece.content.at != first.content.at:
                raise ScheduleError(f"{kind} of {brief(first.content)} with other tokens, {brief(piece.content)}")
        return [[self._result(name, base, first)] for name in results]

    def _result(self, name: str, base: int, tokens: Piece) -> Piece:
        """Return one result of tokens: a tensor of the same tokens, or their part in the gradient of a weight."""
        batch, rows, *_ = tokens.content.at
        if is_weight_gradient(name):
            at = whole_weight(name.removeprefix("d"), self.model)
            return Piece(box_of(at), Content(name, base, at, ((rows, batch),)))
        layer, name = base + name.count("+"), name.removesuffix("+")
        inner = row_of(name, self.model)
        b, s, *_ = tokens.box
        heads, width = inner
        return Piece((b, s, (0, heads.size), (0, width.size)), Content(name, layer, (batch, rows, *inner)))

    def _joined(self, a: list[Piece], b: list[Piece]) -> list[Piece]:
        """Return a result of more tokens: side by side, or summed up where it is a weight's gradient."""
        if is_weight_gradient(a[0].content.tensor):
            return [a[0]._replace(content=union(a[0].content, b[0].content))]
        return a + b


def row_of(tensor: str, model: ModelSpec) -> tuple[Span, Span]:
    """Return all heads and features of one token of a tensor."""
    return Span(0, heads_of(tensor, model) or 1), Span(0, width_of(tensor, model))


def whole_weight(tensor: str, model: ModelSpec) -> Place:
    """Return all of a weight: its rows and columns."""
    rows, *columns = weight_shapes(model)[tensor]
    return ONE, Span(0, rows), ONE, Span(0, *columns) if columns else ONE


def box_of(at: Place) -> Box:
    """Return the box that holds all of a place from its beginning."""
    b, s, h, f = at
    return (0, b.size), (0, s.size), (0, h.size), (0, f.size)


def kind_of(op: TokenKernel) -> str:
    """Return how the table of equations names a kernel."""
    if isinstance(op, Gemm):
        return f"Gemm {op.form}" + (" accumulate" if op.accumulate else "")
    if isinstance(op, Rope) and op.inverse:
        return "Rope inverse"
    return type(op).__name__


def check_positions(pieces: list[Piece], tokens: Tokens) -> None:
    """Raise where a rotary embedding turns tokens by other positions than theirs."""
    at = 0
    for span in tokens:
        for piece in pieces:
            own = piece.box[TOKENS]
            shared = meet(own, (at, at + span.size))
            if shared is None:
                continue
            begin, end = shared
            has = piece.content.tokens.part(begin - own[0], end - own[0])
            if has != span.part(begin - at, end - at):
                raise ScheduleError(f"{brief(piece.content)} is rotated by positions {spell(span)}")
        at += span.size


def _aligned(operands: list[list[Piece]]) -> list[tuple[Piece, ...]]:
    """Return what lies at the same place in every operand."""
    found: list[tuple[Piece, ...]] = [(piece,) for piece in operands[0]]
    for pieces in operands[1:]:
        wider = []
        for group in found:
            for piece in pieces:
                clipped = piece.clipped(group[0].box)
                if clipped is not None:
                    cut = [one.clipped(clipped.box) for one in group]
                    wider.append((*(one for one in cut if one is not None), clipped))
        found = wider
    return found
