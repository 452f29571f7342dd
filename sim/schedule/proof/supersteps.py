"""The proof that remembers: calls of ranks that meet are played once per distinct contents of what they are given.

    programs = calls of fragments ── those that meet ──> a superstep, a small schedule of its own

What an op makes of abstract contents depends on these alone, on layers and sequences by their differences only, and on
ranks by whom they meet. So a superstep whose fragments and whose inputs, with layers and sequences counted from the
least, were seen before has the results that it had then, as many layers and sequences later, on whichever ranks. The
squares that an update takes the norm of count from a first layer of their own, as nothing asks how far from the
weights' that is. No induction is needed: every superstep is looked up by all that it is given. Playing one superstep
after the other is an order that the dependencies allow (``meetings``). It proves or declines: what is wrong with a
schedule the flat proof says, by ``AbstractPlayer`` on all ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

from sim.schedule.derive.dependencies import Dependencies, derive
from sim.schedule.derive.matching import match, wire_bytes
from sim.schedule.derive.replicas import whole_size
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
from sim.schedule.proof.meetings import Meeting, meetings
from sim.schedule.proof.members import of_member
from sim.schedule.proof.owners import check_owners
from sim.schedule.proof.wellformed import check_program
from sim.words.mesh import Axis


class Declined(Exception):  # noqa: N818 - nothing went wrong
    """Supersteps do not say whether a schedule is right."""


class _Kept(msgspec.Struct, frozen=True, gc=False):
    """What a buffer holds: contents by number, and the layer and the sequence from which theirs count; None where they
    have none. A struct, since one is made for each buffer of each call.
    """

    contents: int
    layer: int | None
    sequence: int | None


_LOST = _Kept(-1, None, None)
"""Of a buffer that is written to as a whole before it is used: whatever it held."""


class _Kind:
    """Fragments that meet, as a schedule of their own on the first ranks that call them."""

    def __init__(self, schedule: Schedule, ranks: tuple[int, ...], fragments: tuple[Fragment, ...]) -> None:
        self._schedule = schedule
        self.fragments = fragments
        self.ranks = ranks
        self.alone = self.as_of([0] * len(fragments))
        self.matching = match(self.alone)
        self.wire_bytes = wire_bytes(self.alone, self.matching)

    def as_of(self, layers: Sequence[int]) -> Schedule:
        """Return the schedule of these fragments as of some layers; other ranks do nothing."""
        header = msgspec.structs.replace(self._schedule.header, claims=None)
        found = {
            rank: Program.of_fragment(one, rank, layer)
            for rank, one, layer in zip(self.ranks, self.fragments, layers, strict=True)
        }
        return self._schedule.like(header, lambda rank: found.get(rank) or _idle(rank))


@cache
def _idle(rank: int) -> Program:
    return Program.of_calls(rank, [])


class Supersteps:
    """The supersteps of a schedule; raises Declined where it has none.

    Ranks are played by classes along some axes where calls have these, which may prove less: then Unclassed or
    ScheduleError is raised.
    """

    def __init__(self, schedule: Schedule, along: tuple[Axis, ...] = ()) -> None:
        self._schedule = schedule
        self.programs = schedule.programs
        found = meetings(schedule)
        if found is None:
            raise Declined
        self.all: list[Meeting] = found
        sound = set[Form]()
        for rank, fragment in {(p.rank, call.fragment): None for p in self.programs for call in p.calls}:
            check_program(Program.of_fragment(fragment, rank), schedule, sound)
        self._rules = attention_rules(schedule)
        self._known: dict[object, _Kind] = {}
        """Kinds by what stands for them."""
        self._kind_of: dict[tuple[tuple[int, ...], tuple[Fragment, ...]], _Kind] = {}
        """By ranks and their fragments."""
        self.kinds = Counter([self._kind(meeting) for meeting in self.all])
        """How often those meet that are alike."""
        self.classes: Classes = [[program.rank] for program in self.programs]
        """What ranks are played as one."""
        if along:
            self.classes = _classes(self.programs, [kind.alone for kind in self.kinds], along)
        for ranks in self.classes:
            _check_bindings(self.programs[ranks[0]])
        self.wire_bytes = sum(count * kind.wire_bytes for kind, count in self.kinds.items())
        self._numbers: dict[Held, int] = {}
        self._contents: list[Held] = []
        self._held: list[list[_Kept]] = [[] for _ in self.classes]
        """Per class and buffer."""
        self._remembered: dict[object, list[tuple[list[_Kept], list[_Kept]]]] = {}
        """Per class what is held of what was written to, and of a fragment's own buffers."""
        self._numbered: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._dependencies: dict[Fragment | None, Dependencies] = {}

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
        return Held(tuple(self._of_member(list(pieces), member)), complete)

    def _of_member(self, pieces: list[Piece], member: int) -> list[Piece]:
        """Return what one member of a class holds, where ranks are played by classes; else contents may be those of
        all replicas.
        """
        return of_member(pieces, member) if len(self.classes[0]) > 1 else pieces

    def _moved(self, kept: _Kept) -> Held:
        return _moved(self._contents[kept.contents], kept.layer or 0, kept.sequence or 0)

    def _aligned(self, layer: int) -> int:
        """Return the last layer up to this one from which on kinds follow each other as from the first."""
        return layer - layer % max(1, len(self._rules.kinds))

    def _kind(self, meeting: Meeting) -> _Kind:
        """Return what stands for a meeting: its fragments, on the first ranks that had fragments like these."""
        ranks, fragments = meeting.ranks, tuple([call.fragment for call in meeting.calls])
        if (ranks, fragments) not in self._kind_of:
            first = ranks[0]
            names = dict.fromkeys(name for one in fragments for name in one.shared.communicators)
            groups = [(name, self._groups(name, ranks)) for name in names]
            alike = (
                tuple([rank in self._rules.alone for rank in ranks]),
                tuple([rank - first for rank in ranks]),
                tuple(groups),
                tuple([one.as_of(first) for one in fragments]),
            )
            if alike not in self._known:
                self._known[alike] = _Kind(self._schedule, ranks, fragments)
            self._kind_of[ranks, fragments] = self._known[alike]
        return self._kind_of[ranks, fragments]

    def _groups(self, communicator: str, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of some ranks, counted from the first one, each behind the size of the whole one."""
        some = set(ranks)
        groups = [group for group in self._schedule.communicator(communicator).groups if not some.isdisjoint(group)]
        whole = [whole_size(self._schedule, communicator, group[0]) for group in groups]
        return tuple([(size, *(rank - ranks[0] for rank in group)) for size, group in zip(whole, groups, strict=True)])

    def play(self) -> None:
        """Play all supersteps; raises ScheduleError or Declined where that does not prove them."""
        held, remembered = self._held, self._remembered
        for meeting in self.all:
            kind, classes = self._kind(meeting), self._classes_of(meeting.ranks)
            calls = [meeting.calls[place] for _, place in classes]
            given = [
                [
                    _LOST if place in call.fragment.overwritten else held[number][buffer]
                    for place, buffer in enumerate(call.given)
                ]
                for (number, _), call in zip(classes, calls, strict=True)
            ]
            # Of squares an update asks whether they are all that there are, whichever layers they count from.
            apart = [call.fragment.squares for call in calls]
            layers = [
                kept.layer
                for of_class, squares in zip(given, apart, strict=True)
                for place, kept in enumerate(of_class)
                if kept.layer is not None and place not in squares
            ]
            layers += [call.layer + port.layer for call in calls for port in call.fragment.inputs]
            base = self._aligned(min(layers, default=0))
            sequences = [kept.sequence for of_class in given for kept in of_class if kept.sequence is not None]
            takes = any(call.fragment.inputs for call in calls)  # whose sequences do not count from another
            first = 0 if takes or self._rules.sequences else min(sequences, default=0)
            # The layer of a call matters by its inputs only.
            own = [call.layer - base if call.fragment.inputs else 0 for call in calls]
            counted = [_later(of_class, -base, -first) for of_class in given]
            for of_class, squares in zip(counted, apart, strict=True):
                for place in squares:
                    of_class[place] = _Kept(of_class[place].contents, 0, of_class[place].sequence)
            seen = kind, tuple(own), tuple(map(tuple, counted))
            if seen not in remembered:
                remembered[seen] = self._play(*seen)
            for (number, _), call, (after, made) in zip(classes, calls, remembered[seen], strict=True):
                of_class = held[number]
                for place, kept in zip(sorted(call.fragment.written), _later(after, base, first), strict=True):
                    of_class[call.given[place]] = kept
                of_class.extend(_later(made, base, first))
        self._check_outputs()
        check_owners(self._schedule)

    def _classes_of(self, ranks: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the numbers of the classes of some ranks, each with the place of its first member among these."""
        if ranks not in self._numbered:
            places = {rank: place for place, rank in enumerate(ranks)}
            firsts = enumerate(of_class[0] for of_class in self.classes)
            self._numbered[ranks] = [(number, places[rank]) for number, rank in firsts if rank in places]
        return self._numbered[ranks]

    def _play(
        self, kind: _Kind, layers: Sequence[int], given: Sequence[Sequence[_Kept]]
    ) -> list[tuple[list[_Kept], list[_Kept]]]:
        """Return per class what the buffers that it writes to hold after one superstep, and what its own ones hold."""
        classes = self._classes_of(kind.ranks)
        layer_of = {
            rank: layer for (number, _), layer in zip(classes, layers, strict=True) for rank in self.classes[number]
        }
        alone = kind.as_of([layer_of[rank] for rank in kind.ranks])
        together = alone, kind.matching, [self._derived(program) for program in alone.programs]
        player = ClassPlayer(*together, self.classes) if len(self.classes[0]) > 1 else AbstractPlayer(*together)
        memories = [player.memory[number] for number, _ in classes]
        for memory, of_class in zip(memories, given, strict=True):
            for number, kept in enumerate(of_class):
                if kept is not _LOST:
                    memory.hold(number, self._moved(kept))
        player.play()
        results = []
        for memory, (_, place), before in zip(memories, classes, given, strict=True):
            held = memory.held()
            after = [self._kept(held[at]) for at in sorted(kind.fragments[place].written)]
            results.append((after, [self._kept(one) for one in held[len(before) :]]))
        return results

    def _derived(self, program: Program) -> Dependencies:
        """Return what ops of one fragment, or of none, wait for."""
        fragment = program.calls[0].fragment.shared if program.calls else None
        if fragment not in self._dependencies:
            self._dependencies[fragment] = derive(program)
        return self._dependencies[fragment]

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
                    held = of_class[numbers[port.view.buffer]]
                    layer = 0 if held.layer is None else held.layer - base
                    kept = _Kept(held.contents, layer, held.sequence)
                    seen = (fragments, place, kept, call.layer - base, ranks[0] in self._rules.alone)
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
            check_output(alone.outputs[place], alone, self._of_member(pieces, member), self._rules)


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
