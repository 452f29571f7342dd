"""Where weights are stored, and what sums their gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

from sim.schedule.ir.ops import AllReduce
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.scope import Unit, units
from sim.schedule.model.write import Values
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import DTYPE_BYTES, Workload


class Params(Protocol):
    """The weights of a model on one rank. What is gathered lives until its last use."""

    def gather(self, unit: Unit) -> Values:
        """Append what brings weights here, for one pass; return them whole."""
        ...

    def reduce(self, gradient: Tensor, view: View) -> None:
        """Append what sums a whole gradient of this rank's tokens over the ranks, and declare the sum an output."""
        ...


class Replicated:
    """Every rank has every weight; each gradient is summed by an all-reduce of its own, as soon as it is there."""

    def __init__(self, b: ProgramBuilder, over: tuple[Communicator, ...]) -> None:
        self._b, self._over = b, over
        self._weights = {unit: b.call(unit.name, unit.layer, partial(self._of, unit)) for unit in units(b.workload)}

    def _of(self, unit: Unit) -> Values:
        b = self._b
        return {w: b.input_of(w.later(unit.layer), w.rows(b.workload.model)) for w in unit.weights}

    def gather(self, unit: Unit) -> Values:
        """See Params."""
        return self._weights[unit]

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        for over in self._over:
            self._b.add(AllReduce(label=f"reduce {gradient.name}", communicator=over.name, view=view))
        self._b.output_of(gradient, gradient.rows(self._b.workload.model), view)

    @staticmethod
    def reduced_bytes(workload: Workload, ranks: int) -> int:
        """Return what the all-reduces send, over all ranks: 2 (P-1) bytes per byte of a gradient."""
        sizes = [math.prod(weight.shape(workload.model)) for unit in units(workload) for weight in unit.weights]
        return 2 * (ranks - 1) * sum(sizes) * DTYPE_BYTES[workload.dtype] if workload.backward else 0
