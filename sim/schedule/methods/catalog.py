"""The schedules that ship: add a builder here and the command line, the checks and the tests know it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.schedule.ir.program import Schedule
from sim.schedule.methods import allgather, balanced_ring, double_ring, fpdt, linear, ring, single, ulysses, upipe, usp
from sim.schedule.methods.hints import Hints
from sim.schedule.methods.ring import RingOptions
from sim.words.mesh import Axis, Mesh, require_ranks
from sim.words.workload import ModelSpec, Workload

Build = Callable[..., Schedule]
"""``build(workload, mesh)``; what else its signature names it is given: ``options``, a struct or a dataclass whose
instance there as default says which there are, and ``hints``."""


@kept
def _parameters(build: Build) -> Mapping[str, inspect.Parameter]:
    """Return what a builder takes."""
    return inspect.signature(build).parameters


class Entry(NamedTuple):
    """A schedule by name."""

    build: Build
    paper: str
    degrees: tuple[Axis, ...]
    """The axes that it has; ranks that no given degree takes go to the first one."""
    communication: str
    """Bytes that each rank sends per layer, forward; e bytes an element."""
    preset: Any = None
    """Options that this name stands for, where one builder has several."""

    @property
    def declared(self) -> Any:
        """The builder's options, as they are where none is given; None if it takes none."""
        takes = _parameters(self.build)
        if "options" not in takes:
            return None
        default = takes["options"].default
        if isinstance(default, type) or not (isinstance(default, msgspec.Struct) or is_dataclass(default)):
            raise InputError(
                f"a builder that takes options says which there are, but the default of its parameter is {default!r}: "
                f"give it a struct or a dataclass, such as options=MyOptions()"
            )
        return default

    @property
    def options(self) -> Any:
        """The options of this name, where none is set."""
        return self.declared if self.preset is None else self.preset

    @property
    def takes_hints(self) -> bool:
        """Whether what its builder makes may depend on the machine."""
        return "hints" in _parameters(self.build)

    def schedule(self, workload: Workload, mesh: Mesh, options: Any = None, hints: Hints = Hints()) -> Schedule:
        """Return what its builder makes, by default with the options of this name."""
        offered = {"options": self.options if options is None else options, "hints": hints}
        takes = _parameters(self.build)
        return self.build(workload, mesh, **{name: value for name, value in offered.items() if name in takes})

    def mesh(self, ranks: int, model: ModelSpec) -> Mesh:
        """Return the degrees of so many ranks where none is given: Ulysses takes as many as need no replicas of heads,
        the ring the rest.
        """
        require_ranks(ranks)
        heads = ranks if self.degrees == ("ulysses",) else 1
        if self.degrees == ("ulysses", "ring"):
            heads = max(n for n in range(1, ranks + 1) if ranks % n == 0 and model.num_kv_heads % n == 0)
        return Mesh(ulysses=heads, ring=ranks // heads)


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
    "zigzag": Entry(ring.build, "zhuzilin/ring-flash-attention", ("ring",), _RING, RingOptions(layout="zigzag")),
    "striped": Entry(ring.build, "arXiv:2311.09431", ("ring",), _RING, RingOptions(layout="striped")),
    "burst": Entry(
        ring.build,
        "arXiv:2509.19836",
        ("ring",),
        _RING,
        RingOptions(layout="zigzag", ring_backward="queries", gradients="model"),
    ),
    "double-ring": Entry(double_ring.build, "arXiv:2406.18485", ("ring",), _RING),
    "balanced-ring": Entry(balanced_ring.build, "arXiv:2310.03294", ("ring",), _BALANCED),
    "allgather": Entry(allgather.build, "arXiv:2407.21783", ("ring",), _RING),
    "ulysses": Entry(ulysses.build, "arXiv:2309.14509", ("ulysses",), _ULYSSES),
    "fpdt": Entry(fpdt.build, "arXiv:2408.16978", ("ulysses",), _ULYSSES),
    "usp": Entry(usp.build, "arXiv:2405.07719", ("ulysses", "ring"), f"{_ULYSSES} + {_ON_RINGS}"),
    "upipe": Entry(upipe.build, "arXiv:2602.21196", ("ulysses", "ring"), f"{_ULYSSES} + H/U * {_ON_RINGS}"),
}

LINEAR: dict[str, Entry] = {
    "linear": Entry(linear.build, "arXiv:2404.02882", ("ring",), "B * H_kv * D * D * 4, by all but the last rank"),
}
"""Schedules of another function than softmax attention, which are no way to train the same model: none of what is
asked for the fastest schedule tries them."""

NAMED = SCHEDULES | LINEAR
"""All that have a name."""
