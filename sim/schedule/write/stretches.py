"""What ranks write alike but for whose tokens they name: it is written once, and bound again to other buffers, to other
peers and to other labels.

A rank of a ring attends P times, and P ranks do, each to tokens of its own. What it writes then depends on which
buffers hold what; whose tokens these are, labels say alone.
"""

from __future__ import annotations

from collections.abc import Hashable

from sim.schedule.ir.stretches import Stretch


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
