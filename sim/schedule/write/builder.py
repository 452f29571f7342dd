"""Writes the program of one rank: hands out buffers as views, and appends ops in the order of their issue."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sim.options import Place, SumOptions
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import ONE, Span, Tokens
from sim.schedule.ir.ops import FETCH, OFFLOAD, Copy, HostCopy, HostSync, Op, Part
from sim.schedule.ir.program import Port, Program
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import Buffer, Category, Split, View, parts_are_contiguous
from sim.workload import Dtype, Workload, accumulation_dtype, gradient_dtype


class ProgramBuilder:
    """Collects the buffers and ops of one rank; ``part`` names the pass that is being written.

    Shapes are written once: ``tensor``, ``lse`` and ``new`` make every tensor from its tokens and its heads.
    """

    def __init__(self, rank: int, workload: Workload, batch: Span | None = None) -> None:
        self.rank = rank
        self.workload = workload
        self.batch = batch or Span(0, workload.batch)
        self.part: Part = "forward"
        self._buffers: list[Buffer] = []
        self._ops: list[Op] = []
        self._inputs: list[Port] = []
        self._outputs: list[Port] = []

    def build(self) -> Program:
        """Return what has been written."""
        return Program(
            rank=self.rank,
            buffers=tuple(self._buffers),
            ops=tuple(self._ops),
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
        )

    # Buffers

    def buffer(
        self, name: str, dims: str, shape: Sequence[int], dtype: Dtype, category: Category, place: Place = "hbm"
    ) -> View:
        """Return the whole of a new buffer."""
        self._buffers.append(
            Buffer(name=name, dims=dims, shape=tuple(shape), dtype=dtype, category=category, place=place)
        )
        return View(len(self._buffers) - 1, tuple((0, extent) for extent in shape))

    def tensor(self, name: str, tokens: int, heads: int, category: Category, dtype: Dtype | None = None) -> View:
        """Return a new (B, tokens, heads, D) buffer, by default in the model's data type."""
        shape = (self.batch.size, tokens, heads, self.workload.model.head_dim)
        return self.buffer(name, "bshd", shape, dtype or self.workload.dtype, category)

    def lse(self, name: str, tokens: int, heads: int, category: Category) -> View:
        """Return a new (B, heads, tokens) buffer for a log-sum-exp, in the accumulation data type."""
        shape = (self.batch.size, heads, tokens)
        return self.buffer(name, "bhs", shape, accumulation_dtype(self.workload.dtype), category)

    def like(self, name: str, view: View, category: Category, dtype: Dtype | None = None) -> View:
        """Return a new buffer with the shape and dims of a view, by default with its data type too."""
        buffer = self._buffers[view.buffer]
        return self.buffer(name, buffer.dims, view.shape, dtype or buffer.dtype, category)

    def elsewhere(self, view: View, place: Place) -> View:
        """Return a new buffer like a whole one, in the GPU's memory or its host's."""
        buffer = self._buffers[view.buffer]
        return self.buffer(buffer.name, buffer.dims, buffer.shape, buffer.dtype, buffer.category, place)

    def whole(self, view: View) -> View:
        """Return the whole of a view's buffer."""
        return View(view.buffer, tuple((0, extent) for extent in self._buffers[view.buffer].shape))

    def is_input(self, view: View) -> bool:
        """Return whether a view's buffer is the caller's, and so stays where it is."""
        return any(port.view.buffer == view.buffer for port in self._inputs)

    def gradient(self, name: str, like: View, options: SumOptions) -> View:
        """Return a new buffer in which partial gradients of a tensor are summed."""
        return self.like(name, like, "attention", gradient_dtype(self.workload, options))

    def dtype(self, view: View) -> Dtype:
        """Return the data type of a view's buffer."""
        return self._buffers[view.buffer].dtype

    def parts_are_contiguous(self, split: Split) -> bool:
        """Return whether a split can be sent or received as it is: its parts follow each other in memory."""
        return parts_are_contiguous(split, self._buffers[split.view.buffer])

    def input(self, tensor: str, tokens: Tokens, heads: Span) -> View:
        """Return a buffer that holds these tokens and heads of a global tensor when the program starts."""
        new = self.lse if tensor == "lse" else self.tensor
        view = new(tensor, num_tokens(tokens), heads.size, "other" if tensor == "dout" else "saved")
        self._inputs.append(Port(tensor=tensor, view=view, batch=self.batch, tokens=tokens, heads=heads))
        return view

    def output(self, tensor: str, view: View, tokens: Tokens, heads: Span) -> None:
        """Declare that a view holds these tokens and heads of a global tensor when the program ends."""
        self._outputs.append(Port(tensor=tensor, view=view, batch=self.batch, tokens=tokens, heads=heads))

    def new(self, tensor: Tensor, extent: int) -> View:
        """Return a new buffer for so many tokens of a tensor, with all of its heads, or so many rows of a weight."""
        model, name, shape = self.workload.model, tensor.name, tensor.shape(self.workload.model)
        if tensor.of_weight:
            category: Category = "parameter" if tensor.kind == "weight" else "gradient"
            name = f"{name} {tensor.layer}"
            return self.buffer(name, "io"[: len(shape)], (extent, *shape[1:]), self.workload.dtype, category)
        is_saved, heads = tensor.kind == "activation", tensor.heads(model)
        if heads:
            return self.tensor(name, extent, heads, "saved" if is_saved else "attention")
        own = self.workload.dtype
        dtypes: dict[str, Dtype] = {"model": own, "accumulation": accumulation_dtype(own), "int64": "int64"}
        dims, shape = "bse"[: 2 + len(shape)], (self.batch.size, extent, *shape)
        return self.buffer(name, dims, shape, dtypes[tensor.numbers], "saved" if is_saved else "other")

    def input_of(self, tensor: Tensor, tokens: Tokens) -> View:
        """Return a buffer that holds these tokens of a tensor, or rows of a weight, when the program starts."""
        view = self.new(tensor, num_tokens(tokens))
        self._inputs.append(self._port(tensor, tokens, view))
        return view

    def output_of(self, tensor: Tensor, tokens: Tokens, view: View) -> None:
        """Declare that a view holds these tokens of a tensor, or rows of a gradient, when the program ends."""
        self._outputs.append(self._port(tensor, tokens, view))

    def _port(self, tensor: Tensor, tokens: Tokens, view: View) -> Port:
        batch = ONE if tensor.of_weight else self.batch
        return Port(tensor=tensor.name, layer=tensor.layer, view=view, batch=batch, tokens=tokens, heads=ONE)

    # Ops

    def add(self, op: Op) -> None:
        """Append an op to the pass that is being written."""
        self._ops.append(op if op.part == self.part else msgspec.structs.replace(op, part=self.part))

    def copy(self, source: View, target: View, label: str) -> None:
        """Append target = source, cast where the data types differ."""
        self.add(Copy(label=label, source=Split(source, 0, 1), target=Split(target, 0, 1)))

    def host_copy(self, source: View, target: View, label: str) -> None:
        """Append a copy between the GPU's memory and its host's. From and to pageable memory CUDA copies by way of
        pinned memory of its own, and the host waits for that (CUDA Runtime API, API synchronization behavior).
        """
        places = {self._buffers[view.buffer].place for view in (source, target)}
        stream = FETCH if self._buffers[target.buffer].place == "hbm" else OFFLOAD
        self.add(HostCopy(label=label, stream=stream, source=source, target=target))
        if "pageable" in places:
            self.add(HostSync(label="pageable memory", streams=(stream,)))
