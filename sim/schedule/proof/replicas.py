"""What the first replica holds, as what all replicas do for which it stands: each owns rows of weights of its own.

    rows a of the first ── a + r each, on replica r ── one position of all members of a class (``members``)

Replicas differ in sequences, too, and of these nothing is written down: what is of tokens is of later ones on a later
replica, and never meets what another one has. What is gathered from all replicas, scattered to them or summed over them
is looked at on each; all that is done within one is the same, with rows that move as those that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce

from sim.base.errors import ScheduleError
from sim.schedule.derive.replicas import num_alike
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.tensors import OF_TOKENS
from sim.schedule.model.scope import kind_of
from sim.schedule.proof.contents import ZERO, Content, Piece, Unclassed, brief, differs, union
from sim.schedule.proof.members import content_of_member, moved, moving, of_member, position
from sim.schedule.proof.rules.attention import AttentionRules

Sender = tuple[int, int]
"""A replica, and the number of a rank among the members of a group that are in the first replica."""


def of_replicas(rules: AttentionRules, schedule: Schedule) -> AttentionRules:
    """Return the rules of contents of all replicas that the one of a schedule stands for."""
    replicas = range(num_alike(schedule))
    rows = {
        name: position([replica * each for replica in replicas]) for name, each in schedule.whole.rows_later.items()
    }
    return rules.of_members(len(replicas))._replace(rows_later=rows)


def senders_of(schedule: Schedule, communicator: str, ranks: Sequence[int]) -> list[Sender]:
    """Return who the members of a group over all replicas are, of which a schedule has these ranks, in its order."""
    whole, firsts = schedule.whole, [schedule.order[rank] for rank in ranks]
    mesh, every = whole.header.mesh, range(whole.header.mesh.dp)
    senders = {
        rank: (replica, at)
        for at, first in enumerate(firsts)
        for replica, rank in enumerate(mesh.along(first, "dp", every))
    }
    return [senders[rank] for rank in whole.communicator(communicator).group_of(firsts[0])]


def shards_of_all(of_first: Sequence[list[Piece]], senders: Sequence[Sender]) -> list[list[Piece]]:
    """Return what each member of a group has, by what those of the first replica have: weights, which are of no
    sequence. Raises Unclassed for anything else.
    """
    for content in (piece.content for pieces in of_first for piece in pieces if piece.content.tensor != ZERO):
        if content.seen or kind_of(content.tensor) in (*OF_TOKENS, "weight gradient", "square"):
            raise Unclassed
    return [of_member(of_first[number], replica) for replica, number in senders]


def parts_of_all(parts: Sequence[list[Piece]], senders: Sequence[Sender]) -> list[list[Piece]]:
    """Return what each rank of the first replica takes of the parts for all members of a group, as what all replicas
    take there. Raises Unclassed where parts differ in more than positions.
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
def sum_of_replicas(content: Content, starts: range) -> Content:
    """Return the sum over all replicas of what one of them has: of the gradient of a weight, which is of other
    sequences on each, whose first ones are given; or of squares, which are of other rows.
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
