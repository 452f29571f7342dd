"""The proof that remembers: calls of all ranks that meet are played once per distinct contents of what they are given.

    programs = calls of fragments ── the k-th calls of all ranks ──> a superstep, a small schedule of its own

What an op makes of abstract contents depends on these alone, and on layers and sequences by their differences only. So
a superstep whose fragments and whose inputs, with both counted from the least, were seen before has the results that it
had then, as many layers and sequences later. No induction is needed: every superstep is looked up by all that it is
given. This takes programs whose calls communicate among the k-th ones only; then playing one superstep after the other
is an order that the dependencies allow. It proves or declines: what is wrong with a schedule the flat proof says, by
``AbstractPlayer`` on all ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from sim.schedule.derive.dependencies import derive
from sim.schedule.derive.matching import match, wire_bytes
from sim.schedule.ir.forms import Form
from sim.schedule.ir.program import Fragment, Program, Schedule
from sim.schedule.ir.views import Buffer
from sim.schedule.model.scope import tensor_of
from sim.schedule.proof.abstract import AbstractPlayer, attention_rules, check_output
from sim.schedule.proof.abstract_memory import AbstractMemory, Held
from sim.schedule.proof.contents import ZERO, Content, Piece
from sim.schedule.proof.owners import check_owners
from sim.schedule.proof.wellformed import check_program


class Declined(Exception):  # noqa: N818 - nothing went wrong
    """Supersteps do not say whether a schedule is right."""


class _Kept(NamedTuple):
    """What a buffer holds: contents by number, and the layer and the sequence from which theirs count; None where they
    have none.
    """

    contents: int
    layer: int | None
    sequence: int | None


_LOST = _Kept(-1, None, None)
"""Of a buffer that is written to as a whole before it is used: whatever it held."""


class Supersteps:
    """The supersteps of a schedule; raises Declined where it has none."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.programs = schedule.programs
        counts = {len(program.calls) for program in self.programs}
        if counts == {1} or len(counts) > 1:
            raise Declined
        for program in self.programs:
            _check_bindings(program)
        self.all = list(zip(*(program.calls for program in self.programs), strict=True))
        sound = set[Form]()
        for rank, fragment in {(p.rank, call.fragment): None for p in self.programs for call in p.calls}:
            check_program(fragment.program(rank), schedule, sound)
        self._plain = msgspec.structs.replace(schedule.header, claims=None)
        self.kinds = Counter(tuple([call.fragment for call in calls]) for calls in self.all)
        """How often the same fragments meet."""
        alone = {kind: self._alone(kind, [0] * len(kind)) for kind in self.kinds}
        self._matchings = {kind: match(superstep) for kind, superstep in alone.items()}
        fragments = dict.fromkeys(fragment.shared for kind in self.kinds for fragment in kind)
        derived = {fragment: derive(fragment.program(rank=0)) for fragment in fragments}
        self._dependencies = {kind: [derived[fragment.shared] for fragment in kind] for kind in self.kinds}
        self.wire_bytes = sum(
            count * wire_bytes(alone[kind], self._matchings[kind]) for kind, count in self.kinds.items()
        )
        self._rules = attention_rules(schedule)
        self._numbers: dict[Held, int] = {}
        self._contents: list[Held] = []
        self._held: list[list[_Kept]] = [[] for _ in self.programs]
        """Per rank and buffer."""
        self._remembered: dict[object, list[tuple[list[_Kept], list[_Kept]]]] = {}

    @property
    def num_played(self) -> int:
        """How many supersteps have been played; all others were remembered."""
        return len(self._remembered)

    def held(self, rank: int, number: int) -> Held:
        """Return what a buffer of a rank holds."""
        kept = self._held[rank][number]
        return self._moved(kept)

    def _moved(self, kept: _Kept) -> Held:
        return _moved(self._contents[kept.contents], kept.layer or 0, kept.sequence or 0)

    def _alone(self, kind: Sequence[Fragment], layers: Sequence[int]) -> Schedule:
        """Return fragments that meet as a schedule of their own."""
        programs = [one.program(rank, layer) for rank, (one, layer) in enumerate(zip(kind, layers, strict=True))]
        return Schedule(self._plain, programs.__getitem__, whole=self._schedule.whole)

    def play(self) -> None:
        """Play all supersteps; raises ScheduleError or Declined where that does not prove them."""
        held, remembered = self._held, self._remembered
        for calls in self.all:
            given = [
                [
                    _LOST if place in call.fragment.overwritten else held[rank][number]
                    for place, number in enumerate(call.given)
                ]
                for rank, call in enumerate(calls)
            ]
            layers = [kept.layer for of_rank in given for kept in of_rank if kept.layer is not None]
            layers += [call.layer + port.layer for call in calls for port in call.fragment.inputs]
            base = min(layers, default=0)
            sequences = [kept.sequence for of_rank in given for kept in of_rank if kept.sequence is not None]
            takes = any(call.fragment.inputs for call in calls)  # whose sequences do not count from another
            first = 0 if takes else min(sequences, default=0)
            # The layer of a call matters by its inputs only.
            own = [call.layer - base if call.fragment.inputs else 0 for call in calls]
            kind = tuple([call.fragment for call in calls])
            seen = kind, tuple(own), tuple([tuple(_later(of_rank, -base, -first)) for of_rank in given])
            if seen not in remembered:
                remembered[seen] = self._play(*seen)
            for rank, (call, (after, made)) in enumerate(zip(calls, remembered[seen], strict=True)):
                of_rank = held[rank]
                for number, kept in zip(call.given, _later(after, base, first), strict=True):
                    of_rank[number] = kept
                of_rank += _later(made, base, first)
        self._check_outputs()
        check_owners(self._schedule)

    def _play(
        self, kind: Sequence[Fragment], layers: Sequence[int], given: Sequence[Sequence[_Kept]]
    ) -> list[tuple[list[_Kept], list[_Kept]]]:
        """Return per rank what the buffers that are given hold after one superstep, and what its own ones hold."""
        fragments = tuple(kind)
        player = AbstractPlayer(self._alone(kind, layers), self._matchings[fragments], self._dependencies[fragments])
        for memory, of_rank in zip(player.memory, given, strict=True):
            for number, kept in enumerate(of_rank):
                if kept is not _LOST:
                    memory.hold(number, self._moved(kept))
        player.play()
        results = []
        for memory, fragment, before in zip(player.memory, kind, given, strict=True):
            held, count = memory.held(), len(before)
            after = [self._kept(held[at]) if at in fragment.written else before[at] for at in range(count)]
            results.append((after, [self._kept(one) for one in held[count:]]))
        return results

    def _kept(self, held: Held) -> _Kept:
        """Return contents by number, layers and sequences counted from the least."""
        contents = [piece.content for piece in held.pieces if piece.content.tensor != ZERO]
        layer = min((content.layer for content in contents), default=None)
        sequence = min((start for content in contents for start in _sequences(content)), default=None)
        alike = _moved(held, -(layer or 0), -(sequence or 0))
        if alike not in self._numbers:
            self._numbers[alike] = len(self._contents)
            self._contents.append(alike)
        return _Kept(self._numbers[alike], layer, sequence)

    def _check_outputs(self) -> None:
        """Raise where an output does not hold what its port says; each looked at once per distinct contents."""
        known = set()
        for rank, program in enumerate(self.programs):
            for call in program.calls:
                numbers = call.numbers
                for place, port in enumerate(call.fragment.outputs):
                    contents, layer, sequence = self._held[rank][numbers[port.view.buffer]]
                    kept = _Kept(contents, 0 if layer is None else layer - call.layer, sequence)
                    seen = (call.fragment, place, kept)
                    if seen not in known:
                        known.add(seen)
                        memory = AbstractMemory(alone := call.fragment.program(rank), self._rules)
                        memory.hold(port.view.buffer, self._moved(kept))
                        check_output(port, alone, memory, self._rules)


