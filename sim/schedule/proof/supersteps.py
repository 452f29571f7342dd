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
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.tensors import OF_TOKENS
from sim.schedule.ir.views import Buffer
from sim.schedule.model.scope import kind_of
from sim.schedule.proof.abstract import AbstractPlayer, attention_rules, check_output
from sim.schedule.proof.abstract_memory import AbstractMemory, Held
from sim.schedule.proof.classes import Classes, ClassPlayer, classes_of
from sim.schedule.proof.contents import FAR, ZERO, Content, Piece, Unclassed
from sim.schedule.proof.members import of_member
from sim.schedule.proof.owners import check_owners
from sim.schedule.proof.wellformed import check_program
from sim.words.mesh import Axis


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
    """The supersteps of a schedule; raises Declined where it has none.

    Ranks are played by classes along some axes where calls have these, which may prove less: then Unclassed or
    ScheduleError is raised.
    """

    def __init__(self, schedule: Schedule, along: tuple[Axis, ...] = ()) -> None:
        self._schedule = schedule
        self.programs = schedule.programs
        counts = {len(program.calls) for program in self.programs}
        if counts == {1} or len(counts) > 1:
            raise Declined
        self.all = list(zip(*(program.calls for program in self.programs), strict=True))
        sound = set[Form]()
        for rank, fragment in {(p.rank, call.fragment): None for p in self.programs for call in p.calls}:
            check_program(Program.of_fragment(fragment, rank), schedule, sound)
        self._plain = msgspec.structs.replace(schedule.header, claims=None)
        self.kinds = Counter(tuple([call.fragment for call in calls]) for calls in self.all)
        """How often the same fragments meet."""
        alone = {kind: self._alone(kind, [0] * len(kind)) for kind in self.kinds}
        self.classes: Classes = [[program.rank] for program in self.programs]
        """What ranks are played as one."""
        if along:
            self.classes = _classes(self.programs, alone.values(), along)
        for ranks in self.classes:
            _check_bindings(self.programs[ranks[0]])
        self._matchings = {kind: match(superstep) for kind, superstep in alone.items()}
        fragments = dict.fromkeys(fragment.shared for kind in self.kinds for fragment in kind)
        derived = {fragment: derive(Program.of_fragment(fragment, rank=0)) for fragment in fragments}
        self._dependencies = {kind: [derived[fragment.shared] for fragment in kind] for kind in self.kinds}
        self.wire_bytes = sum(
            count * wire_bytes(alone[kind], self._matchings[kind]) for kind, count in self.kinds.items()
        )
        self._rules = attention_rules(schedule)
        self._numbers: dict[Held, int] = {}
        self._contents: list[Held] = []
        self._held: list[list[_Kept]] = [[] for _ in self.classes]
        """Per class and buffer."""
        self._remembered: dict[object, list[tuple[list[_Kept], list[_Kept]]]] = {}

    @property
    def num_played(self) -> int:
        """How many supersteps have been played; all others were remembered."""
        return len(self._remembered)

    def held(self, rank: int, number: int) -> Held:
        """Return what a buffer of a rank holds."""
        ((of_class, member),) = [
            (own, ranks.index(rank)) for own, ranks in zip(self._held, self.classes, strict=True) if rank in ranks
        ]
        pieces, complete = self._moved(of_class[number])
        return Held(tuple(of_member(list(pieces), member)), complete)

    def _moved(self, kept: _Kept) -> Held:
        return _moved(self._contents[kept.contents], kept.layer or 0, kept.sequence or 0)

    def _aligned(self, layer: int) -> int:
        """Return the last layer up to this one from which on kinds follow each other as from the first."""
        return layer - layer % max(1, len(self._rules.kinds))

    def _alone(self, kind: Sequence[Fragment], layers: Sequence[int]) -> Schedule:
        """Return fragments that meet as a schedule of their own."""
        calls = enumerate(zip(kind, layers, strict=True))
        programs = [Program.of_fragment(one, rank, layer) for rank, (one, layer) in calls]
        return Schedule(self._plain, programs.__getitem__, whole=self._schedule.whole)

    def play(self) -> None:
        """Play all supersteps; raises ScheduleError or Declined where that does not prove them."""
        held, remembered = self._held, self._remembered
        for of_ranks in self.all:
            calls = [of_ranks[ranks[0]] for ranks in self.classes]
            given = [
                [
                    _LOST if place in call.fragment.overwritten else of_class[number]
                    for place, number in enumerate(call.given)
                ]
                for of_class, call in zip(held, calls, strict=True)
            ]
            layers = [kept.layer for of_class in given for kept in of_class if kept.layer is not None]
            layers += [call.layer + port.layer for call in calls for port in call.fragment.inputs]
            base = self._aligned(min(layers, default=0))
            sequences = [kept.sequence for of_class in given for kept in of_class if kept.sequence is not None]
            takes = any(call.fragment.inputs for call in calls)  # whose sequences do not count from another
            first = 0 if takes or self._rules.sequences else min(sequences, default=0)
            # The layer of a call matters by its inputs only.
            own = [call.layer - base if call.fragment.inputs else 0 for call in calls]
            kind = tuple([call.fragment for call in of_ranks])
            seen = kind, tuple(own), tuple([tuple(_later(of_class, -base, -first)) for of_class in given])
            if seen not in remembered:
                remembered[seen] = self._play(*seen)
            for of_class, call, (after, made) in zip(held, calls, remembered[seen], strict=True):
                for number, kept in zip(call.given, _later(after, base, first), strict=True):
                    of_class[number] = kept
                of_class.extend(_later(made, base, first))
        self._check_outputs()
        check_owners(self._schedule)

    def _play(
        self, kind: tuple[Fragment, ...], layers: Sequence[int], given: Sequence[Sequence[_Kept]]
    ) -> list[tuple[list[_Kept], list[_Kept]]]:
        """Return per class what the buffers that are given hold after one superstep, and what its own ones hold."""
        of_ranks = [0] * len(kind)
        for ranks, layer in zip(self.classes, layers, strict=True):
            for rank in ranks:
                of_ranks[rank] = layer
        together = self._alone(kind, of_ranks), self._matchings[kind], self._dependencies[kind]
        player = ClassPlayer(*together, self.classes) if len(self.classes[0]) > 1 else AbstractPlayer(*together)
        for memory, of_class in zip(player.memory, given, strict=True):
            for number, kept in enumerate(of_class):
                if kept is not _LOST:
                    memory.hold(number, self._moved(kept))
        player.play()
        results = []
        for memory, ranks, before in zip(player.memory, self.classes, given, strict=True):
            held, count, written = memory.held(), len(before), kind[ranks[0]].written
            after = [self._kept(held[at]) if at in written else before[at] for at in range(count)]
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
        for of_class, ranks in zip(self._held, self.classes, strict=True):
            for calls in zip(*(self.programs[rank].calls for rank in ranks), strict=True):
                (call, *_), fragments = calls, tuple([call.fragment for call in calls])
                numbers, base = call.numbers, self._aligned(call.layer)
                for place, port in enumerate(call.fragment.outputs):
                    contents, layer, sequence = of_class[numbers[port.view.buffer]]
                    kept = _Kept(contents, 0 if layer is None else layer - base, sequence)
                    seen = (fragments, place, kept, call.layer - base)
                    if seen not in known:
                        known.add(seen)
                        self._check_output(place, kept, fragments, ranks, call.layer - base)

    def _check_output(
        self, place: int, kept: _Kept, fragments: Sequence[Fragment], ranks: Sequence[int], layer: int
    ) -> None:
        """Raise where an output of what members of a class call as of a layer is not what it says."""
        memory = AbstractMemory(Program.of_fragment(fragments[0], ranks[0], layer), self._rules)
        view = fragments[0].outputs[place].view
        memory.hold(view.buffer, self._moved(kept))
        pieces = memory.read(view)
        for member, (fragment, rank) in enumerate(zip(fragments, ranks, strict=True)):
            alone = Program.of_fragment(fragment, rank, layer)
            check_output(alone.outputs[place], alone, of_member(pieces, member), self._rules)


