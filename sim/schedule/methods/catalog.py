"""The schedules that ship: add a builder here and the command line, the checks and the tests know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from sim.options import DEFAULTS, Options
from sim.schedule.ir.program import Schedule
from sim.schedule.methods import allgather, balanced_ring, double_ring, ring, single, ulysses, upipe, usp
from sim.workload import ModelSpec, Parallel, Workload

Build = Callable[[Workload, Parallel], Schedule]


Degree = Literal["ulysses", "ring"]


class Entry(NamedTuple):
    """A schedule by name."""

    build: Build
    paper: str
    degrees: tuple[Degree, ...]
    """The degrees that it has; ranks that no given degree takes go to the first one."""
    communication: str
    """Bytes that each rank sends per layer, forward; e bytes an element."""
    options: Options = DEFAULTS
    """What this name stands for, where one builder has several."""

    def parallel(self, ranks: int, model: ModelSpec) -> Parallel:
        """Return the degrees of so many ranks where none is given: Ulysses takes as many as need no replicas of heads,
        the ring the rest.
        """
        heads = ranks if self.degrees == ("ulysses",) else 1
        if self.degrees == ("ulysses", "ring"):
            heads = max(n for n in range(1, ranks + 1) if ranks % n == 0 and model.num_kv_heads % n == 0)
        return Parallel(ulysses_degree=heads, ring_degree=ranks // heads, options=self.options)


_RING = "(P-1) * 2 * B * S/P * H_kv * D * e"
_ON_RINGS = "(R-1) * 2 * B * S/R * max(H_kv/U, 1) * D * e"
_BALANCED = (
    "over all ranks, in each round t = 1 .. P/2: (P-t) * 2 * B * S/P * H_kv * D * e, and, except in an even P's last, "
    "t * B * S/P * (2 * H * D * e + 4 * H)"
)
_ULYSSES = "(2H + 2 max(H_kv, U)) * D * B * S/P * e * (U-1)/U"

SCHEDULES: dict[str, Entry] = {
    "single": Entry(single.build, "arXiv:2307.08691", (), "none"),
    "ring": Entry(ring.build, "arXiv:2310.01889", ("ring",), _RING),
    "zigzag": Entry(ring.build, "zhuzilin/ring-flash-attention", ("ring",), _RING, Options(layout="zigzag")),
    "striped": Entry(ring.build, "arXiv:2311.09431", ("ring",), _RING, Options(layout="striped")),
    "burst": Entry(ring.build, "arXiv:2509.19836", ("ring",), _RING, Options(layout="zigzag", ring_backward="queries")),
    "double-ring": Entry(double_ring.build, "arXiv:2406.18485", ("ring",), _RING, Options(layout="zigzag")),
    "balanced-ring": Entry(balanced_ring.build, "arXiv:2310.03294", ("ring",), _BALANCED),
    "allgather": Entry(
        allgather.build, "arXiv:2407.21783", ("ring",), _RING, Options(layout="zigzag", gradients="model")
    ),
    "ulysses": Entry(ulysses.build, "arXiv:2309.14509", ("ulysses",), _ULYSSES),
    "usp": Entry(
        usp.build,
        "arXiv:2405.07719",
        ("ulysses", "ring"),
        f"{_ULYSSES} + {_ON_RINGS}",
        Options(layout="zigzag"),
    ),
    "upipe": Entry(
        upipe.build,
        "arXiv:2602.21196",
        ("ulysses", "ring"),
        f"{_ULYSSES} + H/U * {_ON_RINGS}",
        Options(layout="zigzag", overlap=False),
    ),
}
