"""UPipe, untied Ulysses: heads go through Ulysses U at a time, so that attention needs room for O(U) heads, not O(H).

A stage projects U query heads, sends one to each of U ranks, attends, and sends the output back (arXiv:2602.21196 §3).
Heads are taken so that a rank's query head belongs to the key/value head that it holds: keys are projected and sent
once, then serve all query heads of their group. Backward projects and sends q, k and v again, as published code does,
sums dK and dV over the stages of a group, and adds up the gradient of what all were projected from. Inside each stage
may be a ring, whose hops overlap with attention. Stages follow each other, as in published code, whose all-to-alls
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sim.base.errors import InputError
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import ONE, Tokens
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import Category, View
from sim.schedule.methods.ring import check_backward, ring_bytes
from sim.schedule.methods.ulysses import Inside, check_heads, input_bytes, kv_heads_of, ulysses_bytes
from sim.schedule.methods.usp import UspOptions, around_rings
from sim.schedule.write.accumulate import GradientSum
from sim.schedule.write.attention import Saved, Shard, all_heads, needs_forward
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.head_trade import HeadTrade
from sim.schedule.write.inputs import NAMES, HeadsInTurn, Inputs, Part, Whole
from sim.words.mesh import Mesh
from sim.words.workload import Workload, gradient_dtype


@dataclass(frozen=True, kw_only=True)
class UPipeOptions(UspOptions):
    """Options of USP, whose stages these are, and of the stages."""

    recompute: bool = True
    """Whether the backward pass sends q, k and v again, or keeps them."""


def build(workload: Workload, mesh: Mesh, options: UPipeOptions = UPipeOptions()) -> Schedule:
    """Return UPipe over U * R ranks; raises InputError where heads or tokens do not divide over them."""
    mesh.only("upipe", "ring", "ulysses")
    model, size = workload.model, mesh.ulysses
    check_heads(model, mesh)
    check_backward(workload, options)
    needs_forward(workload, "UPipe, which keeps the output of each stage,")
    if model.qk_norm and workload.scope != "attention":
        raise InputError(
            f"schedule 'upipe' projects some heads at a time, and {model.name} norms q and k behind that: set "
            f"`schedule` ulysses or fpdt"
        )
    if options.ring_backward == "kv-at-hand" and options.recompute:
        raise InputError(
            "UPipe sends k and v again, so its rings cannot start from those at hand: allowed are own-kv, queries with "
            "`set` schedule.ring_backward, or `set` schedule.recompute=false"
        )

    def wire_bytes(work: Workload) -> int:
        again = input_bytes(work, size)
        rings = ring_bytes(work, options, mesh.ring, work.model.num_heads)
        return ulysses_bytes(work, size) + again * (work.backward and options.recompute) + rings

    return around_rings(
        workload,
        mesh,
        options,
        name="upipe",
        partwise=True,
        projects_again=options.recompute,
        outside=UPipeAttention,
        wire_bytes=wire_bytes,
        source="arXiv:2602.21196 §3",
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
        self._group = model.num_heads // sent
        """Stages that share keys."""
        self._replicas = kv_heads_of(model, sent)
        self.q_heads = tuple(
            [
                head * self._group + i
                for first in range(0, sent, size)
                for i in range(self._group)
                for head in range(first, first + size)
            ]
        )
        self.saved_shard = all_heads(model, tokens)

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Of whole q, k and v."""
        out, saved = self.forward_from(Whole(self._b, self.q_heads, (q, k, v)))
        return out, saved._replace(q=q, k=k, v=v)

    def forward_from(self, inputs: Inputs) -> tuple[View, Saved]:
        """H/U stages; k and v with the first stage of their group."""
        out = HeadsInTurn(self._b, "out", self._tokens, self.q_heads)
        kept: list[Saved] = []
        for stages, kv_heads in self._stages():
            k, v = self._to_heads({name: inputs.part(name, heads=kv_heads) for name in NAMES[1:]})
            for heads in stages:
                (q,) = self._to_heads({"q": inputs.part("q", heads=heads)})
                of_stage, saved = self._inside.forward(q, k, v)
                self._to_tokens({"out": of_stage}, {"out": out.view[:, :, heads]})
                kept.append(saved.without_inputs() if self._options.recompute else saved)
        return out.in_order(), kept[0]._replace(more=(), stages=tuple(kept))

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Of whole q, k and v."""
        inputs = Whole(self._b, self.q_heads, saved[:3], num_gradients=self._tokens)
        self.backward_into(saved, dout, inputs)
        return inputs.gradients()

    def backward_into(self, saved: Saved, dout: View, inputs: Inputs) -> None:
        """H/U stages again; dK and dV go home after the last stage of their group."""
        again, number = self._options.recompute, 0
        for stages, kv_heads in self._stages():
            _, k, v, *_ = saved.stages[number]
            if again:
                k, v = self._to_heads({name: inputs.part(name, heads=kv_heads) for name in NAMES[1:]})
            sums: list[GradientSum] = []
            for heads in stages:
                of_stage = saved.stages[number]
                q = self._to_heads({"q": inputs.part("q", heads=heads)})[0] if again else of_stage.q
                (dout_here,) = self._to_heads({"dout": Part(dout, self.q_heads[heads])})
                dq, *dkv = self._inside.backward(of_stage._replace(q=q, k=k, v=v), dout_here)
                home = inputs.room("q", heads=heads)
                self._to_tokens({"dq": dq}, {"dq": home})
                inputs.take("q", home, heads=heads)
                self._add(sums, dkv)
                number += 1
            whole = {f"d{name}": total.finished(f"d{name}") for name, total in zip(NAMES[1:], sums, strict=True)}
            homes = {name: inputs.room(name, heads=kv_heads) for name in NAMES[1:]}
            self._to_tokens(whole, {f"d{name}": home for name, home in homes.items()})
            for name, home in homes.items():
                inputs.take(name, home, heads=kv_heads)

    def _stages(self) -> Iterator[tuple[list[slice], slice]]:
        """Yield by group the heads of q of each stage, in their order, and those of k and v."""
        size, width = self._trade.size, min(self._trade.size, self._b.workload.model.num_kv_heads)
        for group in range(len(self._replicas) // size):
            first = group * self._group
            stages = [slice(stage * size, (stage + 1) * size) for stage in range(first, first + self._group)]
            yield stages, slice(group * width, (group + 1) * width)

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

    def _to_heads(self, parts: dict[str, Part]) -> list[View]:
        """Return one head of all tokens of the group for each part of this rank's own tokens."""
        keeps = self._b.part == "forward" and not self._options.recompute
        category: Category = "saved" if keeps else "attention"
        if self._trade.size == 1:
            return [self._one_head(name, view[:, :, head : head + 1]) for name, (view, (head,)) in parts.items()]
        local = {name: part.view for name, part in parts.items()}
        # Where key/value heads are fewer than ranks, several ranks get one.
        each = {name: self._trade.size // len(part.heads) for name, part in parts.items()}
        chosen = {name: [head for head in part.heads for _ in range(each[name])] for name, part in parts.items()}
        return self._trade.to_heads(local, category, chosen)

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