def _classes(programs: Sequence[Program], supersteps: Iterable[Schedule], along: tuple[Axis, ...]) -> Classes:
    """Return the classes of ranks, which are those of every superstep; raises Unclassed where there are none."""
    found = [classes_of(superstep, *along) for superstep in supersteps]
    if not all(found):
        raise Unclassed
    for ranks in found[0]:
        first, *others = (
            [(call.given, call.first, call.layer, len(call.fragment.own)) for call in programs[rank].calls]
            for rank in ranks
        )
        if any(other != first for other in others):
            raise Unclassed
    return found[0]


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
        updates = {port.view.buffer for port in fragment.outputs if kind_of(port.tensor) == "updated"}
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
    """Return where the sequences begin that a content is of, or that a weight's gradient is a sum over: those of the
    first member of a class of ranks, since what members hold may meet and has to be moved as far for each.
    """
    kind = kind_of(content.tensor)
    if kind == "weight gradient":
        return [batch.start % FAR for _, batch in content.seen]
    return [] if kind not in OF_TOKENS else [content.batch.start % FAR]


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
    if sequences and kind_of(name) == "weight gradient":
        seen = tuple([(tokens, of.moved(sequences)) for tokens, of in seen])
    elif sequences and kind_of(name) in OF_TOKENS:
        batch = batch.moved(sequences)
    return Content(name, layer + layers, (batch, *rest), seen)  # type: ignore[arg-type]
