"""How an optimiser updates what a rank owns, and how new weights come to all who hold them whole."""

from __future__ import annotations

from functools import partial
from typing import Any

from sim.schedule.ir.ops import AdamW, Hold, HostAdamW, HostSync
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.views import View
from sim.schedule.model.scope import Unit, num_merged, updated
from sim.schedule.model.weights.gathering import Gathering
from sim.schedule.model.weights.owned import Kept, Owned
from sim.schedule.model.write import Values


class Updating:
    """Where the optimiser is on the host, updates follow each other on the CPU, all behind the norm of all gradients,
    and new weights are copied back beside the next one; with weights=host they stay.
    """

    def __init__(self, owned: Owned, gathering: Gathering) -> None:
        self._owned, self._b, self._gathering = owned, owned.b, gathering

    def update(self, gradients: dict[Unit, View], squares: View) -> None:
        """Append it, by what ``Summing.complete`` returned."""
        b, kept, whole = self._b, self._owned.kept, self._gathering.whole
        within = self._owned.shards.within if self._owned.options.gather == "all" else None
        new = {}
        for unit, gradient in gradients.items():
            update, weights = partial(self._update, unit), {} if within else whole.get(unit, {})
            new[unit] = b.call(f"update {unit.name}", unit.layer, update, gradient, squares, kept[unit], weights)
        if new and within:
            self._gather_all(new, within)

    def _update(self, unit: Unit, gradient: View, squares: View, kept: Kept, weights: Values) -> View:
        """Append what updates a unit's weights and moments where they lie, and brings them to all who hold them whole;
        return what is sent for that.
        """
        b, (own, first, second), gathered = self._b, kept.states, kept.gathered
        given: dict[str, Any] = {"weights": own, "gradient": gradient, "first": first, "second": second}
        given |= {"label": f"update {unit.name}", "squares": squares}
        if self._owned.on_host and self._owned.uses_states:
            b.add(HostAdamW(**given))
        elif self._owned.on_host:
            gathered = self._update_on_host(unit, gathered, given)
        else:
            b.add(AdamW(**given))
        for state, view in zip(unit.states, kept.states, strict=True):
            b.output_of(updated(state), self._owned.rows(state), view)
        if weights:
            direct = self._owned.shards.within is None
            flat = gathered if direct else self._gathering.send(unit, gathered, self._gathering.flat(unit))
            self._renew(unit, flat, weights)
        return gathered

    def _update_on_host(self, unit: Unit, gathered: View, given: dict[str, Any]) -> View:
        """Append the update where passes use others than the optimiser's weights, and what makes these new; return
        them.
        """
        b = self._b
        if self._owned.fetches(unit):
            b.add(HostAdamW(cast=gathered, **given))
        else:
            shape = given["weights"].shape
            cast = b.buffer(f"new {unit.name}", "i", shape, b.workload.dtype, "parameter", "host")
            b.add(HostAdamW(cast=cast, **given))
            gathered = gathered if self._owned.stage == 3 else b.elsewhere(cast, "hbm")
            b.host_copy(cast, gathered, "weights from the host", unit.layer)
        if self._owned.stage == 3:
            b.output_of(updated(unit.working), self._owned.rows(unit.flat), gathered)
        return gathered

    def _renew(self, unit: Unit, flat: View, weights: Values) -> None:
        """Append what makes whole weights of a flat tensor of new ones."""
        self._gathering.fill(unit, flat, weights)
        for weight, view in weights.items():
            whole = updated(weight).later(unit.layer)
            self._b.output_of(whole, whole.rows(self._b.workload.model), view)

    def _gather_all(self, new: dict[Unit, View], within: Communicator) -> None:
        """Append what copies new weights of all units together, gathers them, copies them to one tensor for each rank
        and from there to where they belong; all of that is held until the last one is there (nanotron 0.4
        distributed.py, all_gather_coalesced). The host takes each rank's part of each tensor by itself.
        """
        b, gathering, held, flats = self._b, self._gathering, [], {}
        for unit, own in new.items():
            packs, spreads = partial(gathering.packed, unit), partial(gathering.spread, unit)
            packed = b.call(f"flatten {unit.name}", unit.layer, packs, own, gathering.own(unit))
            flats[unit] = b.call(f"gather {unit.name}", unit.layer, spreads, packed, gathering.flat(unit))
            held.append(packed)
        calls = self._owned.num_parts * sum(num_merged(unit, b.workload.model) for unit in flats)
        b.add(HostSync(label="take new weights apart", streams=(within.name,), calls=calls))
        for unit, flat in flats.items():
            listed = b.call(f"list {unit.name}", unit.layer, partial(self._listed, unit), flat)
            b.call(f"renew {unit.name}", unit.layer, partial(self._renew, unit), listed, gathering.whole[unit])
            held += [flat, listed]
        b.add(Hold(label="hold gathered weights", held=tuple(held)))

    def _listed(self, unit: Unit, flat: View) -> View:
        listed = self._gathering.flat(unit)
        self._b.copy(flat, listed, f"list {unit.name}")
        return listed
