"""Where weights are stored, and what sums their gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

from sim.schedule.ir.ops import AllReduce
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.equations import Block
from sim.schedule.model.write import Values
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import DTYPE_BYTES, Workload


class Params(Protocol):
    """The weights of all layers on one rank. What is gathered lives until its last use."""

    def gather(self, layer: int) -> Values:
        """Append what brings the weights of a layer here, for one pass; return them whole."""
        ...

    def reduce(self, gradient: Tensor, view: View) -> None:
        """Append what sums a whole gradient of this rank's tokens over the ranks, and declare the sum an output."""
        ...


class Replicated:
    """Every rank has every weight; each gradient is summed by an all-reduce of its own, as soon as it is there."""

    def __init__(self, b: ProgramBuilder, block: Block, over: tuple[Communicator, ...]) -> None:
        self._b, self._block, self._over = b, block, over
        layers = range(b.workload.layers)
        self._weights = [b.call("weights", layer, partial(self._of_layer, layer)) for layer in layers]

    def _of_layer(self, layer: int) -> Values:
        b = self._b
        return {w: b.input_of(w.later(layer), w.rows(b.workload.model)) for w in self._block.weights}

    def gather(self, layer: int) -> Values:
        """See Params."""
        return self._weights[layer]

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        for over in self._over:
            self._b.add(AllReduce(label=f"reduce {gradient.name}", communicator=over.name, view=view))
        self._b.output_of(gradient, gradient.rows(self._b.workload.model), view)

    @staticmethod
    def reduced_bytes(block: Block, workload: Workload, ranks: int) -> int:
        """Return what the all-reduces of one layer send, over all ranks: 2 (P-1) bytes per byte of a gradient."""
        sizes = [math.prod(weight.shape(workload.model)) for weight in block.weights]
        return 2 * (ranks - 1) * sum(sizes) * DTYPE_BYTES[workload.dtype] if workload.backward else 0
