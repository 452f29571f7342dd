"""What an op costs: the activity that it is on a cluster, by a profile's efficiencies or at datasheet rates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import NamedTuple

from sim.base.errors import InputError
from sim.base.kept import kept
from sim.base.presets import converted
from sim.engine.channels import Peer, cores_of_threads, held_by_collective, held_by_messages, peer_of
from sim.engine.costs.kernel_table import KernelTable
from sim.engine.costs.phases import OWN_COMPUTE, OWN_MEMORY, Activity, Flow, Latency, Wait, located
from sim.engine.costs.series import Figures
from sim.engine.costs.transfer_table import Spread, TransferTable, waits_s
from sim.engine.traffic.algorithms import slowest_link
from sim.engine.traffic.collectives import algorithm, link_name, link_traffic, slowest_of_kind, usual_traffic, width_of
from sim.engine.traffic.least import least_seconds, needs
from sim.engine.traffic.ways import by_node
from sim.schedule.derive.kernels import ELEMENTWISE, KernelUse, in_place_of
from sim.schedule.ir.ops import (
    FETCH,
    OFFLOAD,
    AdamW,
    Barrier,
    Collective,
    Exchange,
    Hold,
    HostAdamW,
    HostCopy,
    HostSync,
    Op,
)
from sim.schedule.ir.program import Program
from sim.software.host import HostAdam, host_adam, one_pass
from sim.words.options import Place
from sim.words.profile import HOST_COPIES, PAGEABLE_COPIES, SLICE_BACK, TRANSFERS, Issue, Profile
from sim.words.workload import FLOATS, Dtype
from topology.cluster import Cluster, Route
from topology.fabric.switches import GROUP as SWITCHES
from topology.specs import ClusterSpec

HOST_COPY_KINDS: dict[Place, dict[str, str]] = {
    "host": dict(zip((OFFLOAD, FETCH), HOST_COPIES, strict=True)),
    "pageable": dict(zip((OFFLOAD, FETCH), PAGEABLE_COPIES, strict=True)),
}
"""What copies to the host's memory and back are called in profiles, by the place there and by their stream."""


class _Moving(NamedTuple):
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


class _Like(NamedTuple):
    """What messages take that are alike but for the numbers of what they pass."""

    before: Activity
    """What comes before the flow."""
    seconds: float
    """Of the flow."""
    demands: list[tuple[int, float]]
    """Of the flow, by place among what a message passes."""


