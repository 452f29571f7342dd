"""Scope "layer": whole transformer layers around any distributed attention, forward and backward.

Every rank computes all of a layer for its own tokens; only attention sees those of other ranks. Weights are replicated;
their gradients, which each rank has of its own tokens, are summed over all ranks as soon as each is there, one
all-reduce a weight, beside the rest of the backward pass. What each kernel computes stands in ``equations``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sim.errors import InputError
from sim.mesh import Mesh
from sim.options import AttentionName, LayerOptions, Place
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.ops import Accumulate, AllReduce, Gemm, RmsNorm, RmsNormBackward, Rope, SwiGlu, SwiGluBackward
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.views import Category, View
from sim.schedule.model.equations import weight_shapes
from sim.schedule.model.offload import all_out, fetch, offload
from sim.schedule.write.attention import DistributedAttention, Saved, Shard, attention_flops, attention_program
from sim.schedule.write.builder import ProgramBuilder
from sim.workload import DTYPE_BYTES, Workload, accumulation_dtype

GRADIENTS = "gradients"
"""The communicator that sums the gradients of weights over all ranks."""


class AttentionPlan(NamedTuple):
    """What a schedule of attention says of itself; ``build_around`` makes a schedule of any scope of it."""

    name: str
    communicators: tuple[Communicator, ...]
    shard: Callable[[int], Shard]
    """Which tokens and heads a rank owns."""
    attention: Callable[[ProgramBuilder], DistributedAttention]
    wire_bytes: int
    """What attention of one layer sends over all ranks of one replica, by the paper's formula."""
    source: str
    kernel: AttentionName = "flash"


def build_around(
    plan: AttentionPlan, workload: Workload, mesh: Mesh, options: LayerOptions = LayerOptions()
) -> Schedule:
    """Return the schedule of the workload's scope: attention alone, or layers around it; each of the data-parallel
    replicas with a batch of its own.
    """
    layers = workload.scope == "layer"
    if options.activations != "hbm" and not layers:
        raise InputError(
            "activations of scope 'attention' stay where they are: leave out --set schedule.activations, or choose "
            "--scope layer"
        )
    alike = mesh.groups("dp", "ring", "ulysses")
    reduces = layers and workload.backward and len(alike[0]) > 1
    gradients = (Communicator(name=GRADIENTS, groups=alike),) if reduces else ()
    header = Header(
        name=plan.name,
        workload=workload,
        mesh=mesh,
        options=msgspec.to_builtins(options),
        communicators=plan.communicators + gradients,
        claims=_claims(plan, workload, mesh),
    )

    def program(rank: int) -> Program:
        first = mesh.place(rank)["dp"] * workload.batch
        b = ProgramBuilder(rank, workload, Span(first, first + workload.batch))
        if not layers:
            return attention_program(b, plan.shard(rank), plan.attention)
        return _Layers(b, plan, gradients, options.activations).program()

    return Schedule(header, program)


class _SavedLayer(NamedTuple):
    """What the backward pass of a layer needs of its forward pass."""

    x: View
    rstd1: View
    h1: View
    attention: Saved
    out: View
    middle: View
    rstd2: View
    h2: View
    gate: View
    up: View
    act: View


