"""What messages between two ranks and collectives of a group take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import cache, partial
from typing import NamedTuple

from sim.base.errors import InputError
from sim.engine.channels import Peer, peer_of
from sim.engine.costs.moving import Moving, MovingCosts
from sim.engine.costs.phases import Activity, Flow, Latency
from sim.engine.costs.transfer_table import Spread
from sim.engine.traffic.collectives import algorithm, link_traffic, usual_traffic
from sim.engine.traffic.least import least_seconds, needs
from sim.engine.traffic.ways import by_node
from sim.schedule.ir.ops import Barrier, Collective
from topology.cluster import Cluster
from topology.fabric.resources import LINKS


class _Like(NamedTuple):
    """What messages take that are alike but for the numbers of what they pass."""

    before: Activity
    """What comes before the flow."""
    seconds: float
    """Of the flow."""
    demands: list[tuple[int, float]]
    """Of the flow, by place among what a message passes."""


class MessageCosts:
    """What ranks of one cluster send. What is alike is costed once."""

    def __init__(self, cluster: Cluster, moving: MovingCosts, warnings: set[str]) -> None:
        """``warnings`` gets what of the software makes messages slower, and can be avoided."""
        self._cluster, self._moving, self._warnings = cluster, moving, warnings
        self._transfers_found: dict[tuple[int, int, int, int], Activity] = {}
        self.copied = cache(self._copied)
        self._alike = cluster.spec.fabric is None and not cluster.uneven
        """Whether messages between like places of any nodes take as long."""
        self._like: dict[Hashable, _Like] = {}
        """By places in nodes, bytes, spread and channels of a message."""
        self._passing: dict[Hashable, _Like] = {}
        """By what it passes, bytes, spread and channels of a message."""
        self._counted: dict[int, tuple[tuple[int, ...], Counter[int]]] = {}
        self._collective_cache: dict[tuple[type, tuple[int, ...], int], Activity] = {}
        self._peer = cache(partial(peer_of, cluster.spec))

    def transfer(self, source: int, target: int, nbytes: int, group: tuple[int, ...]) -> Activity:
        """Return what one rank sends to another: latency, then a flow over the links of the route and both memories.

        ``group`` are the ranks of the communicator: on a host they all exchange at the same time, and NCCL gives each
        hop fewer channels the more ranks it has. Messages between like places of nodes are costed once, unless a fabric
        or a slow port makes their routes different.
        """
        key = (source, target, nbytes, id(group))
        found = self._transfers_found.get(key)
        if found is None:
            found = self._transfers_found[key] = self._find_transfer(source, target, nbytes, group)
        return found

    def _copied(self, source: int, target: int, nbytes: int, group: tuple[int, ...]) -> Activity:
        """Return what a copy engine writes into the memory of another GPU: at the rate of the links, which is one that
        copy engines were measured to have (``payload`` of NVLink, topology/hardware), behind their latency; what waits
        for it is handed over as behind any stream. On a CPU it is a message. Raises InputError where the other is in
        another node.
        """
        cluster = self._cluster
        if cluster.spec.gpu.kind == "cpu":
            return self.transfer(source, target, nbytes, group)
        if cluster.devices[source].node != cluster.devices[target].node:
            raise InputError(
                f"ranks {source} and {target} are on two nodes, and copy engines reach no other one: `set` "
                f"schedule.tp_overlap=shards or gradients, or a `tp_degree` of the GPUs of a node"
            )
        route = cluster.route(source, target)
        return self._moving.copied(self._moving.along("exchange", (source, target), Spread(1, 2.0), route, nbytes))

    def _find_transfer(self, source: int, target: int, nbytes: int, group: tuple[int, ...]) -> Activity:
        here, there = self._cluster.devices[source], self._cluster.devices[target]
        route, near = self._cluster.route(source, target), here.node == there.node
        counted = self._counted.get(id(group))
        if counted is None:  # kept with the group itself, so that no other one gets its id
            counted = self._counted[id(group)] = (group, Counter(self._cluster.devices[rank].node for rank in group))
        per_node, nodes = (counted[1][here.node], 1) if near else (len(group) / len(counted[1]), len(counted[1]))
        peer = self._peer(len(counted[1]), len(group))
        passed, places = (*route.resources, here.hbm, there.hbm), self._cluster.spec.gpus_per_node
        alike = (near, nbytes, per_node, nodes, peer)
        key = (here.number % places, there.number % places, *alike)
        like = self._like.get(key)
        if like is None:
            by_kind = (self._kinds(passed), route[1:], *alike) if self._alike else None
            like = self._passing.get(by_kind)
            if like is None:
                self._warn_of_channels(peer, len(counted[1]), len(group))
                moving = self._moving.along("exchange", (source, target), Spread(nodes, float(per_node)), route, nbytes)
                activity = self._moving.activity(moving._replace(peer=peer))
                if not (self._alike and self._cluster.spec.gpu.kind == "cuda" and isinstance(activity[-1], Flow)):
                    return activity
                of_places = [(passed.index(resource), amount) for resource, amount in activity[-1].demands]
                like = self._passing[by_kind] = _Like(activity[:-1], activity[-1].seconds, of_places)
            self._like[key] = like
        demands = tuple(sorted([(passed[place], amount) for place, amount in like.demands]))
        return (*like.before, Flow(like.seconds, demands))

    def _warn_of_channels(self, peer: Peer | None, nodes: int, ranks: int) -> None:
        """Warn where messages within a communicator over nodes have fewer channels than between two ranks."""
        pair = self._peer(2, 2)
        if nodes > 1 and peer and pair and peer.has_fewer(pair):
            self._warnings.add(
                f"exchange among {ranks} ranks: NCCL gives a message {peer.most} channel{'s' * (peer.most > 1)}, and "
                f"{pair.most} among fewer ranks, where hops are faster; communicators of two have them (`set` "
                "schedule.messages=packed-separate)"
            )

    def _kinds(self, passed: tuple[int, ...]) -> Hashable:
        """Return what messages have in common that pass as many resources of the same kinds and rates."""
        resources = self._cluster.resources
        return tuple([(passed.index(one), resources[one].group, resources[one].capacity) for one in passed])

    def collective(self, op: Collective, ranks: tuple[int, ...], nbytes: int, played: int | None = None) -> Activity:
        """Return a collective as one activity of its group; ``nbytes`` is one part (for AllReduce the whole).

        Where only ranks below a number are ``played``, what it does to their links and memories: those of the others
        are like theirs.
        """
        key = (type(op), ranks, nbytes)
        if key not in self._collective_cache:
            own = ranks if played is None else tuple([rank for rank in ranks if rank < played])
            near = None if len(own) == len(ranks) else played
            traffic = link_traffic(op.name, ranks, nbytes, self._cluster, near)
            if isinstance(op, Barrier) or len(ranks) == 1:
                self._collective_cache[key] = (Latency(traffic.latency_s),)
            else:
                some = None if near is None else range(near)
                least_s = least_seconds(needs(op.name, ranks, nbytes, self._cluster, some), self._cluster)
                first, *others = by_node(ranks, self._cluster)
                nodes, inside = 1 + len(others), traffic.nbytes
                if others and op.name == "all_reduce":
                    inside = link_traffic(op.name, tuple(first), nbytes, self._cluster).nbytes
                by = algorithm(op.name, self._cluster)
                if by == "fastest" or traffic == usual_traffic(op.name, ranks, nbytes, self._cluster, near):
                    by = ""
                spread = Spread(nodes, len(ranks) / nodes)
                moving = Moving(op.name, own, len(ranks), spread, *traffic, least_s, inside, by)
                activity = self._moving.activity(moving)
                self._collective_cache[key] = activity if near is None else self._of_played(activity, own)
        return self._collective_cache[key]

    def _of_played(self, activity: Activity, own: tuple[int, ...]) -> Activity:
        """Return an activity without links of ranks that are not played: nothing else loads these as it loads others,
        and where sums of loads are rounded otherwise, the last bit of a speed may differ.
        """
        *before, last = activity
        if not isinstance(last, Flow):
            return activity
        resources, links = self._cluster.resources, frozenset[int]().union(*map(self._cluster.links_of, own))
        demands = [one for one in last.demands if one[0] in links or resources[one[0]].group not in LINKS]
        return (*before, last._replace(demands=tuple(demands)))