class CostModel:
    """The cost of ops on one cluster. Without a profile every kernel runs at the datasheet's rates."""

    def __init__(self, cluster: Cluster, profile: Profile | None) -> None:
        self._cluster = cluster
        self._link_figures = link_figures(cluster.even)
        self._profile = profile
        self._kernel = cache(self._find_kernel)
        self._seconds = cache(self._find_seconds)
        self._further_s = cache(self._find_further_s)
        self._transfers_found: dict[tuple[int, int, int, int], Activity] = {}
        self._alike = cluster.spec.fabric is None and not cluster.uneven
        """Whether messages between like places of any nodes take as long."""
        self._like: dict[Hashable, _Like] = {}
        """By places in nodes, bytes, spread and channels of a message."""
        self._passing: dict[Hashable, _Like] = {}
        """By what it passes, bytes, spread and channels of a message."""
        self._counted: dict[int, tuple[tuple[int, ...], Counter[int]]] = {}
        self._host_copy_cache: dict[tuple[int, str, int], Activity] = {}
        self._collective_cache: dict[tuple[type, tuple[int, ...], int], Activity] = {}
        self.held_by_messages = cache(partial(held_by_messages, cluster))
        self.held_by_collective = cache(partial(held_by_collective, cluster))
        self.threads = cache(partial(cores_of_threads, cluster))
        self._peer = cache(partial(peer_of, cluster.spec))
        self.notes: set[str] = set()
        """What was extrapolated, or taken from the datasheet although there is a profile."""
        self.warnings: set[str] = set()
        """What of the software makes costs larger, and can be avoided."""
        self._waits_s: dict[str, float] = {}
        """By kind, of communication over slow links beside kernels."""
        self._kernels: KernelTable | None = None
        self._transfers: TransferTable | None = None
        if profile is not None:
            measured_on = measured_cluster(profile).gpu
            if measured_on.chip != cluster.spec.gpu.chip:
                raise InputError(
                    f"profile {profile.name!r} is of {measured_on.name!r}, but cluster {cluster.spec.name!r} has "
                    f"{cluster.spec.gpu.name!r}: set `profile` to one of that device, or to datasheet"
                )
            self._kernels, self._transfers = _tables(profile)
            host = measured_cluster(profile).host
            self._waits_s = waits_s(profile.points, host.cores) if host and host.transfer_s_per_byte is not None else {}
            note = self._kernels.load.note(cluster.spec.gpu.power_w)
            self.notes |= {note} if note else set()

    @property
    def cuda(self) -> bool:
        """Whether ranks are GPUs, which run kernels and communication side by side, and not threads of a CPU."""
        return self._cluster.spec.gpu.kind == "cuda"

    def kernel(self, rank: int, use: KernelUse) -> Activity:
        """Return a kernel on a rank's device: it flows over the SMs (or a core) and the memory that it works on."""
        return located(self.kernel_anywhere(rank, use), self._cluster.devices[rank])

    def kernel_anywhere(self, rank: int, use: KernelUse) -> Activity:
        """Return a kernel on any device as fast as a rank's, over the compute units and the memory of its own."""
        return self._kernel(self._peak(rank, use), use)

    def _peak(self, rank: int, use: KernelUse) -> float:
        """Return the FLOP/s that bound a kernel. Integers are only copied, which nothing but memory bounds."""
        return self._cluster.peak_flops_per_s(rank, use.dtype) if use.dtype in FLOATS else math.inf

    def _find_kernel(self, peak: float, use: KernelUse) -> Activity:
        seconds, _ = self._seconds(peak, use)
        self.notes |= {note for kernel, _ in use.each for note in self._seconds(peak, kernel)[1:] if note}
        memory = min(self._moved(use) / seconds, self._cluster.spec.hbm.bytes_per_s) if seconds > 0 else 0.0
        return self._on_sms(peak, use, seconds, memory)

    def kernel_seconds(self, rank: int, use: KernelUse) -> tuple[float, str]:
        """Return the solo time of a kernel on a rank's device, and a note where the profile has no points near it."""
        return self._seconds(self._peak(rank, use), use)

    def peak_share(self, use: KernelUse) -> float:
        """Return which share of the solo time of a kernel its FLOPs take at the peak, on the slowest device, where what
        it takes beside them counts least.
        """
        peak = self._peak(min(self._cluster.devices, key=lambda device: device.speed).number, use)
        seconds, _ = self._seconds(peak, use)
        return min(1.0, use.flops / peak / seconds) if seconds > 0 else 0.0

    def limited(self, use: KernelUse) -> float:
        """Return how far a kernel reaches the power limit of its GPU, from 0 to 1."""
        return self._kernels.load.limited(use, self.kernel_seconds(0, use)[0]) if self._kernels else 0.0

    def _find_seconds(self, peak: float, use: KernelUse) -> tuple[float, str]:
        if use.kernel == Hold.meta.kernel:
            return 0.0, ""
        if each := self._run(use) or (not self.cuda and use.documents):
            found_each = [(*self._seconds(peak, kernel), count) for kernel, count in each]
            note = next((note for _, note, _ in found_each if note), "")
            return math.fsum(seconds * count for seconds, _, count in found_each), note
        now = Figures(peak, self._cluster.spec.hbm.bytes_per_s, sms=self._cluster.spec.gpu.sms)
        found = self._kernels.seconds(use, now, self._cluster.spec.gpu.power_w) if self._kernels else None
        if found:
            return found
        efficiency = self._profile.memory_efficiency if self._profile else 1.0
        if self._profile and use.kernel == ELEMENTWISE:
            efficiency /= math.prod(self._profile.elementwise.get(word, 1.0) for word in use.variant.split())
        memory_s = self._moved(use) / (now.bytes_per_s * efficiency)
        seconds = max(use.flops / now.flops_per_s, memory_s)
        if not self._kernels:
            return seconds, ""
        rate = "datasheet rate" if seconds > memory_s or efficiency == 1 else f"{efficiency:g} of the memory's rate"
        return seconds, f"{use.kernel} {use.dtype}: not in the profile, {rate}"

    def _run(self, use: KernelUse) -> tuple[tuple[KernelUse, float], ...]:
        """Return what is run where several kernels stand for one: of a loop, and in software that has it so."""
        ran = self._profile.runs.get(use.kernel, ()) if self._profile else ()
        if use.loop or not ran:
            return use.loop
        return in_place_of(use, ((one.kernel, one.dtype, one.bytes_per_element, one.launches) for one in ran)).loop

    def _moved(self, use: KernelUse) -> float:
        """Return the bytes that a kernel moves through its memory."""
        if self._profile is None:
            return use.hbm_bytes
        if each := self._run(use):
            return math.fsum(self._moved(kernel) * count for kernel, count in each)
        back = self._profile.traffic.get(SLICE_BACK, 0.0) if use.into_slice else 0.0
        return use.hbm_bytes * (self._profile.traffic.get(use.kernel, 1.0) + back)

    def _on_sms(self, peak: float, use: KernelUse, seconds: float, memory: float) -> Activity:
        """Return the flow of a kernel over the SMs (or a core) and the memory of its device.

        On a GPU a grid of more blocks than the SMs take at once fills them until its last wave has been dispatched,
        and what is launched behind it gets none before; one of fewer leaves SMs to others. A kernel that memory bounds
        is no slower on fewer SMs. Before the grid of attention's backward pass runs a short one, for delta, and what
        waits for SMs comes behind that one (flash_attn csrc/flash_attn/src/flash_bwd_launch_template.h).
        """
        sms, work = float(self._cluster.spec.gpu.sms), (OWN_MEMORY, memory)
        if self._cluster.spec.gpu.kind == "cpu":
            return (Flow(seconds, ((OWN_COMPUTE, sms), work)),)
        blocks = self._profile.blocks_per_sm.get(use.kernel, 1) if self._profile else 1
        waves = math.inf if use.tiles is None else use.tiles / (sms * blocks)
        bytes_per_s = self._cluster.spec.hbm.bytes_per_s
        if waves > 1 and use.flops * bytes_per_s < use.hbm_bytes * peak:
            return (Flow(seconds, (work,), fills=OWN_COMPUTE),)
        before = min(use.delta_bytes / bytes_per_s, seconds)
        delta = (Flow(before, (work,), fills=OWN_COMPUTE),) if before else ()
        grid = seconds - before
        if waves <= 1:
            return (*delta, Flow(grid, ((OWN_COMPUTE, waves * sms), work)))
        full = Flow(grid * (1 - 1 / waves), ((OWN_COMPUTE, sms), work), fills=OWN_COMPUTE)
        return (*delta, full) if waves == math.inf else (*delta, full, Flow(grid / waves, (work,)))

    def on_host(self, rank: int, program: Program, op: HostCopy | HostAdamW) -> Activity:
        """Return what a rank does in its host's memory, without SMs."""
        return self.host_copy(rank, program, op) if isinstance(op, HostCopy) else self.host_kernel(rank, program, op)

    def host_kernel(self, rank: int, program: Program, op: HostAdamW) -> Activity:
        """Return a kernel of a GPU's host: a flow over the memory of its socket, which the ranks there share, no
        shorter than its part of the node's cores takes, where they are known.
        """
        spec = self._cluster.spec
        if spec.gpu.kind == "cpu":
            elements, nbytes = math.prod(op.weights.shape), sum(host_bytes(op, program))
            flops = AdamW.meta.flops_per_element * elements
            use = KernelUse(AdamW.meta.kernel, "", program.dtype(op.weights), (elements,), flops, nbytes)
            return self.kernel(rank, use)
        adam = host_adam(self._profile)
        named = "" if self._profile and self._profile.host_optimiser else ", as `software.host_optimiser` is not set"
        self.notes.add(
            f"CPU Adam: not measured on this host, {adam.said}{named}: at {adam.share:.2g} of the rate of its socket's "
            f"memory, as on a DGX-2"
        )
        passes = host_passes(op, program, adam)
        read, written = (sum(moved[way] / code.share for code, moved in passes) for way in (0, 1))
        load = self._cluster.dram_load(rank, read, written)
        seconds = max(nbytes / self._cluster.resources[index].capacity for index, nbytes in load.items())
        if spec.host is not None:
            cores = spec.host.cores / spec.gpus_per_node
            seconds = max(seconds, sum(sum(moved) / code.core_bytes_per_s for code, moved in passes) / cores)
        return (Flow(seconds, tuple(sorted((index, nbytes / seconds) for index, nbytes in load.items()))),)

    def host_copy(self, rank: int, program: Program, op: HostCopy) -> Activity:
        """Return a copy between a device and its host: a flow over the way between them and both memories, without SMs.

        Ranks of a CPU host have one memory: there it is the copy of a thread, which waits for a core.
        """
        nbytes, host = program.nbytes(op.source), self._cluster.spec.host
        if host is not None and self._cluster.spec.gpu.kind == "cpu":
            use = KernelUse("copy", "", program.dtype(op.source), (math.prod(op.source.shape),), 0, 2 * nbytes)
            return (Wait(self._cluster.devices[rank].compute, host.wakeup_s), *self.kernel(rank, use))
        there = program.buffers[(op.target if op.stream == OFFLOAD else op.source).buffer].place
        key = (rank, HOST_COPY_KINDS[there][op.stream], nbytes)
        if key not in self._host_copy_cache:
            route = self._cluster.host_route(rank, to_host=op.stream == OFFLOAD)
            self._host_copy_cache[key] = self._moving(self._message(key[1], (rank,), Spread(1, 1.0), route, nbytes))
        return self._host_copy_cache[key]

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
                moving = self._message("exchange", (source, target), Spread(nodes, float(per_node)), route, nbytes)
                activity = self._moving(moving._replace(peer=peer))
                if not (self._alike and self.cuda and isinstance(activity[-1], Flow)):
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
            self.warnings.add(
                f"exchange among {ranks} ranks: NCCL gives a message {peer.most} channel{'s' * (peer.most > 1)}, and "
                f"{pair.most} among fewer ranks, where hops are faster; communicators of two have them (`set` "
                "schedule.messages=packed-separate)"
            )

    def _kinds(self, passed: tuple[int, ...]) -> Hashable:
        """Return what messages have in common that pass as many resources of the same kinds and rates."""
        resources = self._cluster.resources
        return tuple([(passed.index(one), resources[one].group, resources[one].capacity) for one in passed])

    def _message(self, kernel: str, ranks: tuple[int, ...], spread: Spread, route: Route, nbytes: int) -> _Moving:
        """Return bytes that take one route."""
        load = route.load(nbytes)
        slowest = slowest_link(load, self._cluster)
        least_s = load[slowest] / self._cluster.resources[slowest].capacity
        group = round(spread.nodes * spread.per_node)
        return _Moving(kernel, ranks, group, spread, load, route.latency_s, 1, nbytes, least_s, load)

    def collective(self, op: Collective, ranks: tuple[int, ...], nbytes: int, played: int | None = None) -> Activity:
        """Return a collective as one activity of its group; ``nbytes`` is one part (for AllReduce the whole).

        Where only the first so many ranks are ``played``, what it does to their links and memories: the others are on
        nodes that are like theirs.
        """
        key = (type(op), ranks, nbytes)
        if key not in self._collective_cache:
            own = ranks if played is None else tuple([rank for rank in ranks if rank < played])
            near = None if len(own) == len(ranks) else len(own)
            traffic = link_traffic(op.name, ranks, nbytes, self._cluster, near)
            if isinstance(op, Barrier) or len(ranks) == 1:
                self._collective_cache[key] = (Latency(traffic.latency_s),)
            else:
                least_s = least_seconds(needs(op.name, ranks, nbytes, self._cluster, near), self._cluster)
                first, *others = by_node(ranks, self._cluster)
                nodes, inside = 1 + len(others), traffic.nbytes
                if others and op.name == "all_reduce":
                    inside = link_traffic(op.name, tuple(first), nbytes, self._cluster).nbytes
                by = algorithm(op.name, self._cluster)
                if by == "fastest" or traffic == usual_traffic(op.name, ranks, nbytes, self._cluster, near):
                    by = ""
                spread = Spread(nodes, len(ranks) / nodes)
                moving = _Moving(op.name, own, len(ranks), spread, *traffic, least_s, inside, by)
                self._collective_cache[key] = self._moving(moving)
        return self._collective_cache[key]

    def issue_s(self, op: Op, use: KernelUse | None) -> float:
        """Return what issuing an op costs the host thread: of a loop all of its kernels, before the first one runs."""
        if use and (each := self._run(use)):
            return math.fsum(self.issue_s(op, kernel) * count for kernel, count in each)
        if isinstance(op, Hold):
            return 0.0
        issue = self._profile.issue if self._profile else {}
        if isinstance(op, Exchange) and op.num_messages > 1:
            return self._issue_s(issue.get("exchange")) + op.num_messages * self._issue_s(issue.get("message"), 0.0)
        if isinstance(op, HostSync) and op.calls:
            return op.calls * self._issue_s(issue.get("kernel"))
        kind = use.kernel if use else _kind(op)
        back_s = self._issue_s(issue.get(SLICE_BACK), 0.0) if use and use.into_slice else 0.0
        return self._issue_s(issue.get(kind, issue.get("kernel") if use else None)) + back_s

    def _issue_s(self, issue: Issue | None, unknown: float = 1.0) -> float:
        """Return what the host takes for one entry of a profile; where it has none, so many launches."""
        launch_s = self._cluster.spec.gpu.launch_s
        if issue is None:
            return unknown * launch_s
        each_s = self._issue_s(self._profile.issue.get("kernel")) if self._profile and issue.kernels else 0.0
        return issue.host_s + issue.launches * launch_s + issue.kernels * each_s

    @property
    def handoff(self) -> Activity:
        """What it takes until a stream goes on after another has ended what it waited for: on a CPU a thread has to be
        woken; on a GPU an event takes as long as a launch, and the kernel behind it is on the SMs by then.
        """
        spec = self._cluster.spec
        if spec.gpu.kind == "cuda":
            return (Latency(spec.gpu.launch_s),)
        assert spec.host is not None
        return (Wait(OWN_COMPUTE, spec.host.wakeup_s), Latency(spec.host.handoff_s))

    def _moving(self, what: _Moving) -> Activity:
        """Return the activity of bytes that move: their time by the profile or the links, and what they occupy."""
        resources = self._cluster.resources
        slowest = slowest_link(what.load, self._cluster)
        ideal_s = what.load[slowest] / resources[slowest].capacity
        delay_s, flow_s = what.hop_s * what.steps, ideal_s
        found = None
        if self._transfers:
            copies = what.kernel in {*HOST_COPIES, *PAGEABLE_COPIES}
            link = "dram" if copies else link_name(what.load, self._cluster)
            limits = slowest_of_kind(what.load, link, self._cluster)
            busiest = what.load[limits] / width_of(link, self._cluster) * self._crowding(what.load, limits)
            busiest = float(what.memory_bytes) if copies else busiest  # of which tiers of the host take a share each
            figures = self._figures_of(limits, self._further_s(what.ranks))
            if not what.unlike:
                found = self._transfers.seconds(what.kernel, link, what.spread, busiest, figures, what.peer)
            if found:
                delay_s, total_s, note = found
                flow_s = max(total_s, what.least_s) - delay_s
            else:
                efficiency, whose = self._transfers.efficiency(link, busiest)
                flow_s = ideal_s / efficiency
                inside_s = self._inside_s(what, self._transfers) if link == "nic" else 0.0
                if inside_s > flow_s:
                    flow_s, whose = inside_s, "as long as inside a node"
                kernel = f"{what.kernel} by {what.unlike}" if what.unlike else what.kernel
                note = f"{kernel} over {link}: not in the profile, {whose}"
            self.notes |= {note} if note else set()
        if what.kernel in PAGEABLE_COPIES and not found:
            self.notes.add(
                f"{what.kernel}: not measured, at the rate of pinned memory; real ones take several times as long"
            )
        if flow_s <= 0:
            return (Latency(delay_s),)
        demands = {link: min(nbytes / flow_s, resources[link].capacity) for link, nbytes in what.load.items()}
        for rank in what.ranks:
            memory = self._cluster.devices[rank].hbm
            rate = demands.get(memory, 0.0) + what.memory_bytes / flow_s
            demands[memory] = min(rate, resources[memory].capacity)
        threads = self._threads(what, demands)
        return (*threads, Latency(delay_s), Flow(flow_s, tuple(sorted((r, x) for r, x in demands.items() if x > 0))))

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

    def _inside_s(self, what: _Moving, table: TransferTable) -> float:
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

    def _threads(self, what: _Moving, demands: dict[int, float]) -> Activity:
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


