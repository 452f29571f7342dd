"""The proof-reader: plays a schedule on abstract contents and proves that it computes attention, before anything runs.

It proves that ops of different ranks match and cannot deadlock, that nothing is read before it is written, that every
unmasked (query, key) pair of every head is attended exactly once in each pass, that every gradient arrives once at its
owner, and that FLOPs and bytes equal what the builder claims. Which inputs are allowed and which outputs due it knows
of schedules with claims only; others, as those that time a link, are free to compute what they like. Races between ops
are excluded by construction, since dependencies are derived from the same views that are played here (what is used anew
of memory, by ``sim.accounts.memory``); an op that collides with itself is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from sim.base.errors import InputError, ScheduleError
from sim.base.garbage import garbage_collection_off
from sim.schedule.derive.dependencies import Dependencies, derive
from sim.schedule.derive.kernels import KernelUse, kernel_flops, kernel_uses
from sim.schedule.derive.matching import Matching, match, wire_bytes
from sim.schedule.derive.replicas import folds, stand_for
from sim.schedule.ir.forms import Form
from sim.schedule.ir.ops import STREAMS
from sim.schedule.ir.program import Communicator, Program, Schedule
from sim.schedule.model.scope import ports_of
from sim.schedule.proof.abreast import is_proved_abreast
from sim.schedule.proof.abstract import AbstractPlayer
from sim.schedule.proof.classes import axes_of, is_proved_by_classes
from sim.schedule.proof.contents import Unclassed
from sim.schedule.proof.supersteps import Declined, Supersteps
from sim.schedule.proof.wellformed import check_program
from sim.words.mesh import Axis
from sim.words.workload import Workload


class RankSchedule(NamedTuple):
    """What one rank needs of a checked schedule to execute its program, in a process of its own."""

    num_ranks: int
    workload: Workload
    communicators: tuple[Communicator, ...]
    program: Program
    dependencies: Dependencies
    members: int = 1
    """Of each tensor-parallel group."""


class Checked:
    """A schedule that ``check`` has proved, and what is derived of it; both players start from it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._some: dict[Hashable, Checked] = {}

    def at(self, places: Mapping[Axis, Sequence[int]]) -> Checked:
        """Return what is proved, or played, for the whole schedule where ranks at some places stand for all."""
        key = tuple([(axis, *some) for axis, some in places.items()])
        if key not in self._some:
            self._some[key] = Checked(self.schedule.at(places))
        return self._some[key]

    @cached_property
    def matching(self) -> Matching:
        """Which communication ops meet."""
        return match(self.schedule)

    @cached_property
    def dependencies(self) -> list[Dependencies]:
        """Per rank which ops wait for which."""
        return [derive(program) for program in self.schedule.programs]

    @cached_property
    def kernels(self) -> list[list[KernelUse | None]]:
        """Per rank and op the kernel that it runs, None for communication and synchronisation."""
        return [kernel_uses(program) for program in self.schedule.programs]

    def of_rank(self, rank: int) -> RankSchedule:
        """Return what a rank needs to execute its program."""
        header = self.schedule.header
        return RankSchedule(
            self.schedule.num_ranks,
            header.workload,
            header.communicators,
            self.schedule.program(rank),
            self.dependencies[rank],
            header.members,
        )


@garbage_collection_off()
def check(schedule: Schedule) -> Checked:
    """Return the schedule with its matching and dependencies; raises ScheduleError that names the op at fault."""
    named = Counter(communicator.name for communicator in schedule.header.communicators)
    if twice := [name for name, count in named.items() if count > 1]:
        raise ScheduleError(f"communicators {', '.join(map(repr, twice))} are there twice: give each a name of its own")
    for communicator in schedule.header.communicators:
        if communicator.name in STREAMS:
            raise ScheduleError(f"communicator {communicator.name!r} has the name of a stream: give it another one")
        members = [rank for group in communicator.groups for rank in group]
        if len(set(members)) < len(members) or not set(members) <= set(range(schedule.num_ranks)):
            what = f"communicator {communicator.name!r} has groups {communicator.groups}"
            raise ScheduleError(f"{what}: give each of ranks 0..{schedule.num_ranks - 1} one place at most")
    checked = Checked(schedule)
    one = checked.at({"dp": schedule.written}) if folds(schedule) else checked
    if schedule.rows_later and one is not checked and _is_proved_by_calls(one):
        return checked
    proved = one if schedule.replicated else checked
    if not _is_proved_by_calls(proved):
        _prove(proved)
    return checked


def _prove(checked: Checked, *, together: bool = True) -> None:
    """Prove a schedule by all of its ops: many ranks ``together`` where that does, else rank by rank."""
    schedule = checked.schedule
    sound: set[Form] = set()
    for program in schedule.programs:
        check_program(program, schedule, sound)
    matching, dependencies = checked.matching, checked.dependencies
    _check_ports(schedule)
    played = schedule, matching, dependencies
    if not (together and (is_proved_by_classes(*played) or is_proved_abreast(*played))):
        AbstractPlayer(*played).run()
    _check_claims(checked, wire_bytes(schedule, matching))


def _is_proved_by_calls(checked: Checked) -> bool:
    """Return whether a schedule is proved by its calls; where it is not, a proof by all ops decides, and says why."""
    for along in (*axes_of(checked.schedule), ()):
        try:
            supersteps = Supersteps(checked.schedule, along)
            _check_ports(checked.schedule)
            supersteps.play()
            _check_claims(checked, supersteps.wire_bytes)
        except Declined:
            return False
        except (Unclassed, InputError):
            continue
        return True
    return False


def _check_ports(schedule: Schedule) -> None:
    """Raise where inputs or outputs are not those of the scope: what a builder claims to compute, it has to compute.

    Which rank owns what is seen by the abstract player. Schedules without claims, as those that time a link, are free.
    """
    if schedule.header.claims is None:
        return
    given, asked, others = ports_of(schedule.header.workload)
    allowed = {"input": given, "output": asked | others}
    left: set[tuple[str, int]] = set()
    for program in schedule.programs:
        for what, ports in (("input", program.inputs), ("output", program.outputs)):
            found = {(port.tensor, port.layer) for port in ports}
            for tensor, layer in sorted(found - allowed[what]):
                raise ScheduleError(f"rank {program.rank} has no use for the {what} {tensor} of layer {layer}")
        left |= found
    for tensor, layer in sorted(asked - left):
        raise ScheduleError(f"no rank has the output {tensor} of layer {layer}")


def _check_claims(checked: Checked, sent: int) -> None:
    """Raise where FLOPs or bytes that are sent differ from what the builder claims by its paper's formula."""
    claims = checked.schedule.header.claims
    if claims is None:
        return
    claimed = {"attention": claims.attention_flops, "gemm": claims.gemm_flops}
    alike, replica = list(map(len, stand_for(checked.schedule))), checked.schedule.header.mesh.replica
    found = [
        (kernel, alike[replica(program.rank)] * flops)
        for program in checked.schedule.programs
        for kernel, flops in kernel_flops(program).items()
    ]
    for name, expected in claimed.items():
        flops = sum(of_kernel for kernel, of_kernel in found if kernel.startswith(name))
        if flops != expected:
            raise ScheduleError(f"{name} takes {flops} FLOPs, but {claims.source} says {expected}")
    if sent != claims.wire_bytes:
        raise ScheduleError(f"{sent} bytes are sent, but {claims.source} says {claims.wire_bytes}")
