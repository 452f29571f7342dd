"""Weights and an optimiser's state as flat tensors, sharded over ranks by ZeRO's stages (arXiv:1910.02054 §5), FSDP
(arXiv:2304.11277) being the third.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property, partial
from typing import Any, NamedTuple

from sim.base.errors import InputError
from sim.schedule.ir.masks import Span, Tokens
from sim.schedule.ir.ops import (
    Accumulate,
    AdamW,
    AllGather,
    AllReduce,
    Hold,
    HostAdamW,
    HostSync,
    Pack,
    ReduceScatter,
    SquareSum,
    Unpack,
    Zero,
)
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.tensors import Tensor, d, dtype_of
from sim.schedule.ir.views import Split, View
from sim.schedule.model.params import Reduced, Room
from sim.schedule.model.scope import (
    ADAPTERS,
    LAYER,
    ROOT,
    Unit,
    num_merged,
    together,
    trained,
    trained_of,
    units,
    updated,
    with_options,
)
from sim.schedule.model.write import Values
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions, Place
from sim.words.workload import DTYPE_BYTES, Dtype, Workload, accumulation_dtype


class Shards(NamedTuple):
    """Over which ranks weights are sharded and their gradients summed; each None where there is one rank."""

    within: Communicator | None = None
    """Gathers weights. At stage 0 None, too."""
    gradients: Communicator | None = None
    """The same ranks: sums gradients. The same communicator, or one with a stream of its own."""
    across: Communicator | None = None
    """Those that have the same shards in all replicas, where each replica has shards of all."""
    norm: Communicator | None = None
    """Sums squares of gradients: all that own different ones, of shards or of stages of a model."""

    @property
    def declared(self) -> tuple[Communicator, ...]:
        """All that there are."""
        return tuple(dict.fromkeys(filter(None, self)))


def shards_of(mesh: Mesh, options: LayerOptions) -> Shards:
    """Return the communicators of a mesh, of HSDP (arXiv:2304.11277 §3.2.2) where shards lie within its replicas."""
    hybrid = options.shards == "replica"
    across = mesh.groups("dp")
    within = mesh.groups("ring", "ulysses") if hybrid else mesh.groups("dp", "ring", "ulysses")
    several, gathers = len(within[0]) > 1, options.zero_stage > 0
    weights, gradients = (Communicator(name=name, groups=within) for name in ("weights", "gradients"))
    shared = gathers and options.weight_communicators == "one"
    return Shards(
        within=weights if several and gathers else None,
        gradients=(weights if shared else gradients) if several else None,
        across=Communicator(name="replicas", groups=across) if hybrid and len(across[0]) > 1 else None,
        norm=weights if several and gathers and options.reduce_to == "owner" else None,
    )


def moved_bytes(workload: Workload, mesh: Mesh, options: LayerOptions) -> int:
    """Return what is sent of weights and gradients, over all ranks.

    (P-1) bytes for each byte that P ranks gather or reduce-scatter, twice that if they reduce it to all. Weights of
    layers are gathered for both passes over each micro-batch at stage 3, of both ends once for each; below it all once,
    where they are sharded. Gradients are summed for each micro-batch from stage 2 on, below it and with sync=last once.
    Frozen weights are gathered at stage 3 alone, and have none.
    """
    own, wide = DTYPE_BYTES[workload.dtype], DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    on_wire = own if options.reduce == "model" else wide
    hybrid, stage = options.shards == "replica", options.zero_stage
    groups, ranks = (mesh.dp, mesh.size // mesh.dp) if hybrid else (1, mesh.size)
    gathers = options.micro_batches if stage == 3 else 1
    sums = options.micro_batches if stage >= 2 and options.sync == "every" else 1
    total = gathered = 0
    for unit in units(workload):
        (size,) = unit.flat.shape(workload.model)
        size = _part(size, ranks) * ranks if stage else size
        total += 0 if unit.frozen else size
        if stage == 3 or (stage and not unit.frozen):
            gathered += gathers * size * (2 if stage == 3 and unit.name in {LAYER, ADAPTERS} else 1)
    to_owners = stage > 0 and options.reduce_to == "owner"
    summed = sums * total * on_wire * (1 if to_owners else 2)
    squares = 2 * len(trained(workload)) * wide if to_owners else 0
    across = 2 * (groups - 1) * sums * total * on_wire * (1 if to_owners else ranks)
    return groups * (ranks - 1) * (gathered * own + summed + squares) + across


def _part(size: int, parts: int) -> int:
    """Return how many elements each of some equal parts has, the last of which are padded (arXiv:2304.11277 §3.2.1)."""
    return -(-size // parts)


def rows_later(
    workload: Workload, shards: Shards, options: LayerOptions, role: int, owner: int
) -> dict[str, int] | None:
    """Return by the tensors of ports how many rows later those are that ``owner`` owns than those that ``role`` does;
    None where its program may differ from that of ``role`` in more: where either owns fewer than others, or takes them
    from where they lie among all.
    """
    within = shards.within
    if within is None or options.reduce_to == "all" or len(within.group_of(role)) != len(within.group_of(owner)):
        return None
    later: dict[str, int] = {}
    here, there, parts = within.position(role), within.position(owner), len(within.group_of(role))
    for unit in units(workload):
        (size,) = unit.flat.shape(workload.model)
        each = _part(size, parts)
        if (max(here, there) + 1) * each > size:
            return None
        rows = each * (there - here)
        for tensor in (*unit.states, unit.working):
            for port in (tensor, updated(tensor)):
                if later.setdefault(port.name, rows) != rows:
                    return None
    return later


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


class _Kept(NamedTuple):
    """What a rank keeps of a unit from step to step, of the elements that it owns."""

    states: tuple[View, ...]
    """The optimiser's weights and moments."""
    gathered: View
    """What is sent where weights are gathered: the optimiser's, or where these are on the host mostly others."""


