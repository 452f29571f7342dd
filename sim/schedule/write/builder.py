"""Writes the program of one rank: hands out buffers as views, and appends ops in the order of their issue."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Literal, TypeVar, TypeVarTuple

import msgspec

from sim.base.errors import ScheduleError
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.fragments import Call, Fragment, Port
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import ONE, Span, Tokens
from sim.schedule.ir.ops import FETCH, OFFLOAD, Attend, AttendBackward, Copy, HostCopy, HostSync, Op, Part
from sim.schedule.ir.program import Program
from sim.schedule.ir.shares import Share
from sim.schedule.ir.stretches import Bound, Stretch, Written
from sim.schedule.ir.tensors import Kind, Tensor, dtype_of
from sim.schedule.ir.views import Buffer, Category, Split, View, parts_are_contiguous
from sim.schedule.write.nests import flatten, mapped
from sim.schedule.write.stretches import Stretches
from sim.schedule.write.traces import Shape, Traced, Traces
from sim.words.options import Place, SumOptions
from sim.words.workload import Dtype, Workload, accumulation_dtype, gradient_dtype

Views = TypeVarTuple("Views")
Result = TypeVar("Result")


class _Writing:
    """What is written by one call, or between two of them."""

    def __init__(self, key: str, given: Mapping[int, int], first: int, layer: int) -> None:
        self.key = key
        """Of the call; empty between calls, where all buffers are at hand."""
        self.given = given
        """By the numbers of buffers that the call is given their place among them."""
        self.first = first
        """The number of the first buffer of its own."""
        self.layer = layer
        self.ops = Written()
        self.op_layers: dict[int, int] = {}
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self.asked: dict[int, bool] = {}
        """By place among those given, whether it is an input, where the function asked for that."""


_CATEGORIES: dict[Kind, Category] = {"weight": "parameter", "weight gradient": "gradient", "moment": "optimiser"}


class ProgramBuilder:
    """Collects the buffers and ops of one rank; ``part`` names the pass that is being written.

    Shapes are written once: ``tensor``, ``lse`` and ``new`` make every tensor from its tokens and its heads. What is
    written many times, as layers are, is written by ``call``.
    """

    def __init__(
        self,
        rank: int,
        workload: Workload,
        replicas: int = 1,
        share: Share | None = None,
        *,
        token_major: bool = False,
        traces: Traces | None = None,
        stretches: Stretches | None = None,
    ) -> None:
        self.rank = rank
        self.workload = workload
        self.share = share or Share(workload.model)
        """Of the weights of the whole model; that of the workload is what the rank has of it."""
        self.replicas = replicas
        """How many do the same with sequences of their own."""
        self._token_major: Literal[True] | msgspec.UnsetType = True if token_major else msgspec.UNSET
        """Whether what is of tokens, and of no heads, is so in memory: see ``Buffer``. Attention takes heads of one
        sequence after the other."""
        self.of_batch = workload
        """Of all sequences; ``workload`` is that of those which are at hand, where they differ."""
        self.labels = replicas * workload.num_labels
        """Tokens of all replicas that have a next one to predict."""
        self.form = 0
        """Which of the forms of sequences those at hand have."""
        self.batch = Span(0, workload.batch)
        self.part: Part = "forward"
        self._buffers: list[Buffer] = []
        """Their names without layers; the same object for all that are alike."""
        self._layers: dict[int, int] = {}
        """By number the layer that follows the name of a buffer, where one does."""
        self._inputs: set[int] = set()
        self._calls: list[Call] = []
        self._called = 0
        """How many ops these have."""
        self.standing: dict[Kind, View] = {}
        """By kinds of tensors buffers that stay for what is brought here again and again; every call may use them."""
        self._traces = traces or Traces()
        """What other ranks have written that do the same, for this one to call."""
        self._traced: dict[Shape, list[Traced]] = {}
        """What this one has called."""
        self._writing = _Writing("", {}, 0, 0)
        self._stretched: dict[tuple[Hashable, ...], tuple[Bound, Sequence[View]]] = {}
        """What this one has bound of that by what it was asked for, views by their identity; they are kept for that."""
        self._writes_stretch = False
        self._stretches = stretches
        """What other ranks have written of the same workload, for this one to write again; None where calls do that."""

    def take(self, number: int, count: int, part: Part) -> None:
        """Begin with a pass of one of so many micro-batches, which has its share of the batch."""
        each = self.of_batch.batch // count
        self.batch, self.part = Span(number * each, (number + 1) * each), part
        if self.of_batch.sequences:
            self.form, self.workload = self.of_batch.form_of(number), self.of_batch.of_sequence(number)

    @property
    def num_ops(self) -> int:
        """How many ops have been written."""
        return self._called + len(self._writing.ops)

    def build(self, begins: Sequence[int] = ()) -> Program:
        """Return what has been written; ``begins`` as of programs."""
        self._end_stretch()
        return Program.of_calls(self.rank, self._calls, tuple(begins))

    # Calls

    def call(self, key: str, layer: int, function: Callable[[*Views], Result], *views: *Views) -> Result:
        """Return ``function(*views)``, nests of views, having written what it writes.

        It is run once for all calls with the same key, pass and form of sequences whose views are of the same shapes
        and alias each other in the same way; calls after that bind other buffers to the same ops. So it may depend on
        nothing else but the layer, and on that only in names, labels and ports. Raises ScheduleError if it uses a view
        that it was not given. Calls within calls are part of them.
        """
        if self._writing.key:
            return function(*views)
        self._end_stretch()
        found: list[View] = []
        form: list[Hashable] = []
        flatten((views, self.standing), found, form)
        place = {number: at for at, number in enumerate(dict.fromkeys([view.buffer for view in found]))}
        buffers, layers = self._buffers, self._layers
        described = [(id(buffers[number]), layers[number] - layer if number in layers else None) for number in place]
        shape = (key, self.part, self.form, *form, *[(place[view.buffer], view.slices) for view in found], *described)
        known = self._traced.setdefault(shape, [])
        numbers, is_input = tuple(place), self._inputs.__contains__
        for traced in known:
            if all(is_input(numbers[at]) == flag for at, flag in traced.asked):
                return self._bound(traced, numbers, layer)  # type: ignore[no-any-return]
        if (of_other := self._traces.of(shape, self.rank, lambda at: is_input(numbers[at]))) is not None:
            known.append(of_other)
            return self._bound(of_other, numbers, layer)  # type: ignore[no-any-return]
        first, self._writing = len(buffers), _Writing(key, place, len(buffers), layer)
        result = function(*views)
        number = {**place, **{own: len(place) + own - first for own in range(first, len(buffers))}}
        here = mapped(result, lambda view: View(self._visible(view) and number[view.buffer], view.slices))
        known.append(Traced(self._end(number), here, tuple(self._writing.asked.items())))
        self._traces.add(shape, self.rank, known[-1])
        self._writing = _Writing("", {}, len(buffers), 0)
        self._append(Call(known[-1].fragment, numbers, first, layer))
        return result

    def _append(self, call: Call) -> None:
        self._calls.append(call)
        self._called += len(call.fragment.ops)

    def _bound(self, traced: Traced, given: tuple[int, ...], layer: int) -> Any:
        """Return the result of a call that is made again, on other buffers."""
        fragment, first = traced.fragment, len(self._buffers)
        call = Call(fragment, given, first, layer)
        self._append(call)
        self._buffers += fragment.own
        numbers = call.numbers
        for number, of_layer in fragment.buffer_layers.items():
            self._layers[numbers[number]] = of_layer + layer
        self._inputs.update([numbers[port.view.buffer] for port in fragment.inputs])
        self._writing = _Writing("", {}, len(self._buffers), 0)
        return mapped(traced.result, lambda view: View(numbers[view.buffer], view.slices))

    def _end_stretch(self) -> None:
        """Make a call of what has been written since the last one."""
        writing, count = self._writing, len(self._buffers)
        if not (writing.ops or writing.inputs or writing.outputs or count > writing.first):
            return
        used: list[int] = []
        if writing.first:  # else there is nothing that it could be given
            used += [view.buffer for op in writing.ops.ops for view in (*op.reads, *op.writes)]
            used += [port.view.buffer for port in (*writing.inputs, *writing.outputs)]
        given = tuple(dict.fromkeys([number for number in used if number < writing.first]))
        order = (*given, *range(writing.first, count))
        fragment = self._end({number: at for at, number in enumerate(order)})
        self._append(Call(fragment, given, writing.first, 0))
        self._writing = _Writing("", {}, count, 0)

    def _end(self, number: Mapping[int, int]) -> Fragment:
        """Return what has been written as a fragment whose buffers have these numbers."""
        writing, buffers = self._writing, self._buffers
        moved = bool(writing.layer) or any(old != new for old, new in number.items())
        inputs, outputs = (
            [port.rebound(number, -writing.layer) for port in ports] if moved else ports
            for ports in (writing.inputs, writing.outputs)
        )
        layers = {new: self._layers[old] - writing.layer for old, new in number.items() if old in self._layers}
        given = [old for old in number if old < writing.first]
        return Fragment(
            given=tuple([buffers[old] for old in given]),
            own=tuple(buffers[writing.first :]),
            ops=tuple([rebound(op, number) for op in writing.ops.ops]) if moved else writing.ops.ops,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            buffer_layers=layers,
            op_layers=writing.op_layers,
        )

    def _visible(self, view: View) -> bool:
        """Return True; raises ScheduleError where a call uses what it was not given."""
        writing = self._writing
        if writing.key and view.buffer < writing.first and view.buffer not in writing.given:
            raise ScheduleError(
                f"call {writing.key!r} uses buffer {self._buffers[view.buffer].name!r}, which it was not given: it "
                f"takes a view of it as an argument"
            )
        return True

    def _buffer(self, view: View) -> Buffer:
        """Return the buffer of a view that may be used here."""
        self._visible(view)
        return self._buffers[view.buffer]

    def again(
        self, key: Hashable, views: Sequence[View], label: str, write: Callable[[], None], peers: tuple[int, ...] = ()
    ) -> None:
        """Write what ``write`` does under a label, which may have been written before: see ``bound``."""
        bound, _ = self.bound(key, views, label, write, peers)
        if bound is not None:
            self.again_each([bound], [label])

    def again_each(self, bounds: Sequence[Bound], labels: Sequence[str]) -> None:
        """Write stretches under labels, one after the other."""
        owned = [bound.stretch.buffers for bound in bounds]
        firsts = accumulate(map(len, owned), initial=len(self._buffers))
        self._writing.ops.again(bounds, list(firsts)[:-1], labels)
        self._buffers += chain.from_iterable(owned)

    def bound(
        self, key: Hashable, views: Sequence[View], label: str, write: Callable[[], None], peers: tuple[int, ...] = ()
    ) -> tuple[Bound | None, bool]:
        """Return what ``write`` writes under a label, which adds buffers and ops on these views and on buffers of its
        own, and sends to these peers; and whether it was run for that. It is run once for all stretches with the same
        key, pass and sequences whose views are the same, of buffers that are alike. So it may depend on nothing else
        but the label, and on that in ends of labels only. Where nothing is written again it writes, and there is None.
        """
        if self._stretches is None or self._writes_stretch:
            write()
            return None, True
        asked = key, self.part, self.batch, peers, *map(id, views)
        if found := self._stretched.get(asked):
            return found[0], False
        bound, is_new = self._stretch(self._stretches, key, views, label, write, peers)
        self._stretched[asked] = bound, views
        return bound, is_new

    def _stretch(
        self,
        known: Stretches,
        key: Hashable,
        views: Sequence[View],
        label: str,
        write: Callable[[], None],
        peers: tuple[int, ...],
    ) -> tuple[Bound, bool]:
        """See ``bound``."""
        buffers, writing, first = self._buffers, self._writing, len(self._buffers)
        place = {number: at for at, number in enumerate(dict.fromkeys([view.buffer for view in views]))}
        lie = tuple([(place[view.buffer], view.slices) for view in views])
        others = tuple([buffers[number] for number in place]), tuple(map(peers.index, peers))
        shape = (key, self.part, self.batch, lie, *others)
        stretch = known.of(shape)
        if stretch is not None:
            return Bound(stretch, tuple(place), peers), False
        written, writing.ops, self._writes_stretch = writing.ops, Written(), True
        write()
        stretch = Stretch.of(writing.ops.ops, label, tuple(place), first, buffers[first:], peers)
        writing.ops, self._writes_stretch = written, False
        del buffers[first:]
        known.add(shape, stretch)
        return Bound(stretch, tuple(place), peers), True

    # Buffers

    def buffer(
        self,
        name: str,
        dims: str,
        shape: Sequence[int],
        dtype: Dtype,
        category: Category,
        place: Place = "hbm",
        layer: int | None = None,
    ) -> View:
        """Return the whole of a new buffer. Where its name says the layer, that is given apart."""
        buffer = Buffer(name=name, dims=dims, shape=tuple(shape), dtype=dtype, category=category, place=place)
        return self._add_buffer(buffer, layer)

    def _add_buffer(self, buffer: Buffer, layer: int | None = None) -> View:
        """Return the whole of a buffer that is described."""
        if layer is not None:
            self._layers[len(self._buffers)] = layer
        self._buffers.append(self._traces.alike.setdefault(buffer, buffer))
        return View(len(self._buffers) - 1, tuple([(0, extent) for extent in buffer.shape]))

    def activation(
        self, tensor: Tensor, tokens: int, dtype: Dtype, category: Category, layer: int | None = None
    ) -> View:
        """Return a new buffer for so many tokens of a tensor without heads, in the software's order of memory."""
        shape = (self.batch.size, tokens, *tensor.shape(self.workload.model))
        major = self._token_major if self.batch.size > 1 else msgspec.UNSET
        buffer = Buffer(
            name=tensor.name, dims=tensor.dims, shape=shape, dtype=dtype, category=category, token_major=major
        )
        return self._add_buffer(buffer, layer)

    def tensor(self, name: str, tokens: int, heads: int, category: Category, dtype: Dtype | None = None) -> View:
        """Return a new (B, tokens, heads, D) buffer, by default in the model's data type."""
        shape = (self.batch.size, tokens, heads, self.workload.model.head_dim)
        return self.buffer(name, "bshd", shape, dtype or self.workload.dtype, category)

    def lse(self, name: str, tokens: int, heads: int, category: Category) -> View:
        """Return a new (B, heads, tokens) buffer for a log-sum-exp, in the accumulation data type."""
        shape = (self.batch.size, heads, tokens)
        return self.buffer(name, "bhs", shape, accumulation_dtype(self.workload.dtype), category)

    def like(self, name: str, view: View, category: Category, dtype: Dtype | None = None, place: Place = "hbm") -> View:
        """Return a new buffer with the shape and dims of a view, by default with its data type too."""
        buffer = self._buffer(view)
        given = {"name": name, "shape": view.shape, "dtype": dtype or buffer.dtype, "category": category}
        return self._add_buffer(msgspec.structs.replace(buffer, **given, place=place))

    def like_all(
        self,
        names: Sequence[str],
        views: Sequence[View],
        category: Category,
        dtype: Dtype | None = None,
        *,
        packed: bool,
    ) -> tuple[View, ...]:
        """Return new buffers like views. Where they are ``packed`` those that are alike follow each other in one, cut
        along its first dimension.
        """
        if not packed:
            return tuple([self.like(name, view, category, dtype) for name, view in zip(names, views, strict=True)])
        forms = [(self._buffer(view).dims, view.shape, dtype or self.dtype(view)) for view in views]
        parts: dict[object, list[View]] = {}
        for form in dict.fromkeys(forms):
            (dims, (first, *others), of_form), count = form, forms.count(form)
            name = " ".join([one for one, its in zip(names, forms, strict=True) if its == form])
            whole = self.buffer(name, dims, (count * first, *others), of_form, category)
            parts[form] = [whole[number * first : (number + 1) * first] for number in range(count)]
        return tuple([parts[form].pop(0) for form in forms])

    def elsewhere(self, view: View, place: Place) -> View:
        """Return a new buffer like a whole one, in the GPU's memory or its host's."""
        return self._add_buffer(msgspec.structs.replace(self._buffer(view), place=place), self._layers.get(view.buffer))

    def whole(self, view: View) -> View:
        """Return the whole of a view's buffer."""
        return View(view.buffer, tuple((0, extent) for extent in self._buffer(view).shape))

    def is_input(self, view: View) -> bool:
        """Return whether a view's buffer is the caller's, and so stays where it is."""
        self._visible(view)
        found, place = view.buffer in self._inputs, self._writing.given.get(view.buffer)
        if place is not None:
            self._writing.asked[place] = found
        return found

    def gradient(self, name: str, like: View, options: SumOptions) -> View:
        """Return a new buffer in which partial gradients of a tensor are summed."""
        return self.like(name, like, "attention", gradient_dtype(self.workload, options))

    @property
    def sum_dtype(self) -> Dtype:
        """The data type of sums."""
        return accumulation_dtype(self.workload.dtype)

    def dtype(self, view: View) -> Dtype:
        """Return the data type of a view's buffer."""
        return self._buffer(view).dtype

    def place(self, view: View) -> Place:
        """Return where a view's buffer lies."""
        return self._buffer(view).place

    def parts_are_contiguous(self, split: Split) -> bool:
        """Return whether a split can be sent or received as it is: its parts follow each other in memory."""
        return parts_are_contiguous(split, self._buffer(split.view))

    def input(self, tensor: str, tokens: Tokens, heads: Span) -> View:
        """Return a buffer that holds these tokens and heads of a global tensor when the program starts. Of no tokens
        there is none: what is returned then has a shape only.
        """
        if not tokens:
            batch, dim = self.batch.size, self.workload.model.head_dim
            shape = (batch, heads.size, 0) if tensor == "lse" else (batch, 0, heads.size, dim)
            return View(-1, tuple([(0, extent) for extent in shape]))
        new = self.lse if tensor == "lse" else self.tensor
        view = new(tensor, num_tokens(tokens), heads.size, "other" if tensor == "dout" else "saved")
        return self._input(Port(tensor=tensor, view=view, batch=self.batch, tokens=tokens, heads=heads))

    def output(self, tensor: str, view: View, tokens: Tokens, heads: Span) -> None:
        """Declare that a view holds these tokens and heads of a global tensor when the program ends, if any."""
        if tokens:
            self._output(Port(tensor=tensor, view=view, batch=self.batch, tokens=tokens, heads=heads))

    def new(self, tensor: Tensor, extent: int, place: Place = "hbm") -> View:
        """Return a new buffer for so many tokens of a tensor, with all of its heads, or so many rows of a weight, which
        may be in host memory.
        """
        model, name, dtype = self.workload.model, tensor.name, dtype_of(tensor, self.workload.dtype)
        if tensor.of_weight:
            shape, category = (extent, *tensor.shape(model)[1:]), _CATEGORIES[tensor.kind]
            return self.buffer(name, tensor.dims, shape, dtype, category, place, tensor.layer)
        is_saved, heads = tensor.kind == "activation", tensor.heads(model)
        if heads and tensor.beside:
            shape = ((1 + tensor.beside) * self.batch.size, extent, heads, model.head_dim)
            return self.buffer(name, tensor.dims, shape, dtype, "saved")[: self.batch.size]
        if heads:
            return self.tensor(name, extent, heads, "saved" if is_saved else "attention", dtype)
        return self.activation(tensor, extent, dtype, "saved" if is_saved else "other")

    def input_of(self, tensor: Tensor, tokens: Tokens, place: Place = "hbm") -> View:
        """Return a buffer that holds these tokens of a tensor, or rows of a weight, when the program starts."""
        return self._input(self._port(tensor, tokens, self.new(tensor, num_tokens(tokens), place)))

    def output_of(self, tensor: Tensor, tokens: Tokens, view: View) -> None:
        """Declare that a view holds these tokens of a tensor, or rows of a gradient, when the program ends."""
        self._output(self._port(tensor, tokens, view))

    def _input(self, port: Port) -> View:
        self._writing.inputs.append(port)
        self._inputs.add(port.view.buffer)
        return port.view

    def _output(self, port: Port) -> None:
        self._visible(port.view)
        self._writing.outputs.append(port)

    def _port(self, tensor: Tensor, tokens: Tokens, view: View) -> Port:
        batch, heads, columns = self.batch, ONE, None
        if tensor.of_weight:
            batch, heads, columns = ONE, self.share.place(tensor), self.share.columns(tensor)
            first = self.share.rows(tensor).start
            tokens = tuple([span.moved(first) for span in tokens]) if first else tokens
        return Port(
            tensor=tensor.name,
            layer=tensor.layer,
            view=view,
            batch=batch,
            tokens=tokens,
            heads=heads,
            features=columns,
        )

    # Ops

    def add(self, op: Op, layer: int | None = None) -> None:
        """Append an op to the pass that is being written. Where its label says the layer, that is given apart."""
        writing, model = self._writing, self.workload.model
        if isinstance(op, Attend | AttendBackward) and (model.attention_scale or model.attention_softcap):
            op = msgspec.structs.replace(op, scale=model.attention_scale, softcap=model.attention_softcap)
        for view in (*op.reads, *op.writes) if writing.key else ():
            self._visible(view)
        if layer is not None:
            writing.op_layers[len(writing.ops)] = layer - writing.layer
        writing.ops.add(op if op.part == self.part else msgspec.structs.replace(op, part=self.part))

    def copy(self, source: View, target: View, label: str) -> None:
        """Append target = source, cast where the data types differ."""
        self.add(Copy(label=label, source=Split(source, 0, 1), target=Split(target, 0, 1)))

    def host_copy(self, source: View, target: View, label: str, layer: int | None = None) -> None:
        """Append a copy between the GPU's memory and its host's. From and to pageable memory CUDA copies by way of
        pinned memory of its own, and the host waits for that (CUDA Runtime API, API synchronization behavior).
        """
        places = self.place(source), self.place(target)
        stream = FETCH if places[1] == "hbm" else OFFLOAD
        self.add(HostCopy(label=label, stream=stream, source=source, target=target), layer)
        if "pageable" in places:
            self.add(HostSync(label="pageable memory", streams=(stream,)))
