"""What building, proving and playing a schedule takes, told before any of it is done.

    small ones of the same kind ── program of one rank, counted ──> growth along each axis ──> Counts ──> Effort

Ops of a rank grow with the ring (each rank meets all others), with chunks (each meets all before it, so as their
square), with layers and with micro-batches. So one rank's program is built at small sizes of these, one axis changed
at a time, and what it grows by is carried on to the size that was asked for. Seconds and bytes are what an op, a call
and a member of a collective took on one core (``python -m experiments.recipes sizes`` measures what predictions take,
and prints it beside what is told here).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, TypeVar

import msgspec

from sim.base.errors import TooLargeError
from sim.base.garbage import garbage_collection_off
from sim.schedule.derive.replicas import folds
from sim.schedule.derive.roles import firsts, of_kinds, roles
from sim.schedule.ir.ops import Collective, Exchange
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.stretches import Stretched
from sim.schedule.methods.catalog import NAMED, Entry
from sim.schedule.methods.hints import Hints
from sim.words.mesh import Mesh
from sim.words.workload import Workload

T = TypeVar("T")

MOST_S = 20.0
"""Seconds of one core that are spent without asking."""
MOST_BYTES = 4 * 10**9
"""Bytes of memory, likewise."""

_FEW = 1024
"""Documents that take no time."""

_LOG = logging.getLogger("longstep.effort")

START_S, START_BYTES = 0.4, 60e6
"""Whatever is asked."""


class Planning(NamedTuple):
    """Seconds that a planner takes."""

    planned_s: float
    """Of a document."""
    played_s: float
    power: float = 1.0
    """Of building, proving and playing the plan of n documents: ``played_s`` times n to this power."""
    of_ranks: float = 1.5
    """How many more ranks take longer: their ratio to ``PLANNED_RANKS`` to this power."""


PLANNED_RANKS = 8
PLANNING: Mapping[str, Planning] = {
    "ring": Planning(8e-5, 2.5e-4),
    "zigzag": Planning(8e-5, 3e-4),
    "striped": Planning(1.1e-4, 0.0),
    "all-gather": Planning(6e-5, 1.3e-4),
    "wlb-llm": Planning(9e-5, 3.5e-5, 1.5, 1.2),
    "dcp": Planning(1.4e-3, 5e-4, 1.0, 0.6),
    "fcp-style": Planning(2e-4, 2.5e-2, 1.0, 0.6),
    "groups": Planning(2e-4, 4e-5, 1.6, 0.2),
}
"""By planner, measured likewise."""


class Asked(NamedTuple):
    """What is to be built."""

    schedule: str
    """As the user named it."""
    entry: Entry
    workload: Workload
    mesh: Mesh
    options: Any
    hints: Hints
    folds_members: bool = False
    """Whether members of tensor-parallel groups that do the same are played as one on this machine."""


class Counts(NamedTuple):
    """What one rank's program consists of, and what of it takes time and memory."""

    ops: float
    """That are played: lowered, played by each seed and for what bounds the step, and reported."""
    written: float
    """Of its fragments, each written and proved once however often it is called."""
    again: float
    """Of fragments that are stretches, which are said by columns, and proved abreast."""
    calls: float
    """Each a superstep of the proof."""
    members: float
    """Of the groups of its fragments' collectives, in the proof and in costs."""
    peers: float
    """Ranks that it sends to, to each of which a way has to be found."""


SECONDS = (9e-6, 65e-6, 10e-6, 70e-6, 28e-6, 500e-6, 3.5e-6, 11e-6)
"""Of each of ``Counts``, of a document between two members of a ring, whose block it cuts, and of a stripe that one of
them has seen in a step: what one core of an AMD EPYC took in Python 3.11 (``python -m experiments.recipes sizes``)."""
BYTES = (0.55e3, 2.8e3, 1.6e3, 0.5e3, 0.4e3, 17e3, 40.0, 2.8e3)
"""Of memory, likewise."""
PLAN_BYTES = 1e3
"""Of a document on a rank of a plan, likewise."""
BUILT = 1 / 3
"""Share of the seconds that building takes without a proof, with a walk through memory or a play of one seed."""


