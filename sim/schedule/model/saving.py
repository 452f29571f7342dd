"""What becomes of the activations that a layer saves for its backward pass."""

from __future__ import annotations

from typing import Protocol, TypeVar

from sim.options import Place
from sim.schedule.ir.ops import OFFLOAD, HostSync
from sim.schedule.ir.views import View
from sim.schedule.model.write import Kept, Values
from sim.schedule.write.builder import ProgramBuilder

Nest = TypeVar("Nest")


class Saving(Protocol):
    """Holds what layers save, between the passes."""

    def save(self, layer: int, kept: Kept, /) -> None:
        """Take what a layer saves, when it is written."""
        ...

    def restore(self, layer: int, weights: Values, /) -> Kept:
        """Return what a layer saved, in the GPU's memory; the backward pass asks from the last layer to the first."""
        ...


class Keep:
    """Leaves everything where it is."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}

    def save(self, layer: int, kept: Kept, /) -> None:
        """See Saving."""
        self._kept[layer] = kept

    def restore(self, layer: int, _weights: Values, /) -> Kept:
        """See Saving."""
        return self._kept[layer]


class Offload(Keep):
    """Copies layers to the host's memory behind them, and back one layer ahead of their backward pass.

    The last layer's stays, since it is needed at once. The host copies a layer out when the layer before is out, and
    starts the backward pass when all are, so that the GPU holds what two layers save; so it does backward, where what
    is copied back for a layer is not written before the kernels issued until then have ended.
    """

    def __init__(self, b: ProgramBuilder, place: Place) -> None:
        super().__init__()
        self._b, self._place, self._last = b, place, b.workload.layers - 1

    def save(self, layer: int, kept: Kept, /) -> None:
        """See Saving."""
        if layer < self._last:
            self._b.add(HostSync(label="wait for the layer before", streams=(OFFLOAD,)))
            kept = self._copied(kept, self._place, f"offload layer {layer}")
        self._kept[layer] = kept

    def restore(self, layer: int, _weights: Values, /) -> Kept:
        """See Saving."""
        if layer and layer == self._last:
            self._b.add(HostSync(label="wait for the last one", streams=(OFFLOAD,)))
        if layer:
            self._kept[layer - 1] = self._copied(self._kept[layer - 1], "hbm", f"fetch layer {layer - 1}")
        return self._kept[layer]

    def _copied(self, kept: Nest, place: Place, label: str) -> Nest:
        """Append a copy of every buffer in a nest of tuples but inputs, which stay; return the views of the copies."""
        b = self._b
        copies: dict[int, View] = {}

        def moved(part: object) -> object:
            if isinstance(part, View) and not b.is_input(part):
                if part.buffer not in copies:
                    whole = b.whole(part)
                    copies[part.buffer] = b.elsewhere(whole, place)
                    b.host_copy(whole, copies[part.buffer], label)
                return View(copies[part.buffer].buffer, part.slices)
            if isinstance(part, dict):
                return {tensor: moved(view) for tensor, view in part.items()}
            if isinstance(part, tuple):
                make = getattr(part, "_make", tuple)  # of named tuples
                return make(map(moved, part))
            return part

        return moved(kept)  # type: ignore[return-value]