def host_passes(op: HostAdamW, program: Program, adam: HostAdam) -> list[tuple[HostAdam, tuple[float, float]]]:
    """Return whose code moves what on the host of a GPU, bytes read and written: the update, and what scales the
    gradient before it and casts the new weights behind, which pass once over what they take.
    """
    weights, gradient = (program.nbytes(view) for view in (op.weights, op.gradient))
    update = (adam.update.read * weights, adam.update.written * weights)
    of_cast = (weights, program.nbytes(op.cast)) if op.cast else (0, 0)
    return [(adam, update), (one_pass(), (gradient + of_cast[0], gradient + of_cast[1]))]


def host_bytes(op: HostAdamW, program: Program) -> tuple[int, int]:
    """Return what a kernel of the host reads and writes at least, in three passes: it scales the gradient, updates, and
    casts the new weights (DeepSpeed's runtime/zero/stage3.py, from memory, not checked).
    """
    read, written = (sum(map(program.nbytes, views)) for views in (op.reads, op.writes))
    return read + program.nbytes(op.gradient) + (program.nbytes(op.weights) if op.cast else 0), written


def _kind(op: Op) -> str:
    """Return what the issue of an op that is no kernel is called in profiles; empty if it is in none."""
    if isinstance(op, HostCopy):
        return HOST_COPY_KINDS["host"][op.stream]
    if isinstance(op, Exchange):
        return "call"
    return op.name if isinstance(op, Collective) else op.meta.kernel