class Sizes(NamedTuple):
    """The sizes along which programs grow."""

    ring: int
    chunks: int
    layers: int
    """Of one stage of a pipeline."""
    micro_batches: int
    documents: int
    """0 where there is one, whose masks and layouts are counted with the rest."""
    striped: bool = False
    """Whether a member's tokens lie apart, so that what it has seen of others is in as many pieces as they are."""

    def of(self, along: Mapping[str, Any]) -> Sizes:
        """Return them with others along some axes."""
        return self._replace(**along)


class Effort(NamedTuple):
    """What it takes to answer."""

    ops: int
    """Of all ranks that are played: of equal replicas one."""
    seconds: float
    """Of one core."""
    memory_bytes: float

    @property
    def is_small(self) -> bool:
        """Whether nobody has to be asked."""
        return self.seconds <= MOST_S and self.memory_bytes <= MOST_BYTES

    def __str__(self) -> str:
        taken = f"{_time(self.seconds)} of a core and {_large(self.memory_bytes)}B of memory"
        return f"{_large(self.ops)} ops, {taken}" if self.ops else taken


def _time(seconds: float) -> str:
    for name, unit_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.2g} s"


def _large(count: float) -> str:
    power = min(5, max(0, int(math.log10(max(1.0, count)) // 3)))
    return f"{count / 1000**power:.3g} {' kMGTP'[power]}".rstrip()


class Likeness(NamedTuple):
    """Which ranks stand for others."""

    proved: int
    """How many data-parallel replicas are proved for all."""
    replicas: int
    """How many of them are built, and there played, for all."""
    trading: bool
    """Whether one of the ranks that trade heads is written for all, and all are proved as one."""
    members: int
    """How many of each tensor-parallel group are written, and played, for all."""

    def ranks(self, mesh: Mesh) -> tuple[int, int, int]:
        """Return how many programs differ in more than places, how many are proved, and how many are played."""
        one = mesh.size // mesh.dp
        roles = one // mesh.tp * self.members * self.replicas
        return roles // (mesh.ulysses if self.trading else 1), one * self.proved, roles


class Growth(NamedTuple):
    """How one rank's program grows: what it has at small sizes, and at larger ones along each axis by itself."""

    base: Counts
    along: Mapping[str, tuple[tuple[int, Counts], ...]]
    """By axis that is carried on some sizes, the smallest first, with the counts there."""
    likeness: Likeness

    def at(self, sizes: Sizes) -> Counts:
        """Return the counts at some sizes."""
        found = [*self.base]
        for axis, points in self.along.items():
            given = [size for size, _ in points]
            for place, least in enumerate(self.base):
                there = _through(given, [counts[place] for _, counts in points], getattr(sizes, axis))
                found[place] *= there / (least or 1.0)
        return Counts(*found)


def _through(sizes: list[int], values: list[float], at: int) -> float:
    """Return the value at a size of the polynomial through some values (Lagrange)."""
    return math.fsum(
        value * math.prod((at - other) / (size - other) for other in sizes if other != size)
        for size, value in zip(sizes, values, strict=True)
    )


def sizes_of(asked: Asked) -> Sizes:
    """Return the sizes along which the programs of a configuration grow."""
    workload, options = asked.workload, asked.options
    chunk = getattr(options, "chunk", None)
    step = workload.scope == "step"
    return Sizes(
        ring=asked.mesh.ring,
        chunks=max(1, workload.seq // chunk) if isinstance(chunk, int) and chunk > 0 else 1,
        layers=1 if workload.scope == "attention" else -(-workload.layers // asked.mesh.pp),
        micro_batches=getattr(options, "micro_batches", 1) if step else 1,
        documents=max(len(form.documents or ()) for form in workload.forms),
        striped=getattr(options, "layout", None) == "striped",
    )


@garbage_collection_off()
def growth_of(asked: Asked) -> Growth:
    """Return how the program of one rank grows, from programs of small sizes. Raises whatever its builder does."""
    sizes, rings = sizes_of(asked), (8, 16)
    if asked.entry.takes_hints:  # its rings of rings follow what a node, or an option, says of the inner ones
        inner = getattr(asked.options, "inner_ring_degree", None) or asked.hints.gpus_per_node
        rings = (2 * inner, 3 * inner)
    tried = {"ring": rings, "chunks": (2, 3, 4), "layers": (2, 3), "micro_batches": (2, 3)}
    grows = {axis: points for axis, points in tried.items() if getattr(sizes, axis) > points[-1]}
    least = sizes.of({axis: points[0] for axis, points in grows.items()})
    base, likeness = _smallest(_small(asked, least))
    along = {
        axis: (
            (points[0], base),
            *((size, _grown(_small(asked, least.of({axis: size})))) for size in points[1:]),
        )
        for axis, points in grows.items()
    }
    return Growth(base, along, likeness)


class _Small(NamedTuple):
    """A schedule of small sizes; the same for many larger ones, which count it once."""

    entry: Entry
    workload: Workload
    mesh: Mesh
    options: Any
    hints: Hints
    folds_members: bool

    @property
    def schedule(self) -> Schedule:
        """It, built."""
        return self.entry.schedule(self.workload, self.mesh, self.options, self.hints)


def _once(function: Callable[[_Small], T]) -> Callable[[_Small], T]:
    """Return a function of a small schedule that counts the same one once. What a builder is told of the machine is
    never the same, and options of its own may have no hash.
    """
    known = lru_cache(maxsize=256)(function)

    @wraps(function)
    def counted(small: _Small) -> T:
        alike = small._replace(hints=Hints())
        return known(alike) if not small.entry.takes_hints and _has_hash(alike) else function(small)

    return counted


def _has_hash(small: _Small) -> bool:
    try:
        hash(small)
    except TypeError:
        return False
    return True


@_once
def _smallest(small: _Small) -> tuple[Counts, Likeness]:
    """Return what a program of the smallest schedule has, and which of its ranks do the same."""
    schedule = small.schedule
    return _counted(schedule), _likeness(schedule, folds_members=small.folds_members)


@_once
def _grown(small: _Small) -> Counts:
    """Return what a program has that is larger along one axis."""
    return _counted(small.schedule)


def _small(asked: Asked, sizes: Sizes) -> _Small:
    """Return a schedule of some sizes that is like the one that is asked for, of one long document in one stage."""
    work, options = asked.workload, asked.options
    mesh = msgspec.structs.replace(asked.mesh, pp=1)  # a stage does what a model of its layers does
    if asked.mesh.pp > 1:
        options = dataclasses.replace(options, pipeline_schedule="1f1b", pipeline_chunks=1, pipeline_layers="")
    now = sizes_of(asked)
    even = 2 * mesh.ulysses * mesh.tp
    tokens = even * max(1, work.seq // now.chunks // mesh.ring // even)  # of a member of the ring, or a chunk
    if now.chunks > 1:
        tokens = options.chunk
    batch = max(1, work.batch // now.micro_batches) * sizes.micro_batches
    workload = msgspec.structs.replace(
        work, seq=tokens * sizes.chunks * sizes.ring, padding=0, batch=batch, layers=sizes.layers,
        documents=msgspec.UNSET, sequences=msgspec.UNSET, pattern=msgspec.UNSET, block_mask=msgspec.UNSET,
    )  # fmt: skip
    if now.micro_batches != sizes.micro_batches:
        options = dataclasses.replace(options, micro_batches=sizes.micro_batches)
    mesh = msgspec.structs.replace(mesh, ring=sizes.ring)
    return _Small(asked.entry, workload, mesh, options, asked.hints, asked.folds_members)


def _middle(schedule: Schedule) -> Program:
    """Return the program of a rank in the middle."""
    ranks = schedule.header.mesh.first_replica
    return schedule.program(ranks[len(ranks) // 2])


def _likeness(schedule: Schedule, *, folds_members: bool) -> Likeness:
    """Return which ranks of a schedule do the same."""
    mesh, program = schedule.header.mesh, _middle(schedule)
    trading = next(group for group in mesh.groups("ulysses") if program.rank in group)
    ends = [[call.fragment.shared for call in schedule.program(rank).calls] for rank in (trading[0], trading[-1])]
    on_host = any(buffer.place == "host" for buffer in program.buffers)  # whose memory GPUs of a node share
    members = len(firsts(roles(schedule)["tp"])) if folds_members and mesh.tp > 1 and not on_host else mesh.tp
    proved = len(schedule.written) if folds(schedule) else mesh.dp
    return Likeness(proved, len(firsts(of_kinds(schedule, "dp"))), ends[0] == ends[1], members)


def _counted(schedule: Schedule) -> Counts:
    """Return what the program of a rank in the middle has."""
    program = _middle(schedule)
    fragments = {call.fragment for call in program.calls}
    ops = [op for fragment in fragments for op in fragment.ops]
    again = sum(len(fragment.ops) for fragment in fragments if isinstance(fragment.ops, Stretched))
    groups = {one.name: len(one.groups[0]) for one in schedule.header.communicators if one.groups}
    members = sum(groups[op.communicator] for op in ops if isinstance(op, Collective))
    peers = {message.peer for op in ops if isinstance(op, Exchange) for message in op.sends}
    return Counts(program.num_ops, len(ops) - again, again, len(program.calls), members, len(peers))


class Estimate(NamedTuple):
    """What a configuration takes at any sizes."""

    asked: Asked
    growth: Growth
    ranks: int | None = None
    """How many programs are built, where that is not those of all that differ; 0 where only the header is."""
    share: float = 1.0
    """Of the seconds: below 1 nothing is proved, so that there are no supersteps."""

    def at(self, sizes: Sizes) -> Effort:
        """Return what it takes at some sizes."""
        asked, growth = self.asked, self.growth
        mesh = msgspec.structs.replace(asked.mesh, ring=sizes.ring)
        ranks = self.ranks
        written, proved, played = growth.likeness.ranks(mesh) if ranks is None else (ranks,) * 3
        supersteps = proved if self.share == 1.0 else 0
        times = Counts(ops=played, written=written, again=written, calls=supersteps, members=written, peers=played)
        each = (count * ranks for count, ranks in zip(growth.at(sizes), times, strict=True))
        counts = (*each, sizes.documents * mesh.ring**2, sizes.striped * mesh.ring**3)
        seconds = math.fsum(count * rate for count, rate in zip(counts, SECONDS, strict=True))
        nbytes = math.fsum(count * rate for count, rate in zip(counts, BYTES, strict=True))
        return Effort(round(counts[0]), START_S + self.share * seconds, START_BYTES + nbytes)


def estimate(asked: Asked, ranks: int | None = None, share: float = 1.0) -> Estimate | None:
    """Return what a configuration takes; None where its builder refuses the small sizes that it is told from."""
    with suppress(Exception):  # whatever a builder raises: it will, or will not, at the size that was asked for
        return Estimate(asked, growth_of(asked), ranks, share)
    return None


def effort_of(asked: Asked) -> Effort | None:
    """Return what a configuration takes; None where it is surely small, or its builder refuses the small sizes that it
    is told from.
    """
    if _is_surely_small(asked, asked.mesh.size) or (told := estimate(asked)) is None:
        return None
    return told.at(sizes_of(asked))


def require_small(asked: Asked, ranks: int | None = None, share: float = 1.0, *, yes: bool = False) -> None:
    """Raise TooLargeError, unless told ``yes``, for what takes longer, or more memory, than is spent without asking:
    with what it would take, and what takes less. ``ranks`` and ``share`` as of ``Estimate``.
    """
    if yes and not _LOG.isEnabledFor(logging.INFO):
        return
    if _is_surely_small(asked, asked.mesh.size if ranks is None else ranks):
        return
    if (told := estimate(asked, ranks, share)) is None:
        return
    what, taken = f"{asked.schedule} of {asked.mesh.size} ranks", told.at(sizes_of(asked))
    _LOG.info("%s: about %s", what, taken)
    if yes or taken.is_small:
        return
    if asked.entry in NAMED.values() and sizes_of(asked).documents <= _FEW:  # else even what is asked here is long
        asked.entry.schedule(asked.workload, asked.mesh, asked.options, asked.hints)  # which may refuse it, and why
    raise _too_large(what, taken, _less(told))


def _is_surely_small(asked: Asked, ranks: int) -> bool:
    """Return whether a configuration, or the share of it that so many ranks do, is too small to be worth counting."""
    size, mesh = sizes_of(asked), asked.mesh
    of_layers = size.layers * size.micro_batches * (8 + mesh.ring + size.chunks**2 // 4)
    return ranks * max(of_layers // 8, mesh.ring + mesh.ulysses // 4) <= 1024 and size.documents <= _FEW


def _too_large(what: str, taken: Effort, less: Iterable[str]) -> TooLargeError:
    wanted = "; ".join((*less, "or set `yes` to go on"))
    return TooLargeError(f"{what}: about {taken}, beyond {MOST_S:g} s or {MOST_BYTES / 1e9:g} GB: {wanted}")


def _less(told: Estimate) -> Iterator[str]:
    """Yield changes each of which alone makes it small enough, with what it then takes."""
    asked, sizes = told.asked, sizes_of(told.asked)
    named: dict[str, Callable[[int], str]] = {
        "ring": lambda at: f"`gpus` {at * asked.mesh.size // sizes.ring}",
        "chunks": lambda at: f"`set` schedule.chunk={asked.workload.seq // at}",
        "layers": lambda at: f"`layers` {at * asked.mesh.pp}",
        "micro_batches": lambda at: f"`set` schedule.micro_batches={at}",
        "documents": lambda at: f"{at} of the `documents`",
    }
    for axis in (*told.growth.along, *(["documents"] if sizes.documents else [])):
        whole = getattr(sizes, axis)
        for at in _fewer(whole, divides=axis not in {"layers", "documents"}):
            if (taken := told.at(sizes.of({axis: at}))).is_small:
                yield f"{named[axis](at)} would take {_time(taken.seconds)}"
                break
    narrower = asked.workload.scope == "step" and not asked.workload.sequences
    for scope in ("layer", "attention") if narrower else ():
        work = msgspec.structs.replace(asked.workload, scope=scope, layers=1)
        narrow = estimate(asked._replace(workload=work), told.ranks, told.share)
        if narrow and (taken := narrow.at(sizes_of(narrow.asked))).is_small:
            yield f"`scope` {scope} would take {_time(taken.seconds)}"
            return


def _fewer(whole: int, *, divides: bool) -> list[int]:
    """Return smaller numbers to try, the largest first: divisors, or halves of halves."""
    if not divides:
        return [whole >> power for power in range(1, whole.bit_length())]
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    return [*(whole // n for n in small[1:]), *reversed(small)]


def effort_of_plans(planners: Sequence[str], documents: int, ranks: int, *, plays: bool = True) -> Effort:
    """Return what plans of so many documents take, and playing them."""
    more = ranks / PLANNED_RANKS
    taken_s = math.fsum(
        (one.planned_s * documents + plays * one.played_s * documents**one.power) * more**one.of_ranks
        for one in (PLANNING[name] for name in planners)
    )
    nbytes = START_BYTES + documents * ranks * PLAN_BYTES
    return Effort(0, START_S + taken_s, nbytes)


def require_few(planners: Sequence[str], documents: int, ranks: int, *, plays: bool = True, yes: bool = False) -> None:
    """Raise TooLargeError, unless told ``yes``, where so many documents take longer to plan than is spent without
    asking: with what it would take, and how many take less.
    """
    what = f"planning {documents} documents on {ranks} ranks by {', '.join(planners)}"
    told = partial(effort_of_plans, planners, ranks=ranks, plays=plays)
    taken = told(documents)
    _LOG.info("%s: about %s", what, taken)
    if yes or taken.is_small:
        return
    fewer = next((count for count in _fewer(documents, divides=False) if told(count).is_small), 1)
    raise _too_large(what, taken, [f"{fewer} of the `documents` would take {_time(told(fewer).seconds)}"])
