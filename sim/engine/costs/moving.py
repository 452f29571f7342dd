"""What bytes on the move take, and what they occupy: links, memories, and on a CPU its cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from sim.engine.channels import Peer
from sim.engine.costs.measured import link_figures, measured_cluster
from sim.engine.costs.phases import Activity, Flow, Latency, Wait
from sim.engine.costs.series import Figures
from sim.engine.costs.transfer_table import Spread, TransferTable, waits_s
from sim.engine.traffic.algorithms import slowest_link
from sim.engine.traffic.collectives import link_name, slowest_of_kind, width_of
from sim.engine.traffic.ways import by_node
from sim.words.profile import HOST_COPIES, PAGEABLE_COPIES, Profile
from topology.cluster import Cluster, Route
from topology.fabric.switches import GROUP as SWITCHES


class Moving(NamedTuple):
    """Bytes on the move."""

    kernel: str
    ranks: tuple[int, ...]
    """Whose memory and threads this activity uses."""
    group: int
    """How many ranks communicate at the same time."""
    spread: Spread
    """Of the ranks of its communicator."""
    load: dict[int, float]
    """Bytes per link."""
    hop_s: float
    steps: int
    memory_bytes: float
    """Bytes that each rank reads and writes in its memory."""
    least_s: float
    """What it takes at the links' rates, whatever its algorithm."""
    inside: dict[int, float]
    """Bytes per link of what a node does by itself: those of ``load``, of sums those of its own."""
    unlike: str = ""
    """The algorithm that was asked for, if it is another than measured collectives are taken to have run."""
    peer: Peer | None = None
    """The channels of a message, as NCCL gives them."""


