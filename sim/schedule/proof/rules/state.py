"""What kernels of weights and of an optimiser make of abstract contents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, assert_never

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.ops import AdamW, Divide, HostAdamW, Pack, SquareSum, StateKernel, Unpack
from sim.schedule.ir.shares import Share, num_elements
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.model.ends import w_embed
from sim.schedule.model.scope import BY_NAME, ROOT, Unit, kind_of, tensor_of, trained, unit_kinds, updated
from sim.schedule.proof.contents import (
    FAR,
    OF_GROUP_TOKENS,
    TOKENS,
    ZERO,
    Box,
    Content,
    Piece,
    Seen,
    Unclassed,
    brief,
    coalesced,
    differs,
    last_seen,
    replaced,
    union,
    volume,
)
from sim.schedule.proof.members import content_of_member, seen_of_all, span_of_member
from sim.schedule.proof.rules.attention import AttentionRules
from sim.schedule.proof.rules.group import of_all_heads
from sim.schedule.proof.rules.part import num_apart
from sim.schedule.proof.rules.token import behind
from sim.words.workload import ModelSpec, Workload


class StateRules(NamedTuple):
    """How a workload's weights, their gradients and moments are packed, summed up and updated.

    Where ranks of a tensor-parallel group have shares of weights, a flat tensor is one of elements of one member's
    shares, and which member's is said where other tensors say which heads.
    """

    workload: Workload
    attention: AttentionRules
    members: int = 1
    """Of each tensor-parallel group."""

    def apply(self, op: StateKernel | HostAdamW, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return the pieces of each result; raises ScheduleError where operands do not belong together."""
        if isinstance(op, Unpack):
            return self._unpacked(_only(operands[0]))
        if isinstance(op, Pack):
            return [self._packed([_only(pieces) for pieces in operands])]
        if isinstance(op, Divide):
            return [_divided(operands[0])]
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
        """Return the weights, or the shares of weights, that a flat tensor consists of."""
        content, flat = piece.content, tensor_of(piece.content.tensor, self._model)
        share = self._share(content)
        if content.tensor not in _FLAT_WEIGHTS or content.tokens != share.rows(flat):
            raise ScheduleError(f"unpacks {brief(content)}: all elements of a unit's weights are needed")
        return [[_all_of(part, share, content.layer)] for part in flat.parts]

    def _share(self, content: Content) -> Share:
        """Return whose shares a flat tensor consists of."""
        if content.heads.stop > FAR // 2:
            raise Unclassed
        return Share(self._model, content.heads.start, self.members)

    def _packed(self, pieces: list[Piece]) -> list[Piece]:
        """Return a flat gradient of those of a unit's weights, in their order, of one member's shares of them: one
        piece; or several of a unit that has weights of both ends of the model, and where norms are sums over a member's
        own tokens yet. One stage of a pipeline may have none of weights at both ends, but zeros.
        """
        if self.members > 1 and any(differs(piece.content) for piece in pieces):
            raise Unclassed
        layer = next((piece.content.layer for piece in pieces if piece.content.tensor != ZERO), 0)
        for unit in unit_kinds(self._model):
            packed, zeros = d(unit.flat), unit == ROOT
            members = range(self.members) if Share(self._model, 0, self.members).divides(packed) else range(1)
            shares = (Share(self._model, member, self.members) for member in members)
            share = next((one for one in shares if _are_all(pieces, packed, one, layer, zeros=zeros)), None)
            if not unit.frozen and share:
                break
        else:
            spelled = ", ".join(brief(piece.content) for piece in pieces)
            raise ScheduleError(
                f"packs {spelled}: these are not the gradients of a layer, or of an end, in their order"
            )
        flat, seen = _all_of(packed, share, layer), [self._seen(piece.content) for piece in pieces]
        of_others = {sums for part, sums in zip(packed.parts, seen, strict=True) if not share.is_norm(part)}
        if unit == ROOT or (len(of_others) <= 1 < len({*seen})):
            return self._in_parts(flat, packed, share, pieces)
        if len(of_others) > 1:
            raise ScheduleError("packs gradients that are sums over different tokens")
        return [flat._replace(content=flat.content._replace(seen=seen[0]))]

    def _seen(self, content: Content) -> Seen:
        """Return the tokens and sequences that a gradient is a sum over, of a weight of keys or values of each query
        head of a group the same.
        """
        if last_seen(content) >= OF_GROUP_TOKENS:
            return of_all_heads(content, num_apart(content.tensor, self._model))
        return content.seen

    def _in_parts(self, flat: Piece, packed: Tensor, share: Share, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces of a flat gradient, each of which keeps what it is a sum over. Those of weights that all
        members have are named alike, so that what members have of them adds up.
        """
        found, stop = [], 0
        for piece in pieces:
            start, stop = stop, stop + volume(piece.box)
            part = flat.clipped(replaced(flat.box, TOKENS, (start, stop)))
            assert part is not None
            is_zero = piece.content.tensor == ZERO
            content = piece.content if is_zero else part.content._replace(seen=self._seen(piece.content))
            if share.divides(packed) and not is_zero:
                ((_, whose),) = share.elements(packed, content.tokens)
                content = _of_member(content, whose)
            found.append(part._replace(content=content))
        return coalesced(found)

    def _complete(self, content: Content) -> bool:
        """Return whether a flat gradient is one of all tokens: of a weight at both ends of those of each, see
        ``TokenRules``.
        """
        if content.tensor != d(ROOT.flat).name:
            return self.attention.complete(content)
        if differs(content):  # of which weight rows are depends on the member
            return all(self._complete(content_of_member(content, member)) for member in range(self.attention.members))
        of_table, later = self._share(content).size(w_embed), behind(self.workload.seq)
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
            part = Content(unit.square.name, content.layer, (ONE, ONE, ONE, ONE))
            part = part._replace(seen=self._elements(content, unit))
            square = part if square is None else union(square, part)
        assert square is not None
        return [Piece(((0, 1), (0, 1), (0, 1), (0, 1)), square)]

    def _elements(self, content: Content, unit: Unit) -> Seen:
        """Return some rows of a flat gradient with the member by which they are named. Of which weights rows of one
        member's shares are depends on the replica, where one stands for several with rows of their own.
        """
        if self.members == 1:
            return ((content.tokens, ONE),)
        share, flat, rows = self._share(content), d(unit.flat), [content.tokens]
        if differs(content):
            rows = [span_of_member(content.tokens, replica) for replica in range(self.attention.members)]
        return seen_of_all(tuple([tuple(share.elements(flat, own)) for own in rows]))

    def _updated(self, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return weights, moments and the gradient, which is none any more, after a step of the optimiser."""
        own, gradients, *moments, squares = operands
        weights, first, second = (_only(pieces) for pieces in (own, *moments))
        unit = _unit(weights.content, self._model)
        gradient = self._joined(gradients, unit, weights.content)
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
        own, *moments = (
            [_named(piece, updated(tensor).name)]
            for tensor, piece in zip(unit.states, (weights, first, second), strict=True)
        )
        return [own, [_named(gradient, f"scaled {gradient.content.tensor}")], *moments]

    def _joined(self, pieces: Sequence[Piece], unit: Unit, weights: Content) -> Piece:
        """Return a gradient of one member's weights as one piece, whatever its parts are sums over."""
        flat, found = d(unit.flat), list[Piece]()
        # Where there are no shares, weights may be of several ranks with rows of their own (``classes``).
        share = self._share(weights) if self.members > 1 else Share(self._model)
        for piece in pieces:
            content = piece.content._replace(seen=())
            if share.divides(flat) and [(content.tokens, content.heads)] == share.elements(flat, content.tokens):
                content = _of_member(content, weights.heads)
            found.append(piece._replace(content=content))
        return _only(coalesced(found))

    def _updated_by_host(self, operands: list[list[Piece]]) -> list[list[Piece]]:
        """Return the same, with the new weights as passes use them, where these are others."""
        made = self._updated(operands)
        working = updated(_unit(_only(operands[0]).content, self._model).working).name
        return [*made, [_named(_only(made[0]), working)]]


_FLAT_WEIGHTS = {one.name for unit in BY_NAME for flat in (unit.flat, unit.working) for one in (flat, updated(flat))}


@lru_cache(maxsize=16)
def _squares(workload: Workload) -> dict[tuple[str, int], int]:
    """Return how many elements the sums of squares of a step are of, by name and layer, in order."""
    found = {(unit.square.name, unit.layer): num_elements(unit.flat, workload.model) for unit in trained(workload)}
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
        elements = sum(rows.size * members.size for rows, members in square.seen)
        if elements != wanted[square.tensor, square.layer - first]:
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


def _divided(pieces: list[Piece]) -> list[Piece]:
    """Return what a gradient is that was divided: the same, as a loss is a mean over all ranks already."""
    for content in (piece.content for piece in pieces):
        if content.tensor != ZERO and kind_of(content.tensor) != "weight gradient":
            raise ScheduleError(f"divides {brief(content)}: only gradients of weights are")
    return pieces


def _of_member(content: Content, member: Span) -> Content:
    """Return the same part of a flat tensor of another member's shares."""
    batch, rows, _, columns = content.at
    return content._replace(at=(batch, rows, member, columns))


def _named(piece: Piece, tensor: str) -> Piece:
    """Return the same part of another tensor."""
    return piece._replace(content=piece.content._replace(tensor=tensor))


def _are_all(pieces: list[Piece], packed: Tensor, share: Share, layer: int, *, zeros: bool) -> bool:
    """Return whether pieces are a member's shares of the gradients that a flat one consists of, in their order; some
    may be ``zeros`` of their size.
    """
    parts = [_all_of(part, share, layer) for part in packed.parts]
    return len(parts) == len(pieces) and all(
        zeros and given.box == part.box
        if given.content.tensor == ZERO
        else given.content._replace(seen=()) == part.content
        for part, given in zip(parts, pieces, strict=True)
    )


@lru_cache(maxsize=4096)
def _all_of(tensor: Tensor, share: Share, layer: int) -> Piece:
    """Return all that a member has of a weight or of its gradient, or of a flat tensor of them, of a layer."""
    rows, columns = share.rows(tensor), share.columns(tensor) or Span(0, tensor.features(share.model))
    box: Box = ((0, 1), (0, rows.size), (0, 1), (0, columns.size))
    return Piece(box, Content(tensor.name, layer, (ONE, rows, share.place(tensor), columns)))
