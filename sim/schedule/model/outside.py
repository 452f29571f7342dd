"""What the layers of a model stand between: what comes from outside and is left there, or embedding and loss."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.ir.views import View
from sim.schedule.model.block import x
from sim.schedule.model.ends import (
    EMBEDDING,
    EMBEDDING_BACKWARD,
    HEAD,
    HEAD_BACKWARD,
    h,
    ids,
    labels,
    logits,
    loss,
    rstd,
)  # fmt: skip
from sim.schedule.model.equations import Equation
from sim.schedule.model.params import Params, Reduced, Room
from sim.schedule.model.scope import Unit
from sim.schedule.model.tiling import Tiling, write_all
from sim.schedule.model.write import TokenWriter, Values
from sim.schedule.write.builder import ProgramBuilder


class Outside(Protocol):
    """What stands before the first layer of one rank, and behind the last."""

    def enter(self) -> View:
        """Append what gives the first layer its input; return that."""
        ...

    def leave(self, last: View) -> None:
        """Append what becomes of the output of the last layer."""
        ...

    def enter_backward(self) -> View:
        """Append what gives the gradient of the output of the last layer; return that."""
        ...

    def leave_backward(self, first: View) -> None:
        """Append what becomes of the gradient of the first layer's input."""
        ...


class Ports(NamedTuple):
    """Activations and their gradients come from outside, and are left there."""

    b: ProgramBuilder
    tokens: Tokens
    x: Tensor

    def enter(self) -> View:
        """See Outside."""
        return self.b.input_of(self.x, self.tokens)

    def leave(self, last: View) -> None:
        """See Outside."""
        self.b.output_of(self.x.later(self.b.workload.layers), self.tokens, last)

    def enter_backward(self) -> View:
        """See Outside."""
        return self.b.input_of(d(self.x).later(self.b.workload.layers), self.tokens)

    def leave_backward(self, first: View) -> None:
        """See Outside."""
        self.b.output_of(d(self.x), self.tokens, first)


class Loss:
    """Token ids are embedded; final norm, LM head and cross-entropy make a loss of each token, left as an output."""

    def __init__(
        self, b: ProgramBuilder, tokens: Tokens, first: Unit, last: Unit, params: Params, tiling: Tiling
    ) -> None:
        self._b, self._tokens, self._first, self._last = b, tokens, first, last
        self._params, self._tiling = params, tiling
        self._ids = b.input_of(ids, tokens)
        self._kept: Values = {}
        self._weights: Values = {}

    def enter(self) -> View:
        """See Outside."""
        return self._b.call("embed", 0, self._embed, self._ids, self._params.gather(self._first))

    def _embed(self, given: View, weights: Values) -> View:
        return self._written(EMBEDDING, 0, {ids: given, **weights})[x]

    def leave(self, last: View) -> None:
        """See Outside."""
        layer = self._last.layer
        given = self._b.input_of(labels.later(layer), self._tokens)
        self._weights = self._params.gather(self._last)
        self._kept = self._b.call("loss", layer, self._score, last, given, self._weights)
        self._b.output_of(loss.later(layer), self._tokens, self._kept.pop(loss))

    def _score(self, last: View, given: View, weights: Values) -> Values:
        made = self._written(HEAD, self._last.layer, {x: last, labels: given, **weights})
        return {tensor: made[tensor] for tensor in (x, rstd, h, d(logits), loss)}

    def enter_backward(self) -> View:
        """See Outside."""
        layer, back = self._last.layer, self._back_from_loss
        room = self._params.room(self._last)
        dx, reduced = self._b.call("back from the loss", layer, back, self._kept, self._weights, room)
        self._params.keep(self._last, reduced)
        return dx

    def _back_from_loss(self, kept: Values, weights: Values, room: Room) -> tuple[View, Reduced]:
        made = self._written(HEAD_BACKWARD, self._last.layer, {**kept, **weights})
        return made[d(x)], self._params.reduced(self._last, room)

    def leave_backward(self, first: View) -> None:
        """See Outside."""
        room = self._params.room(self._first)
        reduced = self._b.call("back to the embedding", 0, self._back_to_embedding, self._ids, first, room)
        self._params.keep(self._first, reduced)

    def _back_to_embedding(self, given: View, first: View, room: Room) -> Reduced:
        self._written(EMBEDDING_BACKWARD, 0, {ids: given, d(x): first})
        return self._params.reduced(self._first, room)

    def _written(self, equations: tuple[Equation, ...], layer: int, values: Values) -> Values:
        """Append equations; return all values that are there then."""
        write_all(equations, TokenWriter(self._b, layer, self._tokens, values), self._params, self._tiling)
        return values