@kept
def _tables(profile: Profile) -> tuple[KernelTable, TransferTable | None]:
    """Return a profile's times as efficiencies relative to the machine that it was measured on."""
    name, spec = profile.name, measured_cluster(profile)

    def figures(dtype: Dtype) -> Figures:
        peaks = spec.gpu.peak_flops_per_s
        if dtype not in peaks:
            raise InputError(
                f"profile {name!r} is of a machine without a peak for {dtype}: its data types are "
                f"{', '.join(peaks)}; set `dtype`, or `profile` datasheet, or give the profile's cluster a "
                f"gpu.peak_flops_per_s.{dtype}"
            )
        return Figures(peaks[dtype], spec.hbm.bytes_per_s, sms=spec.gpu.sms)

    transfers = any(point.kernel in TRANSFERS for point in profile.points)
    kernels = KernelTable(profile, figures, spec.gpu.sms, spec.gpu.power_w)
    if not transfers:
        return kernels, None
    return kernels, TransferTable(profile, link_figures(Cluster(spec)), spec)


def link_figures(cluster: Cluster) -> Callable[[str], Figures]:
    """Return what gives the rate of some kind of link, and the latency of a route over it (empty: those of the route
    between neighbours).
    """
    routes = cluster.typical_routes()

    def figures(link: str) -> Figures:
        for route in routes:
            load = route.load(1)
            if not link:
                return Figures(1.0, route.bytes_per_s, route.latency_s)
            if link in {cluster.resources[index].group for index in load}:
                slowest = slowest_of_kind(load, link, cluster)
                rate = cluster.resources[slowest].capacity / load[slowest] / width_of(link, cluster)
                rate = min(rate, route.bytes_per_s)
                return Figures(1.0, rate, route.latency_s)
        raise InputError(
            f"a profile has transfers over {link!r}, but its cluster {cluster.spec.name!r} has no such link"
        )

    return figures


@kept
def measured_cluster(profile: Profile) -> ClusterSpec:
    """Return the spec of the machine that a profile was measured on; raises InputError if it carries none."""
    return converted(
        profile.cluster, ClusterSpec, f"cluster of profile {profile.name!r}", "longstep calibrate makes a new one"
    )
