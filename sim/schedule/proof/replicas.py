"""What the first replica holds, as what all replicas do for which it stands: each owns rows of weights of its own.

    rows a of the first ── a + r each, on replica r ── one position of all members of a class (``members``)

Replicas differ in sequences, too, and of these nothing is written down: what is of tokens is of later ones on a later
replica, and never meets what another one has. What is gathered from all replicas, scattered to them or summed over them
is looked at on each; all that is done within one is the same, with rows that move as those that it is given.

Replicas that are apart, as the last one whose rows end where a tensor does, stand for themselves, and what they hold is
their own: they meet the others in what is looked at on each. The first of all others stands for these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, reduce

from sim.base.errors import ScheduleError
from sim.schedule.derive.replicas import stand_for
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.tensors import OF_TOKENS
from sim.schedule.model.scope import kind_of
from sim.schedule.proof.contents import ZERO, Content, Piece, Unclassed, brief, differs, union
from sim.schedule.proof.members import content_of_member, moved, moving, of_each_member, position
from sim.schedule.proof.rules.attention import AttentionRules

Sender = tuple[int, int]
"""Which of the replicas that one stands for, and the number of a rank among the members of a group that are played."""


def of_replicas(rules: AttentionRules, schedule: Schedule) -> AttentionRules:
    """Return the rules of contents of all replicas that one of a schedule stands for; any other stands for itself."""
    later, by_replica = schedule.whole.rows_later, stand_for(schedule)
    replicas = max(by_replica, key=len)
    alone = [own for own, some in enumerate(by_replica) if some is not replicas]
    if any(len(by_replica[own]) > 1 for own in alone):
        raise Unclassed  # contents are of the members of one class
    moves = {each: position([(replica - replicas[0]) * each for replica in replicas]) for each in set(later.values())}
    rows = {name: moves[each] for name, each in later.items()}
    ranks = frozenset(schedule.header.mesh.at({"dp": alone}))
    return rules.of_members(len(replicas))._replace(rows_later=rows, alone=ranks)


def senders_of(schedule: Schedule, communicator: str, ranks: Sequence[int]) -> list[Sender]:
    """Return who the members of a group over all replicas are, of which a schedule has these ranks, in its order."""
    whole, replica, replicas = schedule.whole, schedule.header.mesh.replica, stand_for(schedule)
    senders = {
        sender: (member, at)
        for at, rank in enumerate(ranks)
        for member, sender in enumerate(
            whole.header.mesh.along(schedule.order[rank], "dp", replicas[replica(rank)]),
        )
    }
    return [senders[rank] for rank in whole.communicator(communicator).group_of(schedule.order[ranks[0]])]


def shards_of_all(of_played: Sequence[list[Piece]], senders: Sequence[Sender]) -> list[list[Piece]]:
    """Return what each member of a group has, by what those that are played have: weights, which are of no sequence.
    Raises Unclassed for anything else.
    """
    for content in (piece.content for pieces in of_played for piece in pieces if piece.content.tensor != ZERO):
        if content.seen or kind_of(content.tensor) in (*OF_TOKENS, "weight gradient", "square"):
            raise Unclassed
    members = Counter([number for _, number in senders])
    each = [
        list(zip(*[of_each_member(piece, members[number]) for piece in pieces], strict=True))
        for number, pieces in enumerate(of_played)
    ]
    return [list(each[number][member]) for member, number in senders]


def parts_of_all(parts: Sequence[list[Piece]], senders: Sequence[Sender]) -> list[list[Piece]]:
    """Return what each rank that is played takes of the parts for all members of a group, as what all replicas take
    for which its own stands. Raises Unclassed where parts differ in more than positions.
    """
    if any(differs(piece.content) for pieces in parts for piece in pieces):
        raise Unclassed
    to: dict[int, list[list[Piece]]] = {}
    for (_, number), pieces in zip(sorted(senders), _in_order(parts, senders), strict=True):
        to.setdefault(number, []).append(pieces)
    found = [moving(to[number]) for number in range(len(to))]
    taken = [moved(*one) for one in found if one is not None]
    if len(taken) < len(found):
        raise Unclassed
    return taken


def _in_order(parts: Sequence[list[Piece]], senders: Sequence[Sender]) -> list[list[Piece]]:
    """Return parts of members in the order of replicas."""
    return [parts[at] for at in sorted(range(len(senders)), key=senders.__getitem__)]


@lru_cache(maxsize=4096)
def sum_of_replicas(content: Content, starts: tuple[int, ...]) -> Content:
    """Return the sum over some replicas of what one has that stands for them: of the gradient of a weight, which is of
    other sequences on each, by how much later is given; or of squares, which are of other rows.
    """
    if content.tensor == ZERO:
        return content
    kind = kind_of(content.tensor)
    if kind == "square":
        return reduce(union, [content_of_member(content, replica) for replica in range(len(starts))])
    if kind != "weight gradient":
        raise ScheduleError(f"sums {brief(content)} over replicas, which have different sequences")
    if differs(content):
        raise ScheduleError(f"sums {brief(content)} over replicas, which have different rows")
    each = [tuple([(tokens, batch.moved(start)) for tokens, batch in content.seen]) for start in starts]
    return reduce(union, [content._replace(seen=seen) for seen in each])
