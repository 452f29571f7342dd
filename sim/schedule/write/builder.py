"""Writes the program of one rank: hands out buffers as views, and appends ops in the order of their issue."""

from __future__ import annotations

from collections.abc import Sequence

from sim.options import AttentionName, Place, SumOptions
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import ONE, Band, Span, Tokens
from sim.schedule.ir.ops import (
    COMPUTE,
    FETCH,
    HOST,
    OFFLOAD,
    Accumulate,
    AllGather,
    AllReduce,
    AllToAll,
    Attend,
    AttendBackward,
    Barrier,
    Copy,
    Delta,
    Exchange,
    Fold,
    Gemm,
    GemmForm,
    HostCopy,
    HostSync,
    Merge,
    Message,
    Op,
    Part,
    ReduceScatter,
    RmsNorm,
    RmsNormBackward,
    Rope,
    SwiGlu,
    SwiGluBackward,
    Zero,
)
from sim.schedule.ir.program import Communicator, Port, Program
from sim.schedule.ir.views import Buffer, Category, Split, View, parts_are_contiguous
from sim.schedule.model.equations import weight_shapes
from sim.workload import Dtype, Workload, accumulation_dtype, gradient_dtype


class ProgramBuilder:
    """Collects the buffers and ops of one rank; ``part`` names the pass that is being written.

    Shapes are written once: ``local`` below makes every attention tensor from its name, its tokens and its heads.
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
        shape = (self.workload.batch, tokens, heads, self.workload.model.head_dim)
        return self.buffer(name, "bshd", shape, dtype or self.workload.dtype, category)

    def lse(self, name: str, tokens: int, heads: int, category: Category) -> View:
        """Return a new (B, heads, tokens) buffer for a log-sum-exp, in the accumulation data type."""
        shape = (self.workload.batch, heads, tokens)
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

    def activation(self, name: str, tokens: int, width: int, category: Category) -> View:
        """Return a new (B, tokens, width) buffer in the model's data type."""
        return self.buffer(name, "bse", (self.workload.batch, tokens, width), self.workload.dtype, category)

    def input(self, tensor: str, tokens: Tokens, heads: Span) -> View:
        """Return a buffer that holds these tokens and heads of a global tensor when the program starts."""
        new = self.lse if tensor == "lse" else self.tensor
        view = new(tensor, num_tokens(tokens), heads.size, "other" if tensor == "dout" else "saved")
        self._inputs.append(Port(tensor=tensor, view=view, batch=self.batch, tokens=tokens, heads=heads))
        return view

    def input_activation(self, tensor: str, layer: int, tokens: Tokens, category: Category) -> View:
        """Return a buffer that holds these tokens of x or dx of a layer, (B, tokens, E), when the program starts."""
        view = self.activation(tensor, num_tokens(tokens), self.workload.model.embed_dim, category)
        self._inputs.append(Port(tensor=tensor, layer=layer, view=view, batch=self.batch, tokens=tokens, heads=ONE))
        return view

    def input_weight(self, tensor: str, layer: int) -> View:
        """Return a buffer that holds a weight of a layer when the program starts."""
        view = self.weight(f"{tensor} {layer}", tensor, "parameter")
        rows = Span(0, view.shape[0])
        self._inputs.append(Port(tensor=tensor, layer=layer, view=view, batch=ONE, tokens=(rows,), heads=ONE))
        return view

    def weight(self, name: str, tensor: str, category: Category) -> View:
        """Return a new buffer with the shape of a weight: a parameter, or its gradient."""
        shape = weight_shapes(self.workload.model)[tensor]
        return self.buffer(name, "io"[: len(shape)], shape, self.workload.dtype, category)

    def output(self, tensor: str, view: View, tokens: Tokens, heads: Span, layer: int = 0) -> None:
        """Declare that a view holds these tokens and heads of a global tensor when the program ends."""
        batch = self.batch if "b" in self._buffers[view.buffer].dims else ONE
        self._outputs.append(Port(tensor=tensor, layer=layer, view=view, batch=batch, tokens=tokens, heads=heads))

    # Kernels

    def attend(
        self,
        q: View,
        k: View,
        v: View,
        out: View,
        lse: View,
        band: Band,
        label: str,
        *,
        kernel: AttentionName = "flash",
        probs: View | None = None,
    ) -> None:
        """Append attention of one block; ``probs`` is what a standard kernel keeps."""
        self._ops.append(
            Attend(
                stream=COMPUTE, part=self.part, label=label, band=band, kernel=kernel,
                q=q, k=k, v=v, out=out, lse=lse, probs=probs,
            )
        )  # fmt: skip

    def attend_backward(
        self,
        saved: tuple[View, View, View, View, View],
        dout: View,
        grads: tuple[View, View, View],
        band: Band,
        label: str,
        *,
        kernel: AttentionName = "flash",
        probs: View | None = None,
    ) -> None:
        """Append the backward pass of one block; ``saved`` is (q, k, v, out or delta, lse), ``grads`` (dq, dk, dv)."""
        q, k, v, out, lse = saved
        dq, dk, dv = grads
        self._ops.append(
            AttendBackward(
                stream=COMPUTE, part=self.part, label=label, band=band, kernel=kernel,
                q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, probs=probs,
            )
        )  # fmt: skip

    def delta(self, out: View, dout: View, delta: View) -> None:
        """Append delta = sum of dout * out over the head dim."""
        self._ops.append(Delta(stream=COMPUTE, part=self.part, label="delta", out=out, dout=dout, delta=delta))

    def merge(self, partial: tuple[View, View], into: tuple[View, View], label: str) -> None:
        """Append the merge of a partial (out, lse) into an accumulated one."""
        self._ops.append(
            Merge(
                stream=COMPUTE, part=self.part, label=label,
                out=partial[0], lse=partial[1], into_out=into[0], into_lse=into[1],
            )
        )  # fmt: skip

    def accumulate(self, source: View, into: View, label: str) -> None:
        """Append into += source."""
        self._ops.append(Accumulate(stream=COMPUTE, part=self.part, label=label, source=source, into=into))

    def zero(self, into: View, label: str) -> None:
        """Append into = 0."""
        self._ops.append(Zero(stream=COMPUTE, part=self.part, label=label, into=into))

    def copy(self, source: View, target: View, label: str) -> None:
        """Append target = source, cast where the data types differ."""
        self.copy_parts(Split(source, 0, 1), Split(target, 0, 1), label)

    def copy_parts(self, source: Split, target: Split, label: str, order: Sequence[int] = ()) -> None:
        """Append one kernel that copies part i of source, or part ``order[i]``, into part i of target."""
        self._ops.append(
            Copy(stream=COMPUTE, part=self.part, label=label, source=source, target=target, order=tuple(order))
        )

    def fold(self, source: Split, target: Split, label: str) -> None:
        """Append one kernel that sums each n parts of source into one of target."""
        self._ops.append(Fold(stream=COMPUTE, part=self.part, label=label, source=source, target=target))

    def gemm(self, form: GemmForm, a: View, b: View, out: View, label: str, *, add: bool = False) -> None:
        """Append a matrix product; with ``add`` it is added to what ``out`` holds."""
        self._ops.append(
            Gemm(stream=COMPUTE, part=self.part, label=label, form=form, a=a, b=b, out=out, accumulate=add)
        )

    def rms_norm(self, x: View, weight: View, out: View, rstd: View, label: str) -> None:
        """Append RMSNorm with the model's epsilon."""
        epsilon = self.workload.model.norm_epsilon
        self._ops.append(
            RmsNorm(
                stream=COMPUTE, part=self.part, label=label,
                x=x, weight=weight, out=out, rstd=rstd, epsilon=epsilon,
            )
        )  # fmt: skip

    def rms_norm_backward(
        self, saved: tuple[View, View, View], dout: View, dx: View, dweight: View, label: str
    ) -> None:
        """Append the backward pass of RMSNorm; ``saved`` is (x, weight, rstd)."""
        x, weight, rstd = saved
        self._ops.append(
            RmsNormBackward(
                stream=COMPUTE, part=self.part, label=label,
                x=x, weight=weight, rstd=rstd, dout=dout, dx=dx, dweight=dweight,
            )
        )  # fmt: skip

    def rope(self, x: View, tokens: Tokens, label: str, *, inverse: bool = False) -> None:
        """Append a rotary embedding in place, or its inverse."""
        theta = self.workload.model.rope_theta
        self._ops.append(
            Rope(stream=COMPUTE, part=self.part, label=label, x=x, tokens=tokens, theta=theta, inverse=inverse)
        )

    def swiglu(self, gate: View, up: View, out: View, label: str) -> None:
        """Append out = silu(gate) * up."""
        self._ops.append(SwiGlu(stream=COMPUTE, part=self.part, label=label, gate=gate, up=up, out=out))

    def swiglu_backward(self, gate: View, up: View, dout: View, grads: tuple[View, View], label: str) -> None:
        """Append the backward pass of SwiGLU; ``grads`` is (dgate, dup)."""
        self._ops.append(
            SwiGluBackward(
                stream=COMPUTE, part=self.part, label=label,
                gate=gate, up=up, dout=dout, dgate=grads[0], dup=grads[1],
            )
        )  # fmt: skip

    # Communication: the stream of an op is its communicator

    def exchange(self, over: Communicator, sends: Sequence[Message], recvs: Sequence[Message], label: str) -> None:
        """Append a grouped exchange."""
        self._ops.append(
            Exchange(
                stream=over.name, part=self.part, label=label,
                communicator=over.name, sends=tuple(sends), recvs=tuple(recvs),
            )
        )  # fmt: skip

    def all_to_all(self, over: Communicator, sends: Split, recvs: Split, label: str) -> None:
        """Append an all-to-all; parts in the order of the group's members."""
        self._ops.append(
            AllToAll(stream=over.name, part=self.part, label=label, communicator=over.name, sends=sends, recvs=recvs)
        )

    def all_gather(self, over: Communicator, send: View, recvs: Split, label: str) -> None:
        """Append an all-gather; parts in the order of the group's members."""
        self._ops.append(
            AllGather(stream=over.name, part=self.part, label=label, communicator=over.name, send=send, recvs=recvs)
        )

    def reduce_scatter(self, over: Communicator, sends: Split, recv: View, label: str) -> None:
        """Append a reduce-scatter; parts in the order of the group's members."""
        self._ops.append(
            ReduceScatter(stream=over.name, part=self.part, label=label, communicator=over.name, sends=sends, recv=recv)
        )

    def all_reduce(self, over: Communicator, view: View, label: str) -> None:
        """Append an all-reduce in place."""
        self._ops.append(AllReduce(stream=over.name, part=self.part, label=label, communicator=over.name, view=view))

    def barrier(self, over: Communicator, label: str = "barrier") -> None:
        """Append a barrier of the communicator's group."""
        self._ops.append(Barrier(stream=over.name, part=self.part, label=label, communicator=over.name))

    def host_copy(self, source: View, target: View, label: str) -> None:
        """Append a copy between the GPU's memory and its host's. From and to pageable memory CUDA copies by way of
        pinned memory of its own, and the host waits for that (CUDA Runtime API, API synchronization behavior).
        """
        places = {self._buffers[view.buffer].place for view in (source, target)}
        stream = FETCH if self._buffers[target.buffer].place == "hbm" else OFFLOAD
        self._ops.append(HostCopy(stream=stream, part=self.part, label=label, source=source, target=target))
        if "pageable" in places:
            self.host_sync(stream, label="pageable memory")

    def host_sync(self, *streams: str, label: str = "host sync") -> None:
        """Append a wait of the host for all that it issued to these streams."""
        self._ops.append(HostSync(stream=HOST, part=self.part, label=label, streams=streams))
