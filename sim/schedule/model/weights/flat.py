"""Weights and an optimiser's state as flat tensors, sharded over ranks."""

from __future__ import annotations

from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.scope import Unit
from sim.schedule.model.weights.gathering import Gathering
from sim.schedule.model.weights.owned import Owned
from sim.schedule.model.weights.params import Reduced, Room
from sim.schedule.model.weights.shards import Shards
from sim.schedule.model.weights.summing import Summing
from sim.schedule.model.weights.updating import Updating
from sim.schedule.model.write import Values
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import LayerOptions


class Flat:
    """Each unit's weights and moments are flat tensors, in fp32 or the model's data type, of which a rank owns one
    part, or all at stage 0. Weights are gathered of them, gradients summed into them, and both updated.
    """

    def __init__(
        self, b: ProgramBuilder, shards: Shards, options: LayerOptions, owner: int, own: tuple[Unit, ...]
    ) -> None:
        """See Owned."""
        owned = Owned(b, shards, options, owner, own)
        self._gathering, self._summing = Gathering(owned), Summing(owned)
        self._updating = Updating(owned, self._gathering)

    def begin(self, order: tuple[Unit, ...]) -> None:
        """See Params."""
        self._gathering.begin(order)

    def gather(self, unit: Unit) -> Values:
        """See Params."""
        return self._gathering.gather(unit)

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        self._summing.reduce(gradient, view)

    def room(self, unit: Unit) -> Room:
        """See Params."""
        return self._summing.room(unit)

    def reduced(self, unit: Unit, room: Room) -> Reduced:
        """See Params."""
        return self._summing.reduced(unit, room)

    def keep(self, unit: Unit, reduced: Reduced) -> None:
        """See Params."""
        self._summing.keep(unit, reduced)

    def end_pass(self) -> None:
        """See Params."""
        self._summing.end_pass()

    def update(self) -> None:
        """See Params."""
        self._updating.update(*self._summing.complete())
        self._summing.hold()