def _check_bindings(program: Program) -> None:
    """Raise Declined where a call is given anything but earlier buffers like those that its fragment was written for,
    each once, or where an input is not its call's own or is written to, but by what leaves an update there.
    """
    buffers: list[Buffer] = []
    inputs: set[int] = set()
    for call in program.calls:
        fragment = call.fragment
        before = len(fragment.given)
        fits = call.first == len(buffers) and len(call.given) == before == len(set(call.given))
        if not (fits and all(0 <= number < call.first for number in call.given)):
            raise Declined
        for number, like in zip(call.given, fragment.given, strict=True):
            if buffers[number] is not like and not _alike(buffers[number], like):
                raise Declined
        updates = {port.view.buffer for port in fragment.outputs if tensor_of(port.tensor).kind == "updated"}
        if not inputs.isdisjoint([call.given[place] for place in fragment.written - updates]):
            raise Declined
        if any(port.view.buffer < before for port in fragment.inputs):
            raise Declined
        inputs.update([port.view.buffer - before + call.first for port in fragment.inputs])
        buffers += fragment.own


def _alike(a: Buffer, b: Buffer) -> bool:
    """Return whether two buffers differ in nothing but their names."""
    return msgspec.structs.replace(a, name="") == msgspec.structs.replace(b, name="")


def _later(kept: Iterable[_Kept], layers: int, sequences: int) -> list[_Kept]:
    if not (layers or sequences):
        return list(kept)
    return [
        _Kept(
            one.contents,
            None if one.layer is None else one.layer + layers,
            None if one.sequence is None else one.sequence + sequences,
        )
        for one in kept
    ]


def _sequences(content: Content) -> list[int]:
    """Return where the sequences begin that a content is of, or that a weight's gradient is a sum over."""
    tensor = tensor_of(content.tensor)
    if tensor.kind == "weight gradient":
        return [batch.start for _, batch in content.seen]
    return [] if tensor.of_weight else [content.batch.start]


def _moved(held: Held, layers: int, sequences: int) -> Held:
    """Return the same contents so many layers and sequences later; zeros are of none."""
    if not (layers or sequences):
        return held
    pieces = [
        piece if piece.content.tensor == ZERO else Piece(piece.box, _content_moved(piece.content, layers, sequences))
        for piece in held.pieces
    ]
    return held._replace(pieces=tuple(pieces))


def _content_moved(content: Content, layers: int, sequences: int) -> Content:
    name, layer, (batch, *rest), seen = content
    if sequences and tensor_of(name).kind == "weight gradient":
        seen = tuple([(tokens, of.moved(sequences)) for tokens, of in seen])
    elif sequences and not tensor_of(name).of_weight:
        batch = batch.moved(sequences)
    return Content(name, layer + layers, (batch, *rest), seen)  # type: ignore[arg-type]
