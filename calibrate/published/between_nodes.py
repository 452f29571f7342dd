"""Communication among nodes of H100, by nodes and ranks a node: nccl-tests where they ran, NCCL's tuning below that.

A size that was measured is kept as measured. Smaller ones, and other numbers of nodes, follow what NCCL itself takes
for the latency and bandwidth of its algorithms, with the ramps that the source of these has fitted to nccl-tests. Of
all-to-alls that source has the latencies and a ramp on 8 ranks a node; the rate is the measured one. Over the five
octaves below the smallest measured size the model is blended into the measurement.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import NamedTuple

import msgspec

from calibrate.published.reading import Row, geometric_mean, rows, transfer_point
from sim.engine.traffic.collectives import wire_bytes
from sim.schedule.ir.ops import CollectiveName
from sim.words.profile import Point
from topology.cluster import Cluster
from topology.specs import ClusterSpec

CLUSTER = "example-cluster01"
"""Whose NICs have 400 Gb/s; those of the other cluster in the table get a third of it."""
MEASURED_SOURCE = f"xxrjun/nccl-tests-cluster@455de4f, {CLUSTER}: 2 and 10 nodes, 1 to 8 ranks a node"
A100_SOURCE = (
    "all-to-all of 2 x 8 A100-SXM4-80GB over RoCE with 8 NICs, a public note on nccl-tests; smaller ones with latency "
    "and ramp of H100"
)
MODEL_SOURCE = (
    "not measured: smaller sizes, and all-gather, reduce-scatter on 2 to 8 nodes, by NCCL 2.27.5's tuning of H100, "
    "small all-to-alls by 0-byte latencies and ramps, all of meta-pytorch/autoparallel@a54c2529b"
)
_KINDS: dict[str, CollectiveName] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_reduce": "all_reduce",
}
_SMALL = tuple(2**n for n in range(10, 35, 2))
"""Bytes of the whole tensor at which NCCL's tuning is asked."""
_SHORT = 2**18
"""Bytes of messages that fill no channel: a hop of any ring takes what one between two ranks takes."""
_NIC = 50.0
"""GB/s of a NIC of 400 Gb/s, as the fits of all-to-alls take them."""
_JOINT = 5
"""Octaves over which the model goes over into what was measured: from there on down latency is most of the time."""
_MODELLED = (2, 4, 8)
"""Nodes on which the ramps of rings were fitted."""


class _Group(NamedTuple):
    """So many ranks of so many nodes."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def collectives(spec: ClusterSpec) -> Iterator[Point]:
    """Yield collectives over the NICs of H100 nodes: what was measured, and below it what NCCL's tuning says."""
    for kind in _KINDS.values():
        measured = _measured(kind)
        for group in sorted({*measured, *_modelled(kind)}):
            model = (
                partial(_all_to_all_s, group, _NIC, _share(group))
                if kind == "all_to_all"
                else partial(_tuned_s, kind, group)
            )
            for nbytes, seconds in _joined(group, measured.get(group, {}), model):
                yield _point(spec, kind, group, nbytes, seconds)


def all_to_all_of_a100(spec: ClusterSpec) -> Iterator[Point]:
    """Yield all-to-alls on two nodes of 8 A100; below what was measured with the latency and the ramp of H100."""
    group, found = _Group(2, 8), {}
    for row in rows("nccl_a100_alltoall_2_nodes"):
        found[int(row["bytes"])] = float(row["time_us"]) / 1e6
    assert spec.nic is not None
    nic = spec.nic.bytes_per_s / 1e9
    model = partial(_all_to_all_s, group, nic, _rate(group, found) / nic)
    for nbytes, seconds in _joined(group, found, model):
        yield _point(spec, "all_to_all", group, nbytes, seconds)