class _Layers:
    """Writes the layers of one rank."""

    def __init__(
        self, builder: ProgramBuilder, plan: AttentionPlan, gradients: tuple[Communicator, ...], place: Place
    ) -> None:
        self._b = builder
        self._place = place
        copied = self._place != "hbm" and builder.workload.backward
        self._elsewhere = range(builder.workload.layers - 1) if copied else range(0)
        """Layers whose activations lie in the host's memory meanwhile."""
        self._shard = plan.shard(builder.rank)
        self._tokens = num_tokens(self._shard.tokens)
        self._attention = plan.attention(builder)
        self._gradients = gradients
        self._weights: dict[str, View] = {}
        self._layer = 0

    def program(self) -> Program:
        """Return the program of this rank."""
        b, count, tokens = self._b, self._b.workload.layers, self._shard.tokens
        weights = [{name: b.input_weight(name, n) for name in weight_shapes(b.workload.model)} for n in range(count)]
        x = b.input_activation("x", 0, tokens, "saved")
        saved = []
        for layer, self._weights in enumerate(weights):
            x, kept = self._forward(x)
            saved.append(offload(b, kept, layer, self._place) if layer in self._elsewhere else kept)
        b.output("x", x, tokens, ONE, count)
        if b.workload.backward:
            b.part = "backward"
            if self._elsewhere:
                all_out(b)
            dx = b.input_activation("dx", count, tokens, "other")
            for self._layer in reversed(range(count)):
                self._weights = weights[self._layer]
                if self._layer - 1 in self._elsewhere:
                    saved[self._layer - 1] = fetch(b, saved[self._layer - 1], self._layer - 1)
                dx = self._backward(saved[self._layer], dx)
            b.output("dx", dx, tokens, ONE)
        return b.build()

    def _forward(self, x: View) -> tuple[View, _SavedLayer]:
        """Append one layer; return what leaves it, and what to save."""
        b, model = self._b, self._b.workload.model
        h1, rstd1 = self._norm(x, "norm1", "h1")
        q, k, v = (
            self._linear(h1, f"w{name}", b.tensor(name, self._tokens, heads, "saved"))
            for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads))
        )
        b.add(Rope(label="rope q", x=q, tokens=self._shard.tokens, theta=model.rope_theta))
        b.add(Rope(label="rope k", x=k, tokens=self._shard.tokens, theta=model.rope_theta))
        out, attention = self._attention.forward(q, k, v)
        middle = self._linear(out, "wo", self._activation("middle"))
        b.add(Accumulate(label="residual of attention", source=x, into=middle))
        h2, rstd2 = self._norm(middle, "norm2", "h2")
        gate, up, act = (self._activation(name, model.ffn_dim) for name in ("gate", "up", "act"))
        self._linear(h2, "w_gate", gate)
        self._linear(h2, "w_up", up)
        b.add(SwiGlu(label="swiglu", gate=gate, up=up, out=act))
        after = self._linear(act, "w_down", self._activation("x"))
        b.add(Accumulate(label="residual of mlp", source=middle, into=after))
        return after, _SavedLayer(x, rstd1, h1, attention, out, middle, rstd2, h2, gate, up, act)

    def _backward(self, saved: _SavedLayer, dx: View) -> View:
        """Append the backward pass of one layer; return the gradient of what came into it."""
        b, model = self._b, self._b.workload.model
        dact, dgate, dup = (self._activation(name, model.ffn_dim, "other") for name in ("dact", "dgate", "dup"))
        self._input_gradient(dx, "w_down", dact)
        self._weight_gradient(saved.act, dx, "w_down")
        b.add(
            SwiGluBackward(label="back through swiglu", gate=saved.gate, up=saved.up, dout=dact, dgate=dgate, dup=dup)
        )
        dh2 = self._activation("dh2", category="other")
        self._input_gradient(dgate, "w_gate", dh2)
        self._weight_gradient(saved.h2, dgate, "w_gate")
        self._input_gradient(dup, "w_up", dh2, add=True)
        self._weight_gradient(saved.h2, dup, "w_up")
        dmiddle = self._norm_backward((saved.middle, saved.rstd2), "norm2", dh2, "dmiddle")
        b.add(Accumulate(label="residual of mlp", source=dx, into=dmiddle))
        dout = b.tensor("dout", self._tokens, model.num_heads, "attention")
        self._input_gradient(dmiddle, "wo", dout)
        self._weight_gradient(saved.out, dmiddle, "wo")
        dq, dk, dv = self._attention.backward(saved.attention, dout)
        b.add(Rope(label="rope dq", x=dq, tokens=self._shard.tokens, inverse=True, theta=model.rope_theta))
        b.add(Rope(label="rope dk", x=dk, tokens=self._shard.tokens, inverse=True, theta=model.rope_theta))
        dh1 = self._activation("dh1", category="other")
        for name, grad in (("wq", dq), ("wk", dk), ("wv", dv)):
            self._input_gradient(grad, name, dh1, add=name != "wq")
            self._weight_gradient(saved.h1, grad, name)
        before = self._norm_backward((saved.x, saved.rstd1), "norm1", dh1, "dx")
        b.add(Accumulate(label="residual of attention", source=dmiddle, into=before))
        return before

    def _activation(self, name: str, width: int | None = None, category: Category = "saved") -> View:
        return self._b.activation(name, self._tokens, width or self._b.workload.model.embed_dim, category)

    def _norm(self, x: View, weight: str, name: str) -> tuple[View, View]:
        """Return the normalised tokens, and what was divided by."""
        b = self._b
        rstd_shape = (b.batch.size, self._tokens)
        rstd = b.buffer(f"rstd of {name}", "bs", rstd_shape, accumulation_dtype(b.workload.dtype), "saved")
        out = self._activation(name)
        b.add(
            RmsNorm(
                label=weight,
                x=x,
                weight=self._weights[weight],
                out=out,
                rstd=rstd,
                epsilon=b.workload.model.norm_epsilon,
            )
        )
        return out, rstd

    def _norm_backward(self, saved: tuple[View, View], weight: str, dout: View, name: str) -> View:
        x, rstd = saved
        dx, dweight = self._activation(name, category="other"), self._gradient(weight)
        self._b.add(
            RmsNormBackward(
                label=f"back through {weight}",
                x=x,
                weight=self._weights[weight],
                rstd=rstd,
                dout=dout,
                dx=dx,
                dweight=dweight,
            )
        )
        self._finish(weight, dweight)
        return dx

    def _linear(self, x: View, weight: str, out: View) -> View:
        self._b.add(Gemm(label=weight, form="nn", a=x, b=self._weights[weight], out=out))
        return out

    def _input_gradient(self, dout: View, weight: str, into: View, *, add: bool = False) -> None:
        self._b.add(
            Gemm(label=f"back through {weight}", form="nt", a=dout, b=self._weights[weight], out=into, accumulate=add)
        )

    def _weight_gradient(self, x: View, dout: View, weight: str) -> None:
        gradient = self._gradient(weight)
        self._b.add(Gemm(label=f"gradient d{weight}", form="tn", a=x, b=dout, out=gradient))
        self._finish(weight, gradient)

    def _gradient(self, weight: str) -> View:
        return self._b.weight(f"d{weight} {self._layer}", weight, "gradient")

    def _finish(self, weight: str, gradient: View) -> None:
        """Sum a gradient over all ranks, and declare it."""
        for over in self._gradients:
            self._b.add(AllReduce(label=f"reduce d{weight}", communicator=over.name, view=gradient))
        rows = Span(0, gradient.shape[0])
        self._b.output(f"d{weight}", gradient, (rows,), ONE, self._layer)


