"""What the kernels of a layer make of abstract contents: each token by itself, weights' gradients summed."""

from __future__ import annotations

from typing import NamedTuple

from sim.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span, Tokens
from sim.schedule.ir.ops import Gemm, Rope, TokenKernel
from sim.schedule.model.equations import EQUATIONS, heads_of, is_weight_gradient, weight_shapes
from sim.schedule.proof.attention_rules import AttentionRules
from sim.schedule.proof.contents import Content, Piece, brief, meet, spell, union
from sim.workload import ModelSpec


class TokenRules(NamedTuple):
    """How a layer's kernels combine contents, by the table of equations."""

    model: ModelSpec
    attention: AttentionRules

    def apply(self, kind: str, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return the pieces of each result; raises ScheduleError where the operands make no equation of the layer, or
        are different tokens.
        """
        weights = {
            i: self._weight(pieces) for i, pieces in enumerate(operands) if pieces[0].content.tensor in self._weights
        }
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

    @property
    def _weights(self) -> dict[str, tuple[int, ...]]:
        return weight_shapes(self.model)

    def _weight(self, pieces: list[Piece]) -> Piece:
        """Return a weight as one piece; raises where it is not all of its rows in their order."""
        piece, rows = pieces[0], self._weights[pieces[0].content.tensor][0]
        if len(pieces) > 1 or piece.s != (0, rows) or piece.content.tokens != Span(0, rows):
            raise ScheduleError(f"{brief(piece.content)} where all {rows} rows in their order are needed")
        return piece

    def _rows(self, pieces: list[Piece]) -> list[Piece]:
        """Return pieces of whole tokens: all heads of a tensor that has heads, in their order, as one."""
        rows = []
        for piece in pieces:
            heads = heads_of(piece.content.tensor, self.model)
            if heads is not None and (piece.content.heads != Span(0, heads) or piece.h != (0, heads)):
                raise ScheduleError(f"{brief(piece.content)} where all {heads} heads in their order are needed")
            if not self.attention.complete(piece.content):
                raise ScheduleError(f"{brief(piece.content)} is not complete yet")
            rows.append(Piece(piece.b, piece.s, (0, 1), piece.content._replace(heads=ONE, seen=())))
        return rows

    def _combined(self, kind: str, operands: list[Piece]) -> list[list[Piece]]:
        """Return the results of one kernel on the same tokens of each operand."""
        base = min(piece.content.layer for piece in operands)
        names = [piece.content.tensor + "+" * (piece.content.layer - base) for piece in operands]
        results = EQUATIONS.get((kind, *names))
        if results is None:
            spelled = ", ".join(f"{piece.content.tensor} of layer {piece.content.layer}" for piece in operands)
            raise ScheduleError(f"{kind} of {spelled} is no equation of the layer")
        tokens = [piece for piece in operands if piece.content.tensor not in self._weights]
        first = tokens[0]
        for piece in tokens:
            if piece.content[2:4] != first.content[2:4]:
                raise ScheduleError(f"{kind} of {brief(first.content)} with other tokens, {brief(piece.content)}")
        return [[self._result(name, base, first)] for name in results]

    def _result(self, name: str, base: int, tokens: Piece) -> Piece:
        """Return one result of tokens: a tensor of the same tokens, or their part in the gradient of a weight."""
        content = tokens.content
        if is_weight_gradient(name):
            rows = self._weights[name.removeprefix("d")][0]
            batches = Span(content.batch, content.batch + tokens.b[1] - tokens.b[0])
            seen = ((content.tokens, batches),)
            return Piece((0, 1), (0, rows), (0, 1), Content(name, base, 0, Span(0, rows), ONE, seen))
        heads = heads_of(name, self.model) or 1
        layer = base + name.count("+")
        made = Content(name.removesuffix("+"), layer, content.batch, content.tokens, Span(0, heads))
        return Piece(tokens.b, tokens.s, (0, heads), made)

    def _joined(self, a: list[Piece], b: list[Piece]) -> list[Piece]:
        """Return a result of more tokens: side by side, or summed up where it is a weight's gradient."""
        if is_weight_gradient(a[0].content.tensor):
            return [a[0]._replace(content=union(a[0].content, b[0].content))]
        return a + b


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
            shared = meet(piece.s, (at, at + span.size))
            if shared is None:
                continue
            begin, end = shared
            has = piece.content.tokens.part(begin - piece.s[0], end - piece.s[0])
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
                clipped = piece.clipped(group[0].b, group[0].s, group[0].h)
                if clipped is not None:
                    cut = [one.clipped(clipped.b, clipped.s, clipped.h) for one in group]
                    wider.append((*(one for one in cut if one is not None), clipped))
        found = wider
    return found
