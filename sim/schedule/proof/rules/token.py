"""What kernels of tokens make of abstract contents: each token by itself, weights' gradients summed."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Mask, Span, Tokens, restarted
from sim.schedule.ir.ops import (
    Accumulate,
    BiasedGemm,
    EagerGeGlu,
    EagerGeGluBackward,
    EagerHeadNorm,
    EagerHeadNormBackward,
    EagerSwiGlu,
    EagerSwiGluBackward,
    Embed,
    EmbedBackward,
    ExpSum,
    GeGlu,
    GeGluBackward,
    Gelu,
    GeluBackward,
    Gemm,
    HeadNorm,
    HeadNormBackward,
    LargestLogit,
    LogitLoss,
    Op,
    Rope,
    Scale,
    SwiGlu,
    SwiGluBackward,
    TokenKernel,
    TokenSum,
)
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.model.ends import w_embed
from sim.schedule.model.scope import ROOT, equations, is_sum, kind_of, tensor_of, terms_of
from sim.schedule.proof.contents import HEADS, TOKENS, Content, Piece, Seen, brief, meet, spell, union
from sim.schedule.proof.rules.attention import AttentionRules
from sim.schedule.proof.rules.group import as_of_all, as_of_some, heads_of
from sim.schedule.proof.rules.part import Part, joined, parts_of
from sim.words.workload import ModelSpec


def _key(kind: type[Op], variant: tuple[object, ...], operands: list[tuple[str, int]]) -> tuple[object, ...]:
    """Return what tells an equation from others: its kernel and its operands, by name and layers after the first."""
    base = min(layer for _, layer in operands)
    return kind, variant, *((name, layer - base) for name, layer in operands)


@lru_cache(maxsize=256)
def _numbers(model: ModelSpec) -> dict[tuple[object, ...], int]:
    """Return the place of each equation of a model among all."""
    return {
        _key(one.kind, one.variant, [(tensor.name, tensor.layer) for tensor in one.operands]): number
        for number, one in enumerate(equations(model))
    }


_IN_PARTS = (
    *(Gemm, BiasedGemm, TokenSum, Rope, Scale, Accumulate),
    *(SwiGlu, SwiGluBackward, GeGlu, GeGluBackward, Gelu, GeluBackward),
    *(EagerSwiGlu, EagerSwiGluBackward, EagerGeGlu, EagerGeGluBackward),
    *(HeadNorm, HeadNormBackward, EagerHeadNorm, EagerHeadNormBackward),
    *(Embed, LargestLogit, ExpSum, LogitLoss),
)
"""Kernels that make of some heads, features of an MLP or the vocabulary what they make of these among all."""
_OF_VOCABULARY = (Embed, EmbedBackward, LargestLogit, ExpSum, LogitLoss)
"""Those of them that are of rows of an embedding, or of logits."""
_AT_ENDS = {weight.name for weight in ROOT.weights}
_GRADIENTS_AT_ENDS = {d(weight).name for weight in ROOT.weights}


class TokenRules(NamedTuple):
    """How kernels of tokens combine contents, by the table of equations."""

    model: ModelSpec
    attention: AttentionRules

    def apply(self, op: TokenKernel | Accumulate, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return the pieces of each result; raises ScheduleError where the operands make no equation of the model, or
        are different tokens.
        """
        if some := heads_of(op, operands, self.attention):
            at, heads = some
            of_all = [*operands[:at], as_of_all(operands[at], self.attention), *operands[at + 1 :]]
            return [as_of_some(pieces, heads, self.attention) for pieces in self.apply(op, of_all)]
        parts = parts_of(operands, self.model) if isinstance(op, _IN_PARTS) else []
        if isinstance(op, EmbedBackward) and op.first is not UNSET:
            rows = op.dtable.shape[0]
            parts = [Part((0, rows), Span(op.first, op.first + rows))]
        if not parts and getattr(op, "first", UNSET) not in {UNSET, 0}:
            raise ScheduleError(f"{type(op).__name__} of all of the vocabulary begins at {getattr(op, 'first', 0)}")
        if parts:
            of_parts = [self._of_part(op, operands, part) for part in parts]
            return [joined(list(of_part), self.model) for of_part in zip(*of_parts, strict=True)]
        weights = {i: self._whole(pieces) for i, pieces in enumerate(operands) if _is_weight(pieces[0])}
        tokens = [self._rows(pieces) for i, pieces in enumerate(operands) if i not in weights]
        if not tokens:
            raise ScheduleError(f"{type(op).__name__} of weights alone is no equation of the layer")
        results: list[list[Piece]] | None = None
        for group in _aligned(tokens):
            rest = iter(group)
            found = self._combined(op, [weights[i] if i in weights else next(rest) for i in range(len(operands))])
            results = found if results is None else [_joined(a, b) for a, b in zip(results, found, strict=True)]
        assert results is not None
        return results

    def _of_part(self, op: TokenKernel | Accumulate, operands: list[list[Piece]], part: Part) -> list[list[Piece]]:
        """Return the pieces of each result that come from one part; of an embedding and a cross-entropy of some of the
        vocabulary sums of a term for each row or logit, but for the loss, which takes these sums of all.
        """
        first = getattr(op, "first", UNSET)
        if isinstance(op, _OF_VOCABULARY) and first is not UNSET and first != part.which.start:
            raise ScheduleError(f"{type(op).__name__} begins at {first} with {spell(part.which)} of the vocabulary")
        of_all = UNSET if isinstance(op, Embed | EmbedBackward) else 0
        whole = op if first is UNSET else msgspec.structs.replace(op, first=of_all)
        made = self.apply(whole, [part.lifted(pieces, self.model) for pieces in operands])
        if isinstance(op, Embed) and first is UNSET:
            raise ScheduleError(f"Embed of {spell(part.which)} of the vocabulary does not say where these begin")
        if isinstance(op, LogitLoss):
            gradient, loss = made
            return [part.lowered(gradient, self.model), loss]
        of_rows = isinstance(op, Embed | LargestLogit | ExpSum)
        return [part.of_vocabulary(pieces) if of_rows else part.lowered(pieces, self.model) for pieces in made]

    def _whole(self, pieces: list[Piece]) -> Piece:
        """Return the one piece of a weight, all of which is needed."""
        tensor = tensor_of(pieces[0].content.tensor, self.model)
        if len(pieces) > 1 or pieces[0].content.at != (ONE, *tensor.rows(self.model), *row_of(tensor, self.model)):
            raise ScheduleError(f"{brief(pieces[0].content)} where all of the weight is needed")
        return pieces[0]

    def _rows(self, pieces: list[Piece]) -> list[Piece]:
        """Return pieces of whole tokens: all heads and features of a tensor, in their order, as one."""
        rows = []
        for piece in pieces:
            batch, tokens, *inner = piece.content.at
            wanted = row_of(tensor_of(piece.content.tensor, self.model), self.model)
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

    def _combined(self, op: TokenKernel | Accumulate, operands: list[Piece]) -> list[list[Piece]]:
        """Return the results of one kernel on the same tokens of each operand."""
        of_layer = self.attention.of(min(piece.content.layer for piece in operands))
        return TokenRules(of_layer.model, of_layer).made(op, operands)

    def made(self, op: TokenKernel | Accumulate, operands: list[Piece]) -> list[list[Piece]]:
        """Return the same, of a layer of the one kind that these rules are of."""
        said = [(name, getattr(op, name, UNSET)) for name in ("form", "inverse", "factor")]
        variant = tuple([one for one in said if one[1] is not UNSET])
        tokens = [piece for piece in operands if not _is_weight(piece)]
        operands = [self._of_layer(tokens[0].content.layer, piece) for piece in operands]
        number = _numbers(self.model).get(_key(type(op), variant, [piece.content[:2] for piece in operands]))
        if number is None:
            kind = " ".join([type(op).__name__, *(f"{name}={value}" for name, value in variant)])
            spelled = ", ".join(f"{piece.content.tensor} of layer {piece.content.layer}" for piece in operands)
            raise ScheduleError(f"{kind} of {spelled} is no equation of the layer")
        first = tokens[0]
        for piece in tokens:
            if piece.content.at != first.content.at:
                raise ScheduleError(f"{op.label} of {brief(first.content)} with other tokens, {brief(piece.content)}")
        equation = equations(self.model)[number]
        layer = operands[0].content.layer - equation.operands[0].layer
        return [[self._result(number, tensor.later(layer), first)] for tensor in equation.results]

    def _of_layer(self, layer: int, piece: Piece) -> Piece:
        """Return a weight that stands at both ends of the model as one of the layer where it is used."""
        at_ends = self.model.tied_embeddings and piece.content.tensor in _AT_ENDS
        return piece._replace(content=piece.content._replace(layer=layer)) if at_ends else piece

    def _result(self, number: int, tensor: Tensor, tokens: Piece) -> Piece:
        """Return what an equation makes of tokens: a tensor of the same tokens, or their part in the gradient of a
        weight. Of a weight at both ends that of the head has seen the tokens behind those of the sequence.
        """
        batch, rows, *_ = tokens.content.at
        inner, (b, s, *_) = row_of(tensor, self.model), tokens.box
        seen: Seen = ((terms_of(number, tensor.name, self.model), ONE),) if is_sum(tensor.name, self.model) else ()
        at = (batch, rows, *inner)
        if tensor.of_weight:
            (own,) = tensor.rows(self.model)
            twice = tensor.name == d(w_embed).name and equations(self.model)[number].kind is Gemm
            seen = ((rows.moved(behind(self.attention.seq)) if twice else rows, batch),)
            at, b, s = (ONE, own, *inner), (0, 1), (0, own.size)
            if self.model.tied_embeddings and tensor.name in _GRADIENTS_AT_ENDS:
                tensor = tensor._replace(layer=0)
        heads, width = inner
        return Piece((b, s, (0, heads.size), (0, width.size)), Content(tensor.name, tensor.layer, at, seen))


