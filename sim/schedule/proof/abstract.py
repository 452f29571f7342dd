"""Plays a schedule on abstract contents instead of numbers. ``check`` is built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, assert_never

from sim.base.errors import ScheduleError
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.interpreter import Interpreter
from sim.schedule.derive.matching import Key, Matching, Transfer, describe
from sim.schedule.derive.replicas import have_shards, stand_for, whole_size
from sim.schedule.derive.show import window
from sim.schedule.derive.tiles import tile_of
from sim.schedule.ir import ops
from sim.schedule.ir.declare import operands
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.masks import CAUSAL, mask_of
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Split, View
from sim.schedule.model.ends import top
from sim.schedule.model.scope import is_sum, kind_of
from sim.schedule.proof.abstract_memory import AbstractMemory, port_pieces
from sim.schedule.proof.contents import (
    ZERO,
    Content,
    Piece,
    Unclassed,
    brief,
    coalesced,
    common,
    is_of_vocabulary,
    union,
)
from sim.schedule.proof.owners import check_owners
from sim.schedule.proof.replicas import of_replicas, parts_of_all, senders_of, shards_of_all, sum_of_replicas
from sim.schedule.proof.rules.attention import AttentionRules
from sim.schedule.proof.rules.linear import STATES, LinearRules
from sim.schedule.proof.rules.state import StateRules
from sim.schedule.proof.rules.token import TokenRules, check_positions
from sim.words.workload import ModelSpec, Workload


class AbstractPlayer(Interpreter):
    """Plays all ranks on contents."""

    def __init__(
        self,
        schedule: Schedule,
        matching: Matching,
        dependencies: list[Dependencies],
        programs: list[Program] | None = None,
    ) -> None:
        super().__init__(schedule, matching, dependencies, programs)
        self._rules = attention_rules(schedule)
        self._token_rules = TokenRules(self._rules.model, self._rules)
        self._linear_rules = LinearRules(self._rules)
        self._state_rules = StateRules(schedule.header.workload, self._rules, schedule.header.members)
        self._at: Key = (0, 0)
        """The op that is being played."""
        self._writers: dict[type[ops.Op], Callable[[AbstractMemory, Any], None]] = {}
        """What writes what a kernel of each kind makes that was met."""
        self.memory = [AbstractMemory(program, self._rules) for program in self._programs]

    def run(self) -> None:
        """Play to the end, then look at the outputs; errors say which op they came from, or which ranks stand still."""
        try:
            self.play()
        except ScheduleError as error:
            if error.grid:
                raise
            grid = window(self._programs, {self._at[0]: self._at[1]})
            raise ScheduleError(f"{describe(self._schedule, self._at)}: {error}", grid) from error
        for program, memory in zip(self._programs, self.memory, strict=True):
            for port in program.outputs:
                check_output(port, program, memory.read(port.view), self._rules)
        check_owners(self._schedule)

    def kernel(self, key: Key, op: ops.Kernel | ops.HostAdamW) -> None:
        """See Interpreter."""
        self._at = key
        self._run(self.memory[key[0]], op)

    def _run(self, memory: AbstractMemory, op: ops.Kernel | ops.HostAdamW) -> None:
        """Write what a kernel makes of what it reads."""
        write = self._writers.get(type(op)) or self._writers.setdefault(type(op), self._writer(op))
        write(memory, op)

    def _writer(self, op: ops.Kernel | ops.HostAdamW) -> Callable[[AbstractMemory, Any], None]:
        """Return what writes what kernels of the kind of this one make."""
        if isinstance(op, ops.AttentionKernel):
            return self._attention
        if isinstance(op, ops.LinearKernel):
            return self._linear
        if isinstance(op, ops.Zero | ops.Hold):
            return self._zero
        if isinstance(op, ops.Copy):
            return self._copy
        if isinstance(op, ops.Fold):
            return self._fold
        if isinstance(op, ops.TokenKernel | ops.Accumulate):
            return self._equation
        if isinstance(op, ops.JoinedGemm):
            return self._joined
        if isinstance(op, ops.TiledKernel):
            return self._tiled
        if isinstance(op, ops.StateKernel | ops.HostAdamW):
            return self._state
        assert_never(op)

    def _zero(self, memory: AbstractMemory, op: ops.Zero | ops.Hold) -> None:
        list(map(memory.zero, op.writes))  # none of the latter

    def _copy(self, memory: AbstractMemory, op: ops.Copy) -> None:
        memory.copy_parts(op.source, op.target, op.order or range(op.source.parts))

    def _fold(self, memory: AbstractMemory, op: ops.Fold) -> None:
        found, each = memory.read_parts(op.source), op.source.parts // op.target.parts
        folded = [reduce(self.sum_of, found[i : i + each]) for i in range(0, len(found), each)]
        memory.write_parts(op.target, folded)

    def _state(self, memory: AbstractMemory, op: ops.StateKernel | ops.HostAdamW) -> None:
        given = [memory.read(view) for view in op.reads]
        into = given.pop() if isinstance(op, ops.Pack | ops.SquareSum) and op.adds else []
        made = self._state_rules.apply(op, given)
        if into:
            made = [self.sum_of(into, made[0])]
        for view, pieces in zip(op.writes, made, strict=True):
            memory.write(view, pieces)

    def _attention(self, memory: AbstractMemory, op: ops.AttentionKernel) -> None:
        """Write what a kernel of softmax attention makes of what it reads."""
        if isinstance(op, ops.Attend):
            ratio = op.q.shape[2] // op.k.shape[2]
            queries, keys, values = memory.read(op.q), memory.read(op.k), memory.read(op.v)
            rules = self._rules.of_pieces(queries)
            rules.require_complete(queries, keys, values)
            out, probs = rules.attend(queries, keys, values, ops.parts_of(op) or op.band, ratio)
            memory.write(op.out, out)
            memory.write(op.lse, renamed(out, "lse"))
            if op.probs is not None:
                memory.write(op.probs, probs)
        elif isinstance(op, ops.AttendBackward):
            ratio = op.q.shape[2] // op.k.shape[2]
            views = {name: getattr(op, name) for name, mark in operands(ops.AttendBackward).items() if mark.is_read}
            saved = {name: memory.read(view) for name, view in views.items() if view is not None}
            rules = self._rules.of_pieces(saved["q"])
            rules.require_complete(saved["q"], saved["k"], saved["v"])
            grads = rules.attend_backward(saved, ops.parts_of(op) or op.band, ratio)
            for view, pieces in zip(op.writes, grads, strict=True):
                memory.write(view, pieces)
        elif isinstance(op, ops.Delta):
            out, dout = memory.read(op.out), memory.read(op.dout)
            self._rules.same_queries("out", dout, out)
            self._rules.same_queries("dout", out, dout)
            memory.write(op.delta, renamed(dout, "delta"))
        elif isinstance(op, ops.Merge):
            out, lse = memory.read(op.out), memory.read(op.lse)
            into_out, into_lse = memory.read(op.into_out), memory.read(op.into_lse)
            _check_pair(out, lse)
            _check_pair(into_out, into_lse)
            memory.write(op.into_out, _united(into_out, out))
            memory.write(op.into_lse, _united(into_lse, lse))
        else:
            assert_never(op)

    def _linear(self, memory: AbstractMemory, op: ops.LinearKernel) -> None:
        """Write what a kernel of linear attention makes of what it reads."""
        made: Sequence[list[Piece]]
        self._rules.require_complete(*(memory.read(view) for view in op.reads))
        if isinstance(op, ops.LinearAttend | ops.LinearAttendBackward):
            ratio = op.q.shape[2] // op.k.shape[2]
            saved = dict(zip(("q", "k", "v", "dout"), [memory.read(view) for view in op.reads], strict=False))
            if isinstance(op, ops.LinearAttend):
                made = self._rules.attend(**saved, band=CAUSAL, ratio=ratio)[:1]
            else:
                made = self._rules.attend_backward(saved, CAUSAL, ratio)
        elif isinstance(op, ops.StateSum):
            a, b, ratio = memory.read(op.a), memory.read(op.b), op.a.shape[2] // op.state.shape[1]
            made = [self._linear_rules.state_sum(a, b, ratio)]
        elif isinstance(op, ops.StateProduct):
            x, state, into = (memory.read(view) for view in op.reads)
            ratio = op.x.shape[2] // op.state.shape[1]
            made = [self._linear_rules.product(x, state, into, ratio, transposed=op.transposed)]
        else:
            assert_never(op)
        for view, pieces in zip(op.writes, made, strict=True):
            memory.write(view, pieces)

    def _joined(self, memory: AbstractMemory, op: ops.JoinedGemm) -> None:
        """Play the product of each layer."""
        for product in op.products:
            self._run(memory, product)

    def _tiled(self, memory: AbstractMemory, op: ops.TiledKernel) -> None:
        """Play what a tile does, for all tokens as one: each token by itself, gradients of weights summed, it makes the
        same as tiles of some.
        """
        batch, tokens, _ = op.x.shape
        tile = tile_of(op, memory.program, (batch, tokens), first=True)
        inner = AbstractMemory(tile, self._rules)
        for number, view in enumerate(op.reads):
            inner.write(_whole(tile, number), memory.read(view))
        for one in tile.ops:
            assert isinstance(one, ops.Kernel)
            self._run(inner, one)
        for number, view in enumerate(op.writes, len(op.reads)):
            memory.write(view, inner.read(_whole(tile, number)))

    def _equation(self, memory: AbstractMemory, op: ops.TokenKernel | ops.Accumulate) -> None:
        """Play an equation of the layer, or a sum of two parts of one tensor."""
        adds = isinstance(op, ops.Accumulate) or (isinstance(op, ops.Gemm) and op.accumulate)
        given = [memory.read(view) for view in op.reads]
        into = given.pop() if adds else []
        if isinstance(op, ops.Rope):
            self._check_positions(given[0], op)
            theta = self._rules.of_pieces(given[0]).model.rope_theta
            if op.theta != theta:
                raise ScheduleError(f"rotates by theta {op.theta!r}: rope_theta of this layer is {theta!r}")
        plain = isinstance(op, ops.Accumulate) and any(
            len({piece.content[:2] for piece in pair if piece.content.tensor != ZERO}) < 2
            for pair in common(given[0], into)
        )
        made = given if plain else self._token_rules.apply(op, given)
        if len(made) != len(op.writes):
            raise ScheduleError(f"leaves {len(op.writes)} results of {len(made)}: only frozen weights have no gradient")
        for view, pieces in zip(op.writes, made, strict=True):
            largest = isinstance(op, ops.Accumulate) and op.largest is True
            memory.write(view, self.sum_of(into, pieces, largest=largest) if adds else pieces)

    def sum_of(self, a: list[Piece], b: list[Piece], *, largest: bool = False) -> list[Piece]:
        """Return the sum of two operands of one shape, or the larger one of each element."""
        for piece in (*a, *b):
            if (piece.content.tensor == top.name) != largest:
                does = "takes the largest of" if largest else "adds up"
                raise ScheduleError(f"{does} {brief(piece.content)}: what is largest of logits, nothing else, is")
            if not (_adds_up(piece.content.tensor, self._rules.model) or is_of_vocabulary(piece.content)):
                raise ScheduleError(
                    f"adds up {brief(piece.content)}: only gradients add up, outputs merge by their lse"
                )
        return _united(a, b)

    def _check_positions(self, pieces: list[Piece], op: ops.Rope) -> None:
        """Raise where a rotary embedding turns what it is given by other positions."""
        check_positions(pieces, op.tokens, self._rules.of_pieces(pieces).mask)

    def host_copy(self, key: Key, op: ops.HostCopy) -> None:
        """See Interpreter."""
        self._at, memory = key, self.memory[key[0]]
        memory.copy(op.target, memory, op.source)

    def host_sync(self, key: Key, op: ops.HostSync) -> None:
        """See Interpreter: here ops end at once."""

    def transfer(self, transfer: Transfer) -> None:
        """See Interpreter."""
        self._at = transfer.source
        source, target = self.memory[transfer.source[0]], self.memory[transfer.target[0]]
        for sent, received in transfer.pairs:
            target.copy(received, source, sent)

    def collective(self, members: tuple[Key, ...], calls: list[ops.Collective]) -> None:
        """See Interpreter."""
        ranks = tuple([rank for rank, _ in members])
        over_all = whole_size(self._schedule, calls[0].communicator, ranks[0]) > len(ranks)
        if over_all and not all(isinstance(op, ops.AllReduce | ops.Barrier) for op in calls):
            self._among_shards(members, calls)
            return
        sent = [self._sent(key, op, len(calls)) for key, op in zip(members, calls, strict=True)]
        for place, (key, op) in enumerate(zip(members, calls, strict=True)):
            self._at, parts = key, [of_member[place] for of_member in sent if of_member[place]]
            if isinstance(op.taken, Split):
                self.memory[key[0]].write_parts(op.taken, parts)
            elif op.taken is not None:
                summed = self._sum_over_all(op, ranks, parts) if over_all else self.sum_of_all(op, parts)
                self.memory[key[0]].write(op.taken, summed)

    def _among_shards(self, members: tuple[Key, ...], calls: list[ops.Collective]) -> None:
        """Gather shards of weights from all replicas, or scatter sums of gradients to them (``replicas``)."""
        ranks = tuple([rank for rank, _ in members])
        senders = senders_of(self._schedule, calls[0].communicator, ranks)
        if all(isinstance(op, ops.AllGather) for op in calls):
            shards = shards_of_all([self._sent(*one, 1)[0] for one in zip(members, calls, strict=True)], senders)
            gathered: dict[object, list[Piece]] = {}
            for (rank, _), op in zip(members, calls, strict=True):
                assert isinstance(op.taken, Split)
                memory, view = self.memory[rank], op.taken.view
                lies = op.taken, memory.program.buffers[view.buffer]
                if lies not in gathered:
                    gathered[lies] = coalesced(memory.side_by_side(op.taken, shards))
                memory.write(view, gathered[lies])
            return
        split, *others = [op.given for op in calls]
        if not (isinstance(split, Split) and all(one == split for one in others)):
            raise Unclassed  # views that are cut otherwise do not add up before they are
        summed = self._sum_over_all(calls[0], ranks, [self.memory[rank].read(split.view) for rank in ranks])
        parts = parts_of_all(self.memory[ranks[0]].parts_of(split, summed), senders)
        for rank, op, pieces in zip(ranks, calls, parts, strict=True):
            assert isinstance(op.taken, View)
            self.memory[rank].write(op.taken, pieces)

    def sum_of_all(self, op: ops.Collective, parts: list[list[Piece]]) -> list[Piece]:
        """Return the sum of what all members of a collective send to one, or the largest of it."""
        largest = isinstance(op, ops.AllReduce) and op.largest is True
        return reduce(partial(self.sum_of, largest=largest), parts)

    def _sum_over_all(self, op: ops.Collective, ranks: Sequence[int], parts: list[list[Piece]]) -> list[Piece]:
        """Return the sum over all replicas of what members of a collective send that are played."""
        of_replicas: dict[int, list[list[Piece]]] = {}
        for rank, pieces in zip(ranks, parts, strict=True):
            of_replicas.setdefault(self._schedule.header.mesh.replica(rank), []).append(pieces)
        return self.sum_of_all(
            op, [self._over_replicas(self.sum_of_all(op, some), replica) for replica, some in of_replicas.items()]
        )

    def _over_replicas(self, summed: list[Piece], replica: int = 0) -> list[Piece]:
        """Return the sum over the replicas that one stands for of what was summed over that: the others sum up the same
        of their own sequences.
        """
        each, some = self._rules.batch // self._schedule.whole.header.mesh.dp, stand_for(self._schedule)[replica]
        starts = tuple([(one - some[0]) * each for one in some])
        return [piece._replace(content=sum_of_replicas(piece.content, starts)) for piece in summed]

    def _sent(self, key: Key, op: ops.Collective, size: int) -> list[list[Piece]]:
        """Return what one member of a collective sends to each."""
        self._at, memory = key, self.memory[key[0]]
        if isinstance(op.given, Split):
            return memory.read_parts(op.given)
        return [memory.read(op.given) if op.given else []] * size


def _whole(program: Program, number: int) -> View:
    """Return all of a buffer."""
    return View(number, tuple([(0, extent) for extent in program.buffers[number].shape]))


def attention_rules(schedule: Schedule) -> AttentionRules:
    """Return what attention of a schedule's workload makes of contents."""
    workload = schedule.header.workload
    batch = workload.batch * schedule.whole.header.mesh.dp
    found = _rules_of(workload, batch)
    if have_shards(schedule):
        found = of_replicas(found, schedule)
    if not workload.sequences:
        return found
    forms = [_rules_of(form, batch) for form in workload.forms]
    return found._replace(sequences=tuple([forms[workload.form_of(number)] for number in range(workload.batch)]))