def _joined(group: _Group, found: dict[int, float], model: Callable[[int], float]) -> Iterator[tuple[int, float]]:
    """Yield bytes and seconds: of a model below the least measured size, and of what was measured."""
    least = min(found, default=0)
    apart = found[least] / model(least) if found else 1.0
    for nbytes in _SMALL:
        if nbytes >= group.ranks and (not found or nbytes < least):
            near = max(0.0, 1 - math.log2(least / nbytes) / _JOINT) if found else 0.0
            yield nbytes, model(nbytes) * apart**near
    yield from sorted(found.items())


def hops(pair: dict[str, dict[int, float]]) -> Iterator[Point]:
    """Yield hops of rings, by the ranks of the ring: inside a node, where NCCL gives each hop fewer channels the more
    ranks a ring has, and over NICs. ``pair`` has those between two ranks alone, by link: short ones take the same in
    any ring, and on two nodes one hop leaves each, whichever ranks pass on to it.
    """
    measured = _rows("sendrecv")
    for group, found in sorted(measured.items()):
        link, nodes = ("nic", group.nodes) if group.nodes > 1 else ("nvlink", None)
        of_pair = {nbytes: s for nbytes, s in pair[link].items() if nbytes <= _SHORT or group.nodes == 2}
        for nbytes, seconds in sorted((of_pair | found).items()):
            yield transfer_point("exchange", link, group.ranks, nbytes, seconds, nodes=nodes)


def _measured(kind: CollectiveName) -> dict[_Group, dict[int, float]]:
    """Return seconds by bytes of what was measured across nodes, by group; none of all-reduce by another table."""
    table = next(name for name, known in _KINDS.items() if known == kind)
    return {group: found for group, found in _rows(table).items() if group.nodes > 1}


def _modelled(kind: CollectiveName) -> Iterable[_Group]:
    """Return the groups of which only the model speaks. Of all-reduce on 8 ranks of two nodes there are times."""
    if kind == "all_to_all":
        return [_Group(nodes, 8) for nodes in _latencies()]
    few = (1, 2, 4) if kind == "all_reduce" else (1, 2, 4, 8)
    return [_Group(nodes, per_node) for nodes in _MODELLED for per_node in few]


@cache
def _rows(table: str) -> dict[_Group, dict[int, float]]:
    found: dict[_Group, dict[int, float]] = defaultdict(dict)
    for row in rows("nccl_h100_multinode_all_collectives"):
        if (row["cluster"], row["collective"]) == (CLUSTER, table):
            group = _Group(int(row["nodes"]), int(row["gpus_per_node"]))
            found[group][int(row["bytes"])] = float(row["time_us_median"]) / 1e6
    return found


def _tuned_s(kind: CollectiveName, group: _Group, nbytes: int) -> float:
    """Return what NCCL takes the best of its algorithms and protocols for, by its own latencies and bandwidths."""
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in _tuning(kind):
        if int(row["ranks_per_node"]) == group.per_node and int(row["nodes"]) in _around(group.nodes, row, kind):
            found[_algorithm(row)].append(row)
    return min(_by_tuning_us(kind, group, nbytes, both) for both in found.values()) / 1e6


def _by_tuning_us(kind: CollectiveName, group: _Group, nbytes: int, both: list[Row]) -> float:
    """Return the time of one algorithm and protocol, between two numbers of nodes if the group's is not there: NCCL's
    latencies grow by hop, those of trees by the logarithm of nodes, which differs little from 8 to 16.
    """
    few, many = both[0], both[-1]
    apart = int(many["nodes"]) - int(few["nodes"])
    share = (group.nodes - int(few["nodes"])) / apart if apart else 0.0
    latency, rate = (
        float(few[name]) + share * (float(many[name]) - float(few[name])) for name in ("latency_us", "bandwidth_GBs")
    )
    ramp = 1.0
    if kind != "all_reduce" and group.per_node == 8:
        ramp = _ramp("all_gather / reduce_scatter", nbytes / group.ranks)
    elif kind == "all_reduce" and few["algorithm"] != "tree" and few["protocol"] == "SIMPLE":
        ramp = _ramp(f"all_reduce ({few['algorithm']})", nbytes / group.ranks)
    return latency + nbytes / (1e3 * rate * ramp)