def behind(seq: int) -> int:
    """Return by how much later the tokens are numbered that the head adds to the gradient of a weight at both ends: so
    much that no span of them continues one of the sequence.
    """
    return 2 * seq


def _is_weight(piece: Piece) -> bool:
    return kind_of(piece.content.tensor) == "weight"


def _joined(a: list[Piece], b: list[Piece]) -> list[Piece]:
    """Return a result of more tokens: side by side, or summed up where it is a weight's gradient."""
    if kind_of(a[0].content.tensor) == "weight gradient":
        return [x._replace(content=union(x.content, y.content)) for x, y in zip(a, b, strict=True)]
    return a + b


@lru_cache(maxsize=4096)
def row_of(tensor: Tensor, model: ModelSpec) -> tuple[Span, Span]:
    """Return all heads and features of one token of a tensor; of a weight, of one row."""
    return Span(0, tensor.heads(model) or 1), Span(0, tensor.features(model))


def check_positions(pieces: list[Piece], tokens: Tokens, mask: Mask) -> None:
    """Raise where a rotary embedding turns tokens by other positions than theirs in their documents."""
    at = 0
    for span in tokens:
        for piece in pieces:
            own = piece.box[TOKENS]
            shared = meet(own, (at, at + span.size))
            if shared is None:
                continue
            begin, end = shared
            has = piece.content.tokens.part(begin - own[0], end - own[0])
            if restarted((has,), mask) != (span.part(begin - at, end - at),):
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
