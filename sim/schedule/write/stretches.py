"""What ranks write alike but for whose tokens they name: it is written once, and again on other buffers and with other
labels.

A rank of a ring attends P times, and P ranks do, each to tokens of its own. What it writes then depends on which
buffers hold what; whose tokens these are, labels say alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from sim.schedule.ir.declare import rebound
from sim.schedule.ir.ops import Op
from sim.schedule.ir.views import Buffer

Where = tuple[tuple[int, ...], int]
"""The numbers of the buffers that a stretch is given, and of the first of its own."""


class Stretch:
    """Ops that were written one after the other, on buffers that were given and on own ones."""

    def __init__(self, label: str, ops: Sequence[Op], where: Where, buffers: Sequence[Buffer]) -> None:
        self.buffers = tuple(buffers)
        """Its own."""
        self._starts = [op.label.removesuffix(label) if op.label.endswith(f" {label}") else None for op in ops]
        """What labels begin with that end as that of the stretch does; None of others."""
        self._first = where
        self._ops = {where: ops}

    def again(self, label: str, where: Where) -> Sequence[Op]:
        """Return its ops under another label, on other buffers."""
        if where in self._ops:
            replace = msgspec.structs.replace
            return [
                op if start is None else replace(op, label=start + label)
                for op, start in zip(self._ops[where], self._starts, strict=True)
            ]
        (old, own), (new, other) = self._first, where
        number = dict(zip(old, new, strict=True))
        number.update({own + at: other + at for at in range(len(self.buffers))})
        self._ops[where] = [
            rebound(op, number, label=op.label if start is None else start + label)
            for op, start in zip(self._ops[self._first], self._starts, strict=True)
        ]
        return self._ops[where]


class Stretches:
    """The stretches of all ranks of a schedule."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Stretch] = {}

    def of(self, key: Hashable) -> Stretch | None:
        """Return what was written for a key."""
        return self._known.get(key)

    def add(self, key: Hashable, stretch: Stretch) -> None:
        """Remember what was written for a key."""
        self._known[key] = stretch
