"""What belongs together on different ranks: transfers, and calls of collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from sim.engine.play.facts import COLLECTIVE_ROW, EXCHANGE_ROW, INT, SIDE, Array, Distinct, Facts, facts_of
from sim.schedule.derive.replicas import whole_group
from sim.schedule.ir import ops
from sim.schedule.ir.columns import together
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.program import Schedule

TRANSFER = np.dtype([("source", INT), ("target", INT)])
GROUP = np.dtype([("members", INT), ("members_end", INT)])


class MessageKey(NamedTuple):
    """What a transfer's cost depends on."""

    source: int
    target: int
    nbytes: int
    group: tuple[int, ...]
    """Ranks of its communicator."""
    by_copies: bool = False
    """As of Exchange."""


class ExchangeKey(NamedTuple):
    """What the compute units that an Exchange holds depend on."""

    group: tuple[int, ...]
    """Ranks of its communicator."""
    peers: int
    nbytes: int
    """See ``largest_message``."""


class CollectiveKey(NamedTuple):
    """What a collective's cost depends on, beside an op of its kind."""

    kind: type[ops.Collective]
    ranks: tuple[int, ...]
    """Of its whole group, of which the schedule may have only the first replicas."""
    nbytes: int
    """Of one part, see ``part_bytes``."""


