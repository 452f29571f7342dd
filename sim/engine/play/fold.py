"""Classes of equal replicas and of equal members of tensor-parallel groups: of each, one is played for all.

    roles of a schedule ── whole nodes, or GPUs without common links ── by speeds ── classes, the first is played

Who plays for others needs links of its own. Replicas have them on nodes of their own, which share nothing but a fabric
that limits nothing; members in nodes whose GPUs share no link. Then they meet only where a collective is over all of
them. That one has the cost of its true group and loads the links of the ranks that are played as it does those of all
others; each waits for its members that are played, since the others arrive with them. So times are, to the bit, those
of a play of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sim.base.kept import kept
from sim.schedule.derive.roles import firsts, roles
from sim.schedule.proof.check import Checked
from sim.words.mesh import Axis, Mesh
from topology.cluster import Cluster
from topology.specs import ClusterSpec

_NAMED = 8
"""Replicas, or members, that a note names."""
_CALLED: dict[Axis, str] = {"dp": "data-parallel replicas", "tp": "members of each tensor-parallel group"}

Played = Mapping[Axis, Mapping[int, Sequence[int]]]
"""By axis the places that are played, each with those that it is played for; of an axis that is not there all."""


class Fold(NamedTuple):
    """What is played of a schedule, and where."""

    checked: Checked
    """Of as many ranks as are played: they count through."""
    cluster: Cluster
    """The devices of these ranks come first."""
    played: Mapping[Axis, Mapping[int, Sequence[int]]] = {}
    """See Played."""
    notes: tuple[str, ...] = ()
    """What is to be said of it."""

    @property
    def ranks(self) -> list[int]:
        """The numbers, in the whole schedule, of the ranks that are played."""
        return _mesh(self.checked).at(_places(self.played))

    @property
    def counts(self) -> list[int]:
        """How many ranks each of those that are played is played for."""
        places = map(_mesh(self.checked).place, self.ranks)
        return [math.prod(len(of[place[axis]]) for axis, of in self.played.items()) for place in places]

    @property
    def members(self) -> list[list[int]]:
        """By rank that is played the ranks of its tensor-parallel group, in the whole schedule, that it is played for,
        but for itself.
        """
        mesh, found = _mesh(self.checked), list[list[int]]()
        for rank in self.ranks:
            own = mesh.place(rank)["tp"]
            others = [other for other in self.played.get("tp", {own: [own]})[own] if other != own]
            found.append(mesh.along(rank, "tp", others))
        return found

    def number_of(self, rank: int) -> int:
        """Return which of the ranks that are played, counted through, is played for a rank of the whole schedule."""
        mesh = _mesh(self.checked)
        for axis, places in self.played.items():
            own = mesh.place(rank)[axis]
            (rank,) = mesh.along(rank, axis, [one for one, others in places.items() if own in others])
        return self.ranks.index(rank)

    def of_all(self, of_ranks: Sequence[float]) -> list[float]:
        """Return values of the ranks that were played as often as there are ranks like them."""
        return [value for value, count in zip(of_ranks, self.counts, strict=True) for _ in range(count)]


def fold(checked: Checked, cluster: Cluster, *, members: bool = True) -> Fold:
    """Return what has to be played of a schedule on a cluster: ranks of each class, or all. ``members`` says whether
    those of a tensor-parallel group may be equal: with noise they are not.
    """
    mesh, played = checked.schedule.header.mesh, dict[Axis, Mapping[int, Sequence[int]]]()
    alike = {axis: places for axis, places in roles(checked.schedule).items() if len(set(places)) < len(places)}
    if not members:
        alike.pop("tp", None)
    if alike and (why := why_all(cluster.spec)):
        notes = (f"all {mesh.dp} replicas were played: {why}",) if "dp" in alike else ()
        return Fold(checked, cluster, notes=notes)
    if "dp" in alike:
        played |= _replicas(alike["dp"], cluster, mesh)
    if "tp" in alike and folds_members(cluster.spec) and not _is_on_host(checked):
        played |= _members(alike["tp"], cluster, mesh, played)
    if not played:
        return Fold(checked, cluster)
    some = checked.at(_places(played))
    return Fold(some, _placed(cluster, some.schedule.order), played, tuple(_notes(played, mesh)))


def folds_members(spec: ClusterSpec) -> bool:
    """Return whether a machine lets equal members of a tensor-parallel group be played as one."""
    return spec.has_links_apart and not why_all(spec)


def _mesh(checked: Checked) -> Mesh:
    return checked.schedule.whole.header.mesh


def _places(played: Played) -> dict[Axis, list[int]]:
    return {axis: sorted(of) for axis, of in played.items()}


def why_all(spec: ClusterSpec) -> str:
    """Return why all ranks are played on a cluster, empty where they need not."""
    if spec.gpu.kind == "cpu":
        return "those on a host share its cores"
    if spec.fabric is not None or spec.uneven:
        return "they share links between nodes"
    return ""


def _placed(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """Return a cluster on which the devices of some ranks come first."""
    if list(order) == list(range(len(order))):
        return cluster
    return cluster.placed([cluster.devices[rank].number for rank in order])


def _notes(played: Played, mesh: Mesh) -> Iterator[str]:
    """Yield what is said of a play of some places."""
    for axis, places in played.items():
        degree, named = mesh.degrees[axis], _CALLED[axis]
        if len(places) == 1:
            yield f"{degree} equal {named}, of which one was played for all"
            continue
        numbers = ", ".join(map(str, sorted(places)[:_NAMED])) + ("" if len(places) <= _NAMED else ", ...")
        yield f"{degree} {named}, of which {len(places)} were played (numbers {numbers}) for all"


def _replicas(alike: Sequence[int], cluster: Cluster, mesh: Mesh) -> Played:
    """Return which replicas are played: of each class of equal blocks of them, on whole nodes, the first. None where
    blocks are not on whole nodes, or not in the same order of GPUs in each.
    """
    per_node = cluster.spec.gpus_per_node
    each = math.lcm(mesh.replica_stride, per_node) // mesh.replica_stride
    classes: dict[tuple[tuple[int, ...], tuple[float, ...]], list[int]] = {}
    places: tuple[tuple[int, int], ...] = ()
    for first in range(0, mesh.dp, each):
        block = range(first, first + each)
        if block.stop > mesh.dp:
            return {}
        devices = [cluster.devices[rank] for rank in mesh.at({"dp": block})]
        nodes: dict[int, int] = {}
        own = tuple([(nodes.setdefault(one.node, len(nodes)), one.number % per_node) for one in devices])
        places = places or own
        if own != places or len(nodes) * per_node != len(devices):
            return {}
        kind = tuple([alike[replica] for replica in block]), tuple([device.speed for device in devices])
        classes.setdefault(kind, []).append(first)
    played = {blocks[0] + at: [block + at for block in blocks] for blocks in classes.values() for at in range(each)}
    return {"dp": played} if len(played) < mesh.dp else {}


def _members(alike: Sequence[int], cluster: Cluster, mesh: Mesh, played: Played) -> Played:
    """Return which members of tensor-parallel groups are played, in the replicas that are: of each class on the same
    nodes, with GPUs that are as fast, the first.
    """
    classes: dict[tuple[int, tuple[tuple[int, float], ...]], list[int]] = {}
    for member, role in enumerate(alike):
        devices = (cluster.devices[rank] for rank in mesh.at({**_places(played), "tp": [member]}))
        classes.setdefault((role, tuple([(one.node, one.speed) for one in devices])), []).append(member)
    return {"tp": {members[0]: members for members in classes.values()}} if len(classes) < mesh.tp else {}


@kept
def _is_on_host(checked: Checked) -> bool:
    """Return whether a schedule keeps anything in the memory of hosts, which GPUs of a node share."""
    schedule = checked.schedule
    ranks = schedule.header.mesh.at({axis: firsts(places) for axis, places in roles(schedule).items()})
    return any(buffer.place == "host" for fragment in schedule.fragments(ranks) for buffer in fragment.own)