def _all_to_all_s(group: _Group, nic: float, share: float, nbytes: int) -> float:
    """Return an all-to-all by its latency on so many nodes, a share of the NIC's GB/s, and the ramp."""
    part = nbytes / group.ranks
    ramp = 1 - (1 - _ramp("all_to_all", part)) / max(math.log2(group.nodes), 1.0)
    return _latency_us(group.nodes) / 1e6 + _across(group, nbytes) / (1e9 * nic * share * ramp)


def _share(group: _Group) -> float:
    """Return the share of an H100's NIC that large all-to-alls get: as measured, or as fitted for 8 ranks a node; where
    both are, their mean.
    """
    found = _measured("all_to_all").get(group)
    measured = [_rate(group, found) / _NIC] if found else []
    return geometric_mean([*measured, *([1 - 0.44 / group.nodes] if group.per_node == 8 else [])])


def _rate(group: _Group, found: dict[int, float]) -> float:
    """Return the GB/s of a NIC in the largest of some all-to-alls."""
    nbytes = max(found)
    return _across(group, nbytes) / found[nbytes] / 1e9


def _across(group: _Group, nbytes: int) -> float:
    """Return the bytes that a rank sends to other nodes."""
    return nbytes * (group.ranks - group.per_node) / group.ranks


@cache
def _latencies() -> dict[int, float]:
    """Return microseconds of all-to-alls of no bytes, by nodes of 8."""
    return {
        int(row["gpus_or_bytes"]) // 8: float(row["value"])
        for row in _fits()
        if row["collective"] == "all_to_all" and row["what"].startswith("latency") and row["where"].endswith("x 8")
    }


def _latency_us(nodes: int) -> float:
    """Return that of any number of nodes, linear between two."""
    known = _latencies()
    below = max(count for count in known if count <= nodes)
    above = min((count for count in known if count >= nodes), default=below)
    share = (nodes - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])


def _ramp(collective: str, nbytes: float) -> float:
    """Return the share of the bandwidth that messages of so many bytes a rank get."""
    known = _ramps(collective)
    return known[max((size for size in known if size <= nbytes), default=min(known))]


@cache
def _ramps(collective: str) -> dict[int, float]:
    return {
        int(row["gpus_or_bytes"]): float(row["value"])
        for row in _fits()
        if row["collective"] == collective and "ramp" in row["what"]
    }


@cache
def _fits() -> list[Row]:
    return list(rows("nccl_h100_empirical_ramps"))


@cache
def _tuning(kind: CollectiveName) -> list[Row]:
    return [row for row in rows("nccl_h100_tuning_lat_bw_by_nodes_ppn") if kind in row["collective"].split("/")]


def _around(nodes: int, row: Row, kind: CollectiveName) -> set[int]:
    """Return the numbers of nodes next to a wanted one that NCCL's tuning has for an algorithm."""
    same = [other for other in _tuning(kind) if _algorithm(other) == _algorithm(row)]
    known = sorted({int(other["nodes"]) for other in same})
    below = max((count for count in known if count <= nodes), default=known[0])
    return {below, min((count for count in known if count >= nodes), default=below)}


def _algorithm(row: Row) -> tuple[str, ...]:
    return row["algorithm"], row["protocol"], row["ranks_per_node"]


def _point(spec: ClusterSpec, kind: CollectiveName, group: _Group, nbytes: int, seconds: float) -> Point:
    ranks = tuple(node * spec.gpus_per_node + place for node in range(group.nodes) for place in range(group.per_node))
    wire, link = wire_bytes(kind, ranks, nbytes, _cluster(msgspec.json.encode(spec), group.nodes))
    return transfer_point(kind, link, group.ranks, wire, seconds, nodes=group.nodes)


@cache
def _cluster(spec: bytes, nodes: int) -> Cluster:
    return Cluster(msgspec.structs.replace(msgspec.json.decode(spec, type=ClusterSpec), nodes=nodes))
