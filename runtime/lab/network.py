"""A network to be built, as plain data: ranks and switches, the wires between them, and who is reached by which wire.

rank ── wire ── switch ── wire ── rank          switches forward at once; each end of a wire has a rate of its own
rank ── wire ── rank ── wire ── rank            without switches ranks forward what is for others
"""

from __future__ import annotations

from itertools import product

import msgspec

from sim.base.errors import InputError

MOST_RANKS = 16
"""As many as a calibration starts: all share the cores of this machine."""
LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 125e3, 12.5e9
"""Rates that a token bucket of this machine can be set to: 1 Mbit/s to 100 Gbit/s."""
BURST_S = 1e-3
"""Of its rate that a link passes at once after a pause. A bucket that holds less loses rate whenever the kernel's timer
wakes late: with 0.16 ms at 200 Mbit/s 12 % of it, with 1 ms 2 %, measured between two namespaces.
"""
LEAST_BURST_BYTES = 12 * 1514
"""Twelve frames of Ethernet. TCP hands over half a bucket at once, and acknowledges each time: with a bucket of 1 ms at
50 Mbit/s, so two frames at once, acknowledgements of 66 bytes took 2 % of the links.
"""

WINDOW_S = 2e-3
"""Of the slowest rate that a connection may have on the way: so connections take turns at a link, as queue pairs of an
RDMA NIC do, and nothing waits for megabytes of another. gloo needs that more than NCCL: a receiver lets a sender begin
by a note, which travels among the data. Without a limit an all-reduce over a thin link took 1.3 times as long, and a
zigzag layer at 1 Gbit/s 0.35 s for 0.32 s.
"""
LEAST_WINDOW_BYTES = 2**16
"""At 50 Mbit/s a layer of usp over a thin link took 3.94 s with so much, 4.05 s with twice and 4.14 s with four times
as much. A link of 1 Gbit/s needs more: there a zigzag layer took 0.34 s with so much, and 0.32 s with 2 ms.
"""


class Wire(msgspec.Struct, frozen=True):
    """A cable between two places."""

    ends: tuple[str, str]
    bytes_per_s: tuple[float | None, float | None]
    """Of what leaves at each end, headers included; None: not limited."""


class Network(msgspec.Struct, frozen=True):
    """Places are names; each rank is a namespace, each switch a bridge."""

    ranks: tuple[str, ...]
    switches: tuple[str, ...]
    wires: tuple[Wire, ...]
    ways: tuple[tuple[str, ...], ...]
    """Per rank and target the place next to the rank by which it reaches that one; its own name for itself."""

    def __post_init__(self) -> None:
        """Raise InputError for what cannot be built."""
        if not 2 <= len(self.ranks) <= MOST_RANKS:
            raise InputError(f"a lab of {len(self.ranks)} ranks: expected 2 to {MOST_RANKS}; set `gpus`")
        places = {*self.ranks, *self.switches}
        for wire in self.wires:
            if not set(wire.ends) <= places or wire.ends[0] == wire.ends[1]:
                raise InputError(f"a wire between {' and '.join(wire.ends)}: expected two of {', '.join(places)}")
            for rate in wire.bytes_per_s:
                if rate is not None and not LEAST_BYTES_PER_S <= rate <= MOST_BYTES_PER_S:
                    raise InputError(
                        f"a link of {rate:g} B/s: this machine sets {LEAST_BYTES_PER_S:g} to {MOST_BYTES_PER_S:g}; "
                        f"change bytes_per_s of that link in the cluster file, or `rates`"
                    )

        joined = {frozenset(wire.ends) for wire in self.wires}
        for (name, ways), (target, other) in product(zip(self.ranks, self.ways, strict=True), enumerate(self.ranks)):
            if name != other and {name, ways[target]} not in joined:
                raise InputError(f"{name} reaches {other} by {ways[target]}, which no wire joins it to; add that wire")

    @property
    def forwards(self) -> bool:
        """Whether ranks pass on what is for others."""
        return any(
            way in self.ranks and way != target
            for name, ways in zip(self.ranks, self.ways, strict=True)
            for way, target in zip(ways, self.ranks, strict=True)
            if target != name
        )


def burst_bytes(bytes_per_s: float) -> int:
    """Return what a link of a rate passes at once after a pause."""
    return max(int(bytes_per_s * BURST_S), LEAST_BURST_BYTES)


def window_bytes(network: Network) -> int:
    """Return what one connection may have on the way in a network, as TCP counts it."""
    slowest = min((rate for wire in network.wires for rate in wire.bytes_per_s if rate is not None), default=0.0)
    return max(int(slowest * WINDOW_S), LEAST_WINDOW_BYTES)
