"""FPDT: Ulysses in chunks of the sequence, which wait in the host's memory for their turn (arXiv:2408.16978 §4).

    forward    per chunk i: q, k, v are projected; their all-to-alls; for j <= i: attend q_i to kv_j, while kv_j+1 is
               fetched; one all-to-all of the output; q, k, v, out, lse to the host
    backward   per chunk j: for i >= j: q_i, out_i, lse_i, dout_i and the sum of dq_i are fetched, the sum goes back;
               dk_j and dv_j stay on the GPU; then all-to-alls of dq_j, dk_j, dv_j, which are complete, and what
               goes back through their projections

A rank has the r-th P-th of every chunk, so that the all-to-alls of a chunk give each rank all of its tokens for H/P
heads. What is fetched has two places on the GPU in turns: one is filled while kernels use the other. Published code
(DeepSpeed fpdt_layer.py) waits for each all-to-all, has a barrier a chunk, and lets the host wait in every step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from sim.base.errors import InputError, LengthError
from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.masks import Mask, Tokens, mask_of
from sim.schedule.ir.ops import COMPUTE, FETCH, OFFLOAD, Barrier, HostSync
from sim.schedule.ir.program import Communicator, Schedule
from sim.schedule.ir.views import TOKENS, Split, View
from sim.schedule.methods.ulysses import check_heads, replicas_of, shard_of_heads, ulysses_bytes
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.accumulate import Gradients, GradientSum, SoftmaxAccumulator, attend_backward, new_sums
from sim.schedule.write.attention import Saved, all_heads, needs_forward
from sim.schedule.write.blocks import Block, blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.head_trade import HeadTrade, TradeOptions
from sim.schedule.write.inputs import NAMES, Inputs, Name, Whole
from sim.words.mesh import Mesh
from sim.words.options import SumOptions
from sim.words.workload import Dtype, Workload, gradient_dtype

MOST_CHUNKS = 256
"""Of a sequence: what is written of a step grows with their square."""
_SAVED = ("q", "k", "v", "out", "lse")
"""What backward needs of a chunk."""


@dataclass(frozen=True, kw_only=True)
class FpdtOptions(SumOptions):
    """Options of chunks."""

    chunk: int = 65536
    """Tokens of a chunk, over all ranks; shorter sequences are one."""
    offload: bool = True
    """Whether chunks wait in the host's memory, or on the GPU."""
    pipeline: Literal["ideal", "published"] = "ideal"
    """Whether streams wait for what they need only, or the host for each step, and all ranks for each other once a
    chunk, as in published code."""


def build(workload: Workload, mesh: Mesh, options: FpdtOptions = FpdtOptions()) -> Schedule:
    """Return FPDT along the axis ulysses; raises InputError where heads or chunks do not divide over it, and
    LengthError where chunks do not divide the sequence.
    """
    mesh.only("fpdt", "ulysses")
    check_heads(workload.model, mesh)
    needs_forward(workload, "FPDT, which keeps its chunks,")
    chunks = _chunks(workload.seq, options.chunk, mesh.ulysses)
    ulysses = Communicator(name="ulysses", groups=mesh.groups("ulysses"))

    def own(rank: int) -> Tokens:
        place, size = mesh.place(rank)["ulysses"], chunks[0].size // mesh.ulysses
        return tuple(chunk.part(place * size, (place + 1) * size) for chunk in chunks)

    plan = AttentionPlan(
        name="fpdt",
        communicators=(ulysses,) if mesh.ulysses > 1 else (),
        shard=lambda rank: all_heads(workload.model, own(rank)),
        attention=lambda b: FpdtAttention(b, ulysses, chunks, options),
        wire_bytes=lambda work: ulysses_bytes(work, mesh.ulysses),
        partwise=True,
        source="arXiv:2408.16978 §4; all-to-alls as in arXiv:2309.14509 §3.2",
        alike=("ulysses",),
    )
    return build_around(plan, workload, mesh, options)


