"""How many SMs a communication kernel holds: NCCL runs a block on an SM for each channel that the kernel uses.

A communicator inside a node has the channels of ``gpu.communication_sms``, one over nodes those of its NICs. A
collective takes all of them. A message takes a few, by the links to its peer, the ranks of the communicator and its
bytes. So NCCL has it in src/graph/paths.cc (ncclTopoComputeP2pChannels) and src/enqueue.cc (scheduleP2pTasksToPlan,
addP2pToPlan, getAlgoInfo), read from memory of 2.18 to 2.29. Measured times show the same steps: send/receive in rings
of 4 and 8 H100 runs at 20 GB/s for each of 8 and 4 channels up to 128 and 64 MiB, of 8 from there to 128 MiB, of 16 at
256 MiB (xxrjun/nccl-tests-cluster@455de4f, NCCL 2.29.2); between two A800 at 143 GB/s up to 128 MiB and at 155 from 160
MiB, 8 and 16 channels (oliverYoung2001/UltraAttn@b5aa10e prof_data/fit/cb_8_g01_all.log).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from sim.schedule.ir.ops import AllReduce, AllToAll, CollectiveName
from topology.cluster import Cluster
from topology.specs import ClusterSpec, LinkSpec

_BYTES_A_CHANNEL = 512 * 64
"""Of a collective with fewer bytes for each channel fewer channels run: 64 for each of the 512 threads of a block."""
_CHUNK = 2**17
"""Bytes of a step of a message; NVLink has four times as many."""


class _Communicator(NamedTuple):
    channels: int
    """Of its collectives."""
    link: LinkSpec | None
    """The slowest that its ranks need to reach each other."""
    chunk: int


def cores_of_threads(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    """Return the cores that a rank's threads of TCP take to send at the rate of the slowest link between ranks, and as
    many to receive; 0 where transfers share cores with kernels as if they computed (no ``host.transfer_s_per_byte``).

    On slow links these threads mostly sleep. Linux gives a core at once to a thread that has used less than its share
    (EEVDF, kernel/sched/fair.c), so kernels get what they leave, as they do of a GPU's SMs. Messages at once each have
    a share of the link, and packets and timers are the link's, so they are taken once for all that a rank sends. Some
    of the cores is always left.
    """
    host = cluster.spec.host
    if host is None or host.transfer_s_per_byte is None or len(ranks) == 1:
        return 0.0
    slowest = min(cluster.route(*pair).bytes_per_s for pair in pairwise(ranks))
    ranks_here = len(cluster.devices) if host.shared else cluster.spec.gpus_per_node
    side = host.transfer_cores + host.transfer_s_per_byte * slowest
    return float(min(side, host.cores / (2 * (ranks_here + 1))))


def held_by_collective(cluster: Cluster, name: CollectiveName, ranks: tuple[int, ...], nbytes: int) -> float:
    """Return the SMs that a collective holds on each of its ranks; ``nbytes`` is one part (of AllReduce the whole).

    An all-to-all is messages to all ranks. One rank alone runs no kernel.
    """
    if cluster.spec.gpu.kind == "cpu":
        return 0.0
    if name == AllToAll.name:
        return held_by_messages(cluster, ranks, len(ranks), nbytes)
    if len(ranks) == 1:
        return 0.0
    moved = nbytes if name == AllReduce.name else nbytes * len(ranks)
    found = _communicator(cluster.spec, nodes_of(cluster, ranks), len(ranks))
    return float(min(found.channels, max(1, moved // _BYTES_A_CHANNEL)))


class Peer(NamedTuple):
    """The channels of messages to one peer, within some communicator."""

    least: int
    most: int
    smallest: int
    """Bytes below which a channel less runs, of ``least``."""
    largest: int
    """Bytes of a channel beyond which there are twice as many, up to ``most``."""

    def channels(self, nbytes: float) -> int:
        """Return the channels of a message of so many bytes."""
        found = max(1, min(self.least, math.ceil(nbytes / self.smallest)))
        while nbytes > found * self.largest and 2 * found <= self.most:
            found *= 2
        return found

    def busiest(self, nbytes: float) -> float:
        """Return the bytes of the busiest channel of a message of so many bytes, or of a smaller one."""
        channels = self.channels(nbytes)
        return max(nbytes / channels, self.largest if channels > self.least else 0)

    def apart(self, other: Peer) -> float:
        """Return how many octaves two lie apart."""
        return abs(math.log2(self.least / other.least)) + abs(math.log2(self.most / other.most))

    def has_fewer(self, other: Peer) -> bool:
        """Return whether messages of some size have fewer channels than with another one."""
        return self.least < other.least or self.most < other.most


def peer_of(spec: ClusterSpec, nodes: int, ranks: int) -> Peer | None:
    """Return what NCCL gives messages within a communicator of so many ranks on so many nodes: the fewer channels the
    more ranks there are, and inside a node as many as over NICs if there are several nodes. None where links say no
    ``peer_sms``.
    """
    channels, link, chunk = _communicator(spec, nodes, ranks)
    if spec.gpu.kind == "cpu" or link is None or link.peer_sms is None or not channels:
        return None
    every = _power_of_2(channels)
    least = most = min(_power_of_2(link.peer_sms), every)
    while least * ranks > every and least > 1:
        least //= 2
    while most * ranks > 4 * every and most > 1:
        most //= 2
    return Peer(least, most, chunk // 8, chunk * 32) if nodes == 1 else Peer(least, most, chunk // 2, chunk)


def held_by_messages(cluster: Cluster, group: tuple[int, ...], peers: int, nbytes: int) -> float:
    """Return the SMs that an Exchange holds within a communicator: with so many peers, its largest message of so many
    bytes; none with no peers, whose memory copy engines write.
    """
    spec, nodes = cluster.spec, nodes_of(cluster, group)
    if spec.gpu.kind == "cpu" or not peers:
        return 0.0
    every, peer = _communicator(spec, nodes, len(group)).channels, peer_of(spec, nodes, len(group))
    if peer is None:
        return float(every)
    return float(min(peer.channels(nbytes) * peers, _power_of_2(every), spec.gpu.sms - 1))


def nodes_of(cluster: Cluster, ranks: tuple[int, ...]) -> int:
    """Return on how many nodes some ranks are."""
    return len({cluster.devices[rank].node for rank in ranks})


def _communicator(spec: ClusterSpec, nodes: int, ranks: int) -> _Communicator:
    channels = spec.gpu.communication_sms
    if nodes == 1:
        nvlink = None if spec.bridged_gpus and ranks > spec.bridged_gpus else spec.nvlink
        return _Communicator(channels, nvlink or spec.pcie, _CHUNK * 4 if nvlink else _CHUNK)
    if spec.nic and spec.nic.peer_sms is not None:
        nics = -(-ranks * (spec.nic.per_node or spec.gpus_per_node) // (nodes * spec.gpus_per_node))
        channels = min(channels, spec.nic.peer_sms * nics)
    return _Communicator(channels, spec.nic, _CHUNK)


def _power_of_2(count: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << (count - 1).bit_length()
