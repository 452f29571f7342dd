"""What becomes of the activations that a layer saves for its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from sim.base.errors import InputError
from sim.schedule.ir.ops import OFFLOAD, HostSync
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.equations import Block
from sim.schedule.model.write import Kept, Values
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.nests import flatten, mapped
from sim.words.options import Place, SavingName


class Visit(NamedTuple):
    """One micro-batch in one layer."""

    micro: int
    layer: int


class Saving(Protocol):
    """Holds what layers save of each micro-batch, between the passes."""

    def save(self, at: Visit, kept: Kept, /) -> None:
        """Take what a layer saves of a micro-batch, when it is written."""
        ...

    def restore(self, at: Visit, weights: Values, /) -> Kept:
        """Return what a layer saved of a micro-batch, in the GPU's memory, once; the backward pass of a micro-batch
        asks from the last layer to the first.
        """
        ...


class Keep:
    """Leaves everything where it is."""

    def __init__(self) -> None:
        self._kept: dict[Visit, Kept] = {}

    def save(self, at: Visit, kept: Kept, /) -> None:
        """See Saving."""
        self._kept[at] = kept

    def restore(self, at: Visit, _weights: Values, /) -> Kept:
        """See Saving."""
        return self._kept.pop(at)


class Chosen(NamedTuple):
    """Which tensors of a layer go to the host's memory."""

    tensors: frozenset[Tensor]
    block: Block

    def of(self, kept: Kept) -> list[View]:
        """Return where those lie, with attention's output what attention keeps beside its inputs."""
        around = {**kept.before, **kept.after}
        found: list[object] = [view for tensor, view in around.items() if tensor in self.tensors]
        if kept.attention is not None:
            own = kept.attention._asdict()
            inputs = {name: own.pop(name) for name in ("q", "k", "v")}
            asked = zip((self.block.q, self.block.k, self.block.v), inputs.values(), strict=True)
            found += [view for tensor, view in asked if tensor in self.tensors]
            found += [own] if self.block.out in self.tensors else []
        views: list[View] = []
        flatten(found, views, [])
        return views


class _Elsewhere(Keep):
    """Keeps what layers save, or what is chosen of it, in a host's memory of a kind."""

    def __init__(self, b: ProgramBuilder, place: Place, chosen: Chosen | None, first: int, *, waits: bool) -> None:
        super().__init__()
        self._b, self._place, self._chosen, self._waits = b, place, chosen, waits
        self._first = first
        """Number of the first layer that leaves the GPU."""
        self._stays: set[int] = set()
        """Numbers of buffers."""

    def _leave(self, kept: Kept) -> None:
        """Let what attention keeps in the host's memory itself stay there, and on the GPU what is not chosen."""
        views: list[View] = []
        flatten(kept, views, [])
        self._stays.update([view.buffer for view in views if self._b.place(view) != "hbm"])
        if self._chosen is not None:
            goes = {view.buffer for view in self._chosen.of(kept)}
            self._stays.update([view.buffer for view in views if view.buffer not in goes])

    def _copied(self, layer: int, place: Place, label: str, kept: Kept) -> Kept:
        """Append a copy of every buffer of what is kept but those that stay, as inputs do; return where all is."""
        b = self._b
        copies: dict[int, View] = {}

        def moved(view: View) -> View:
            if b.is_input(view) or view.buffer in self._stays:
                return view
            if view.buffer not in copies:
                whole = b.whole(view)
                copies[view.buffer] = b.elsewhere(whole, place)
                b.host_copy(whole, copies[view.buffer], label, layer)
                if self._waits and place != "hbm":
                    b.add(HostSync(label="wait for the copy", streams=(OFFLOAD,)))
            return View(copies[view.buffer].buffer, view.slices)

        return mapped(kept, moved)

    def _fetched(self, layer: int, kept: Kept) -> Kept:
        """Append a copy of what is kept to the GPU's memory; return where it is."""
        return self._b.call("fetch", layer, partial(self._copied, layer, "hbm", "fetch layer"), kept)


