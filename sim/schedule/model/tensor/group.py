"""The tensor-parallel group of a rank, and what it sends: what is between kernels of tokens and kernels of shares.

Kernels of what is divided have all tokens of the group and a share of the weights; all others have some of the tokens
and whole weights (sequence parallelism, arXiv:2205.05198 §4.2.2). So tokens are gathered before the former, and what
these leave, sums that lack the terms of other shares, is summed up and scattered. Where all others have all tokens,
too (``LayerOptions.tp_sequence``), it is summed up on all members. ``LayerOptions.tp_overlap`` says beside which
products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm
from typing import Literal, NamedTuple

from msgspec import UNSET, UnsetType

from sim.base.errors import InputError, LengthError
from sim.schedule.ir.layout import cut, num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import Accumulate, AllGather, AllReduce, Copy, Exchange, Fold, Message, ReduceScatter
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.shares import Share
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import TOKENS, Split, View
from sim.schedule.model.ends import embedding_of, head_of
from sim.schedule.model.equations import Equation, back, is_of_weights, is_product
from sim.schedule.model.tensor.buffers import room_for
from sim.schedule.model.write import TokenWriter, Values
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions
from sim.words.workload import DTYPE_BYTES, ModelSpec, Workload, accumulation_dtype

TENSOR = "tp"
"""The communicator of tensor-parallel groups."""
COPIES = "tp copies"
"""That of what copy engines move in them."""


def group_of(mesh: Mesh) -> Communicator | None:
    """Return the communicator of the groups of a mesh, None where ranks have whole weights."""
    return Communicator(name=TENSOR, groups=mesh.groups("tp")) if mesh.tp > 1 else None


def alike_of(mesh: Mesh, model: ModelSpec) -> tuple[Communicator, ...]:
    """Return the communicators of ranks that have the same of some weights, each of its own tokens or heads: of those
    of whole weights all of a group, of those of a key/value head some where these are fewer than ranks.
    """
    group = group_of(mesh)
    each = mesh.tp // model.num_kv_heads
    if group is None or each in {0, 1, mesh.tp}:
        return (group,) if group else ()
    some = [ranks[first : first + each] for ranks in group.groups for first in range(0, mesh.tp, each)]
    return group, Communicator(name="key/value heads", groups=tuple(some))


def copies_of(mesh: Mesh, options: LayerOptions) -> tuple[Communicator, ...]:
    """Return the communicator of what copy engines move in these groups, if they move anything."""
    moves = mesh.tp > 1 and options.moves_chunks
    return (Communicator(name=COPIES, groups=mesh.groups("tp")),) if moves else ()


def share_of(mesh: Mesh, rank: int, model: ModelSpec) -> Share:
    """Return what a rank has of a model's weights."""
    return Share(model, mesh.place(rank)["tp"], mesh.tp)


def own_tokens(mesh: Mesh, rank: int, every: Tokens, workload: Workload) -> Tokens:
    """Return which of the tokens of a rank's group are its own; raises LengthError where they do not divide."""
    count = num_tokens(every)
    if count % mesh.tp:
        parts, rest = divmod(workload.seq, count)
        if rest:
            raise InputError(
                f"a rank of the plan has {count} tokens, which `tp_degree` {mesh.tp} does not divide: choose another "
                f"planner, or set it to 1"
            )
        raise LengthError(workload.seq, parts * lcm(2, mesh.tp))
    each, place = count // mesh.tp, mesh.place(rank)["tp"]
    return cut(every, place * each, (place + 1) * each)


