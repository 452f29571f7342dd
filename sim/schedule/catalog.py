"""The schedules that ship: add a builder here and the command line, the checks and the tests know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from sim.schedule import ring, single, ulysses
from sim.schedule.ir import Schedule
from sim.workload import Parallel, Workload

Build = Callable[[Workload, Parallel], Schedule]


Splits = Literal["ring", "ulysses", "anything", "nothing"]
"""What the ranks of a schedule make up where no degree is given."""


class Entry(NamedTuple):
    """A schedule by name."""

    build: Build
    paper: str
    splits: Splits
    communication: str
    """Bytes that each rank sends per layer, forward; e bytes an element."""


SCHEDULES: dict[str, Entry] = {
    "single": Entry(single.build, "arXiv:2307.08691", "nothing", "none"),
    "ring": Entry(ring.build, "arXiv:2310.01889", "ring", "(P-1) * 2 * B * S/P * H_kv * D * e"),
    "ulysses": Entry(ulysses.build, "arXiv:2309.14509", "ulysses", "(2H + 2H_kv) * D * B * S/P * e * (P-1)/P"),
}