class Flat:
    """Each unit's weights and moments are flat tensors, in fp32 or the model's data type, of which a rank owns one
    part, or all at stage 0.

    Stage 3 gathers weights for each pass, ``prefetch`` units ahead, into a pool of buffers; below it they stay, and are
    gathered when they have been updated. Gradients are summed by a reduce-scatter as soon as a unit has all of its own,
    at stage 1 when all units have theirs, and at stage 0 by an all-reduce. Those of several micro-batches add up in
    fp32: summed in the shards, as in torch's FSDP2; below stage 2 whole, and are summed once. With sync=last they are
    whole from stage 2 on, too, and at every stage a unit's are summed in the last backward pass as soon as they are
    complete, as behind FSDP2's set_requires_gradient_sync(False) (torch/distributed/fsdp/_fully_shard/
    _fsdp_param_group.py, post_backward) and DDP's no_sync (torch/nn/parallel/distributed.py), which nanotron leaves
    for the last one alone (0.4 parallel/pipeline_parallel/engine.py, _get_bwd_context).

    With reduce_to=all stage 1 sums by an all-reduce, too, of which each rank takes what it owns and squares all. With
    accumulate=in-place a unit's gradients are added, as they are, to a buffer that a step begins with as zeros and
    holds to its end. With bucket_mb those of the last backward pass go through buckets in the model's data type, which
    stay, too: torch's DDP fills its own before it calls the hook that adds them up (nanotron 0.4
    optim/gradient_accumulator.py, fp32_accum_hook).

    Frozen weights are in the model's data type and have neither gradients nor moments: at stage 3 a rank has a part of
    each flat tensor of them, which is gathered as the others are; below it it has all of them. Adapters have flat
    tensors of their own, gathered behind those of their layer, where FSDP2 gathers both at once.

    Where the optimiser is on the host (arXiv:2101.06840 §4) so are weights and moments, but for weights in the model's
    data type that are gathered. Each summed gradient goes there; its squares are summed up before, on the GPU, as
    DeepSpeed's runtime/zero/stage3.py does it. Updates follow each other on the CPU, all behind the norm of all
    gradients, and new weights are copied back beside the next one. With weights=host they stay there: where a unit is
    gathered, what a rank owns of it is copied to the GPU before, as far ahead, and sent from there.
    """

    def __init__(
        self, b: ProgramBuilder, shards: Shards, options: LayerOptions, owner: int, own: tuple[Unit, ...]
    ) -> None:
        """``owner`` is the rank that the program is for, ``b.rank`` the one in its place in the first replica; its
        stage of the model has the units ``own``, in the order of ``units``.
        """
        self._b, self._stage, self._shards, self._options = b, options.zero_stage, shards, options
        self._owner = owner
        self._on_host = options.optimiser == "host"
        self._uses_states = not self._on_host or options.weights == "host-states"
        """Whether the optimiser's weights are those that are gathered."""
        if options.weights != "gpu" and not self._on_host and not b.workload.model.is_frozen:
            raise InputError(
                f"`set` schedule.weights={options.weights} with schedule.optimiser=gpu: the optimiser's own weights on "
                f"the GPU are those that are gathered; set schedule.optimiser=host"
            )
        self._units, self._trained = own, [unit for unit in own if not unit.frozen]
        kept = self._units if self._stage == 3 else self._trained
        self._kept = {unit: b.call(f"{unit.name} state", unit.layer, partial(self._keep, unit)) for unit in kept}
        self._weights: dict[Unit, Values] = {}
        if self._stage < 3:
            whole = {unit: partial(self._whole, unit) for unit in self._units}
            self._weights = {unit: b.call(unit.name, unit.layer, made) for unit, made in whole.items()}
        self._ahead = min(options.prefetch, len(self._layers))
        """Layers that are gathered ahead: more would need the buffers of layers that are in use."""
        self._pools: dict[str, _Pool] = defaultdict(_Pool)
        self._sets: list[tuple[View, Values]] = []
        """Of units that are on their way."""
        self._both_ends: dict[Unit, tuple[View, Values]] = {}
        """The unit of both ends of the model, where it has one and this pass has gathered it."""
        self._begun = self._gathered = 0
        """How many are in this pass, and have arrived."""
        self._packed: dict[str, View] = {}
        self._made: Values = {}
        """Gradients of the unit that is being written."""
        self._arrived: list[tuple[Unit, View]] = []
        """Gradients of this micro-batch with which nothing was done yet."""
        self._summed: dict[Unit, View] = {}
        self._squared: dict[Unit, View] = {}
        """Of what squares are summed up."""
        self._to_all = options.reduce_to == "all"
        """Whether a rank gets more of a sum than it owns."""
        self._to_come = dict.fromkeys(self._trained, options.micro_batches)
        """Of how many micro-batches a unit still lacks gradients."""
        at_once = options.sync == "last"
        self._sums_late = not at_once and (self._stage == 1 or (self._stage == 0 and options.micro_batches > 1))
        """Whether gradients are summed over ranks when all units have theirs."""
        self._adds_whole = at_once and (options.micro_batches > 1 or options.accumulate == "in-place")
        """Whether those of micro-batches add up before they are summed over ranks, unit by unit."""
        self._in_place: dict[Unit, View] = {}
        """The buffer to which all gradients of a unit are added, where there is one from step to step."""
        self._filled: list[View] = []
        """Buckets in the model's data type, out of which the last gradients are added to these."""
        if options.accumulate == "in-place":
            zeros = {unit: partial(self._zeros, unit) for unit in self._trained}
            self._in_place = {unit: b.call(f"zero {unit.name}", unit.layer, made) for unit, made in zeros.items()}

    @cached_property
    def _layers(self) -> list[Unit]:
        """Those of layers, without adapters."""
        return [unit for unit in self._units if unit.name == LAYER]

    @property
    def _num_parts(self) -> int:
        within = self._shards.within
        return len(within.group_of(self._owner)) if within else 1

    def _rows(self, flat: Tensor) -> Tokens:
        """Return the elements that this rank owns."""
        (whole,), each = flat.rows(self._b.workload.model), self._each(flat)
        start = self._shards.within.position(self._owner) * each if self._shards.within else 0
        if start >= whole.size:
            raise InputError(
                f"`gpus`: {self._num_parts} ranks are too many for the {whole.size} elements of {flat.name}, {each} "
                f"each: choose fewer, or `set` schedule.zero_stage=0"
            )
        return (Span(start, min(start + each, whole.size)),)

    def _each(self, flat: Tensor) -> int:
        """Return how many elements a rank sends or takes, padding included."""
        (size,) = flat.shape(self._b.workload.model)
        return _part(size, self._num_parts)

    def _pad(self, view: View, count: int) -> View:
        """Append what sets to zero all behind the first elements of a flat view; return these."""
        if count < view.shape[0]:
            self._b.add(Zero(label="padding", into=view[count:]))
        return view[:count]

    def _fetches(self, unit: Unit) -> bool:
        """Return whether what is gathered of a unit is on the host."""
        return self._options.weights != "gpu" and (self._on_host or unit.frozen)

    def _casts(self, unit: Unit) -> bool:
        """Return whether what is gathered of a unit is to be made of weights in another data type."""
        return self._uses_states and not unit.frozen and self._options.optimiser_states == "fp32"

    def _states(self, unit: Unit) -> list[Tensor]:
        return [with_options(state, self._options.optimiser_states) for state in unit.states]

    def _keep(self, unit: Unit) -> _Kept:
        """Return this rank's part of the weights and of both moments."""
        b, rows = self._b, self._rows(unit.flat)
        working: Place = "host" if self._fetches(unit) else "hbm"
        if unit.frozen:
            return _Kept((), b.input_of(unit.working, rows, working))
        place: Place = "host" if self._on_host else "hbm"
        states = tuple([b.input_of(state, rows, place) for state in self._states(unit)])
        works = not self._uses_states and self._stage == 3
        return _Kept(states, b.input_of(unit.working, rows, working) if works else states[0])

    def _whole(self, unit: Unit) -> Values:
        b = self._b
        return {w: b.input_of(w.later(unit.layer), w.rows(b.workload.model)) for w in unit.weights}

    def gather(self, unit: Unit) -> Values:
        """See Params. Weights of the next units are on their way before the kernels of this one are issued, as those of
        FSDP2 are, which has streams for what is done before they are sent.
        """
        weights: Values = {}
        for one in together(unit, self._b.workload.model):
            weights |= self._weights[one] if self._stage < 3 else self._gathered_weights(one)
        return weights

    def _gathered_weights(self, unit: Unit) -> Values:
        """Append what brings the weights of a unit here, and sends those of the next ones; return them."""
        ahead_of_it = self._ahead * len(together(self._layers[0], self._b.workload.model))
        for ahead in self._order[self._begun : self._gathered + 1 + ahead_of_it]:
            self._sets.append(self._begin(ahead))
            self._begun += 1
        assert self._order[self._gathered] == unit, f"{unit.name} {unit.layer} is gathered out of order"
        self._gathered += 1
        flat, weights = self._sets.pop(0)
        if self._gathered > 1 and unit == self._order[0]:
            return weights
        self._b.call(f"unpack {unit.name}", unit.layer, partial(self._unpack, unit), flat, weights)
        return weights

    @cached_property
    def _order(self) -> tuple[Unit, ...]:
        """In which order a pass gathers: weights of both ends once, those of layers for backward again. A unit of both
        ends stands where the head is needed, too, and is there already.
        """
        there = [unit for unit in self._units if unit.name != ADAPTERS]
        again = [unit for unit in there if unit.name == ROOT.name]
        passed = (*there, *again, *reversed(self._layers))
        return tuple([one for unit in passed for one in together(unit, self._b.workload.model)])

    def _begin(self, unit: Unit) -> tuple[View, Values]:
        """Append what sends a unit's weights; return where they arrive, and where they are to be."""
        if unit in self._both_ends:
            return self._both_ends[unit]
        pool, alike = self._pools[unit.name], sum(other.name == unit.name for other in self._units)
        if len(pool.sets) < min(alike, 1 + self._ahead):
            pool.sets.append(self._b.call(f"room for {unit.name}", unit.layer, partial(self._room, unit)))
        flat, weights, fetched = pool.sets[pool.taken % len(pool.sets)]
        pool.taken += 1
        given = (self._kept[unit].gathered, flat, fetched)
        begun = self._b.call(f"gather {unit.name}", unit.layer, partial(self._send, unit), *given), weights
        if unit.name == ROOT.name:
            self._both_ends[unit] = begun
        return begun

    def _room(self, unit: Unit) -> _Gathered:
        b = self._b
        shapes = {weight: weight.shape(b.workload.model) for weight in unit.weights}
        flat, weights = (
            self._flat(unit),
            {
                weight: b.buffer(weight.name, "io"[: len(shape)], shape, b.workload.dtype, "parameter")
                for weight, shape in shapes.items()
            },
        )
        if not self._fetches(unit):
            return _Gathered(flat, weights)
        dtype = b.sum_dtype if self._casts(unit) else b.workload.dtype
        fetched = b.buffer(f"fetched {unit.name}", "i", (self._each(unit.flat),), dtype, "communication")
        return _Gathered(flat, weights, fetched)

    def _flat(self, unit: Unit) -> View:
        """Return a new buffer for all of a unit's weights in the model's data type, padding included."""
        extent = self._each(unit.flat) * self._num_parts
        return self._b.buffer(f"gathered {unit.name}", "i", (extent,), self._b.workload.dtype, "communication")

    def _send(self, unit: Unit, own: View, flat: View, fetched: View | None = None) -> View:
        """Append what brings the weights of all ranks here, in the model's data type; return where they are. Those of
        this rank may be on the host, and are copied to ``fetched`` then.
        """
        b, within, each = self._b, self._shards.within, self._each(unit.flat)
        (count,) = own.shape
        if fetched is not None:
            b.host_copy(own, fetched[:count], "fetch weights", unit.layer)
            own = fetched[:count]
        if self._casts(unit) or count < each:
            sent = b.buffer(f"own {unit.name}", "i", (each,), b.workload.dtype, "communication") if within else flat
            b.copy(own, self._pad(sent, count), "cast weights")
            own = sent
        if within is None:
            return own
        recvs = Split(flat, 0, self._num_parts)
        b.add(AllGather(label=f"gather {unit.name}", communicator=within.name, send=own, recvs=recvs))
        return flat

    def _unpack(self, unit: Unit, flat: View, weights: Values) -> None:
        (size,) = unit.flat.shape(self._b.workload.model)
        self._b.add(Unpack(label=f"unpack {unit.name}", flat=flat[:size], weights=tuple(weights.values())))

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        self._made[gradient._replace(layer=0)] = view

    def _gradient(self, unit: Unit) -> Tensor:
        """Return a unit's gradient as it is sent."""
        return d(unit.flat)._replace(numbers="model" if self._options.reduce == "model" else "accumulation")

    def room(self, unit: Unit) -> Room:
        """See Params: gradients of alike units are packed in one buffer, so each waits for the sum of the one before
        where that leaves the buffer free, as FSDP2 waits. Gradients that others are added to have buffers of their own.
        """
        learns = trained_of(unit, self._b.workload.model)
        return self._room_for(learns) if learns else ()

    def _room_for(self, unit: Unit) -> Room:
        """Return the same of a unit that is trained."""
        if self._in_place:
            flat = self._in_place[unit]
            if not self._options.bucket_mb or self._to_come[unit] > 1:
                return (flat,)
            made = self._b.buffer(f"buckets of {unit.name}", "i", flat.shape, self._b.workload.dtype, "communication")
            self._filled.append(made)
            return flat, made
        if self._stage < 2 or not self._shards.gradients or (self._adds_whole and unit not in self._summed):
            return ()
        if unit.name not in self._packed:
            extent, dtype = (
                self._each(unit.flat) * self._num_parts,
                dtype_of(self._gradient(unit), self._b.workload.dtype),
            )
            self._packed[unit.name] = self._b.buffer(f"gradients of {unit.name}", "i", (extent,), dtype, "gradient")
        return (self._packed[unit.name],)

    def _whole_gradient(self, unit: Unit) -> View:
        """Return a new buffer for all of a unit's gradient, padding included."""
        return self._b.new(self._gradient(unit), self._each(unit.flat) * self._num_parts)

    def _zeros(self, unit: Unit) -> View:
        flat = self._whole_gradient(unit)
        self._b.add(Zero(label=f"zero gradients of {unit.name}", into=flat))
        return flat

    def reduced(self, unit: Unit, room: Room) -> Reduced:
        """See Params."""
        learns = trained_of(unit, self._b.workload.model)
        return self._reduced(learns, room) if learns else ()

    def _reduced(self, unit: Unit, room: Room) -> Reduced:
        """Return the same of a unit that is trained."""
        b, made = self._b, self._made
        self._made = {}
        (size,) = unit.flat.shape(b.workload.model)
        gradients = tuple([made[d(weight)] for weight in unit.weights])
        if self._in_place:
            flat, *buckets = room
            label, into = f"add gradients of {unit.name}", flat[:size]
            for bucket in buckets:
                packed = bucket[:size]
                b.add(Pack(label=f"fill buckets of {unit.name}", gradients=gradients, flat=packed))
                b.add(Accumulate(label=label, source=packed, into=into))
            if not buckets:
                b.add(Pack(label=label, gradients=gradients, flat=into, adds=True))
        else:
            (flat,) = room or (self._whole_gradient(unit),)
            b.add(Pack(label=f"pack gradients of {unit.name}", gradients=gradients, flat=self._pad(flat, size)))
        return (flat if self._sums_late or self._adds_whole else self._sum(unit, flat),)

    def _sum(self, unit: Unit, flat: View) -> View:
        """Append what sums a gradient over all ranks; return what this rank owns of it."""
        b, gradients, across = self._b, self._shards.gradients, self._shards.across
        own = flat
        if gradients and self._stage and not self._to_all:
            own, sends = b.new(self._gradient(unit), self._each(unit.flat)), Split(flat, 0, self._num_parts)
            b.add(ReduceScatter(label=f"reduce {unit.name}", communicator=gradients.name, sends=sends, recv=own))
        elif gradients:
            for bucket in self._buckets(unit, flat):
                b.add(AllReduce(label=f"reduce {unit.name}", communicator=gradients.name, view=bucket))
        if across:
            b.add(AllReduce(label=f"reduce {unit.name} over replicas", communicator=across.name, view=own))
        return self._owned(unit, own)

    def _buckets(self, unit: Unit, flat: View) -> list[View]:
        """Return the parts of a gradient that an all-reduce each sums, in this order, padding with the first."""
        model, dtype = self._b.workload.model, self._b.workload.dtype
        cap, found, stop, start = self._options.bucket_mb << 20, [], flat.shape[0], sum(unit.flat.shape(model))
        if not cap:
            return [flat]
        for weight in reversed(unit.weights):
            start -= math.prod(weight.shape(model))
            if (stop - start) * DTYPE_BYTES[dtype] >= cap or not start:
                found.append(flat[start:stop])
                stop = start
        return found

    def _owned(self, unit: Unit, summed: View) -> View:
        """Return what this rank owns of a summed gradient, without padding."""
        (rows,) = self._rows(unit.flat)
        return summed[rows.start : rows.stop] if self._to_all else summed[: rows.size]

    def keep(self, unit: Unit, reduced: Reduced) -> None:
        """See Params."""
        learns = trained_of(unit, self._b.workload.model)
        if not learns:
            return
        unit, (gradient,) = learns, reduced
        self._to_come[unit] -= 1
        if self._adds_whole:
            self._take(unit, gradient)
            if self._to_come[unit]:
                return
            whole = self._summed[unit]
            gradient = self._b.call(f"reduce {unit.name}", unit.layer, partial(self._sum, unit), whole)
        self._arrived.append((unit, gradient))
        self._settle(lag=1)

    def _settle(self, lag: int) -> None:
        """Append what is done with each gradient by itself, but for the last ``lag`` of them: so kernels of the next
        unit do not wait for a sum, as they do not in FSDP2 and DeepSpeed, which have streams for this.
        """
        while len(self._arrived) > lag:
            unit, gradient = self._arrived.pop(0)
            if self._adds_whole:
                self._summed[unit] = gradient
            else:
                self._take(unit, gradient)
            if not (self._to_come[unit] or self._sums_late):
                self._finish(unit)

    def _take(self, unit: Unit, gradient: View) -> None:
        """Append what adds a gradient to those of earlier micro-batches, where that is still to do."""
        b, several = self._b, self._options.micro_batches > 1
        if self._in_place:
            self._summed[unit] = gradient
        elif unit in self._summed:
            b.call(f"add {unit.name}", unit.layer, partial(self._added, unit), gradient, self._summed[unit])
        else:
            self._summed[unit] = self._cast(gradient, b.sum_dtype) if several else gradient

    def _added(self, unit: Unit, gradient: View, into: View) -> None:
        self._b.add(Accumulate(label=f"add gradients of {unit.name}", source=gradient, into=into))

    def _cast(self, gradient: View, dtype: Dtype) -> View:
        """Return a gradient in a data type."""
        b = self._b
        if b.dtype(gradient) == dtype:
            return gradient
        cast = b.like("gradient", gradient, "gradient", dtype)
        b.copy(gradient, cast, "cast gradients")
        return cast

    def _finish(self, unit: Unit) -> None:
        """Append what makes of a unit's summed gradient what the optimiser takes, and brings it to where that is."""
        b, weights = self._b, self._states(unit)[0]
        (size,), summed = unit.flat.shape(b.workload.model), self._summed[unit]
        gradient = self._cast(summed, dtype_of(weights, b.workload.dtype))
        self._squared[unit] = View(summed.buffer, ((0, size),)) if self._to_all else gradient
        if self._on_host:
            self._square(unit)
            there = b.buffer("gradient", "i", gradient.shape, b.dtype(gradient), "gradient", "host")
            b.host_copy(gradient, there, "gradients to the host", unit.layer)
            gradient = there
        self._summed[unit] = gradient

    def end_pass(self) -> None:
        """See Params: what is gathered into and packed is freed before the next pass, which waits for the last sums, as
        FSDP2's does (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, finalize_backward).
        """
        self._settle(lag=0)
        self._pools.clear()
        self._both_ends.clear()
        self._begun = self._gathered = 0
        self._packed.clear()
        sums = [one.name for one in (self._shards.gradients, self._shards.across) if one]
        if any(self._to_come.values()) and sums and not (self._sums_late or self._adds_whole):
            self._b.add(HostSync(label="wait for sums", streams=tuple(sums)))

    @cached_property
    def _squares(self) -> View:
        """A place for each unit of the model; zero for those of other stages, until all stages' are summed."""
        count = len(trained(self._b.workload))
        squares = self._b.buffer("squares of gradients", "i", (count,), self._b.sum_dtype, "optimiser")
        if count > len(self._trained):
            self._b.add(Zero(label="norm of other stages", into=squares))
        return squares

    def _square(self, unit: Unit) -> None:
        """Append the sum of squares of what this rank owns of a gradient, or of all of it where it has that; in the
        order in which a backward pass makes them.
        """
        number = trained(self._b.workload)[::-1].index(unit)
        square = self._squares[number : number + 1]
        self._b.add(SquareSum(label=f"square {unit.name} {unit.layer}", gradient=self._squared[unit], square=square))

    def update(self) -> None:
        """See Params."""
        b = self._b
        if self._sums_late:
            self._summed = {
                unit: b.call(f"reduce {unit.name}", unit.layer, partial(self._sum, unit), flat)
                for unit, flat in self._summed.items()
            }
            for unit in self._summed:
                self._finish(unit)
        if not self._on_host:
            for unit in self._summed:
                self._square(unit)
        squares = self._squares
        if norm := self._shards.norm:
            b.add(AllReduce(label="norm of gradients", communicator=norm.name, view=squares))
        if self._on_host:
            squares = b.elsewhere(squares, "host")
            b.host_copy(self._squares, squares, "norm to the host")
        at_once = self._options.gather == "units"
        new = {}
        for unit, gradient in self._summed.items():
            update, weights = partial(self._update, unit), self._weights.get(unit, {}) if at_once else {}
            new[unit] = b.call(f"update {unit.name}", unit.layer, update, gradient, squares, self._kept[unit], weights)
        if not at_once:
            self._gather_all(new)
        if self._in_place:
            b.add(Hold(label="hold gradients", held=(*self._in_place.values(), *self._filled)))

    def _update(self, unit: Unit, gradient: View, squares: View, kept: _Kept, weights: Values) -> View:
        """Append what updates a unit's weights and moments where they lie, and brings them to all who hold them whole;
        return what is sent for that.
        """
        b, (own, first, second), gathered = self._b, kept.states, kept.gathered
        given: dict[str, Any] = {"weights": own, "gradient": gradient, "first": first, "second": second}
        given |= {"label": f"update {unit.name}", "squares": squares}
        if self._on_host and self._uses_states:
            b.add(HostAdamW(**given))
        elif self._on_host:
            gathered = self._update_on_host(unit, gathered, given)
        else:
            b.add(AdamW(**given))
        for state, view in zip(unit.states, kept.states, strict=True):
            b.output_of(updated(state), self._rows(state), view)
        if weights:
            self._renew(unit, self._send(unit, gathered, self._flat(unit)), weights)
        return gathered

    def _update_on_host(self, unit: Unit, gathered: View, given: dict[str, Any]) -> View:
        """Append the update where passes use others than the optimiser's weights, and what makes these new; return
        them.
        """
        b = self._b
        if self._fetches(unit):
            b.add(HostAdamW(cast=gathered, **given))
        else:
            shape = given["weights"].shape
            cast = b.buffer(f"new {unit.name}", "i", shape, b.workload.dtype, "parameter", "host")
            b.add(HostAdamW(cast=cast, **given))
            gathered = gathered if self._stage == 3 else b.elsewhere(cast, "hbm")
            b.host_copy(cast, gathered, "weights from the host", unit.layer)
        if self._stage == 3:
            b.output_of(updated(unit.working), self._rows(unit.flat), gathered)
        return gathered

    def _renew(self, unit: Unit, flat: View, weights: Values) -> None:
        """Append what makes whole weights of a flat tensor of new ones."""
        self._unpack(unit, flat, weights)
        for weight, view in weights.items():
            whole = updated(weight).later(unit.layer)
            self._b.output_of(whole, whole.rows(self._b.workload.model), view)

    def _gather_all(self, new: dict[Unit, View]) -> None:
        """Append what gathers the new weights of all units, copies them to one tensor for each rank and from there to
        where they belong; all of that is held until the last one is there. The host takes each rank's part of each
        tensor by itself.
        """
        b, held = self._b, []
        flats = {
            unit: b.call(f"gather {unit.name}", unit.layer, partial(self._send, unit), own, self._flat(unit))
            for unit, own in new.items()
        }
        if within := self._shards.within:
            calls = self._num_parts * sum(num_merged(unit, b.workload.model) for unit in flats)
            b.add(HostSync(label="take new weights apart", streams=(within.name,), calls=calls))
        for unit, flat in flats.items():
            listed = b.call(f"list {unit.name}", unit.layer, partial(self._listed, unit), flat)
            b.call(f"renew {unit.name}", unit.layer, partial(self._renew, unit), listed, self._weights[unit])
            held += [flat, listed]
        b.add(Hold(label="hold gathered weights", held=tuple(held)))

    def _listed(self, unit: Unit, flat: View) -> View:
        listed = self._flat(unit)
        self._b.copy(flat, listed, f"list {unit.name}")
        return listed
