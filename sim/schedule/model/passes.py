"""Writes the passes of a layer around any distributed attention: forward, again where it is checkpointed, and backward,
at once or gradients of weights by themselves.

Every rank computes all of a layer for its own tokens; only attention sees those of other ranks. What a layer computes
is in ``block``; where weights and activations are, and how many tokens are taken at a time, is in ``params``,
``saving`` and ``tiling``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.ir.views import View
from sim.schedule.model.checkpoint import Checkpoint, checkpoint
from sim.schedule.model.equations import Around, Block, Equation, is_of_weights
from sim.schedule.model.projections import Projections, chains
from sim.schedule.model.saving import Saving, Visit
from sim.schedule.model.scope import Unit
from sim.schedule.model.tensor.group import Group
from sim.schedule.model.tiling import Tiling, write_all
from sim.schedule.model.weights.params import Params, Reduced, Room
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
    group: Group | None = None
    """The ranks that have shares of weights, whose tokens attention has; None where it has those of this rank."""

    def _call(self, name: str) -> str:
        """Return the key of a call that layers of this kind make of sequences like these."""
        form = f" of form {self.b.form}" if self.b.form else ""
        return f"{name} of kind {self.kind}{form}" if self.kind else name + form

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
            values[block.out], saved = self._partwise.forward_from(self._projections(layer, values)[0])
        else:
            values[block.out], saved = self.attention.forward(values[block.q], values[block.k], values[block.v])
        self._write(around.after, layer, self.tokens, values)
        return values, saved

    @property
    def _partwise(self) -> PartwiseAttention:
        return cast("PartwiseAttention", self.attention)

    def _projections(self, layer: int, values: Values) -> tuple[Projections, Values]:
        """Return what projects the inputs of attention, and where it takes what from and leaves gradients: where ranks
        have shares of weights what is projected is gathered before.
        """
        tokens = self.tokens
        if self.group:
            rows = TokenWriter(self.b, layer, tokens, values)
            tokens, values = self.group.every, self.group.spread(rows, self.sources)
        return Projections(self.b, layer, tokens, self.block, values, self._partwise.q_heads), values

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What is projected part by part."""
        return tuple(dict.fromkeys(source for chain in chains(self.block).values() for source in chain.sources))

    def _kept(self, values: Values, saved: Saved, point: Checkpoint) -> Kept:
        """Return what is kept of a layer's values, and of what attention saves."""
        held = point.held
        at = held.index(self.block.out) if self.block.out in held else len(held)
        before, after = ({tensor: values[tensor] for tensor in part} for part in (held[:at], held[at:]))
        attention = None if point.attends else saved.without_inputs() if point.lays_out else saved
        return Kept(before, attention, after)

    def backward(self, micro: int, unit: Unit, dx: View) -> View:
        """Append the backward pass of a layer for a micro-batch; return the gradient of what came into it."""
        weights, kept = self._restored(micro, unit)
        backward = partial(self._backward_with, unit)
        room = self.params.room(unit)
        following, reduced = self.b.call(self._call("backward"), unit.layer, backward, dx, weights, kept, room)
        self.params.keep(unit, reduced)
        return following

    def backward_of_inputs(self, micro: int, unit: Unit, dx: View) -> tuple[View, Values]:
        """Append the same without what makes gradients of weights alone; return what that needs, too."""
        weights, kept = self._restored(micro, unit)
        backward = partial(self._backward_of_inputs_with, unit.layer)
        return self.b.call(self._call("backward of inputs"), unit.layer, backward, dx, weights, kept)

    def backward_of_weights(self, unit: Unit, left: Values) -> None:
        """Append what makes gradients of weights alone, of what is ``left`` of the backward pass of inputs."""
        backward, room = partial(self._backward_of_weights_with, unit), self.params.room(unit)
        reduced = self.b.call(self._call("backward of weights"), unit.layer, backward, left, room)
        self.params.keep(unit, reduced)

    def _restored(self, micro: int, unit: Unit) -> tuple[Values, Kept]:
        """Append what brings the weights of a layer here, and all that backward needs of its forward pass."""
        weights = self.params.gather(unit)
        kept = self.saving.restore(Visit(micro, unit.layer), weights)
        if self.checkpoint.is_needed:
            again = partial(self._again, unit.layer)
            kept = self.b.call(self._call("forward again"), unit.layer, again, kept, weights)
        return weights, kept

    def _backward_with(self, unit: Unit, dx: View, weights: Values, kept: Kept, room: Room) -> tuple[View, Reduced]:
        values = self._led_back(unit.layer, {**weights, d(self.block.x).later(1): dx}, kept, self._write)
        return values[d(self.block.x)], self.params.reduced(unit, room)

    def _backward_of_inputs_with(self, layer: int, dx: View, weights: Values, kept: Kept) -> tuple[View, Values]:
        assert not self.block.projections
        values = self._led_back(layer, {**weights, d(self.block.x).later(1): dx}, kept, self._write_of_inputs)
        needed = {tensor for one in self._of_weights for tensor in one.operands}
        left = {tensor: view for tensor, view in values.items() if tensor in needed or tensor.kind == "weight gradient"}
        return values[d(self.block.x)], left

    def _backward_of_weights_with(self, unit: Unit, left: Values, room: Room) -> Reduced:
        for tensor, view in left.items():
            if tensor.kind == "weight gradient":
                self.params.reduce(tensor.later(unit.layer), view)
        self._write(self._of_weights, unit.layer, self.tokens, dict(left))
        return self.params.reduced(unit, room)

    def _led_back(self, layer: int, given: Values, kept: Kept, write: Callable[..., None]) -> Values:
        """Append what leads gradients back through a layer, its equations by ``write``; return all values."""
        block, around = self.block, self.block.backward
        assert kept.attention is not None
        values = {**given, **kept.before, **kept.after}
        write(around.before, layer, self.tokens, values)
        dout = values[d(block.out)]
        if block.projections:
            projections, made = self._projections(layer, values)
            self._partwise.backward_into(kept.attention, dout, projections)
            projections.reduce(self.params)
            if self.group:
                for source in map(d, self.sources):
                    self.group.add(TokenWriter(self.b, layer, self.tokens, values), source, made[source])
        else:
            grads = self.attention.backward(kept.attention, dout)
            values |= zip(map(d, (block.q, block.k, block.v)), grads, strict=True)
        write(around.after, layer, self.tokens, values)
        return values

    @property
    def _of_weights(self) -> tuple[Equation, ...]:
        """What makes gradients of weights alone."""
        return backward_apart(self.block)[-1]

    def _write(self, equations: tuple[Equation, ...], layer: int, tokens: Tokens, values: Values) -> None:
        """Append equations of a layer."""
        write_all(equations, TokenWriter(self.b, layer, tokens, values), self.params, self.tiling)

    def _write_of_inputs(self, equations: tuple[Equation, ...], layer: int, tokens: Tokens, values: Values) -> None:
        """Append those that do not make gradients of weights alone; others' gradients of weights stay in ``values``."""
        rest = tuple([one for one in equations if not is_of_weights(one)])
        for _ in self.tiling(rest, TokenWriter(self.b, layer, tokens, values)):
            pass


def backward_apart(block: Block) -> list[tuple[Equation, ...]]:
    """Return the equations of a backward pass that are written together where gradients of weights are made apart:
    those before and behind attention, and all of these by themselves.
    """
    of_inputs = [tuple([one for one in part if not is_of_weights(one)]) for part in block.backward]
    return [*of_inputs, tuple([one for part in block.backward for one in part if is_of_weights(one)])]