def _chunks(seq: int, chunk: int, ranks: int) -> Tokens:
    """Return the chunks of a sequence."""
    size = min(chunk, seq)
    if size < 1 or (size < seq and size % ranks):
        raise InputError(
            f"`set` schedule.chunk={chunk}: expected tokens of all {ranks} ranks: allowed are multiples of {ranks}"
        )
    if seq % size or size % ranks:
        raise LengthError(seq, size if size < seq else ranks)
    if seq // size > MOST_CHUNKS:
        least = -(-seq // MOST_CHUNKS // ranks) * ranks
        raise InputError(
            f"`set` schedule.chunk={chunk}: {seq // size} chunks, of which each meets all before it: expected at most "
            f"{MOST_CHUNKS}; set schedule.chunk={least} or more"
        )
    return tuple(chunk for (chunk,) in contiguous(seq, seq // size))


class _Step(NamedTuple):
    """A chunk of queries meets a chunk of keys."""

    queries: int
    keys: int
    block: Block
    parts: int
    """How many chunks of keys these queries meet."""
    arrival: int
    """The chunk with which all is there that these queries need."""
    is_first: bool
    is_last: bool
    """Of these queries."""
    opens: bool
    closes: bool
    """First and last of these keys."""

    @property
    def label(self) -> str:
        """Which they are."""
        return f"q{self.queries} kv{self.keys}"


@lru_cache(maxsize=16)
def _steps(mask: Mask, chunks: Tokens) -> tuple[_Step, ...]:
    """Return all steps that a mask leaves, by queries, then by keys."""
    met = {
        (i, j): block
        for i, queries in enumerate(chunks)
        for j, keys in enumerate(chunks)
        for block in blocks(mask, (queries,), (keys,))
    }
    of_queries, of_keys = defaultdict(list), defaultdict(list)
    for i, j in met:
        of_queries[i].append(j)
        of_keys[j].append(i)
    return tuple(
        _Step(
            queries=i,
            keys=j,
            block=block,
            parts=len(of_queries[i]),
            arrival=max(i, of_queries[i][-1]),
            is_first=j == of_queries[i][0],
            is_last=j == of_queries[i][-1],
            opens=i == of_keys[j][0],
            closes=i == of_keys[j][-1],
        )
        for (i, j), block in met.items()
    )


def _saved(chunk: Mapping[str, View]) -> Saved:
    return Saved(q=chunk["q"], k=chunk["k"], v=chunk["v"], out=chunk["out"], lse=chunk["lse"])


class _Tools:
    """What both passes of one rank do with a chunk."""

    def __init__(self, builder: ProgramBuilder, ulysses: Communicator, own: int, options: FpdtOptions) -> None:
        self.b, self.options, self._over, self._own = builder, options, ulysses.name, own
        self._published = options.pipeline == "published"
        trades = (
            TradeOptions(all_to_alls="host-sync", layout_copies="always")
            if self._published
            else TradeOptions(all_to_alls="async")
        )
        self.trade = HeadTrade(builder, ulysses, trades)
        self._replicas = replicas_of(builder.workload.model, self.trade.size)

    def rows(self, chunk: int) -> slice:
        """Return where a chunk lies among this rank's tokens."""
        return slice(chunk * self._own, (chunk + 1) * self._own)

    def to_heads(self, local: dict[str, View], into: View | None = None) -> dict[str, View]:
        """Return all tokens of a chunk, with the heads of this rank, from its own tokens with all heads."""
        if self.trade.size == 1:
            return {name: self._in_one_piece(name, view) for name, view in local.items()}
        return dict(zip(local, self.trade.to_heads(local, "attention", self._replicas, into), strict=True))

    def _in_one_piece(self, name: str, view: View) -> View:
        """Return a view, or a copy where it has gaps."""
        if self.b.parts_are_contiguous(Split(view, 0, 1)):
            return view
        whole = self.b.like(name, view, "attention")
        self.b.copy(view, whole, f"gather {name}")
        return whole

    def to_tokens(self, name: str, whole: View, into: View) -> None:
        """Append what takes a chunk to the ranks whose tokens they are."""
        if self.trade.size == 1:
            self.b.copy(whole, into, f"place {name}")
        else:
            self.trade.to_tokens({name: whole}, {name: into})

    def kept(self, name: str, view: View, into: View | None = None) -> View:
        """Return where a chunk waits for its turn, having copied it there: in the host's memory, or where it is."""
        if not self.options.offload:
            return view
        into = into or self.b.like(name, view, "saved", place="host")
        self.b.host_copy(view, into, f"offload {name}")
        return into

    def meet(self) -> None:
        """Append what published code does once a chunk: all ranks wait for each other."""
        if self._published and self.trade.size > 1:
            self.b.add(Barrier(label="barrier", communicator=self._over))
            self.b.add(HostSync(label="wait for the barrier", streams=(self._over,)))

    def wait(self) -> None:
        """Append what published code does in every step: the host waits for kernels and copies."""
        if self._published:
            streams = (COMPUTE, OFFLOAD, FETCH) if self.options.offload else (COMPUTE,)
            self.b.add(HostSync(label="wait for the step", streams=streams))


class _Places:
    """Where on the GPU chunks take turns, so that one arrives while kernels use the one before. Where nothing is
    offloaded, each has its own place.
    """

    def __init__(self, tools: _Tools) -> None:
        self._tools = tools
        self._turns: tuple[dict[str, View], dict[str, View]] = ({}, {})

    def turn(self) -> None:
        """Go on to the other place."""
        self._turns = self._turns[::-1]

    def empty(self, name: str, like: View, dtype: Dtype | None = None) -> View:
        """Return the place for a tensor of this turn."""
        tools, places = self._tools, self._turns[0]
        if name not in places or not tools.options.offload:
            places[name] = tools.b.like(name, like, "attention", dtype)
        return places[name]

    def bring(self, chunk: Mapping[str, View]) -> dict[str, View]:
        """Return a chunk on the GPU, having fetched it from where it waited."""
        if not self._tools.options.offload:
            return dict(chunk)
        here = {name: self.empty(name, view) for name, view in chunk.items()}
        for name, view in chunk.items():
            self._tools.b.host_copy(view, here[name], f"fetch {name}")
        return here


class FpdtAttention:
    """FPDT of one rank, whose group has these chunks of tokens."""

    def __init__(self, builder: ProgramBuilder, ulysses: Communicator, chunks: Tokens, options: FpdtOptions) -> None:
        self._b, self._count = builder, len(chunks)
        self._tools = _Tools(builder, ulysses, chunks[0].size // len(ulysses.groups[0]), options)
        model, trade = builder.workload.model, self._tools.trade
        self.saved_shard = shard_of_heads(model, trade.size, trade.position, chunks)
        self.q_heads = tuple(range(model.num_heads))
        self._steps = _steps(mask_of(builder.workload), chunks)
        self._held: list[dict[str, View]] = []
        """Of each chunk that has arrived q, k, v, and once they are there out, lse: where they wait for their turn."""

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """Of whole q, k and v."""
        return self.forward_from(Whole(self._b, self.q_heads, (q, k, v)))

    def forward_from(self, inputs: Inputs) -> tuple[View, Saved]:
        """Chunk by chunk: all-to-alls of q, k and v; attention of the queries whose keys are all there."""
        self._held = []
        rows = self._tools.rows
        self._out = self._b.tensor("out", rows(self._count - 1).stop, self._b.workload.model.num_heads, "attention")
        self._queries, self._keys = _Places(self._tools), _Places(self._tools)
        self._left = deque(sorted(self._steps, key=lambda step: step.arrival))
        self._ahead: dict[str, View] | None = None
        for chunk in range(self._count):
            self._take({name: inputs.part(name, rows(chunk)).view for name in NAMES})
        done = tuple([_saved(held) for held in self._held])
        return self._out, done[0]._replace(stages=done)

    def _take(self, local: dict[str, View]) -> None:
        """Take one more chunk, and all steps that can be done then."""
        tools, number = self._tools, len(self._held)
        here = tools.to_heads(local)
        tools.meet()
        self._held.append({name: tools.kept(name, view) for name, view in here.items()})
        while self._left and self._left[0].arrival == number:
            step = self._left.popleft()
            found = here | (self._brought(step) if self._ahead is None else self._ahead)
            follows = bool(self._left) and self._left[0].arrival <= number + 1
            self._ahead = self._brought(self._left[0]) if follows else None
            if step.is_first:
                softmax = SoftmaxAccumulator(self._b, found["q"], step.parts)
            softmax.attend(step.block, found["k"], found["v"], step.label)
            tools.wait()
            if step.is_last:
                tools.to_tokens("out", softmax.out, self._out[:, tools.rows(step.queries)])
                self._held[step.queries] |= {
                    name: tools.kept(name, view) for name, view in (("out", softmax.out), ("lse", softmax.lse))
                }

    def _brought(self, step: _Step) -> dict[str, View]:
        """Return what a step needs beside what arrives just before it, having brought it here."""
        brought: dict[str, View] = {}
        if step.is_first and step.queries < step.arrival:
            self._queries.turn()
            brought |= self._queries.bring({"q": self._held[step.queries]["q"]})
        if step.keys < step.arrival:
            self._keys.turn()
            brought |= self._keys.bring({name: self._held[step.keys][name] for name in "kv"})
        return brought

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """Of whole q, k and v."""
        inputs = Whole(self._b, self.q_heads, num_gradients=dout.shape[TOKENS])
        self.backward_into(saved, dout, inputs)
        return inputs.gradients()

    def backward_into(self, saved: Saved, dout: View, inputs: Inputs) -> None:
        """By chunks of keys, for all queries that attend to them; all-to-alls of gradients once they are complete."""
        b, tools = self._b, self._tools
        chunks = [dict(zip(_SAVED, stage[:5], strict=True)) for stage in saved.stages]
        queries, keys = _Places(tools), _Places(tools)

        def brought(step: _Step, before: _Step | None) -> dict[str, View]:
            """Return what a step needs that the one before did not, having brought it here. The first time of some
            queries dout is traded, and there is no sum of dq yet.
            """
            held, here = chunks[step.queries], dict[str, View]()
            if step.opens:
                keys.turn()
                here |= keys.bring({name: chunks[step.keys][name] for name in "kv"})
            if before and before.queries == step.queries:
                return here
            queries.turn()
            here |= queries.bring({name: view for name, view in held.items() if name not in "kv"})
            if step.is_first:
                place = queries.empty("dout", held["q"]) if tools.trade.size > 1 else None
                here |= tools.to_heads({"dout": dout[:, tools.rows(step.queries)]}, place)
                here["dq"] = queries.empty("dq", held["q"], gradient_dtype(b.workload, tools.options))
                if not step.is_last:
                    held["dout"] = tools.kept("dout", here["dout"])
            return here

        steps = sorted(self._steps, key=lambda step: step.keys)
        found: dict[str, View] = {}
        ahead = brought(steps[0], None)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            found |= ahead
            ahead = brought(following, step) if following else {}
            if step.opens:
                sums = new_sums(b, tools.options, {"dk": found["k"], "dv": found["v"]})
            dq = GradientSum(b, "dq", found["dq"], empty=step.is_first)
            here = _saved(found)
            attend_backward(b, step.block, here, found["dout"], Gradients(dq, *sums), step.label)
            dq.fill()
            if step.is_last:
                self._give(inputs, "q", dq, step.queries)
            elif following and following.queries != step.queries:
                held = chunks[step.queries]
                held["dq"] = tools.kept("dq", dq.total, held.get("dq"))
            tools.wait()
            if step.closes:
                for name, total in zip(NAMES[1:], sums, strict=True):
                    total.fill()
                    self._give(inputs, name, total, step.keys)
                tools.meet()

    def _give(self, inputs: Inputs, name: Name, total: GradientSum, chunk: int) -> None:
        """Append what takes the gradient of a chunk to the ranks whose tokens they are."""
        rows = self._tools.rows(chunk)
        whole, home = total.finished(f"d{name}"), inputs.room(name, rows)
        self._tools.to_tokens(f"d{name}", whole, home)
        inputs.take(name, home, rows)