class Group(NamedTuple):
    """The group of one rank; it writes what is between kernels of shares and of own tokens."""

    over: Communicator
    every: Tokens
    """The tokens of the group; a rank's own are a part of them, in the order of its members."""
    options: LayerOptions = LayerOptions()

    def tiling(self, equations: tuple[Equation, ...], rows: TokenWriter) -> Iterator[Tensor]:
        """See Tiling: kernels of shares take all tokens of the group at once, others all own ones."""
        model, values = rows.b.workload.model, rows.values
        last = {made: one for one in equations if is_divided(one, model) for made in one.results}
        of_all: Values = {}
        """Of all tokens of the group: what is gathered, and sums that lack terms."""
        every = rows._replace(tokens=self.every, values=of_all)
        for some in self._together(equations, model):
            if not is_divided(some[0], model):
                begins = some[0].adds and some[0].results[0] not in values
                rows.write(some[0]._replace(adds=False) if begins else some[0])
                yield from some[0].results
                continue
            of_all |= {tensor: view for tensor, view in values.items() if not is_own(tensor, model)}
            used = dict.fromkeys(tensor for one in some for tensor in one.operands if is_own(tensor, model))
            to_come = [tensor for tensor in used if tensor not in of_all]
            in_shards = to_come and self._begins_with_own(some[0], model)
            if in_shards and self.options.moves_chunks:
                self._write_by_hops(some, every, values[to_come[0]])
            elif in_shards:
                self._write_by_shards(some, every, values[to_come[0]])
            else:
                for tensor in to_come:
                    of_all[tensor] = self._brought(some, every, tensor, values[tensor])
            summed: Values = {}
            for one in sorted(some, key=is_of_weights):
                if self.options.moves_chunks and _narrows(one, model) and last[one.results[0]] is one:
                    summed[one.results[0]] = self._summed_by_chunks(one, every)
                    continue
                if not in_shards:
                    begins = one.adds and one.results[0] not in of_all
                    every.write(one._replace(adds=False) if begins else one)
                for tensor in one.results:
                    if not is_own(tensor, model):
                        values[tensor] = of_all[tensor]
                        yield tensor
                    elif last[tensor] is one:
                        summed[tensor] = self.scattered(rows.b, tensor.later(rows.layer), of_all.pop(tensor))
            for tensor, view in summed.items():
                self._put(rows, tensor, view)
                yield tensor

    def _together(self, equations: tuple[Equation, ...], model: ModelSpec) -> Iterator[tuple[Equation, ...]]:
        """Yield equations that are written together: where products overlap with what they send, those of one input;
        and those that lead back to one, with what makes the gradients of their weights behind them.
        """
        stop = 0
        while stop < len(equations):
            start, first = stop, equations[stop]
            stop += 1
            if self._begins_with_own(first, model):
                while stop < len(equations) and _widens(equations[stop], model, first.operands[0]):
                    stop += 1
            elif self.options.tp_overlap != "none" and _narrows_back(first, model):
                while stop < len(equations) and _goes_with(equations[stop], first, model):
                    stop += 1
            yield equations[start:stop]

    def _begins_with_own(self, equation: Equation, model: ModelSpec) -> bool:
        """Return whether it is a product of gathered tokens that begins with own ones."""
        of_head = any("vocab" in tensor.axes for tensor in equation.operands)
        in_order = _widens(equation, model) and not (self.options.moves_chunks and of_head)
        return self.options.begins_with_own and in_order

    def _brought(self, some: tuple[Equation, ...], every: TokenWriter, tensor: Tensor, own: View) -> View:
        """Append what brings all tokens of a tensor here for some equations, where they are not; return them."""
        if not self.options.tp_sequence:
            return own
        gathered = self._gather(every.b, tensor.later(every.layer), own, room_for(some, every, tensor, own))
        return self._in_order(every.b, tensor.later(every.layer), *gathered)

    def _write_by_shards(self, some: tuple[Equation, ...], every: TokenWriter, own: View) -> None:
        """Append products of one tensor: of own tokens while those of other members are gathered, then of those before
        and those behind, into what they make of all tokens.
        """
        tensor, of_all = some[0].operands[0], every.values
        whole, arrived = self._gather(every.b, tensor.later(every.layer), own, room_for(some, every, tensor, own))
        of_all |= {made: every.new(made) for one in some for made in one.results}
        first, size = self.over.position(every.b.rank) * own.shape[TOKENS], num_tokens(self.every)
        last = first + own.shape[TOKENS]
        for one in some:
            self._write_rows(one, every, first, last, {tensor: own})
        of_all[tensor] = self._in_order(every.b, tensor, whole, arrived)
        for one in some:
            for start, stop in ((0, first), (last, size)):
                if start < stop:
                    self._write_rows(one, every, start, stop, {tensor: of_all[tensor][:, start:stop]})

    def _write_by_hops(self, some: tuple[Equation, ...], every: TokenWriter, own: View) -> None:
        """Append products of one tensor, of the tokens of one member after the other, as these come around the group:
        each rank hands on to the next what it has taken from the one before. Hops are issued one product ahead, so that
        none is in the way of products where launches have one queue.
        """
        tensor, of_all, b = some[0].operands[0], every.values, every.b
        whole, arrived = self._whole(b, tensor.later(every.layer), own)
        of_all |= {made: every.new(made) for one in some for made in one.results}
        ranks, me, each = self.over.group_of(b.rank), self.over.position(b.rank), own.shape[TOKENS]
        come = {member: arrived.part(member) for member in (*reversed(range(me)), *reversed(range(me + 1, len(ranks))))}
        following, before, coming = ranks[(me + 1) % len(ranks)], ranks[me - 1], iter(come.values())
        for step, (member, view) in enumerate({me: own, **come}.items(), 1):
            if taken := next(coming, None):
                self._copy(b, f"hop {step} of {tensor.name}", (following, view), (before, taken))
            if member == me:
                source, target = Split(own, 0, 1), Split(arrived.part(me), 0, 1)
                b.add(Copy(label=f"place {tensor.name}", source=source, target=target))
            for one in some:
                self._write_rows(one, every, member * each, (member + 1) * each, {tensor: view})
        of_all[tensor] = self._in_order(b, tensor, whole, arrived)

    def _summed_by_chunks(self, one: Equation, every: TokenWriter) -> View:
        """Append a product whose results lack terms of other members, of the tokens of one member after the other, each
        of which goes there beside the next; and the sum of what comes from there. Return own tokens of it.
        """
        (tensor,), b = one.results, every.b
        ranks, me = self.over.group_of(b.rank), self.over.position(b.rank)
        own = b.new(tensor.later(every.layer), num_tokens(self.every) // len(ranks))
        each, divided = own.shape[TOKENS], [some for some in one.operands if not some.of_weight]
        (_, made), (_, taken) = (self._whole(b, tensor.later(every.layer), own) for _ in range(2))

        def multiply(member: int, into: View) -> None:
            start, stop = member * each, (member + 1) * each
            given = {some: every.values[some][:, start:stop] for some in divided}
            self._write_rows(one, every, start, stop, {**given, tensor: into})

        for step in range(1, len(ranks)):
            to, by = (me + step) % len(ranks), (me - step) % len(ranks)
            multiply(to, made.part(to))
            sent, received = (ranks[to], made.part(to)), (ranks[by], taken.part(by))
            self._copy(b, f"terms {step} of {tensor.name}", sent, received)
        multiply(me, taken.part(me))
        b.add(Fold(label=f"sum {tensor.name}", source=taken, target=Split(own, taken.dim, 1)))
        return own

    def _copy(self, b: ProgramBuilder, label: str, sent: tuple[int, View], taken: tuple[int, View]) -> None:
        """Append what copy engines write into one member's memory, and what another one's do into this rank's."""
        sends, recvs = (Message(*sent),), (Message(*taken),)
        b.add(Exchange(label=label, communicator=COPIES, sends=sends, recvs=recvs, by_copies=True))

    def _write_rows(self, one: Equation, every: TokenWriter, start: int, stop: int, given: Values) -> None:
        """Append an equation of some of all tokens, from what is given and into it, or into what it makes of all."""
        made = {tensor: every.values[tensor][:, start:stop] for tensor in one.results if tensor not in given}
        weights = {tensor: every.values[tensor] for tensor in one.operands if tensor.of_weight}
        every._replace(tokens=cut(self.every, start, stop), values={**weights, **made, **given}).write(one)

    def spread(self, rows: TokenWriter, tensors: tuple[Tensor, ...]) -> Values:
        """Return the values of all tokens of the group: some tensors, having gathered them, what is divided, and all
        weights.
        """
        b, model = rows.b, rows.b.workload.model
        found = {tensor: view for tensor, view in rows.values.items() if not is_own(tensor, model)}
        return found | {one: self.gathered(b, one.later(rows.layer), rows.values[one]) for one in tensors}

    def add(self, rows: TokenWriter, tensor: Tensor, terms: View) -> None:
        """Append what sums a tensor over the group, own tokens of it, and adds it to what is there of it already."""
        self._put(rows, tensor, self.scattered(rows.b, tensor.later(rows.layer), terms))

    def _put(self, rows: TokenWriter, tensor: Tensor, summed: View) -> None:
        """Append what adds own tokens of a tensor to what is there of it already."""
        if tensor in rows.values:
            rows.b.add(Accumulate(label=f"add {tensor.name}", source=summed, into=rows.values[tensor]))
        else:
            rows.values[tensor] = summed

    def gathered(self, b: ProgramBuilder, tensor: Tensor, own: View) -> View:
        """Append what brings all tokens of a tensor here, where they are not; return them. Where those of several
        sequences lie one behind the other they arrive by members, and are copied, as torch's all-gather along another
        dimension than the first does it (torch 2.13 distributed/_functional_collectives.py, all_gather_single).
        """
        return self.of_parts(b, tensor, own) if self.options.tp_sequence else own

    def of_parts(self, b: ProgramBuilder, tensor: Tensor, own: View) -> View:
        """Append what brings the part of each member here; return all tokens."""
        return self._in_order(b, tensor, *self._gather(b, tensor, own))

    def part(self, b: ProgramBuilder, view: View) -> View:
        """Return a rank's own tokens of all of the group."""
        each, place = view.shape[TOKENS] // len(self.over.groups[0]), self.over.position(b.rank)
        return view[:, place * each : (place + 1) * each]

    def sent_part(self, b: ProgramBuilder, tensor: Tensor, view: View) -> View:
        """Return a rank's own tokens of a tensor in one piece, having copied them where they are in several."""
        part = self.part(b, view)
        if b.parts_are_contiguous(Split(view, TOKENS, len(self.over.groups[0]))):
            return part
        own = b.new(tensor, part.shape[TOKENS])
        b.copy(part, own, f"own {tensor.name}")
        return own

    def _gather(self, b: ProgramBuilder, tensor: Tensor, own: View, room: View | None = None) -> tuple[Split, Split]:
        """Append the all-gather alone; return where all tokens are to be, and where they arrive."""
        whole, arrived = self._whole(b, tensor, own, room)
        b.add(AllGather(label=f"gather {tensor.name}", communicator=self.over.name, send=own, recvs=arrived))
        return whole, arrived

    def _in_order(self, b: ProgramBuilder, tensor: Tensor, whole: Split, arrived: Split) -> View:
        """Append what puts into order what has arrived; return it."""
        if arrived.view != whole.view:
            b.add(Copy(label=f"order {tensor.name}", source=arrived, target=whole))
        return whole.view

    def scattered(self, b: ProgramBuilder, tensor: Tensor, terms: View) -> View:
        """Append what sums up a tensor over the group; return own tokens of it, or all where ranks have all."""
        if not self.options.tp_sequence:
            self.reduced(b, tensor, terms)
            return terms
        own = b.new(tensor, terms.shape[TOKENS] // len(self.over.groups[0]))
        whole, sent = Split(terms, TOKENS, len(self.over.groups[0])), Split(terms, TOKENS, len(self.over.groups[0]))
        if not b.parts_are_contiguous(sent):
            sent = self._by_member(b, tensor, own)
            b.add(Copy(label=f"order {tensor.name}", source=whole, target=sent))
        b.add(ReduceScatter(label=f"sum {tensor.name}", communicator=self.over.name, sends=sent, recv=own))
        return own

    def reduced(self, b: ProgramBuilder, tensor: Tensor, view: View, *, largest: bool = False) -> None:
        """Append what sums up a tensor over the group on all of its members, or takes the largest of each element."""
        label = f"{'largest of' if largest else 'sum'} {tensor.name}"
        by: Literal[True] | UnsetType = True if largest else UNSET
        b.add(AllReduce(label=label, communicator=self.over.name, view=view, largest=by))

    def leave(self, b: ProgramBuilder, tensor: Tensor, view: View) -> None:
        """Declare that a rank leaves its own tokens of a tensor, of which it has these or all."""
        each, place = num_tokens(self.every) // len(self.over.groups[0]), self.over.position(b.rank)
        own = cut(self.every, place * each, (place + 1) * each)
        b.output_of(tensor, own, self.part(b, view) if view.shape[TOKENS] > each else view)

    def _whole(self, b: ProgramBuilder, tensor: Tensor, own: View, room: View | None = None) -> tuple[Split, Split]:
        """Return where all tokens of a tensor are to be, by default in a new buffer, and where they arrive."""
        size = len(self.over.groups[0])
        view = room or b.activation(tensor, own.shape[TOKENS] * size, b.dtype(own), "communication", tensor.layer)
        whole = Split(view, TOKENS, size)
        return whole, whole if b.parts_are_contiguous(whole) else self._by_member(b, tensor, own)

    def _by_member(self, b: ProgramBuilder, tensor: Tensor, own: View) -> Split:
        """Return a new buffer in which the tokens of each member lie in one piece."""
        size, (batch, *rest) = len(self.over.groups[0]), own.shape
        name = f"{tensor.name} by member"
        view = b.buffer(name, tensor.dims, (size * batch, *rest), b.dtype(own), "communication", layer=tensor.layer)
        return Split(view, 0, size)


def is_divided(equation: Equation, model: ModelSpec) -> bool:
    """Return whether an equation is of heads or features that are divided: then its kernel has all tokens."""
    return any(one.divided(model) for one in (*equation.operands, *equation.results))


def _widens(equation: Equation, model: ModelSpec, given: Tensor | None = None) -> bool:
    """Return whether it is a product of what ranks have whole, or of one such tensor, that makes a share of tokens: of
    columns of a weight forward, of rows backward. Not one that adds to what is there, as fused adapters do.
    """
    operand, made = equation.operands[0], equation.results[0]
    if equation.adds:
        return False
    to_share = not (made.of_weight or is_own(made, model))
    return is_product(equation) and is_own(operand, model) and to_share and given in {None, operand}


def _narrows(equation: Equation, model: ModelSpec) -> bool:
    """Return whether it is a product of shares that makes all terms of what ranks have whole that a member has: of rows
    of a weight, which nothing adds to.
    """
    made = equation.results[0]
    return is_product(equation) and made.kind == "activation" and is_own(made, model) and not equation.adds


def _narrows_back(equation: Equation, model: ModelSpec) -> bool:
    """Return whether it is a product that leads back from shares to what ranks have whole: of columns of a weight."""
    made = equation.results[0]
    from_shares = is_product(equation) and is_divided(equation, model)
    return from_shares and made.kind == "gradient" and is_own(made, model)


def _goes_with(equation: Equation, first: Equation, model: ModelSpec) -> bool:
    """Return whether it leads back to what another one does, or makes gradients of weights on the way there."""
    return is_divided(equation, model) and (equation.results == first.results or is_of_weights(equation))


def is_own(tensor: Tensor, model: ModelSpec) -> bool:
    """Return whether ranks have whole features of own tokens of a tensor. Ids and labels they have of all tokens."""
    return not (tensor.of_weight or tensor.divided(model) or tensor.numbers == "int64")


def moved_features(equations: Iterable[Equation], model: ModelSpec, *, sequence: bool) -> int:
    """Return how many features of each token are gathered before some equations, and scattered behind them: each tensor
    once, however many of them read it or add to it. Where ranks have all tokens, those that are summed up count twice.
    """
    wide = [one for one in equations if is_divided(one, model)]
    given = {tensor for one in wide for tensor in one.operands if is_own(tensor, model)}
    made = {tensor for one in wide for tensor in one.results if is_own(tensor, model)}
    return sum(tensor.shape(model)[0] for tensor in ((*given, *made) if sequence else (*made, *made)))


def sent_bytes(workload: Workload, size: int, written: Iterable[Iterable[Equation]], *, sequence: bool) -> int:
    """Return what all members of groups over the whole sequence send for equations, those that are written together in
    one list: (T-1) B S E elements for each gather or scatter, twice that for each sum on all (arXiv:2205.05198 §4.2.2).
    """
    if size == 1:
        return 0
    features = sum(moved_features(equations, workload.model, sequence=sequence) for equations in written)
    return (size - 1) * features * workload.num_tokens * DTYPE_BYTES[workload.dtype]


def ends_bytes(workload: Workload, size: int, options: LayerOptions) -> int:
    """Return what all members of groups over the whole sequence send at the ends of a model: what is embedded and what
    goes into the head, their gradients, and three statistics of each token's logits.
    """
    head, embedding = head_of(workload.model), embedding_of(workload.model)
    scored = [[head.to_logits], head.backward] if options.loss != "chunked" else [[head.to_logits, *head.backward]]
    wide = DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    statistics = 3 * 2 * (size - 1) * workload.num_tokens * wide
    written = [embedding, *scored, back(*reversed(embedding))]
    return statistics + sent_bytes(workload, size, written, sequence=options.tp_sequence)