class SaveOnCpu(_Elsewhere):
    """Copies every layer to pinned memory behind it, for which the host waits, and back when its backward pass begins,
    behind the kernels before it (torch/autograd/graph.py, save_on_cpu with pin_memory).
    """

    def __init__(self, b: ProgramBuilder, chosen: Chosen | None, first: int) -> None:
        super().__init__(b, "host", chosen, first, waits=True)

    def save(self, at: Visit, kept: Kept, /) -> None:
        """See Saving."""
        if at.layer >= self._first:
            self._leave(kept)
            copied = partial(self._copied, at.layer, self._place, "offload layer")
            kept = self._b.call("offload", at.layer, copied, kept)
        super().save(at, kept)

    def restore(self, at: Visit, weights: Values, /) -> Kept:
        """See Saving."""
        kept = super().restore(at, weights)
        return kept if at.layer < self._first else self._fetched(at.layer, kept)


class Offload(_Elsewhere):
    """Copies layers to the host's memory behind them, and back one layer ahead of their backward pass.

    The last layer's of each chunk stays, since it is needed first. The host copies a layer out when the layer before is
    out, and starts the backward pass when all are, so that the GPU holds what two layers save; so it does backward,
    where what is copied back for a layer is not written before the kernels issued until then have ended.
    """

    def __init__(
        self, b: ProgramBuilder, place: Place, chosen: Chosen | None, first: int, chunks: Sequence[range]
    ) -> None:
        super().__init__(b, place, chosen, first, waits=False)
        self._lasts = {layers[-1] for layers in chunks if layers}
        self._firsts = {max(layers[0], first) for layers in chunks if layers}
        """The first layers of which something leaves the GPU."""

    def save(self, at: Visit, kept: Kept, /) -> None:
        """See Saving."""
        if at.layer >= self._first and at.layer not in self._lasts:
            self._leave(kept)
            kept = self._b.call("offload", at.layer, partial(self._offloaded, at.layer), kept)
        super().save(at, kept)

    def restore(self, at: Visit, weights: Values, /) -> Kept:
        """See Saving."""
        if at.layer > self._first and at.layer not in self._firsts:
            if at.layer in self._lasts:
                self._b.add(HostSync(label="wait for the last one", streams=(OFFLOAD,)))
            ahead = at._replace(layer=at.layer - 1)
            self._kept[ahead] = self._fetched(ahead.layer, self._kept[ahead])
        return super().restore(at, weights)

    def _offloaded(self, layer: int, kept: Kept) -> Kept:
        self._b.add(HostSync(label="wait for the layer before", streams=(OFFLOAD,)))
        return self._copied(layer, self._place, "offload layer", kept)


def leaves(chunks: Sequence[range]) -> bool:
    """Return whether a layer of a stage's chunks leaves its activations: those of the last one of each stay."""
    return any(len(layers) > 1 for layers in chunks)


def saving(
    b: ProgramBuilder,
    name: SavingName,
    chosen: Chosen | None = None,
    first: int = 0,
    chunks: Sequence[range] | None = None,
) -> Saving:
    """Return what an option names, for the layers of a builder from the ``first`` on, of all that they save or of what
    is chosen; raises InputError where it would copy nothing. ``chunks`` are the layers of the rank's stage of the model
    that follow each other, by default all in one.
    """
    workload = b.workload
    if name == "hbm":
        return Keep()
    if first >= (least := workload.layers - (name != "save-on-cpu")) > 0:
        raise InputError(
            f"`set` schedule.offload_from={first} with schedule.activations={name} leaves all of {workload.layers} "
            f"layers on the GPU: allowed are 0 to {least - 1}; set it lower, or leave out schedule.activations"
        )
    if not workload.backward:
        raise InputError(
            f"`set` schedule.activations={name}: a forward pass alone saves nothing; leave it out, or set `passes` both"
        )
    if name == "save-on-cpu":
        return SaveOnCpu(b, chosen, first)
    chunks = chunks or (range(workload.layers),)
    if not leaves(chunks):
        raise InputError(
            f"`set` schedule.activations={name} keeps the last layer on the GPU, and there is one: set `layers` 2 or "
            f"more, or `set` schedule.activations=save-on-cpu"
        )
    return Offload(b, name, chosen, first, chunks)
