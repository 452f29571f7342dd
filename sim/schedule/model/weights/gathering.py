"""How weights come whole to where a pass needs them."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property, partial
from typing import NamedTuple

from sim.schedule.ir.ops import AllGather, Unpack
from sim.schedule.ir.views import Split, View
from sim.schedule.model.scope import LAYER, ROOT, Unit, together
from sim.schedule.model.weights.owned import Owned
from sim.schedule.model.write import Values


class _Pool:
    """Buffers for gathered weights of one kind of unit: as many as are gathered ahead, and those in use."""

    def __init__(self) -> None:
        self.sets: list[_Gathered] = []
        self.taken = 0


class _Gathered(NamedTuple):
    """Where weights of a unit are gathered, and where they are then."""

    flat: View
    weights: Values
    fetched: View | None = None
    """Where what a rank owns of them comes from the host, if it does."""


class Gathering:
    """Stage 3 gathers weights for each pass, ``prefetch`` units ahead, into a pool of buffers; below it they stay, and
    are gathered when they have been updated. Adapters are gathered behind their layer, where FSDP2 gathers both at
    once. What is on the host of what a rank owns is copied to the GPU before, as far ahead, and sent from there.
    """

    def __init__(self, owned: Owned) -> None:
        self._owned, self._b = owned, owned.b
        self.whole: dict[Unit, Values] = {}
        """Weights that stay."""
        if owned.stage < 3:
            whole = {unit: partial(self._whole, unit) for unit in owned.units}
            self.whole = {unit: self._b.call(unit.name, unit.layer, made) for unit, made in whole.items()}
        self._ahead = min(owned.options.prefetch, len(self._layers))
        """Layers that are gathered ahead: more would need the buffers of layers that are in use."""
        self._pools: dict[str, _Pool] = defaultdict(_Pool)
        self._sets: list[tuple[View, Values]] = []
        """Of units that are on their way."""
        self._both_ends: dict[Unit, tuple[View, Values]] = {}
        """The unit of both ends of the model, where it has one and this pass has gathered it."""
        self._order: tuple[Unit, ...] = ()
        """In which order this pass gathers."""
        self._turn = 0
        """How many of these are of the forward pass, where a backward pass follows it at once."""
        self._begun = self._gathered = 0
        """How many are in this pass, and have arrived."""

    def _whole(self, unit: Unit) -> Values:
        b = self._b
        return {w: b.input_of(w.later(unit.layer), w.rows(b.workload.model)) for w in unit.weights}

    def gather(self, unit: Unit) -> Values:
        """See Params. Weights of the next units are on their way before the kernels of this one are issued, as those of
        FSDP2 are, which has streams for what is done before they are sent.
        """
        weights: Values = {}
        for one in together(unit, self._b.workload.model):
            weights |= self.whole[one] if self._owned.stage < 3 else self._gathered_weights(one)
        return weights

    @cached_property
    def _layers(self) -> list[Unit]:
        """Those of layers, without adapters."""
        return [unit for unit in self._owned.units if unit.name == LAYER]

    def _gathered_weights(self, unit: Unit) -> Values:
        """Append what brings the weights of a unit here, and sends those of the next ones; return them."""
        for ahead in self._order[self._begun : self._to_begin]:
            self._sets.append(self._begin(ahead))
            self._begun += 1
        assert self._order[self._gathered] == unit, f"{unit.name} {unit.layer} is gathered out of order"
        self._gathered += 1
        flat, weights = self._sets.pop(0)
        if unit in self._order[: self._gathered - 1] and unit in self._both_ends:
            return weights
        self._b.call(f"unpack {unit.name}", unit.layer, partial(self.fill, unit), flat, weights)
        return weights

    @property
    def _to_begin(self) -> int:
        """How many of this pass are to be on their way before kernels of the next one."""
        needed = self._gathered + 1
        wanted = needed + (self._ahead * len(together(self._layers[0], self._b.workload.model)) if self._ahead else 0)
        if self._owned.options.backward_prefetch == "ahead":
            return wanted
        return needed if self._b.part == "backward" else max(needed, min(wanted, self._turn))

    def _begin(self, unit: Unit) -> tuple[View, Values]:
        """Append what sends a unit's weights; return where they arrive, and where they are to be."""
        if unit in self._both_ends:
            return self._both_ends[unit]
        pool, alike = self._pools[unit.name], sum(other.name == unit.name for other in self._owned.units)
        if len(pool.sets) < min(alike, 1 + self._ahead):
            pool.sets.append(self._b.call(f"room for {unit.name}", unit.layer, partial(self._room, unit)))
        flat, weights, fetched = pool.sets[pool.taken % len(pool.sets)]
        pool.taken += 1
        given = (self._owned.kept[unit].gathered, flat, fetched)
        begun = self._b.call(f"gather {unit.name}", unit.layer, partial(self.send, unit), *given), weights
        if unit.name == ROOT.name:
            self._both_ends[unit] = begun
        return begun

    def _room(self, unit: Unit) -> _Gathered:
        b = self._b
        shapes = {weight: weight.shape(b.workload.model) for weight in unit.weights}
        flat = self.flat(unit)
        weights = {
            weight: b.buffer(weight.name, "io"[: len(shape)], shape, b.workload.dtype, "parameter")
            for weight, shape in shapes.items()
        }
        if not self._owned.fetches(unit):
            return _Gathered(flat, weights)
        dtype = b.sum_dtype if self._owned.casts(unit) else b.workload.dtype
        fetched = b.buffer(f"fetched {unit.name}", "i", (self._owned.each(unit.flat),), dtype, "communication")
        return _Gathered(flat, weights, fetched)

    def flat(self, unit: Unit) -> View:
        """Return a new buffer for all of a unit's weights in the model's data type, padding included."""
        extent = self._owned.each(unit.flat) * self._owned.num_parts
        return self._b.buffer(f"gathered {unit.name}", "i", (extent,), self._b.workload.dtype, "communication")

    def send(self, unit: Unit, own: View, flat: View, fetched: View | None = None) -> View:
        """Append what brings the weights of all ranks here, in the model's data type; return where they are. Those of
        this rank may be on the host, and are copied to ``fetched`` then.
        """
        b, within = self._b, self._owned.shards.within
        if fetched is not None:
            (count,) = own.shape
            b.host_copy(own, fetched[:count], "fetch weights", unit.layer)
            own = fetched[:count]
        sent = self.packed(unit, own, flat if within is None and self._owned.casts(unit) else None)
        return self.spread(unit, sent, flat) if within else sent

    def spread(self, unit: Unit, sent: View, flat: View) -> View:
        """Append what brings what all ranks send here; return it."""
        within, recvs = self._owned.shards.within, Split(flat, 0, self._owned.num_parts)
        assert within, "ranks have all weights"
        self._b.add(AllGather(label=f"gather {unit.name}", communicator=within.name, send=sent, recvs=recvs))
        return flat

    def own(self, unit: Unit) -> View:
        """Return a new buffer for what a rank sends of a unit's weights, padding included."""
        shape = (self._owned.each(unit.flat),)
        return self._b.buffer(f"own {unit.name}", "i", shape, self._b.workload.dtype, "communication")

    def packed(self, unit: Unit, own: View, into: View | None = None) -> View:
        """Return what a rank owns of a unit as it is sent, in the model's data type and padded: what there is, where
        that is so already, or a copy, having appended it; with ``into`` always a copy there.
        """
        (count,) = own.shape
        if into is None and not self._owned.casts(unit) and count == self._owned.each(unit.flat):
            return own
        sent = into or self.own(unit)
        self._b.copy(own, self._owned.pad(sent, count), "cast weights")
        return sent

    def fill(self, unit: Unit, flat: View, weights: Values) -> None:
        """Append what copies weights out of a flat tensor to where they belong."""
        (size,) = unit.flat.shape(self._b.workload.model)
        self._b.add(Unpack(label=f"unpack {unit.name}", flat=flat[:size], weights=tuple(weights.values())))

    def begin(self, order: tuple[Unit, ...]) -> None:
        """See Params. What was gathered into is freed, and gathered anew."""
        self._pools.clear()
        self._both_ends.clear()
        self._begun = self._gathered = 0
        self._order = tuple([one for unit in order for one in together(unit, self._b.workload.model)])
        again = (at for at, unit in enumerate(self._order) if unit in self._order[:at])
        self._turn = next(again, len(self._order))
