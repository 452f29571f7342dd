"""Where weights are stored, and what sums their gradients."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from sim.schedule.ir.ops import AllReduce
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.shares import Share
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.scope import Unit, together, trained
from sim.schedule.model.write import Values
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, Workload

Room = tuple[View, ...]
Reduced = tuple[View, ...]
"""What is left of a unit's gradients."""


class Params(Protocol):
    """The weights of a model on one rank. What is gathered lives until its last use."""

    def begin(self, order: tuple[Unit, ...]) -> None:
        """Take the units that will be gathered next, in this order: those of a pass, or of a forward pass and of the
        backward pass that follows it at once.
        """
        ...

    def gather(self, unit: Unit) -> Values:
        """Append what brings weights here, for one pass; return them whole."""
        ...

    def reduce(self, gradient: Tensor, view: View) -> None:
        """Take a whole gradient of this rank's tokens; append what sums it over ranks, where that is done at once."""
        ...

    def room(self, unit: Unit) -> Room:
        """Return buffers that ``reduced`` uses, taken before the call that it is in."""
        ...

    def reduced(self, unit: Unit, room: Room) -> Reduced:
        """Append what is done once a unit has all gradients, in the call that made them; return what is left."""
        ...

    def keep(self, unit: Unit, reduced: Reduced) -> None:
        """Take what ``reduced`` returned, when its call has ended."""
        ...

    def end_pass(self) -> None:
        """Append what is left to do behind each backward pass."""
        ...

    def update(self) -> None:
        """Append what the optimiser does, behind the last backward pass."""
        ...


def sum_over_group(
    b: ProgramBuilder, alike: tuple[Communicator, ...], gradient: Tensor, view: View, *, sequence: bool
) -> None:
    """Append what sums the gradient of a weight over the ranks of a group that have the same of it, each of its own
    tokens, or of its own query heads of a key/value head. Of shares of one rank there is nothing to sum; ``sequence``
    as of ``Share.sums``.
    """
    for one in alike if b.share.sums(gradient, sequence=sequence) else ():
        if len(one.groups[0]) == b.share.alike(gradient):
            b.add(AllReduce(label=f"sum {gradient.name}", communicator=one.name, view=view))


def summed_over_group(workload: Workload, degree: int, *, sequence: bool) -> tuple[int, int]:
    """Return how many elements all members of a group of so many ranks send for that, once for all trained norms of a
    workload and once for all else: 2 (A-1) for each that A of them have alike.
    """
    share, found = Share(workload.model, 0, degree), {True: 0, False: 0}
    for weight in (one for unit in trained(workload) for one in unit.weights if share.sums(one, sequence=sequence)):
        alike = share.alike(weight)
        found[share.is_norm(weight)] += degree // alike * 2 * (alike - 1) * share.size(weight)
    return (found[True], found[False]) if workload.backward else (0, 0)


class Replicated:
    """Every rank has every weight, or its share of it; each gradient is summed by an all-reduce of its own, once it is
    there, and left.
    """

    def __init__(
        self,
        b: ProgramBuilder,
        over: tuple[Communicator, ...],
        own: tuple[Unit, ...],
        alike: tuple[Communicator, ...] = (),
        *,
        sequence: bool = True,
    ) -> None:
        """``own`` are the units that a rank has: those of its stage of the model; ``alike`` and ``sequence`` as of
        ``sum_over_group``.
        """
        self._b, self._over, self._alike, self._sequence = b, over, alike, sequence
        self._weights = {unit: b.call(unit.name, unit.layer, partial(self._of, unit)) for unit in own}

    def _of(self, unit: Unit) -> Values:
        b = self._b
        return {w: b.input_of(w.later(unit.layer), w.rows(b.workload.model)) for w in unit.weights}

    def begin(self, order: tuple[Unit, ...]) -> None:
        """See Params."""

    def gather(self, unit: Unit) -> Values:
        """See Params."""
        of_unit = [self._weights[one] for one in together(unit, self._b.workload.model)]
        return {weight: view for weights in of_unit for weight, view in weights.items()}

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        sum_over_group(self._b, self._alike, gradient, view, sequence=self._sequence)
        for over in self._over:
            self._b.add(AllReduce(label=f"reduce {gradient.name}", communicator=over.name, view=view))
        self._b.output_of(gradient, gradient.rows(self._b.workload.model), view)

    def room(self, _unit: Unit) -> Room:
        """See Params."""
        return ()

    def reduced(self, _unit: Unit, _room: Room) -> Reduced:
        """See Params."""
        return ()

    def keep(self, _unit: Unit, _reduced: Reduced) -> None:
        """See Params."""

    def end_pass(self) -> None:
        """See Params."""

    def update(self) -> None:
        """See Params: gradients are left as they are."""

    @staticmethod
    def reduced_bytes(workload: Workload, mesh: Mesh, *, sequence: bool = True) -> int:
        """Return what the all-reduces send, over all ranks: 2 (P-1) bytes per byte of a gradient that P ranks have."""
        share, alike = Share(workload.model, 0, mesh.tp), mesh.size // mesh.tp
        size = sum(share.size(unit.flat) for unit in trained(workload)) * DTYPE_BYTES[workload.dtype]
        of_group = alike * sum(summed_over_group(workload, mesh.tp, sequence=sequence)) * DTYPE_BYTES[workload.dtype]
        return 2 * mesh.tp * (alike - 1) * size + of_group if workload.backward else 0
