"""Weights and an optimiser's state as flat tensors, sharded over ranks by ZeRO's stages (arXiv:1910.02054 §5), FSDP
(arXiv:2304.11277) being the third.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import NamedTuple

from sim.errors import InputError
from sim.mesh import Mesh
from sim.options import LayerOptions
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.ops import AdamW, AllGather, AllReduce, Pack, ReduceScatter, SquareSum, Unpack
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.tensors import Tensor, d, dtype_of
from sim.schedule.ir.views import Split, View
from sim.schedule.model.params import Reduced, Room
from sim.schedule.model.scope import LAYER, Unit, units, updated
from sim.schedule.model.write import Values
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import DTYPE_BYTES, Workload, accumulation_dtype


class Shards(NamedTuple):
    """Over which ranks weights are sharded and their gradients summed; each None where there is one rank."""

    within: Communicator | None = None
    """Gathers weights. At stage 0 None, too."""
    gradients: Communicator | None = None
    """The same ranks, with a stream of their own: sums gradients."""
    across: Communicator | None = None
    """Those that have the same shards in all replicas, where each replica has shards of all."""

    @property
    def declared(self) -> tuple[Communicator, ...]:
        """All that there are."""
        return tuple(filter(None, self))


def shards_of(mesh: Mesh, options: LayerOptions) -> Shards:
    """Return the communicators of a mesh, of HSDP (arXiv:2304.11277 §3.2.2) where shards lie within its replicas."""
    hybrid = options.shards == "replica"
    within, across = mesh.groups(*([] if hybrid else ["dp"]), "ring", "ulysses"), mesh.groups("dp")
    several = len(within[0]) > 1
    return Shards(
        Communicator(name="weights", groups=within) if several and options.zero_stage else None,
        Communicator(name="gradients", groups=within) if several else None,
        Communicator(name="replicas", groups=across) if hybrid and len(across[0]) > 1 else None,
    )


def moved_bytes(workload: Workload, mesh: Mesh, options: LayerOptions) -> int:
    """Return what is sent of weights and gradients, over all ranks.

    (P-1) bytes for each byte that P ranks gather or reduce-scatter, twice that if they reduce it to all. Weights of
    layers are gathered for both passes at stage 3, of both ends once; below it all once, where they are sharded.
    """
    own, wide = DTYPE_BYTES[workload.dtype], DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    on_wire = own if options.reduce == "model" else wide
    hybrid, stage = options.shards == "replica", options.zero_stage
    groups, ranks = (mesh.dp, mesh.size // mesh.dp) if hybrid else (1, mesh.size)
    total = gathered = 0
    for unit in units(workload):
        (size,) = unit.flat.shape(workload.model)
        total += size
        gathered += size * (2 if stage == 3 and unit.name == LAYER.name else 1 if stage else 0)
    summed = total * on_wire * (1 if stage else 2)
    squares = 2 * len(units(workload)) * wide if stage else 0
    across = 2 * (groups - 1) * total * on_wire * (1 if stage else ranks)
    return groups * (ranks - 1) * (gathered * own + summed + squares) + across


class _Pool:
    """Buffers for gathered weights of one kind of unit: as many as are gathered ahead, and those in use."""

    def __init__(self) -> None:
        self.sets: list[tuple[View, Values]] = []
        self.taken = 0


class Flat:
    """Each unit's weights and moments are flat fp32 tensors, of which a rank owns one part, or all at stage 0.

    Stage 3 gathers weights for each pass, ``prefetch`` units ahead, into a pool of buffers; below it they stay, and are
    gathered when they have been updated. Gradients are summed by a reduce-scatter as soon as a unit has all of its own,
    at stage 1 when all units have theirs, and at stage 0 by an all-reduce.
    """

    def __init__(self, b: ProgramBuilder, shards: Shards, options: LayerOptions, owner: int) -> None:
        """``owner`` is the rank that the program is for, ``b.rank`` the one in its place in the first replica."""
        self._b, self._stage, self._shards, self._options = b, options.zero_stage, shards, options
        self._owner = owner
        self._units = units(b.workload)
        self._states = {
            unit: b.call(f"{unit.name} state", unit.layer, partial(self._held, unit)) for unit in self._units
        }
        self._weights: dict[Unit, Values] = {}
        if self._stage < 3:
            whole = {unit: partial(self._whole, unit) for unit in self._units}
            self._weights = {unit: b.call(unit.name, unit.layer, made) for unit, made in whole.items()}
        self._pools: dict[str, _Pool] = defaultdict(_Pool)
        self._packed: dict[str, View] = {}
        self._made: Values = {}
        """Gradients of the unit that is being written."""
        self._summed: dict[Unit, View] = {}

    @property
    def _num_parts(self) -> int:
        within = self._shards.within
        return len(within.group_of(self._owner)) if within else 1

    def _rows(self, flat: Tensor) -> Tokens:
        """Return the elements that this rank owns."""
        (whole,) = flat.rows(self._b.workload.model)
        within, (each, rest) = self._shards.within, divmod(whole.size, self._num_parts)
        if rest:
            raise InputError(
                f"`gpus`: {self._num_parts} ranks do not divide the {whole.size} weights of {flat.name}: set "
                f"`set` schedule.zero_stage=0, or choose a number that does"
            )
        start = within.position(self._owner) * each if within else 0
        return (Span(start, start + each),)

    def _held(self, unit: Unit) -> tuple[View, ...]:
        """Return this rank's part of the weights and of both moments."""
        return tuple([self._b.input_of(state, self._rows(state)) for state in unit.states])

    def _whole(self, unit: Unit) -> Values:
        b = self._b
        return {w: b.input_of(w.later(unit.layer), w.rows(b.workload.model)) for w in unit.weights}

    def gather(self, unit: Unit) -> Values:
        """See Params."""
        if self._stage < 3:
            return self._weights[unit]
        pool, alike = self._pools[unit.name], sum(other.name == unit.name for other in self._units)
        if len(pool.sets) < min(alike, 1 + self._options.prefetch):
            pool.sets.append(self._b.call(f"room for {unit.name}", unit.layer, partial(self._room, unit)))
        flat, weights = pool.sets[pool.taken % len(pool.sets)]
        pool.taken += 1
        own = self._states[unit][0]
        self._b.call(f"gather {unit.name}", unit.layer, partial(self._gather, unit), own, flat, weights)
        return weights

    def _room(self, unit: Unit) -> tuple[View, Values]:
        b = self._b
        shapes = {weight: weight.shape(b.workload.model) for weight in unit.weights}
        return self._flat(unit), {
            weight: b.buffer(weight.name, "io"[: len(shape)], shape, b.workload.dtype, "parameter")
            for weight, shape in shapes.items()
        }

    def _flat(self, unit: Unit) -> View:
        """Return a new buffer for all of a unit's weights in the model's data type."""
        b = self._b
        return b.buffer(
            f"gathered {unit.name}", "i", unit.flat.shape(b.workload.model), b.workload.dtype, "communication"
        )

    def _gather(self, unit: Unit, own: View, flat: View, weights: Values) -> None:
        """Append what brings the weights of all ranks here, in the model's data type."""
        b, within = self._b, self._shards.within
        if within is None:
            b.copy(own, flat, "cast weights")
        else:
            cast = b.like(f"own {unit.name}", own, "communication", b.workload.dtype)
            b.copy(own, cast, "cast weights")
            recvs = Split(flat, 0, self._num_parts)
            b.add(AllGather(label=f"gather {unit.name}", communicator=within.name, send=cast, recvs=recvs))
        b.add(Unpack(label=f"unpack {unit.name}", flat=flat, weights=tuple(weights.values())))

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        self._made[gradient._replace(layer=0)] = view

    def _gradient(self, unit: Unit) -> Tensor:
        """Return a unit's gradient as it is sent."""
        return d(unit.flat)._replace(numbers="model" if self._options.reduce == "model" else "accumulation")

    def room(self, unit: Unit) -> Room:
        """See Params: gradients of alike units are packed in one buffer, so each waits for the sum of the one before
        where that leaves the buffer free, as FSDP2 waits.
        """
        if self._stage < 2 or not self._shards.gradients:
            return ()
        if unit.name not in self._packed:
            gradient = self._gradient(unit)
            shape = gradient.shape(self._b.workload.model)
            dtype = dtype_of(gradient, self._b.workload.dtype)
            self._packed[unit.name] = self._b.buffer(f"gradients of {unit.name}", "i", shape, dtype, "gradient")
        return (self._packed[unit.name],)

    def reduced(self, unit: Unit, room: Room) -> Reduced:
        """See Params."""
        b, made = self._b, self._made
        self._made = {}
        (rows,) = unit.flat.rows(b.workload.model)
        (flat,) = room or (b.new(self._gradient(unit), rows.size),)
        gradients = tuple([made[d(weight)] for weight in unit.weights])
        b.add(Pack(label=f"pack gradients of {unit.name}", gradients=gradients, flat=flat))
        return (flat if self._stage == 1 else self._sum(unit, flat),)

    def _sum(self, unit: Unit, flat: View) -> View:
        """Append what sums a gradient over all ranks; return what this rank owns of it, in the data type of sums."""
        b, (_, gradients, across) = self._b, self._shards
        own = flat
        if gradients and self._stage:
            own, sends = b.new(self._gradient(unit), num_tokens(self._rows(unit.flat))), Split(flat, 0, self._num_parts)
            b.add(ReduceScatter(label=f"reduce {unit.name}", communicator=gradients.name, sends=sends, recv=own))
        elif gradients:
            b.add(AllReduce(label=f"reduce {unit.name}", communicator=gradients.name, view=flat))
        if across:
            b.add(AllReduce(label=f"reduce {unit.name} over replicas", communicator=across.name, view=own))
        if b.dtype(own) == b.sum_dtype:
            return own
        wide = b.like("gradient", own, "gradient", b.sum_dtype)
        b.copy(own, wide, "cast gradients")
        return wide

    def keep(self, unit: Unit, reduced: Reduced) -> None:
        """See Params."""
        (self._summed[unit],) = reduced

    def update(self) -> None:
        """See Params."""
        b, within, summed = self._b, self._shards.within, self._summed
        if self._stage == 1:
            summed = {
                unit: b.call(f"reduce {unit.name}", unit.layer, partial(self._sum, unit), flat)
                for unit, flat in summed.items()
            }
        squares = b.buffer("squares of gradients", "i", (len(summed),), b.sum_dtype, "optimiser")
        for number, (unit, gradient) in enumerate(summed.items()):
            square = squares[number : number + 1]
            b.add(SquareSum(label=f"square {unit.name} {unit.layer}", gradient=gradient, square=square))
        if within:
            b.add(AllReduce(label="norm of gradients", communicator=within.name, view=squares))
        for unit, gradient in summed.items():
            update, weights = partial(self._update, unit), self._weights.get(unit, {})
            b.call(f"update {unit.name}", unit.layer, update, gradient, squares, self._states[unit], weights)

    def _update(self, unit: Unit, gradient: View, squares: View, states: tuple[View, ...], weights: Values) -> None:
        """Append what updates a unit's weights and moments where they lie, and below stage 3 brings them to all."""
        b, (own, first, second) = self._b, states
        label = f"update {unit.name}"
        b.add(AdamW(label=label, weights=own, gradient=gradient, first=first, second=second, squares=squares))
        for state, view in zip(unit.states, states, strict=True):
            b.output_of(updated(state), self._rows(state), view)
        if weights:
            self._gather(unit, own, self._flat(unit), weights)
            for weight, view in weights.items():
                whole = updated(weight).later(unit.layer)
                b.output_of(whole, whole.rows(b.workload.model), view)
