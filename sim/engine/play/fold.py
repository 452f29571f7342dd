"""Classes of data-parallel replicas: of those that are equal, on equal nodes, one is played for all.

    replicas on whole nodes ── blocks ── by the speeds of their devices ── classes, the first block of each is played

Nodes share nothing but a fabric that limits nothing, so replicas on nodes of their own meet only where a collective is
over all of them. That one has the cost of its true group and loads the links of the replicas that are played as it does
those of all others; each waits for its members that are played, since the others arrive with them. So times are, to the
bit, those of a play of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sim.schedule.proof.check import Checked
from sim.words.mesh import Mesh
from topology.cluster import Cluster

_NAMED = 8
"""Replicas that a note names."""


class Fold(NamedTuple):
    """What is played of a schedule, and where."""

    checked: Checked
    """Of so many replicas as are played: ranks count through them."""
    cluster: Cluster
    """The devices of these ranks come first."""
    replicas: tuple[int, ...] = ()
    """Which replicas those are, by their numbers in the whole; empty where all ranks are played."""
    equals: tuple[int, ...] = ()
    """For each of them, how many replicas it is played for; empty where all ranks are played."""
    notes: tuple[str, ...] = ()
    """What is to be said of it."""

    @property
    def ranks(self) -> list[int]:
        """The numbers, in the whole schedule, of the ranks that are played."""
        schedule = self.checked.schedule
        if not self.replicas:
            return list(range(schedule.num_ranks))
        return schedule.whole.header.mesh.of_replicas(self.replicas)

    @property
    def counts(self) -> list[int]:
        """How many ranks each of those that are played is played for."""
        mesh = self.checked.schedule.header.mesh
        return [self.equals[mesh.replica(rank)] if self.equals else 1 for rank in range(mesh.size)]

    def of_all(self, of_ranks: Sequence[float]) -> list[float]:
        """Return values of the ranks that were played as often as there are ranks like them."""
        return [value for value, count in zip(of_ranks, self.counts, strict=True) for _ in range(count)]


def fold(checked: Checked, cluster: Cluster) -> Fold:
    """Return what has to be played of a schedule on a cluster: one replica of each class, or all ranks."""
    mesh, per_node = checked.schedule.header.mesh, cluster.spec.gpus_per_node
    if not checked.folds:
        return Fold(checked, cluster)
    if cluster.spec.gpu.kind == "cpu":
        return Fold(checked, cluster, notes=(f"all {mesh.dp} replicas were played: those on a host share its cores",))
    if cluster.spec.fabric is not None or cluster.uneven:
        return Fold(checked, cluster, notes=(f"all {mesh.dp} replicas were played: they share links between nodes",))
    replicas = math.lcm(mesh.replica_stride, per_node) // mesh.replica_stride
    blocks = {} if mesh.dp % replicas else _classes(cluster, mesh, replicas)
    played = [block * replicas + number for block in blocks for number in range(replicas)]
    equals = tuple([count for count in blocks.values() for _ in range(replicas)])
    if len(played) in {0, mesh.dp}:
        return Fold(checked, cluster)
    placed, notes = _placed(cluster, played, mesh), (_note(mesh.dp, played),)
    return Fold(checked.first(len(played)), placed, tuple(played), equals, notes)


def _placed(cluster: Cluster, played: list[int], mesh: Mesh) -> Cluster:
    """Return a cluster on which the devices of some replicas come first."""
    some = set(played)
    order = [*mesh.of_replicas(played), *mesh.of_replicas(one for one in range(mesh.dp) if one not in some)]
    if order == list(range(mesh.size)):
        return cluster
    return Cluster(cluster.spec, [cluster.devices[rank].number for rank in order])


def _note(replicas: int, played: list[int]) -> str:
    """Return what is said of a play of some replicas."""
    if len(played) == 1:
        return f"{replicas} equal data-parallel replicas, of which one was played for all"
    numbers = ", ".join(map(str, played[:_NAMED])) + ("" if len(played) <= _NAMED else ", ...")
    return f"{replicas} data-parallel replicas, of which {len(played)} were played (numbers {numbers}) for all"


def _classes(cluster: Cluster, mesh: Mesh, replicas: int) -> dict[int, int]:
    """Return the first of each class of equal blocks, of so many replicas each, and how many the class has; none where
    blocks are not on whole nodes, or not in the same order of GPUs in each.
    """
    per_node, size = cluster.spec.gpus_per_node, mesh.size // mesh.dp * replicas
    classes: dict[tuple[float, ...], list[int]] = {}
    places: tuple[tuple[int, int], ...] = ()
    for block in range(mesh.dp // replicas):
        ranks = mesh.of_replicas(range(block * replicas, (block + 1) * replicas))
        devices = [cluster.devices[rank] for rank in ranks]
        nodes: dict[int, int] = {}
        own = tuple([(nodes.setdefault(one.node, len(nodes)), one.number % per_node) for one in devices])
        places = places or own
        if own != places or len(nodes) * per_node != size:
            return {}
        classes.setdefault(tuple([device.speed for device in devices]), []).append(block)
    return {first: 1 + len(others) for first, *others in classes.values()}
