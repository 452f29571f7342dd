"""The objects that names stand for: what is played, on what."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import msgspec

from sim.base.errors import LengthError
from sim.engine.costs.cost import CostModel
from sim.engine.play.fold import folds_members
from sim.engine.play.jitter import STEADY, Jitter
from sim.engine.play.simulate import Engine
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import Entry
from sim.schedule.methods.hints import Hints
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked
from sim.schedule.proof.remembered import check_once
from sim.setup import names
from sim.setup.effort import BUILT, Asked, require_small
from sim.setup.masks import Kept
from sim.setup.names import PLACEMENTS
from sim.setup.prediction import blaming_the_builder, built
from sim.words.mesh import AXES, Mesh
from sim.words.options import AllocatorName
from sim.words.profile import Profile
from sim.words.workload import Workload
from topology.cluster import Cluster, cluster_of
from topology.specs import ClusterSpec


def _filled(workload: Workload, error: LengthError) -> Workload:
    """Return a workload whose sequences have the lengths that a layout wants."""
    if not workload.sequences:
        padding = workload.padding + error.above - workload.seq
        return msgspec.structs.replace(workload, seq=error.above, padding=padding)
    sequences = tuple(
        [msgspec.structs.replace(one, padding=one.padding + -one.seq % error.multiple) for one in workload.sequences]
    )
    return msgspec.structs.replace(workload, sequences=sequences, seq=max(one.seq for one in sequences))


@dataclass(frozen=True)
class Configuration:
    """What a setup stands for."""

    schedule: str
    """As the user named it."""
    workload: Workload
    mesh: Mesh
    options: Any
    """Of the schedule; None if it takes none."""
    entry: Entry
    spec: ClusterSpec
    profile: Profile | None
    jitter: Jitter = STEADY
    engine: Engine = "auto"
    one_device: bool = False
    yes: bool = False

    def has_schedule_of(self, other: Configuration) -> bool:
        """Return whether another configuration has the same schedule, on any machine. Never where the builder asks
        about the machine.
        """

        def what(one: Configuration) -> tuple[object, ...]:
            return one.entry, one.workload, one.mesh, one.options, one.one_device

        return what(self) == what(other) and not self.entry.takes_hints

    @property
    def asked(self) -> Asked:
        """What is to be built."""
        alike = folds_members(self.spec) and not self.jitter.share  # members whose noise differs are not
        return Asked(self.schedule, self.entry, self.workload, self.mesh, self.options, self.hints, alike)

    def built(self, ranks: int | None = None, share: float = BUILT) -> Schedule:
        """Return the schedule. ``ranks`` is how many ranks' programs will be used, by default all; ``share`` is as of
        ``Estimate``. Raises InputError also where a builder of the user's fails, and TooLargeError where building takes
        longer than is spent without asking.
        """
        require_small(self.asked, ranks, share, yes=self.yes)
        return built(self.entry, self.workload, self.mesh, self.options, self.hints)

    def checked(self) -> Checked:
        """Return the schedule, built and proved; raises InputError also where a builder of the user's fails."""
        schedule = self.built(share=1.0)
        with blaming_the_builder():
            checked = check_once(schedule)
        return check_once(on_one_device(checked)) if self.one_device else checked

    def padded(self) -> Configuration:
        """Return it with as many tokens of padding as the schedule needs, first its layout and then groups that have
        parts of it; of sequences with documents of their own each by itself.
        """
        found = self
        for _ in range(2 * len(self.workload.forms)):
            try:
                found.built(ranks=0, share=1.0)
            except LengthError as error:
                found = dataclasses.replace(found, workload=_filled(found.workload, error))
            else:
                break
        return found

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster, built."""
        return cluster_of(self.spec)

    @property
    def allocator(self) -> AllocatorName | None:
        """What gives tensors their memory; None where that is not known."""
        return self.profile.allocator if self.profile else None

    @property
    def hints(self) -> Hints:
        """What a builder may ask: the cost model is made when it first does."""
        cost = cache(lambda: CostModel(self.cluster, self.profile))
        return Hints(self.spec.gpus_per_node, lambda use: cost().kernel_seconds(0, use)[0])

    @property
    def title(self) -> str:
        """One line that names what is played."""
        w = self.workload
        ranks = f"{self.mesh.size} ranks on one" if self.one_device else f"{self.mesh.size} x"
        scope = names.scope_title(w.scope, w.layers)
        length = f"S {w.seq}" + (f" ({w.padding} of them padding)" if w.padding else "")
        mask = Kept(w.mask, w.window, w.pattern or None).name
        mask += f", {len(w.document_lengths)} documents" if len(w.document_lengths) > 1 else ""
        if w.sequences:
            length = f"S {min(one.seq for one in w.sequences)} to {w.seq}"
            mask += f", {sum(len(one.documents) for one in w.sequences)} documents"
        return (
            f"{self._schedule_title}, {scope} of {w.model.name}, {w.passes}: {length}, B {w.batch}, {w.dtype}, {mask}, "
            f"{ranks} {self.spec.gpu.name} ({self.spec.name})"
        )

    @property
    def _schedule_title(self) -> str:
        """The schedule with what was chosen of it: degrees where there are two, options that are not the default, and
        how often key/value heads are replicated.
        """
        mesh, kv_heads = self.mesh, self.workload.model.num_kv_heads
        said = [f"TP {mesh.tp}"] if mesh.tp > 1 else []
        if mesh.ulysses > 1 and mesh.ring > 1:
            said.append(f"U {mesh.ulysses} x R {mesh.ring}")
        if mesh.pp > 1:
            said.append(f"{mesh.pp} stages")
        if mesh.dp > 1:
            said.append(f"{mesh.dp} replicas")
        said += [f"placement {name}" for name, order in PLACEMENTS.items() if order == mesh.order != AXES]
        for name, value in msgspec.to_builtins(self.options or {}).items():
            if value != getattr(self.entry.declared, name):
                said.append(f"{name} {str(value).lower() if isinstance(value, bool) else value}")
        if (shared := mesh.ulysses * mesh.tp) > kv_heads:
            said.append(f"each of {kv_heads} key/value heads on {shared // kv_heads} ranks")
        return self.schedule + (f" ({', '.join(said)})" if said else "")
