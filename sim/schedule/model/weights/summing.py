"""How gradients are summed: those of micro-batches, of ranks, and their squares."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property, partial
from itertools import accumulate
from typing import Literal

from msgspec import UNSET, UnsetType

from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Accumulate, AllReduce, Divide, Hold, HostSync, Pack, ReduceScatter, SquareSum, Zero
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.tensors import Tensor, d, dtype_of
from sim.schedule.ir.views import Split, View
from sim.schedule.model.scope import HEADED, LAYER, Unit, trained, trained_of
from sim.schedule.model.weights.owned import Owned
from sim.schedule.model.weights.params import Reduced, Room, sum_over_group
from sim.schedule.model.write import Values
from sim.words.workload import DTYPE_BYTES, Dtype


class Summing:
    """Gradients are summed by a reduce-scatter as soon as a unit has all of its own, at stage 1 when all units have
    theirs, and at stage 0 by an all-reduce. Those of several micro-batches add up in fp32: summed in the shards, as in
    torch's FSDP2; below stage 2 whole, and are summed once. With sync=last they are whole from stage 2 on, too, and at
    every stage a unit's are summed in the last backward pass as soon as they are complete, as behind FSDP2's
    set_requires_gradient_sync(False) (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward) and
    DDP's no_sync (torch/nn/parallel/distributed.py), which nanotron leaves for the last one alone (0.4
    parallel/pipeline_parallel/engine.py, _get_bwd_context).

    With accumulate_in=model whole gradients of micro-batches are added as they are to those of the first one.

    With reduce_by=all-reduce stages 1 and 2 sum by an all-reduce, of which each rank copies what it owns: behind the
    kernels of the next unit, unless these wait for sums. With
    reduce_to=all stage 1 sums by an all-reduce, too, of which each rank takes what it owns and squares all. With
    accumulate=in-place or in-products a unit's gradients are added, as they are, to a buffer that a step begins with as
    zeros and holds to its end. With bucket_mb and in-place those of the last backward pass go through buckets in the
    model's data type, which stay, too: torch's DDP fills its own before it calls the hook that adds them up (nanotron
    0.4 optim/gradient_accumulator.py, fp32_accum_hook); where there are no replicas there is no DDP (trainer.py,
    make_ddp).

    Where the optimiser is on the host each summed gradient goes there; its squares are summed up before, on the GPU, as
    DeepSpeed's runtime/zero/stage3.py does it.
    """

    def __init__(self, owned: Owned) -> None:
        self._owned, self._b, options = owned, owned.b, owned.options
        self._packed: dict[tuple[str, int], View] = {}
        self._num_packed: Counter[str] = Counter()
        self._made: Values = {}
        """Gradients of the unit that is being written."""
        self._arrived: list[tuple[Unit, View]] = []
        """Gradients of this micro-batch with which nothing was done yet."""
        self._summed: dict[Unit, View] = {}
        self._squared: dict[Unit, View] = {}
        """Of what squares are summed up."""
        self._to_all = options.reduce_to == "all"
        """Whether a rank gets more of a sum than it owns."""
        self._to_come = dict.fromkeys(owned.trained, owned.visits)
        """Of how many micro-batches a unit still lacks gradients."""
        self._sums_late, self._adds_whole, self._sums_whole = options.sums_late, options.adds_whole, options.sums_whole
        self._holds = options.waits_for_sums and not options.sums_late
        """Whether kernels of a backward pass wait for sums that are made in it."""
        self._cuts_later = options.cuts_sums and not (options.sums_late or options.waits_for_sums)
        """Whether a sum of all gradients is cut when kernels of the next unit have been issued."""
        self._adds_direct = options.adds_narrow and options.sums_whole
        """Whether those of further micro-batches are added, as they are, to those of the first one."""
        self._in_place: dict[Unit, View] = {}
        """The buffer to which all gradients of a unit are added, where there is one from step to step."""
        self._filled: list[View] = []
        """Buckets in the model's data type, out of which the last gradients are added to these."""
        if options.accumulate != "copies":
            zeros = {unit: partial(self._zeros, unit) for unit in owned.trained}
            self._in_place = {unit: self._b.call(f"zero {unit.name}", unit.layer, made) for unit, made in zeros.items()}

    def reduce(self, gradient: Tensor, view: View) -> None:
        """See Params."""
        self._made[gradient._replace(layer=0)] = view

    def _gradient(self, unit: Unit) -> Tensor:
        """Return a unit's gradient as it is sent."""
        return d(unit.flat)._replace(numbers="model" if self._owned.options.reduce == "model" else "accumulation")

    def room(self, unit: Unit) -> Room:
        """See Params: gradients of alike units are packed in one buffer, so each waits for the sum of the one before
        where that leaves the buffer free, as FSDP2 waits; in two by turns, where sums are cut later. Gradients that
        others are added to have buffers of their own.
        """
        learns = trained_of(unit, self._b.workload.model)
        return self._room_for(learns) if learns else ()

    def _room_for(self, unit: Unit) -> Room:
        """Return the same of a unit that is trained."""
        if self._in_place:
            flat = self._in_place[unit]
            shards, options = self._owned.shards, self._owned.options
            copies = options.bucket_mb and options.accumulate == "in-place" and (shards.gradients or shards.across)
            if not copies or self._to_come[unit] > 1:
                return (flat,)
            made = self._b.buffer(f"buckets of {unit.name}", "i", flat.shape, self._b.workload.dtype, "communication")
            self._filled.append(made)
            return flat, made
        if self._adds_direct and unit in self._summed:
            return (self._summed[unit],)
        if self._owned.stage < 2 or not self._owned.shards.gradients or (self._adds_whole and unit not in self._summed):
            return ()
        self._num_packed[unit.name] += 1
        turn = (unit.name, self._num_packed[unit.name] % 2 if self._cuts_later else 0)
        if turn not in self._packed:
            extent = self._owned.each(unit.flat) * self._owned.num_parts
            dtype = dtype_of(self._gradient(unit), self._b.workload.dtype)
            self._packed[turn] = self._b.buffer(f"gradients of {unit.name}", "i", (extent,), dtype, "gradient")
        return (self._packed[turn],)

    def _whole_gradient(self, unit: Unit) -> View:
        """Return a new buffer for all of a unit's gradient, padding included."""
        return self._b.new(self._gradient(unit), self._owned.each(unit.flat) * self._owned.num_parts)

    def _none_of(self, weight: Tensor) -> View:
        """Return the gradient of a weight that has none on this stage: one of the other end of the model."""
        view = self._b.new(d(weight), weight.shape(self._b.workload.model)[0])
        self._b.add(Zero(label=f"no {d(weight).name}", into=view))
        return view

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
        for weight in unit.weights:
            if d(weight) in made and not (self._sums_whole and b.share.is_norm(weight)):
                self._sum_over_group(weight, made[d(weight)])
        if self._owned.shards.has_both_ends(unit):
            made |= {d(weight): self._none_of(weight) for weight in unit.weights if d(weight) not in made}
        gradients = tuple([made[d(weight)] for weight in unit.weights])
        if self._adds_direct and unit in self._summed:
            (flat,) = room
            b.add(Pack(label=f"add gradients of {unit.name}", gradients=gradients, flat=flat[:size], adds=True))
        elif self._in_place:
            flat, *buckets = room
            label, into = f"add gradients of {unit.name}", flat[:size]
            for bucket in buckets:
                packed = bucket[:size]
                b.add(Pack(label=f"fill buckets of {unit.name}", gradients=gradients, flat=packed))
                b.add(Accumulate(label=label, source=packed, into=into))
            if not buckets:
                added = self._owned.options.accumulate == "in-products" and unit.name in {LAYER, HEADED.name}
                by: Literal[True] | UnsetType = True if added else UNSET
                b.add(Pack(label=label, gradients=gradients, flat=into, adds=True, by_products=by))
        else:
            (flat,) = room or (self._whole_gradient(unit),)
            b.add(Pack(label=f"pack gradients of {unit.name}", gradients=gradients, flat=self._owned.pad(flat, size)))
        return (flat if self._sums_whole else self._sum(unit, flat),)

    def _sum_over_group(self, weight: Tensor, gradient: View) -> None:
        sequence = self._owned.options.tp_sequence
        sum_over_group(self._b, self._owned.shards.alike, d(weight), gradient, sequence=sequence)

    def _sum(self, unit: Unit, flat: View) -> View:
        """Append what sums a gradient over all ranks; return what this rank owns of it. Norms come first, which have
        waited for the last micro-batch to be summed over a tensor-parallel group (nanotron 0.4
        parallel/tied_parameters.py, sync_tied_weights_gradients; megatron-core 0.16.1
        distributed/finalize_model_grads.py, _allreduce_non_tensor_model_parallel_grads).
        """
        b, (gradients, across) = self._b, self._over
        ends = [*accumulate(math.prod(weight.shape(b.workload.model)) for weight in unit.weights)]
        for start, stop, weight in zip([0, *ends], ends, unit.weights, strict=False):
            if self._sums_whole and b.share.is_norm(weight) and not self._lacks_norms(unit):
                self._sum_over_group(weight, flat[start:stop])
        own = flat
        if self._owned.options.divides == "before" and (gradients or across):
            b.add(Divide(label=f"divide {unit.name}", gradient=flat))
        if gradients and self._owned.stage and not self._to_all and not self._owned.options.cuts_sums:
            own, sends = b.new(self._gradient(unit), self._owned.each(unit.flat)), Split(flat, 0, self._owned.num_parts)
            b.add(ReduceScatter(label=f"reduce {unit.name}", communicator=gradients.name, sends=sends, recv=own))
        elif gradients:
            for bucket in self._buckets(unit, flat):
                b.add(AllReduce(label=f"reduce {unit.name}", communicator=gradients.name, view=bucket))
        return own if self._cuts_later else self._sum_of_owned(unit, own)

    def _sum_of_owned(self, unit: Unit, summed: View) -> View:
        """Append what makes of a sum what this rank owns: that is cut out, and summed over replicas."""
        b, (gradients, across) = self._b, self._over
        own = self._cut(unit, summed) if gradients and self._owned.options.cuts_sums else summed
        if across:
            b.add(AllReduce(label=f"reduce {unit.name} over replicas", communicator=across.name, view=own))
        if self._holds and (gradients or across):
            b.add(Hold(label=f"wait for {unit.name}", held=(own,)))
        return self._own_part(unit, own)

    @property
    def _over(self) -> tuple[Communicator | None, Communicator | None]:
        """What sums gradients: over ranks with parts of them, and over replicas that have the same parts."""
        return self._owned.shards.gradients, self._owned.shards.across

    def _sum_whole(self, unit: Unit, flat: View) -> View:
        """Append the same in a call of its own."""
        name = f"reduce {unit.name}{' without norms' if self._lacks_norms(unit) else ''}"
        return self._b.call(name, unit.layer, partial(self._sum, unit), flat)

    def _lacks_norms(self, unit: Unit) -> bool:
        """Return whether this stage has the first one of both ends of the model, whose norm is at the last one."""
        ends = self._ends_of(unit)
        return ends is not None and not ends.position(self._b.rank)

    def _ends_of(self, unit: Unit) -> Communicator | None:
        """Return what sums the gradient of a unit over both ends of the model, where two stages have one each."""
        shards = self._owned.shards
        return shards.ends if shards.has_both_ends(unit) else None

    def _cut(self, unit: Unit, summed: View) -> View:
        """Append what copies of a gradient that all ranks have what this one owns; return that, padding included."""
        each, at = self._owned.each(unit.flat), self._owned.position
        own = self._b.new(self._gradient(unit), each)
        self._b.copy(summed[at * each : (at + 1) * each], own, f"take own part of {unit.name}")
        return own

    def _buckets(self, unit: Unit, flat: View) -> list[View]:
        """Return the parts of a gradient that an all-reduce each sums, in this order, padding with the first."""
        model, dtype = self._b.workload.model, self._b.workload.dtype
        cap, found, stop, start = self._owned.options.bucket_mb << 20, [], flat.shape[0], sum(unit.flat.shape(model))
        if not cap:
            return [flat]
        for weight in reversed(unit.weights):
            start -= math.prod(weight.shape(model))
            if (stop - start) * DTYPE_BYTES[dtype] >= cap or not start:
                found.append(flat[start:stop])
                stop = start
        return found

    def _own_part(self, unit: Unit, summed: View) -> View:
        """Return what this rank owns of a summed gradient, without padding."""
        (rows,) = self._owned.rows(unit.flat)
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
            gradient = self._sum_whole(unit, whole)
        self._arrived.append((unit, gradient))
        self._settle(lag=1)

    def _settle(self, lag: int) -> None:
        """Append what is done with each gradient by itself, but for the last ``lag`` of them: so kernels of the next
        unit do not wait for a sum, as they do not in FSDP2 and DeepSpeed, which have streams for this.
        """
        while len(self._arrived) > lag:
            unit, gradient = self._arrived.pop(0)
            if self._cuts_later:
                name, cut = f"take own part of {unit.name}", partial(self._sum_of_owned, unit)
                gradient = self._b.call(name, unit.layer, cut, gradient)
            if self._adds_whole:
                self._summed[unit] = gradient
            else:
                self._take(unit, gradient)
            if not (self._to_come[unit] or self._sums_late or self._ends_of(unit)):
                self._finish(unit)

    def _take(self, unit: Unit, gradient: View) -> None:
        """Append what adds a gradient to those of earlier micro-batches, where that is still to do."""
        b, several = self._b, self._owned.options.micro_batches > 1
        if self._in_place or (self._adds_direct and unit in self._summed):
            self._summed[unit] = gradient
        elif unit in self._summed:
            b.call(f"add {unit.name}", unit.layer, partial(self._added, unit), gradient, self._summed[unit])
        else:
            cast = several and not self._owned.options.adds_narrow
            self._summed[unit] = self._cast(gradient, b.sum_dtype) if cast else gradient

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
        b, weights = self._b, self._owned.states(unit)[0]
        (size,), summed = unit.flat.shape(b.workload.model), self._summed[unit]
        if ends := self._ends_of(unit):
            both = View(summed.buffer, ((0, size),)) if self._to_all else summed
            b.add(AllReduce(label=f"reduce {unit.name} of both ends", communicator=ends.name, view=both))
        gradient = self._cast(summed, dtype_of(weights, b.workload.dtype))
        self._squared[unit] = View(summed.buffer, ((0, size),)) if self._to_all else gradient
        if self._owned.on_host:
            self._square(unit)
            there = b.buffer("gradient", "i", gradient.shape, b.dtype(gradient), "gradient", "host")
            b.host_copy(gradient, there, "gradients to the host", unit.layer)
            gradient = there
        self._summed[unit] = gradient

    def end_pass(self) -> None:
        """See Params: what is packed into is freed before the next pass, which waits for the last sums, as FSDP2's does
        (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, finalize_backward).
        """
        self._settle(lag=0)
        self._packed.clear()
        sums = [one.name for one in (self._owned.shards.gradients, self._owned.shards.across) if one]
        if any(self._to_come.values()) and sums and not self._sums_whole:
            self._b.add(HostSync(label="wait for sums", streams=tuple(sums)))

    def complete(self) -> tuple[dict[Unit, View], View]:
        """Append what is left to sum behind the last pass, also over both ends of the model (megatron-core 0.16.1
        distributed/finalize_model_grads.py, _allreduce_embedding_grads); return gradients as the optimiser takes them,
        and all units' sums of squares, where the optimiser is.
        """
        b = self._b
        if self._sums_late:
            self._summed = {unit: self._sum_whole(unit, flat) for unit, flat in self._summed.items()}
        for unit in self._summed:
            if self._sums_late or self._ends_of(unit):
                self._finish(unit)
        if not self._owned.on_host:
            for unit in self._summed:
                self._square(unit)
        squares = self._squares
        if norm := self._owned.shards.norm:
            b.add(AllReduce(label="norm of gradients", communicator=norm.name, view=squares))
        if self._owned.on_host:
            squares = b.elsewhere(squares, "host")
            b.host_copy(self._squares, squares, "norm to the host")
        return self._summed, squares

    def hold(self) -> None:
        """Append what holds the buffers that stay, to the end of a step."""
        if self._in_place:
            self._b.add(Hold(label="hold gradients", held=(*self._in_place.values(), *self._filled)))

    @cached_property
    def _squares(self) -> View:
        """A place for each unit of the model; zero for those of other stages, until all stages' are summed."""
        count = len(trained(self._b.workload))
        squares = self._b.buffer("squares of gradients", "i", (count,), self._b.sum_dtype, "optimiser")
        if count > sum(map(self._squares_it, self._owned.trained)):
            self._b.add(Zero(label="norm of other stages", into=squares))
        return squares

    def _square(self, unit: Unit) -> None:
        """Append the sum of squares of what this rank owns of a gradient, or of all of it where it has that; in the
        order in which a backward pass makes them. Of weights that all ranks of a group have whole the first one counts
        them (megatron-core 0.16.1 tensor_parallel/layers.py, param_is_not_tensor_parallel_duplicate).
        """
        if not self._squares_it(unit):
            return
        b, gradient, label = self._b, self._squared[unit], f"square {unit.name} {unit.layer}"
        number = trained(b.workload)[::-1].index(unit)
        square = self._squares[number : number + 1]
        rows = Span(0, gradient.shape[0]) if self._to_all else self._owned.rows(unit.flat)[0]
        counted = b.share.counted(unit.flat, rows)
        for at, one in enumerate(counted):
            own = gradient[one.start - rows.start : one.stop - rows.start]
            b.add(SquareSum(label=label, gradient=own, square=square, adds=True if at else UNSET))
        if not counted:
            b.add(Zero(label=label, into=square))

    def _squares_it(self, unit: Unit) -> bool:
        """Return whether this rank adds the squares of a unit: of one on two stages the first one does."""
        ends = self._ends_of(unit)
        return ends is None or not ends.position(self._b.rank)