def _rules_of(workload: Workload, batch: int) -> AttentionRules:
    """Return those of sequences that are alike, of so many in all."""
    kinds = tuple([AttentionRules(mask_of(one), one.seq, batch, one.model) for one, _ in workload.kinds()])
    return kinds[0]._replace(kinds=kinds if len(kinds) > 1 else ())


def check_output(port: Port, program: Program, held: list[Piece], rules: AttentionRules) -> None:
    """Raise where what the view of an output holds is not what its port says, or not complete."""
    where = f"rank {program.rank} output {port.name}"
    for piece, expected in common(held, port_pieces(port, program, rules)):
        if piece.content[:3] != expected.content[:3]:
            raise ScheduleError(f"{where} holds {brief(piece.content)}, expected {brief(expected.content)}")
        if not rules.complete(piece.content):
            raise ScheduleError(f"{where}: {brief(piece.content)} lacks contributions; it has {piece.content.seen}")


def renamed(pieces: list[Piece], tensor: str) -> list[Piece]:
    """Return what another tensor of the same tokens, heads and keys consists of."""
    return [Piece(piece.box, Content(tensor, *piece.content[1:])) for piece in pieces]


def _check_pair(out: list[Piece], lse: list[Piece]) -> None:
    """Raise where a log-sum-exp does not belong to its output."""
    for x, y in common(out, lse):
        if (x.content.tensor, y.content.tensor) != ("out", "lse") or x.content[1:] != y.content[1:]:
            raise ScheduleError(f"merges {brief(x.content)} with {brief(y.content)} that saw other keys")


_SUMS = {"weight gradient", "square"}


@lru_cache(maxsize=4096)
def _adds_up(name: str, model: ModelSpec) -> bool:
    """Return whether parts of a tensor are summed."""
    return name in {"dq", "dk", "dv", ZERO, *STATES} or kind_of(name) in _SUMS or is_sum(name, model)


def _united(a: list[Piece], b: list[Piece]) -> list[Piece]:
    """Return what two operands of one shape have seen together."""
    return [Piece(x.box, union(x.content, y.content)) for x, y in common(a, b)]