class Met:
    """What belongs together on different ranks: ``match`` on arrays, of a schedule that is proved."""

    def __init__(self, schedule: Schedule, first: Sequence[int], op_rank: Array, into: Array) -> None:
        """Set what ops ``into`` take part in; ``first`` has the number of each rank's first op."""
        self._schedule, self._op_rank, self._ops = schedule, op_rank, into
        names = sorted(communicator.name for communicator in schedule.header.communicators)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._communicators = [schedule.communicator(name) for name in names]
        self._kinds = Distinct()
        self._groups = [group for communicator in self._communicators for group in communicator.groups]
        rows: dict[np.dtype[Any], list[Array]] = {SIDE: [], EXCHANGE_ROW: [], COLLECTIVE_ROW: []}
        begins: dict[np.dtype[Any], list[int]] = {dtype: [] for dtype in rows}
        known: dict[Fragment, list[Array]] = {}
        for program, begin in zip(schedule.programs, first, strict=False):
            for call in program.calls:
                fragment = call.fragment
                if fragment not in known:
                    known[fragment] = self._numbered(facts_of(fragment.shared), fragment.peers_later)
                for some in known[fragment]:
                    rows[some.dtype].append(some)
                    begins[some.dtype].append(begin)
                begin += len(fragment.ops)  # noqa: PLW2901 - of the rank's next call
        sides, exchanges, collectives = (_placed(found, begins[dtype], dtype) for dtype, found in rows.items())
        self._group_of = self._find_group_of(len(schedule.programs))
        self._set_transfers(sides)
        self._set_exchanges(exchanges)
        self._set_groups(collectives)

    def _numbered(self, facts: Facts, later: int) -> list[Array]:
        """Return those rows of a fragment that there are, by the numbers of communicators of the schedule, and with
        peers that are so many later.
        """
        some = (facts.sides, facts.exchanges, facts.collectives)
        return [self._named(facts, rows, later) for rows in some if len(rows)]

    def _named(self, facts: Facts, rows: Array, later: int) -> Array:
        placed = rows.copy()
        if rows.dtype == SIDE:
            placed["peer"] += later
        placed["communicator"] = np.array([self._numbers[name] for name in facts.communicators])[rows["communicator"]]
        if rows.dtype == COLLECTIVE_ROW:
            placed["kind"] = np.array([self._kinds.number(type(op), op) for op in facts.kinds])[rows["kind"]]
        return placed

    def _set_transfers(self, sides: Array) -> None:
        """Let the n-th that a rank sends to another over a communicator meet the n-th that this takes from it."""
        ranks = self._op_rank[sides["op"]]

        def ordered(receives: int) -> tuple[Array, Array]:
            which = np.flatnonzero(sides["receives"] == receives)
            some = sides.take(which)
            own, peers = ranks[which], some["peer"]
            source, target = (peers, own) if receives else (own, peers)
            order = np.lexsort((some["op"], target, source, some["communicator"]))
            return some.take(order), np.stack([source, target], axis=1)[order]

        (sent, pairs), (taken, met) = ordered(0), ordered(1)
        assert np.array_equal(pairs, met)
        assert np.array_equal(sent["nbytes"], taken["nbytes"])
        self.transfers = np.zeros(len(sent), TRANSFER)
        self.transfers["source"], self.transfers["target"] = sent["op"], taken["op"]
        of_op = np.concatenate([sent["op"], taken["op"]])
        order = np.argsort(of_op, kind="stable")  # an op's sends, then its receives
        self.transfers_of = (np.arange(len(of_op)) % max(len(sent), 1))[order].astype(INT)
        ends = np.cumsum(np.bincount(of_op, minlength=len(self._ops)), dtype=INT)
        self._ops["transfers_end"], self._ops["transfers"][1:] = ends, ends[:-1]
        numbers = self._group_of[sent["communicator"], pairs[:, 0]] if len(sent) else np.zeros(0, np.int64)
        columns = (pairs[:, 0], pairs[:, 1], sent["nbytes"], numbers, sent["by_copies"])
        distinct, self.transfer_message = _distinct(*columns)
        self.messages = [
            MessageKey(source, target, nbytes, self._groups[number], bool(copies))
            for source, target, nbytes, number, copies in distinct
        ]

    def _find_group_of(self, ranks: int) -> Array:
        """Return the number of each rank's group, by communicator; -1 where it is in none."""
        found = np.full((len(self._communicators), ranks), -1, np.int64)
        numbers = count()
        for row, communicator in zip(found, self._communicators, strict=True):
            for group in communicator.groups:
                row[list(group)] = next(numbers)
        return found

    def _set_exchanges(self, exchanges: Array) -> None:
        """Set which Exchanges hold the same compute units."""
        found = self._group_of[exchanges["communicator"], self._op_rank[exchanges["op"]]] if len(exchanges) else []
        distinct, which = _distinct(np.array(found, np.int64), exchanges["peers"], exchanges["nbytes"])
        self.op_exchange = np.full(len(self._ops), -1, INT)
        self.op_exchange[exchanges["op"]] = which
        self.exchanges = [ExchangeKey(self._groups[group], *rest) for group, *rest in distinct]

    def _set_groups(self, collectives: Array) -> None:
        """Let the n-th collectives of all members of a group be one."""
        calls = Distinct()
        members, sizes, group_call = [], [], []
        ranks = self._op_rank[collectives["op"]]
        for number, communicator in enumerate(self._communicators):
            own = collectives["communicator"] == number
            for group in sorted(communicator.groups):
                rows = [collectives[own & (ranks == rank)] for rank in group]
                if not len(rows[0]):
                    continue
                ops_of = np.stack([row["op"] for row in rows], axis=1)
                nbytes = np.stack([row["nbytes"] for row in rows], axis=1).max(axis=1)
                members.append(ops_of.reshape(-1))
                sizes.append(np.full(len(ops_of), len(group)))
                kinds = [self._kinds.found[kind] for kind in rows[0]["kind"].tolist()]
                whole = whole_group(self._schedule, communicator.name, group)
                keys = [CollectiveKey(type(op), whole, size) for op, size in zip(kinds, nbytes.tolist(), strict=True)]
                group_call += [calls.number(key, (key, op)) for key, op in zip(keys, kinds, strict=True)]
        self.members, counts = together(members), together(sizes)
        self.groups = np.zeros(len(counts), GROUP)
        self.groups["members_end"] = np.cumsum(counts)
        self.groups["members"] = self.groups["members_end"] - counts
        self._ops["group"] = -1
        self._ops["group"][self.members] = np.repeat(np.arange(len(counts)), counts)
        self.group_call = np.array(group_call, INT)
        self.calls: list[tuple[CollectiveKey, ops.Collective]] = calls.found


def _placed(found: Sequence[Array], begins: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return rows of fragments one behind the other, their ops counted from where each fragment begins."""
    placed = together(found, dtype)
    placed["op"] += np.repeat(np.array(begins, INT), [len(some) for some in found])
    return placed


def _distinct(*columns: Array) -> tuple[list[tuple[int, ...]], Array]:
    """Return which rows there are, in their order, and of each row which of them it is. Rows are sorted as one number
    each: numpy compares rows byte by byte.
    """
    values, codes = zip(*(np.unique(column, return_inverse=True) for column in columns), strict=True)
    sizes = [max(len(some), 1) for some in values]
    if math.prod(sizes) > np.iinfo(np.int64).max:
        rows, which = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
        return [tuple(row) for row in rows.tolist()], which.reshape(-1)
    numbers, which = np.unique(np.ravel_multi_index(codes, sizes), return_inverse=True)
    found = (some[of].tolist() for some, of in zip(values, np.unravel_index(numbers, sizes), strict=True))
    return list(zip(*found, strict=True)), which
