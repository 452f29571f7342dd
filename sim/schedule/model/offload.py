"""What layers save for their backward pass, in the host's memory meanwhile: copied out behind the layer, and back one
layer ahead of its backward pass.

The last layer's stays, since it is needed at once. The host copies a layer out when the layer before is out, and starts
the backward pass when all are, so that the GPU holds what two layers save; so it does backward, where what is copied
back for a layer is not written before the kernels issued until then have ended.
"""

from __future__ import annotations

from typing import TypeVar

from sim.options import Place
from sim.schedule.ir.ops import OFFLOAD, HostSync
from sim.schedule.ir.views import View
from sim.schedule.write.builder import ProgramBuilder

Kept = TypeVar("Kept")


def offload(b: ProgramBuilder, kept: Kept, layer: int, place: Place) -> Kept:
    """Append copies of everything in ``kept``, a nest of tuples, to the host's memory; return where it lies there."""
    b.add(HostSync(label="wait for the layer before", streams=(OFFLOAD,)))
    return _copied(b, kept, place, f"offload layer {layer}")


def all_out(b: ProgramBuilder) -> None:
    """Append a wait for what is still on its way to the host."""
    b.add(HostSync(label="wait for the last one", streams=(OFFLOAD,)))


def fetch(b: ProgramBuilder, kept: Kept, layer: int) -> Kept:
    """Append copies back from the host; return where all lies then."""
    return _copied(b, kept, "hbm", f"fetch layer {layer}")


def _copied(b: ProgramBuilder, kept: Kept, place: Place, label: str) -> Kept:
    """Append a copy of every buffer in ``kept`` but inputs, which stay; return the same views of the copies."""
    copies: dict[int, View] = {}

    def moved(part: object) -> object:
        if isinstance(part, View) and not b.is_input(part):
            if part.buffer not in copies:
                whole = b.whole(part)
                copies[part.buffer] = b.elsewhere(whole, place)
                b.host_copy(whole, copies[part.buffer], label)
            return View(copies[part.buffer].buffer, part.slices)
        if isinstance(part, tuple):
            make = getattr(part, "_make", tuple)  # of named tuples
            return make(map(moved, part))
        return part

    return moved(kept)  # type: ignore[return-value]