def _claims(plan: AttentionPlan, workload: Workload, mesh: Mesh) -> Claims:
    """Attention by its paper, in every replica; 2 FLOPs per token and weight forward, 4 backward; an all-reduce of
    every gradient.
    """
    flops, wire_bytes = mesh.dp * attention_flops(workload, plan.kernel), mesh.dp * plan.wire_bytes
    if workload.scope == "attention":
        return Claims(attention_flops=flops, wire_bytes=wire_bytes, source=plan.source)
    sizes = [math.prod(shape) for shape in weight_shapes(workload.model).values()]
    reduced = 2 * (mesh.size - 1) * sum(sizes) * DTYPE_BYTES[workload.dtype] if workload.backward else 0
    return Claims(
        attention_flops=workload.layers * flops,
        gemm_flops=mesh.dp * gemm_flops(workload),
        wire_bytes=workload.layers * (wire_bytes + reduced),
        source=f"{plan.source}; 6 FLOPs per token and weight (arXiv:2001.08361 §2.1), 2 (P-1) bytes per gradient byte",
    )


def gemm_flops(workload: Workload) -> int:
    """Return the FLOPs of all linear layers over all ranks of a replica: 2 per token and weight forward, 4 backward."""
    if workload.scope == "attention":
        return 0
    weights = sum(math.prod(shape) for shape in weight_shapes(workload.model).values() if len(shape) == 2)
    per_weight = 2 * workload.forward + 4 * workload.backward
    return per_weight * weights * workload.batch * workload.seq * workload.layers
