"""The proof of classes of ranks: those that do the same but for peers and positions are played as one.

    programs ── by what their ops have in common ── classes of equally many members ── a program for each class

What a member holds differs from what another one holds in positions (``members``), and so does what an op makes of it.
Where ranks meet, in messages and collectives, each member is looked at, and what all take is put together again. A
standstill of ranks would be one of classes, too. Classes prove or decline, by Unclassed or by what a rule refuses: what
is wrong with a schedule the proof of each rank by itself says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from sim.base.errors import ScheduleError
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.matching import Group, Key, Matching, Transfer
from sim.schedule.derive.replicas import have_shards, whole_size
from sim.schedule.ir import ops
from sim.schedule.ir.declare import operands
from sim.schedule.ir.forms import Form
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Split
from sim.schedule.proof.abstract import AbstractPlayer, check_output
from sim.schedule.proof.abstract_memory import given_pieces
from sim.schedule.proof.contents import Piece, Unclassed
from sim.schedule.proof.members import moved, moving, of_all, of_member
from sim.schedule.proof.owners import check_owners
from sim.schedule.proof.rules.token import check_positions
from sim.words.mesh import Axis

Classes = Sequence[Sequence[int]]
"""The ranks of each class, in their order; all have equally many."""


def axes_of(schedule: Schedule) -> list[tuple[Axis, ...]]:
    """Return along which axes ranks may do the same, the largest classes first: replicas that have shards of their own,
    and ranks that trade heads. None where contents are already those of several replicas.
    """
    if have_shards(schedule):
        return []
    mesh = schedule.header.mesh
    trading: list[tuple[Axis, ...]] = [("ulysses",)] if mesh.ulysses > 1 else []
    return [("dp", "ulysses"), *trading] if mesh.dp > 1 else trading


def classes_of(schedule: Schedule, *axes: Axis) -> Classes:
    """Return the groups along some axes, by default of ranks that trade heads, where all of a group do the same but for
    peers and positions: in them, what ranks hold differs in positions. None where they do other things.
    """
    groups, programs = schedule.header.mesh.groups(*(axes or ("ulysses",))), schedule.programs
    if len(groups[0]) == 1:
        return ()
    known: dict[int, Hashable] = {}

    def outline(program: Program) -> Hashable:
        formed = program.formed  # of ranks that share their fragments the same
        if id(formed) not in known:
            outlines = list(map(_outline, formed.forms))
            alike = tuple([outlines[form] for form in formed.which.tolist()]), tuple(formed.buffers)
            known[id(formed)] = alike, tuple([(one.lies, one.shape, one.dtype, one.place) for one in program.buffers])
        ports = [(port.tensor, port.layer, port.view) for port in (*program.inputs, *program.outputs)]
        return known[id(formed)], len(program.inputs), ports

    for ranks in groups:
        first = outline(programs[ranks[0]])
        if any(outline(programs[rank]) != first for rank in ranks[1:]):
            return ()
    return groups


@cache
def _others(kind: type[ops.Op]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name not in {*operands(kind), "label", "tokens"}]


def _outline(form: Form) -> Hashable:
    """Return what ops have in common that differ in no more than labels, peers and positions."""
    op = form.op
    if not isinstance(op, ops.Rope):
        return form
    return ops.Rope, tuple(form.boxes), tuple([getattr(op, name) for name in _others(ops.Rope)])


class _Quotient(NamedTuple):
    """What classes of ranks do together."""

    matching: Matching
    """Of the programs of classes, by their numbers."""
    ways: list[list[int] | None]
    """Of each transfer to which member each member sends; None where that is the one of the same number."""
    groups: dict[tuple[Key, ...], list[tuple[Key, ...]]]
    """By the calls of classes that meet those of ranks that do."""


def _quotient(matching: Matching, place: dict[int, tuple[int, int]], members: int) -> _Quotient:
    """Return the matching of classes; ``place`` is each rank's class and number there. Raises Unclassed where members
    of a class do not meet the same ones, each one of them.
    """
    sent: dict[tuple[Key, Key], list[tuple[int, int, Transfer]]] = defaultdict(list)
    for transfer in matching.transfers:
        (source, u), (target, v) = (place[rank] for rank, _ in transfer[:2])
        sent[(source, transfer.source[1]), (target, transfer.target[1])].append((u, v, transfer))
    transfers, ways = [], list[list[int] | None]()
    for (one, other), each in sent.items():
        targets = {u: v for u, v, _ in each}
        once = len(each) == len(targets) == len(set(targets.values())) == members
        if one[0] == other[0] or not once or any(transfer.pairs != each[0][2].pairs for *_, transfer in each):
            raise Unclassed
        way = [targets[u] for u in range(members)]
        transfers.append(Transfer(one, other, each[0][2].pairs, each[0][2].nbytes))
        ways.append(None if way == list(range(members)) else way)
    groups: dict[tuple[Key, ...], list[tuple[Key, ...]]] = defaultdict(list)
    for group in matching.groups:
        groups[tuple(sorted({(place[rank][0], op) for rank, op in group.members}))].append(group.members)
    group_of: dict[Key, int] = {}
    for number, (calls, of_ranks) in enumerate(groups.items()):
        sizes = {len(ranks) for ranks in of_ranks}
        if len(sizes) > 1 or sum(map(len, of_ranks)) != members * len(calls):
            raise Unclassed
        for call in calls:
            if group_of.setdefault(call, number) != number:
                raise Unclassed
    found = Matching(transfers, [Group(calls) for calls in groups])
    return _Quotient(found, ways, dict(groups))


Calls = Mapping[int, ops.Collective]
"""A collective's calls, by class."""
Sent = Mapping[int, list[list[Piece]]]
"""By class what each of its members sends to each place in a group."""