class MovingCosts:
    """Bytes on one cluster's links, by a profile's points, or at the datasheet's rates where they say nothing."""

    def __init__(self, cluster: Cluster, profile: Profile | None, table: TransferTable | None, notes: set[str]) -> None:
        """``table`` is the profile's; ``notes`` gets what was extrapolated, or taken from the datasheet."""
        self._cluster, self._table, self._notes = cluster, table, notes
        self._link_figures = link_figures(cluster.even)
        self._further_s = cache(self._find_further_s)
        self._waits_s: dict[str, float] = {}
        """By kind, of communication over slow links beside kernels."""
        host = measured_cluster(profile).host if profile else None
        if profile and host and host.transfer_s_per_byte is not None:
            self._waits_s = waits_s(profile.points, host.cores)

    def activity(self, what: Moving) -> Activity:
        """Return the activity of bytes that move: their time by the profile or the links, and what they occupy."""
        resources = self._cluster.resources
        slowest = slowest_link(what.load, self._cluster)
        ideal_s = what.load[slowest] / resources[slowest].capacity
        delay_s, flow_s = what.hop_s * what.steps, ideal_s
        found = None
        if self._table:
            copies = what.kernel in {*HOST_COPIES, *PAGEABLE_COPIES}
            link = "dram" if copies else link_name(what.load, self._cluster)
            limits = slowest_of_kind(what.load, link, self._cluster)
            busiest = what.load[limits] / width_of(link, self._cluster) * self._crowding(what.load, limits)
            busiest = float(what.memory_bytes) if copies else busiest  # of which tiers of the host take a share each
            figures = self._figures_of(limits, self._further_s(what.ranks))
            if not what.unlike:
                found = self._table.seconds(what.kernel, link, what.spread, busiest, figures, what.peer)
            if found:
                delay_s, total_s, note = found
                flow_s = max(total_s, what.least_s) - delay_s
            else:
                efficiency, whose = self._table.efficiency(link, busiest)
                flow_s = ideal_s / efficiency
                inside_s = self._inside_s(what, self._table) if link == "nic" else 0.0
                if inside_s > flow_s:
                    flow_s, whose = inside_s, "as long as inside a node"
                kernel = f"{what.kernel} by {what.unlike}" if what.unlike else what.kernel
                note = f"{kernel} over {link}: not in the profile, {whose}"
            self._notes |= {note} if note else set()
        if what.kernel in PAGEABLE_COPIES and not found:
            self._notes.add(
                f"{what.kernel}: not measured, at the rate of pinned memory; real ones take several times as long"
            )
        return self._occupying(what, delay_s, flow_s)

    def copied(self, what: Moving) -> Activity:
        """Return the activity of bytes that copy engines move, at the rate of the links."""
        slowest = slowest_link(what.load, self._cluster)
        flow_s = what.load[slowest] / self._cluster.resources[slowest].capacity
        return self._occupying(what, what.hop_s * what.steps, flow_s)

    def _occupying(self, what: Moving, delay_s: float, flow_s: float) -> Activity:
        """Return an activity of so long a flow, with what it occupies."""
        resources = self._cluster.resources
        if flow_s <= 0:
            return (Latency(delay_s),)
        demands = {link: min(nbytes / flow_s, resources[link].capacity) for link, nbytes in what.load.items()}
        for rank in what.ranks:
            memory = self._cluster.devices[rank].hbm
            rate = demands.get(memory, 0.0) + what.memory_bytes / flow_s
            demands[memory] = min(rate, resources[memory].capacity)
        threads = self._threads(what, demands)
        return (*threads, Latency(delay_s), Flow(flow_s, tuple(sorted((r, x) for r, x in demands.items() if x > 0))))

    def along(self, kernel: str, ranks: tuple[int, ...], spread: Spread, route: Route, nbytes: int) -> Moving:
        """Return bytes that take one route."""
        load = route.load(nbytes)
        slowest = slowest_link(load, self._cluster)
        least_s = load[slowest] / self._cluster.resources[slowest].capacity
        group = round(spread.nodes * spread.per_node)
        return Moving(kernel, ranks, group, spread, load, route.latency_s, 1, nbytes, least_s, load)

    def _crowding(self, load: dict[int, float], link: int) -> float:
        """Return how many times as long as a link those between switches take, if longer: measured times, which are of
        NICs and a fabric that does not block, are those of so many times the bytes then.
        """
        resources = self._cluster.resources
        between = [n / resources[one].capacity for one, n in load.items() if resources[one].group == SWITCHES]
        return max(1.0, max(between, default=0.0) * resources[link].capacity / load[link])

    def _find_further_s(self, ranks: tuple[int, ...]) -> float:
        """Return what the way from one node to the next takes longer than that over one NIC and a switch, at most: the
        switches and nodes that a fabric has between them.
        """
        nodes = by_node(ranks, self._cluster)
        if self._cluster.spec.fabric is None or len(nodes) == 1:
            return 0.0
        pairs = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
        longest_s = max(self._cluster.route(here[0], there[0]).latency_s for here, there in pairs)
        return max(0.0, longest_s - self._link_figures("nic").latency_s)

    def _figures_of(self, link: int, further_s: float) -> Callable[[str], Figures]:
        """Return the figures of links as one of them has them, whose rate may be less than that of all others, and
        whose way may be longer.
        """
        if not self._cluster.uneven and not further_s:
            return self._link_figures
        share = self._cluster.resources[link].capacity / self._cluster.even.resources[link].capacity

        def figures(kind: str) -> Figures:
            found = self._link_figures(kind)
            longer_s = found.latency_s + further_s if kind == "nic" else found.latency_s
            return found._replace(bytes_per_s=found.bytes_per_s * share, latency_s=longer_s)

        return figures

    def _inside_s(self, what: Moving, table: TransferTable) -> float:
        """Return what the links inside nodes take for their bytes of a transfer over nodes, without latency: as long as
        that kind of transfer inside one node, since each node has to do its part, too; 0 if none was measured there.
        """
        near, longest_s = Spread(1, what.spread.per_node), 0.0
        for kind in {self._cluster.resources[link].group for link in what.inside} - {"nic"}:
            busiest = what.inside[slowest_of_kind(what.inside, kind, self._cluster)]
            if found := table.seconds(what.kernel, kind, near, busiest, self._link_figures):
                delay_s, total_s, _ = found
                longest_s = max(longest_s, total_s - delay_s)
        return longest_s

    def _threads(self, what: Moving, demands: dict[int, float]) -> Activity:
        """On a CPU, threads carry the bytes through the TCP stack: add the cores that they take, return their queue.

        When the time was measured, all of the group moved at once and together had no more than all cores. Threads of
        slow links take theirs off the top, see ``channels.cores_of_threads``.
        """
        host = self._cluster.spec.host
        if host is None or self._cluster.spec.gpu.kind != "cpu":
            return ()
        cores = [self._cluster.devices[rank].compute for rank in what.ranks]
        if host.transfer_s_per_byte is not None:
            return (Wait(cores[0], self._waits_s.get(what.kernel, host.wakeup_s)),)
        at_once = min(host.transfer_cores * what.group, host.cores)
        share = at_once / what.group if what.kernel == "exchange" else at_once
        for resource in cores:
            demands[resource] = demands.get(resource, 0.0) + share / len(cores)
        return (Wait(cores[0], host.wakeup_s),)
