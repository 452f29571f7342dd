"""What a rank owns of weights and of an optimiser's state, which are flat tensors."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from sim.base.errors import InputError
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.ops import Zero
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.scope import Unit, with_options
from sim.schedule.model.weights.shards import Shards, part_of
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import LayerOptions, Place


class Kept(NamedTuple):
    """What a rank keeps of a unit from step to step, of the elements that it owns."""

    states: tuple[View, ...]
    """The optimiser's weights and moments."""
    gathered: View
    """What is sent where weights are gathered: the optimiser's, or where these are on the host mostly others."""


class Owned:
    """One part of each flat tensor, or all of it at stage 0; and where that is kept from step to step.

    Frozen weights are in the model's data type and have neither gradients nor moments: at stage 3 a rank has a part of
    each flat tensor of them, which is gathered as the others are; below it it has all of them.

    Where the optimiser is on the host (arXiv:2101.06840 §4) so are weights and moments, but for weights in the model's
    data type that are gathered. With weights=host they stay there, too.
    """

    def __init__(
        self, b: ProgramBuilder, shards: Shards, options: LayerOptions, owner: int, units: tuple[Unit, ...]
    ) -> None:
        """``owner`` is the rank that the program is for, ``b.rank`` the one in its place in the first replica; its
        stage of the model has the ``units``, in the order of ``scope.units``.
        """
        self.b, self.stage, self.shards, self.options = b, options.zero_stage, shards, options
        self._owner = owner
        self.on_host = options.optimiser == "host"
        self.uses_states = not self.on_host or options.weights == "host-states"
        """Whether the optimiser's weights are those that are gathered."""
        if options.weights != "gpu" and not self.on_host and not b.workload.model.is_frozen:
            raise InputError(
                f"`set` schedule.weights={options.weights} with schedule.optimiser=gpu: the optimiser's own weights on "
                f"the GPU are those that are gathered; set schedule.optimiser=host"
            )
        self.units, self.trained = units, [unit for unit in units if not unit.frozen]
        kept = self.units if self.stage == 3 else self.trained
        self.kept = {unit: b.call(f"{unit.name} state", unit.layer, partial(self._keep, unit)) for unit in kept}

    @property
    def visits(self) -> int:
        """How many micro-batches pass a unit on this rank."""
        return self.options.micro_batches // self.shards.copies

    @property
    def num_parts(self) -> int:
        """Into how many parts flat tensors are cut."""
        within = self.shards.within
        return len(within.group_of(self._owner)) if within else 1

    @property
    def position(self) -> int:
        """Which of the parts of flat tensors this rank owns."""
        return self.shards.within.position(self._owner) if self.shards.within else 0

    def rows(self, flat: Tensor) -> Tokens:
        """Return the elements that this rank owns."""
        (whole,), each = flat.rows(self.b.workload.model), self.each(flat)
        start = self.position * each
        if start >= whole.size:
            raise InputError(
                f"`gpus`: {self.num_parts} ranks are too many for the {whole.size} elements of {flat.name}, {each} "
                f"each: choose fewer, or `set` schedule.zero_stage=0"
            )
        return (Span(start, min(start + each, whole.size)),)

    def each(self, flat: Tensor) -> int:
        """Return how many elements a rank sends or takes, padding included."""
        (size,) = flat.shape(self.b.workload.model)
        return part_of(size, self.num_parts)

    def pad(self, view: View, count: int) -> View:
        """Append what sets to zero all behind the first elements of a flat view; return these."""
        if count < view.shape[0]:
            self.b.add(Zero(label="padding", into=view[count:]))
        return view[:count]

    def fetches(self, unit: Unit) -> bool:
        """Return whether what is gathered of a unit is on the host."""
        return self.options.weights != "gpu" and (self.on_host or unit.frozen)

    def casts(self, unit: Unit) -> bool:
        """Return whether what is gathered of a unit is to be made of weights in another data type."""
        return self.uses_states and not unit.frozen and self.options.optimiser_states == "fp32"

    def states(self, unit: Unit) -> list[Tensor]:
        """Return the optimiser's weights and moments of a unit, in the data type that they have."""
        return [with_options(state, self.options.optimiser_states) for state in unit.states]

    def _keep(self, unit: Unit) -> Kept:
        """Return this rank's part of the weights and of both moments."""
        b, rows = self.b, self.rows(unit.flat)
        working: Place = "host" if self.fetches(unit) else "hbm"
        if unit.frozen:
            return Kept((), b.input_of(unit.working, rows, working))
        place: Place = "host" if self.on_host else "hbm"
        states = tuple([b.input_of(state, rows, place) for state in self.states(unit)])
        works = not self.uses_states and self.stage == 3
        return Kept(states, b.input_of(unit.working, rows, working) if works else states[0])