class ClassPlayer(AbstractPlayer):
    """Plays one program for each class of ranks on contents of all of its members. Raises Unclassed, or what a rule
    refuses, where that proves nothing.
    """

    def __init__(
        self, schedule: Schedule, matching: Matching, dependencies: list[Dependencies], classes: Classes
    ) -> None:
        self._classes, self._of_ranks = classes, schedule.programs
        self.members = len(classes[0])
        self._place = {rank: (number, u) for number, ranks in enumerate(classes) for u, rank in enumerate(ranks)}
        self._meets = _quotient(matching, self._place, self.members)
        self._way_of = dict(zip(map(id, self._meets.matching.transfers), self._meets.ways, strict=True))
        programs = [Program.of_calls(number, self._of_ranks[ranks[0]].calls) for number, ranks in enumerate(classes)]
        super().__init__(schedule, self._meets.matching, [dependencies[ranks[0]] for ranks in classes], programs)
        self._alone, self._rules = self._rules, self._rules.of_members(self.members)
        self._token_rules = self._token_rules._replace(attention=self._rules)
        self._state_rules = self._state_rules._replace(attention=self._rules)
        for memory, ranks in zip(self.memory, classes, strict=True):
            for ports in zip(*(self._of_ranks[rank].inputs for rank in ranks), strict=True):
                given = [
                    given_pieces(port, self._of_ranks[rank], self._alone)
                    for port, rank in zip(ports, ranks, strict=True)
                ]
                memory.write(ports[0].view, of_all(given))

    def run(self) -> None:
        """Play to the end, then look at the outputs of every rank."""
        self.play()
        for memory, ranks in zip(self.memory, self._classes, strict=True):
            for u, rank in enumerate(ranks):
                program = self._of_ranks[rank]
                for port in program.outputs:
                    check_output(port, program, of_member(memory.read(port.view), u), self._alone)
        check_owners(self._schedule)

    def _check_positions(self, pieces: list[Piece], op: ops.Rope) -> None:
        number, index = self._at
        for u, rank in enumerate(self._classes[number]):
            rope = self._of_ranks[rank].ops[index]
            turned = rope.tokens if isinstance(rope, ops.Rope) else op.tokens
            own = of_member(pieces, u)
            check_positions(own, turned, self._rules.of_pieces(own).mask)

    def transfer(self, transfer: Transfer) -> None:
        """See Interpreter."""
        way = self._way_of[id(transfer)]
        if way is None:
            super().transfer(transfer)
            return
        source, target = self.memory[transfer.source[0]], self.memory[transfer.target[0]]
        for sent, received in transfer.pairs:
            pieces = source.read(sent)
            taken = {target_member: of_member(pieces, u) for u, target_member in enumerate(way)}
            target.write(received, of_all([taken[u] for u in range(self.members)]))

    def collective(self, members: tuple[Key, ...], calls: list[ops.Collective]) -> None:
        """See Interpreter: all groups of ranks whose calls these are."""
        groups = self._meets.groups[members]
        op_of = {number: op for (number, _), op in zip(members, calls, strict=True)}
        sent = {key[0]: self._sent(key, op, len(groups[0])) for key, op in zip(members, calls, strict=True)}
        taken = self._of_all(groups[0], op_of, sent) if len(groups) == 1 else None
        taken = taken or self._of_each(groups, op_of, sent)
        for number, op in op_of.items():
            if op.taken is not None:
                view = op.taken.view if isinstance(op.taken, Split) else op.taken
                self.memory[number].write(view, taken[number])

    def _of_all(self, group: tuple[Key, ...], op_of: Calls, sent: Sent) -> dict[int, list[Piece]] | None:
        """Return what the classes that make up one group take, where the parts that a rank sends to the members of a
        class are alike but for positions: what comes from it is then one list of pieces for all of these. None where
        parts differ in more.
        """
        places, over_all = [self._place[rank] for rank, _ in group], self._is_over_all(group, op_of)
        found: dict[int, list[Piece]] = {}
        for number, op in op_of.items():
            to = [at for _, at in sorted((u, at) for at, (of, u) in enumerate(places) if of == number)]
            parts = {of: moving([by_place[at] for at in to]) for of, by_place in sent.items()}
            taken: list[list[Piece]] = []
            for of, v in places:
                part = parts[of]
                if part is None:
                    return None
                if part[0]:
                    taken.append(moved(of_member(part[0], v), part[1]))
            found[number] = self._taken(number, op, taken, over_all=over_all)
        return found

    def _of_each(self, groups: list[tuple[Key, ...]], op_of: Calls, sent: Sent) -> dict[int, list[Piece]]:
        """Return what classes take, looking at what each of their members does."""
        alike = not any(isinstance(op.given, Split) for op in op_of.values())  # each sends the same to all
        takes: dict[int, list[list[Piece]]] = {number: [[]] * self.members for number in op_of}
        for group in groups:
            places, over_all = [self._place[rank] for rank, _ in group], self._is_over_all(group, op_of)
            known: dict[int, list[Piece]] = {}
            parts: list[list[Piece]] = []
            for at, (number, u) in enumerate(places):
                if alike and number in known:
                    takes[number][u] = known[number]
                    continue
                if not (alike and parts):
                    parts = [of_member(sent[of][at], v) for of, v in places if sent[of][at]]
                known[number] = takes[number][u] = self._taken(number, op_of[number], parts, over_all=over_all)
        return {number: of_all(of_members) for number, of_members in takes.items()}

    def _is_over_all(self, group: tuple[Key, ...], op_of: Calls) -> bool:
        """Return whether a group has members in replicas that the schedule leaves out."""
        communicator = next(iter(op_of.values())).communicator
        return whole_size(self._schedule, communicator, group[0][0]) > len(group)

    def _taken(self, number: int, op: ops.Collective, parts: list[list[Piece]], *, over_all: bool) -> list[Piece]:
        """Return what a member of a class takes of what all send to it."""
        if op.taken is None:
            return []
        if isinstance(op.taken, Split):
            return self.memory[number].side_by_side(op.taken, parts)
        summed = self.sum_of_all(op, parts)
        return self._over_replicas(summed) if over_all else summed


def is_proved_by_classes(schedule: Schedule, matching: Matching, dependencies: list[Dependencies]) -> bool:
    """Return whether a schedule has classes of ranks, and is proved by them."""
    for axes in axes_of(schedule):
        classes = classes_of(schedule, *axes)
        if classes:
            try:
                ClassPlayer(schedule, matching, dependencies, classes).run()
            except (Unclassed, ScheduleError):
                continue
            return True
    return False
