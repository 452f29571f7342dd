"""Scope "attention": q, k, v and dout come in, out, dq, dk and dv go out; between them a distributed attention.

Every schedule of attention has the form of ``DistributedAttention``; this file gives it its inputs and takes its
outputs, so that one pass alone, or later a whole layer, is the same code around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from sim.base.errors import InputError
from sim.schedule.ir.masks import Span, Tokens, count_pairs, mask_of
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import View
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import AttentionName
from sim.words.workload import ModelSpec, Workload


class Shard(NamedTuple):
    """Which part of the global tensors a rank holds."""

    tokens: Tokens
    heads: Span
    kv_heads: Span


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass. q, out: bshd; k, v: bshd; lse: bhs.

    Where there is no log-sum-exp, as in linear attention, out stands for it.
    """

    q: View
    k: View
    v: View
    out: View
    lse: View
    more: tuple[View, ...] = ()
    """What else a schedule keeps. It then cannot play its backward pass alone."""
    stages: tuple[Saved, ...] = ()
    """What each stage keeps, of a schedule that attends to some heads at a time. It cannot either."""

    def without_inputs(self) -> Saved:
        """Return this without q, k and v: where they stood, out stands until they are laid out again."""
        stages = tuple([stage.without_inputs() for stage in self.stages])
        return self._replace(q=self.out, k=self.out, v=self.out, stages=stages)


class DistributedAttention(Protocol):
    """Attention of one rank, written into the program builder that it was made with.

    A pass of a layer is a call (see ``ProgramBuilder.call``): it uses no buffer that was made outside of it but those
    that it is given.
    """

    saved_shard: Shard
    """How the tensors in ``Saved`` are sharded."""

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Append the forward pass; return the output of this rank's own tokens, and what to save."""
        ...

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Append the backward pass; return dq, dk, dv of this rank's own tokens."""
        ...


@runtime_checkable
class LaysOut(Protocol):
    """Attention that saves q, k and v otherwise than it is given them. All other saves them as they are."""

    def lay_out(self, q: View, k: View, v: View) -> tuple[View, View, View]:
        """Append what brings q, k and v of this rank's own tokens to where ``Saved`` has them; return that."""
        ...


def needs_forward(workload: Workload, what: str) -> None:
    """Raise InputError where a backward pass alone is asked for, which needs more of its forward pass than that."""
    if not workload.forward:
        raise InputError(f"pass backward: {what} needs its own forward pass; set `passes` both")


def all_heads(model: ModelSpec, tokens: Tokens) -> Shard:
    """Return the shard with these tokens and every head."""
    return Shard(tokens, Span(0, model.num_heads), Span(0, model.num_kv_heads))


def attention_program(
    b: ProgramBuilder, local: Shard, attention: Callable[[ProgramBuilder], DistributedAttention]
) -> Program:
    """Return the program of one rank at scope "attention"; ``local`` is what it owns of q, k, v, out and gradients."""
    workload, distributed = b.workload, attention(b)
    if workload.forward:
        q = b.input("q", local.tokens, local.heads)
        k = b.input("k", local.tokens, local.kv_heads)
        v = b.input("v", local.tokens, local.kv_heads)
        out, saved = distributed.forward(q, k, v)
        b.output("out", out, local.tokens, local.heads)
    else:
        shard = distributed.saved_shard
        saved = Saved(
            q=b.input("q", shard.tokens, shard.heads),
            k=b.input("k", shard.tokens, shard.kv_heads),
            v=b.input("v", shard.tokens, shard.kv_heads),
            out=b.input("out", shard.tokens, shard.heads),
            lse=b.input("lse", shard.tokens, shard.heads),
        )
    if workload.backward:
        b.part = "backward"
        dq, dk, dv = distributed.backward(saved, b.input("dout", local.tokens, local.heads))
        b.output("dq", dq, local.tokens, local.heads)
        b.output("dk", dk, local.tokens, local.kv_heads)
        b.output("dv", dv, local.tokens, local.kv_heads)
    elif not (saved.more or saved.stages or saved.lse == saved.out):
        b.output("lse", saved.lse, distributed.saved_shard.tokens, distributed.saved_shard.heads)
    return b.build()


def attention_flops(workload: Workload, kernel: AttentionName = "flash") -> int:
    """Return the FLOPs of attention over all ranks: 4*D per kept (query, key) pair and head forward, 2.5 times that
    backward (five matmuls against two, arXiv:2307.08691 §4.1); a multiply-add counts 2. Kernels that are not fused
    compute all pairs, and a standard one, which keeps the probabilities, four matmuls backward. Of linear attention
    those of its recurrence: each key goes into a state, and each query reads it.
    """
    model, whole = workload.model, Span(0, workload.seq)
    if workload.attention == "linear":
        products = workload.batch * workload.seq * (model.num_heads + model.num_kv_heads)
        return 2 * model.head_dim**2 * products * (workload.forward + 2 * workload.backward)
    pairs = count_pairs(mask_of(workload), whole, whole) if kernel == "flash" else workload.seq**2
    backward = 8 if kernel == "standard" else 10
    per_pair = (4 if workload.forward else 0) + (backward if workload.backward else 0)
    return pairs * workload.batch * model.num_heads * per_pair * model.head_dim
