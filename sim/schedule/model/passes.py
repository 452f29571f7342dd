"""Writes the passes of a layer around any distributed attention: forward, again where it is checkpointed, backward.

Every rank computes all of a layer for its own tokens; only attention sees those of other ranks. What a layer computes
is in ``block``; where weights and activations are, and how many tokens are taken at a time, is in ``params``,
``saving`` and ``tiling``.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.tensors import d
from sim.schedule.ir.views import View
from sim.schedule.model.checkpoint import Checkpoint, checkpoint
from sim.schedule.model.equations import Around, Block, Equation
from sim.schedule.model.params import Params, Reduced, Room
from sim.schedule.model.projections import Projections
from sim.schedule.model.saving import Saving, Visit
from sim.schedule.model.scope import Unit
from sim.schedule.model.tiling import Tiling, write_all
from sim.schedule.model.write import Kept, TokenWriter, Values
from sim.schedule.write.attention import DistributedAttention, LaysOut, Saved
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.inputs import PartwiseAttention


class LayerWriter(NamedTuple):
    """Writes the layers of one kind of one rank; what may differ between techniques is in protocols."""

    b: ProgramBuilder
    block: Block
    tokens: Tokens
    attention: DistributedAttention | PartwiseAttention
    """The latter where the block has projections apart."""
    params: Params
    saving: Saving
    tiling: Tiling
    checkpoint: Checkpoint
    kind: int = 0
    """Which of the model's kinds of layers it writes."""

    def _call(self, name: str) -> str:
        """Return the key of a call that layers of this kind make."""
        return f"{name} of kind {self.kind}" if self.kind else name

    def forward(self, micro: int, unit: Unit, x: View) -> View:
        """Append a layer for a micro-batch; return what leaves it."""
        forward = partial(self._forward_with, unit.layer)
        following, kept = self.b.call(self._call("forward"), unit.layer, forward, x, self.params.gather(unit))
        self.saving.save(Visit(micro, unit.layer), kept)
        return following

    def _forward_with(self, layer: int, x: View, weights: Values) -> tuple[View, Kept]:
        """Append a layer; return what leaves it and what it saves."""
        values, saved = self._attended(layer, {self.block.x: x}, weights, self.block.forward)
        return values[self.block.x.later(1)], self._kept(values, saved, self.checkpoint)

    def _again(self, layer: int, kept: Kept, weights: Values) -> Kept:
        """Append what makes the rest of what a backward pass needs of what was kept; return it all."""
        block, point, values = self.block, self.checkpoint, {**kept.before, **kept.after}
        everything = checkpoint(block, "none")
        if point.attends:
            return self._kept(*self._attended(layer, values, weights, point.again), everything)
        values |= weights
        self._write(point.again.before, layer, self.tokens, values)
        saved = kept.attention
        assert saved is not None
        if point.lays_out:
            q, k, v = values[block.q], values[block.k], values[block.v]
            if isinstance(self.attention, LaysOut):
                q, k, v = self.attention.lay_out(q, k, v)
            saved = saved._replace(q=q, k=k, v=v)
        self._write(point.again.after, layer, self.tokens, values)
        return self._kept(values, saved, everything)

    def _attended(self, layer: int, at_hand: Values, weights: Values, around: Around) -> tuple[Values, Saved]:
        """Append attention of a layer with the equations around it; return all values, and what attention saves."""
        block, values = self.block, {**weights, **at_hand}
        self._write(around.before, layer, self.tokens, values)
        if block.projections:
            values[block.out], saved = self._partwise.forward_from(self._projections(layer, values))
        else:
            values[block.out], saved = self.attention.forward(values[block.q], values[block.k], values[block.v])
        self._write(around.after, layer, self.tokens, values)
        return values, saved

    @property
    def _partwise(self) -> PartwiseAttention:
        return cast("PartwiseAttention", self.attention)

    def _projections(self, layer: int, values: Values) -> Projections:
        return Projections(self.b, layer, self.tokens, self.block, values, self._partwise.q_heads)

    def _kept(self, values: Values, saved: Saved, point: Checkpoint) -> Kept:
        """Return what is kept of a layer's values, and of what attention saves."""
        held = point.held
        at = held.index(self.block.out) if self.block.out in held else len(held)
        before, after = ({tensor: values[tensor] for tensor in part} for part in (held[:at], held[at:]))
        attention = None if point.attends else saved.without_inputs() if point.lays_out else saved
        return Kept(before, attention, after)

    def backward(self, micro: int, unit: Unit, dx: View) -> View:
        """Append the backward pass of a layer for a micro-batch; return the gradient of what came into it."""
        weights = self.params.gather(unit)
        kept = self.saving.restore(Visit(micro, unit.layer), weights)
        if self.checkpoint.is_needed:
            again = partial(self._again, unit.layer)
            kept = self.b.call(self._call("forward again"), unit.layer, again, kept, weights)
        backward = partial(self._backward_with, unit)
        room = self.params.room(unit)
        following, reduced = self.b.call(self._call("backward"), unit.layer, backward, dx, weights, kept, room)
        self.params.keep(unit, reduced)
        return following

    def _backward_with(self, unit: Unit, dx: View, weights: Values, kept: Kept, room: Room) -> tuple[View, Reduced]:
        block, around, layer = self.block, self.block.backward, unit.layer
        assert kept.attention is not None
        values = {d(block.x).later(1): dx, **weights, **kept.before, **kept.after}
        self._write(around.before, layer, self.tokens, values)
        dout = values[d(block.out)]
        if block.projections:
            projections = self._projections(layer, values)
            self._partwise.backward_into(kept.attention, dout, projections)
            projections.reduce(self.params)
        else:
            grads = self.attention.backward(kept.attention, dout)
            values |= zip(map(d, (block.q, block.k, block.v)), grads, strict=True)
        self._write(around.after, layer, self.tokens, values)
        return values[d(block.x)], self.params.reduced(unit, room)

    def _write(self, equations: tuple[Equation, ...], layer: int, tokens: Tokens, values: Values) -> None:
        """Append equations of a layer."""
        write_all(equations, TokenWriter(self.b, layer, tokens, values), self.params, self.tiling)
