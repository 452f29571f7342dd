"""UPipe, untied Ulysses: heads go through Ulysses U at a time, so that attention needs room for O(U) heads, not O(H).

A stage sends one query head to each of U ranks, attends, and sends the output back (arXiv:2602.21196 §3). Heads are
taken so that a rank's query head belongs to the key/value head that it holds: keys are sent once, then serve all query
heads of their group. Backward sends q, k and v again, as published code computes them again, and sums dK and dV over
the stages of a group. Inside each stage may be a ring. Stages follow each other, as in published code, which overlaps
nothing (``overlap`` overlaps only copies with all-to-alls).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import InputError
from sim.mesh import Mesh
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import ONE, Tokens
from sim.schedule.ir.ops import Copy
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import HEADS, Category, Split, View
from sim.schedule.methods.ring import check_backward, ring_bytes
from sim.schedule.methods.ulysses import Inside, check_heads, input_bytes, kv_heads_of, ulysses_bytes
from sim.schedule.methods.usp import UspOptions, around_rings
from sim.schedule.write.accumulate import GradientSum
from sim.schedule.write.attention import Saved, Shard, all_heads, needs_forward
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.head_trade import HeadTrade
from sim.workload import Workload, gradient_dtype


@dataclass(frozen=True, kw_only=True)
class UPipeOptions(UspOptions):
    """Options of USP, whose stages these are, and of the stages."""

    overlap: bool = False
    recompute: bool = True
    """Whether the backward pass sends q, k and v again, or keeps them."""


def build(workload: Workload, mesh: Mesh, options: UPipeOptions = UPipeOptions()) -> Schedule:
    """Return UPipe over U * R ranks; raises InputError where heads or tokens do not divide over them."""
    mesh.only("upipe", "ring", "ulysses")
    model, size = workload.model, mesh.ulysses
    check_heads(model, size)
    check_backward(workload, options)
    needs_forward(workload, "UPipe, which keeps the output of each stage,")
    if options.ring_backward == "kv-at-hand" and options.recompute:
        raise InputError(
            "UPipe sends k and v again, so its rings cannot start from those at hand: allowed are own-kv, queries with "
            "`set` schedule.ring_backward, or `set` schedule.recompute=false"
        )

    def wire_bytes(work: Workload) -> int:
        again = input_bytes(work, size)
        rings = ring_bytes(work, options, mesh.ring, model.num_heads)
        return ulysses_bytes(work, size) + again * (work.backward and options.recompute) + rings

    return around_rings(
        workload,
        mesh,
        options,
        name="upipe",
        outside=UPipeAttention,
        wire_bytes=wire_bytes,
        source="arXiv:2602.21196 §3",
        keeps_inputs=not options.recompute,
    )


class UPipeAttention:
    """UPipe of one rank, whose group has ``tokens``."""

    def __init__(
        self, builder: ProgramBuilder, ulysses: Communicator, tokens: Tokens, inside: Inside, options: UPipeOptions
    ) -> None:
        self._b = builder
        self._options = options
        self._trade = HeadTrade(builder, ulysses, options)
        self._inside = inside(builder, Shard(tokens, ONE, ONE))  # heads differ from stage to stage
        self._tokens = num_tokens(tokens) // self._trade.size
        model, size = builder.workload.model, self._trade.size
        sent = max(model.num_kv_heads, size)
        group = model.num_heads // sent
        replicas = kv_heads_of(model, sent)
        self._kv_heads = [replicas[first : first + size] for first in range(0, sent, size)]
        self._q_heads = [
            [[head * group + i for head in range(first, first + size)] for i in range(group)]
            for first in range(0, sent, size)
        ]
        order = [head for stages in self._q_heads for stage in stages for head in stage]
        self._places = [order.index(head) for head in range(model.num_heads)]
        self.saved_shard = all_heads(model, tokens)

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """H/U stages; k and v with the first stage of their group."""
        staged = self._local("out", self._b.workload.model.num_heads)
        kept: list[Saved] = []
        for kv_heads, stages in zip(self._kv_heads, self._q_heads, strict=True):
            k_here, v_here = self._to_heads({"k": k, "v": v}, kv_heads)
            for heads in stages:
                (q_here,) = self._to_heads({"q": q}, heads)
                out, saved = self._inside.forward(q_here, k_here, v_here)
                self._to_tokens({"out": out}, {"out": self._stage(staged, len(kept))})
                kept.append(saved)
        return self._in_order(staged, "out"), Saved(q, k, v, kept[0].out, kept[0].lse, stages=tuple(kept))

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """H/U stages again; dK and dV go home after the last stage of their group."""
        model, kept = self._b.workload.model, saved.stages
        staged = self._local("dq", model.num_heads)
        local = {name: self._local(name, model.num_kv_heads) for name in ("dk", "dv")}
        number = 0
        for group, (kv_heads, stages) in enumerate(zip(self._kv_heads, self._q_heads, strict=True)):
            k, v = kept[number].k, kept[number].v
            if self._options.recompute:
                k, v = self._to_heads({"k": saved.k, "v": saved.v}, kv_heads)
            sums: list[GradientSum] = []
            for heads in stages:
                q = self._to_heads({"q": saved.q}, heads)[0] if self._options.recompute else kept[number].q
                (dout_here,) = self._to_heads({"dout": dout}, heads)
                dq, *dkv = self._inside.backward(kept[number]._replace(q=q, k=k, v=v), dout_here)
                self._to_tokens({"dq": dq}, {"dq": self._stage(staged, number)})
                self._add(sums, dkv)
                number += 1
            whole = {name: total.finished(name) for name, total in zip(("dk", "dv"), sums, strict=True)}
            width = min(len(kv_heads), model.num_kv_heads)
            self._to_tokens(whole, {name: x[:, :, group * width : (group + 1) * width] for name, x in local.items()})
        return self._in_order(staged, "dq"), local["dk"], local["dv"]

    def _add(self, sums: list[GradientSum], parts: list[View]) -> None:
        """Add the gradients of a stage; the first ones become the sums where they have the data type of sums."""
        b = self._b
        for number, (name, part) in enumerate(zip(("dk", "dv"), parts, strict=True)):
            if number < len(sums):
                sums[number].take(part, "of a stage")
            elif b.dtype(part) == gradient_dtype(b.workload, self._options):
                sums.append(GradientSum(b, name, part, empty=False))
            else:
                sums.append(GradientSum(b, name, b.gradient(f"{name} sum", part, self._options)))
                sums[-1].take(part, "of a stage")

    def _to_heads(self, local: dict[str, View], heads: Sequence[int]) -> list[View]:
        """Return one head of all tokens of the group for each tensor of this rank's tokens."""
        keeps = self._b.part == "forward" and not self._options.recompute
        category: Category = "saved" if keeps else "attention"
        if self._trade.size == 1:
            return [self._one_head(name, view[:, :, heads[0] : heads[0] + 1]) for name, view in local.items()]
        return self._trade.to_heads(local, category, dict.fromkeys(local, heads))

    def _one_head(self, name: str, view: View) -> View:
        """Return a copy in one piece."""
        alone = self._b.like(f"{name} of heads", view, "attention")
        self._b.copy(view, alone, f"pick {name}")
        return alone

    def _to_tokens(self, whole: dict[str, View], into: dict[str, View]) -> None:
        if self._trade.size > 1:
            self._trade.to_tokens(whole, into)
            return
        for name, view in whole.items():
            self._b.copy(view, into[name], f"place {name}")

    def _stage(self, staged: View, number: int) -> View:
        """Return where the heads of a stage lie among those of all stages."""
        return staged[:, :, number * self._trade.size : (number + 1) * self._trade.size]

    def _in_order(self, staged: View, name: str) -> View:
        """Return all heads in their order instead of that of the stages."""
        total = staged.shape[HEADS]
        if self._places == list(range(total)):
            return staged
        whole = self._local(name, total)
        self._b.add(
            Copy(
                label=f"order {name}",
                source=Split(staged, HEADS, total),
                target=Split(whole, HEADS, total),
                order=tuple(self._places),
            )
        )
        return whole

    def _local(self, name: str, heads: int) -> View:
        return self._b.tensor(name, self._tokens, heads, "attention")
