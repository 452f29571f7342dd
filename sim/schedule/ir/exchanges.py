"""The Exchanges of a fragment by what they have in common: a ring of many ranks hops often, and in few ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sim.schedule.ir.forms import Formed
from sim.schedule.ir.ops import Exchange, Op

Ints: TypeAlias = NDArray[np.int64]


class Exchanges(NamedTuple):
    """Exchanges that are of one form and have the same peers are of one kind: they differ in labels and buffers."""

    at: Ints
    """Their numbers among the ops, rising."""
    which: Ints
    """Of each its kind."""
    first: list[int]
    """Of each kind the number of its first op, rising."""

    def each(self, rows: Sequence[Sequence[tuple[int, ...]]], width: int) -> tuple[Ints, Ints]:
        """Return rows of numbers that are said by kind, once for each Exchange, and of each row its op."""
        which, found = of_each(self.which, rows, width)
        return self.at[which], found


def of_each(kinds: Ints, rows: Sequence[Sequence[tuple[int, ...]]], width: int) -> tuple[Ints, Ints]:
    """Return rows of numbers that are said by kind, once for each of what is of these kinds, and of each row of which
    of these it is.
    """
    counts = np.array([len(some) for some in rows], np.int64)
    table = np.array([row for some in rows for row in some], np.int64).reshape(-1, width)
    begins, own = np.cumsum(counts) - counts, counts[kinds]
    which = np.repeat(np.arange(len(kinds)), own)
    return which, table[np.arange(len(which)) + (begins[kinds] - np.cumsum(own) + own)[which]]


def exchanges_of(ops: Sequence[Op], formed: Formed) -> Exchanges:
    """Return the Exchanges among ops that have these forms."""
    forms, which, _ = formed
    of_forms = np.array([isinstance(form.op, Exchange) for form in forms], bool)
    at = np.flatnonzero(of_forms[which])
    kinds: dict[tuple[int, ...], int] = {}
    first: list[int] = []
    found: list[int] = []
    for index, form in zip(at.tolist(), which[at].tolist(), strict=True):
        op = ops[index]
        assert isinstance(op, Exchange)
        kind = kinds.setdefault((form, *[peer for peer, _ in op.sends], *[peer for peer, _ in op.recvs]), len(first))
        if kind == len(first):
            first.append(index)
        found.append(kind)
    return Exchanges(at, np.array(found, np.int64), first)
