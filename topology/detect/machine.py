"""A cluster file from what the tools of one node print: what they tell is taken from them, the rest from the preset of
its GPU. Each figure has in ``sources`` which of the two it is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sim.base.errors import InputError
from sim.base.presets import converted, preset_names
from topology.cluster import load_cluster
from topology.detect.tools import GpuFacts, RdmaDevice, Topology
from topology.detect.written import leaf_paths, stated, toml_lines
from topology.named import HARDWARE, gpu_name
from topology.reserved import DRIVER
from topology.specs import ClusterSpec

TOPO, GPUS, IB = "nvidia-smi topo -m", "nvidia-smi", "ibstat"
MARK = "# Written by longstep machine"
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways over PCIe, shortest first: one bridge, several, a CPU's host bridge, several of a NUMA node, another node."""
_BEHIND_SWITCH = ("PIX", "PXB")
_NVLINK_BYTES_PER_S = dict.fromkeys(("A100", "A800", "H100", "H800", "H20", "H200", "GH200"), 25e9) | dict.fromkeys(
    ("B200", "GB200", "GB300"), 50e9
)
"""Of one link per direction: NVLink 3 and 4, NVLink 5 (stas00/ml-engineering@744d01e network/README.md)."""
_LANE_BYTES_PER_S = {3: 15.75e9 / 16, 4: 31.5e9 / 16, 5: 63e9 / 16, 6: 121e9 / 16}
"""Of PCIe per direction by generation, after its coding (6: after FLITs, 242 of 256 bytes)."""
_OTHERS = {"D", "LAPTOP", "MAX"}
"""Words that make another GPU of a name, such as RTX 4090 D."""
_NICS_OF = "hgx-h100"
"""The preset whose figures NICs have that the GPU's own preset does not tell of."""
_ABOUT = 0.1
"""Share of its memory that a GPU keeps to itself, or datasheets round."""
_HBM_BYTES_PER_S = {("A100-SXM", 40): 1.555e12, ("A100-PCIe", 40): 1.555e12}
"""Of chips with another memory than that of a preset, by its GiB: NVIDIA A100 40GB datasheet, from memory."""


class Machine(NamedTuple):
    """What a node was read to be."""

    spec: ClusterSpec
    remarks: list[str]
    """What of it a cluster file does not tell."""

    def toml(self) -> str:
        """Return it as a cluster file."""
        head = f"{MARK}: what its tools tell is of this node, the rest of a preset."
        return "\n".join([head, *(f"# {one}" for one in self.remarks), *toml_lines(stated(self.spec))]) + "\n"


def is_named(spec: ClusterSpec, name: str, memory_bytes: float) -> bool:
    """Return whether a GPU is of the kind that a cluster has, by what drivers call it and its memory."""
    capacity = spec.hbm.capacity_bytes
    return _has_chip(spec, name) and abs(memory_bytes - capacity) < _ABOUT * capacity


def _has_chip(spec: ClusterSpec, name: str) -> bool:
    """Return whether a cluster has the chip that drivers call so. They name the cards on PCIe (NVL: with bridges) where
    there are both, but not always those on NVLink.
    """
    words = {*re.split("[ -]", name.upper())}
    named = {word.upper() for word in gpu_name(spec.gpu.name).words} <= words and not words & _OTHERS
    card = [bool({"PCIE", "NVL"} & some) for some in (words, {*spec.gpu.name.upper().split("-")})]
    return named and card[0] == card[1]


def machine(
    topology: Topology,
    gpus: Sequence[GpuFacts],
    rdma: Sequence[RdmaDevice] = (),
    *,
    like: str = "",
    chip: str = "",
    memory_bytes: int | None = None,
) -> Machine:
    """Return the cluster of one such node; ``like`` is the cluster whose figures it has, by default the preset of its
    GPU. What the driver says of the GPU's memory counts. ``memory_bytes`` is the host's memory, of all sockets.

    Raises InputError where the tools contradict each other, no preset has such a GPU, or ``like`` has another chip,
    whose SMs, FLOP/s and profile are taken only where ``chip`` names it.
    """
    if len(gpus) != topology.gpus:
        raise InputError(
            f"`topo` has {topology.gpus} GPUs, `gpus` has {len(gpus)}: give the output of both tools on the same node"
        )
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise InputError(f"`gpus` has different GPUs, {', '.join(names)}: a cluster has GPUs of one kind")
    base = load_cluster(like) if like else _preset_of(gpus[0])
    draft = _Draft(base, like or base.name)
    if not _has_chip(base, gpus[0].name):
        _require_named(base, chip, gpus[0].name)
        draft.remarks.append(
            f"the GPU is {gpus[0].name}; its SMs, FLOP/s and profile here are those of {base.gpu.chip}"
        )
    _gpu(draft, gpus)
    _memory(draft, gpus)
    _nvlink(draft, topology)
    _pcie(draft, topology, gpus)
    _sockets(draft, topology, memory_bytes)
    _nics(draft, topology, rdma)
    return draft.machine(f"{topology.gpus}x {gpus[0].name}")


class _Draft:
    """A cluster in the making: its figures, and where each is from."""

    def __init__(self, base: ClusterSpec, called: str) -> None:
        self.base, self.called = base, called
        self.data: dict[str, Any] = {"nodes": 1, "profile": base.profile}
        self.sources: dict[str, str] = {}
        self.remarks: list[str] = []
        for table in ("gpu", "hbm"):
            self.take(table)

    def take(self, table: str, base: ClusterSpec | None = None, *, without: tuple[str, ...] = ()) -> None:
        """Take a table of the preset, or of another one, with its sources."""
        found = base or self.base
        self.data[table] = {key: value for key, value in stated(getattr(found, table)).items() if key not in without}
        called = self.called if base is None else found.name
        for key in leaf_paths(self.data[table], table):
            said = next((found.sources[one] for one in (key, table) if one in found.sources), "")
            self.sources[key] = f"{called}: {said}" if said else called

    def put(self, path: str, value: object, source: str) -> None:
        """Set a figure that a tool has told."""
        *tables, key = path.split(".")
        node = self.data
        for table in tables:
            node = node[table]
        node[key], self.sources[path] = value, source

    def machine(self, name: str) -> Machine:
        data = {"name": name, **self.data, "sources": self.sources}
        return Machine(converted(data, ClusterSpec, f"the cluster of {name}", "see its tools' output"), self.remarks)


def _preset_of(gpu: GpuFacts) -> ClusterSpec:
    presets = [load_cluster(name) for name in preset_names(HARDWARE) if name != "host"]
    found = [one for one in presets if is_named(one, gpu.name, gpu.memory_bytes or one.hbm.capacity_bytes)]
    if len({one.gpu.name for one in found}) == 1:
        return found[0]
    memory = f" of {gpu.memory_bytes / 1e9:.0f} GB" if gpu.memory_bytes else ""
    known = ", ".join(f"{one.gpu.name} ({one.name})" for one in presets)
    raise InputError(
        f"{'several presets have' if found else 'no preset has'} the GPU {gpu.name!r}{memory}: they have {known}; name "
        f"with `like` one with that chip, or {_YOURS}"
    )


_YOURS = (
    "a cluster FILE.toml of yours with that gpu.name, and its gpu.sms, gpu.peak_flops_per_s, gpu.launch_s, "
    "hbm.bytes_per_s and profile (none: rates of its datasheet)"
)


def _require_named(base: ClusterSpec, chip: str, name: str) -> None:
    """Raise InputError where the figures of another chip would be taken that is not the one that was named."""
    if chip not in {base.gpu.name, base.gpu.chip}:
        raise InputError(
            f"`like` {base.name}: it has {base.gpu.name}, and this node {name}, whose SMs and FLOP/s are others: "
            f"name {_YOURS}; or set `chip` {base.gpu.chip} to take that one's all the same"
        )


def _gpu(draft: _Draft, gpus: Sequence[GpuFacts]) -> None:
    draft.put("gpus_per_node", len(gpus), TOPO)
    limits = {gpu.power_w for gpu in gpus if gpu.power_w}
    if limits:
        draft.put("gpu.power_w", min(limits), f"{GPUS}: enforced power limit")
    if len(limits) > 1:
        draft.remarks.append(f"power limits differ, {_listed(limits)} W; gpu.power_w is the lowest")


def _memory(draft: _Draft, gpus: Sequence[GpuFacts]) -> None:
    """Take the memory that the driver tells, where it is another than the preset's without what drivers keep of it."""
    told = min((int(gpu.memory_bytes) for gpu in gpus if gpu.memory_bytes), default=0)
    spec, gib = draft.base, round(told / 2**30)
    if not told or abs(told - spec.hbm.capacity_bytes) <= DRIVER.nbytes + DRIVER.within_bytes:
        return
    draft.put("hbm.capacity_bytes", told, f"{GPUS}: memory.total")
    draft.put("gpu.name", f"{spec.gpu.chip}-{gib}GB", f"{GPUS}: memory.total")
    if rate := _HBM_BYTES_PER_S.get((spec.gpu.chip, gib)):
        draft.put("hbm.bytes_per_s", rate, f"{rate / 1e9:g} GB/s: datasheet of {spec.gpu.chip}-{gib}GB, from memory")
    else:
        draft.remarks.append(
            f"its {gib} GiB of memory are taken to be as fast as those of {spec.gpu.name}; see hbm.bytes_per_s"
        )


def _nvlink(draft: _Draft, topology: Topology) -> None:
    """Take NVLink where it joins all GPUs of the node, or as many neighbours everywhere."""
    pairs = {(one, other): topology.between(one, other) for one in range(topology.gpus) for other in range(one)}
    linked = {pair: int(way[2:]) for pair, way in pairs.items() if way.startswith("NV")}
    joined = next(
        (size for size in range(2, topology.gpus + 1) if linked.keys() == _neighbours(topology.gpus, size)), 0
    )
    if len(set(linked.values())) != 1 or not joined:
        if linked:
            draft.remarks.append(
                f"{len(linked)} of {len(pairs)} pairs of GPUs are joined by NVLink, of {_listed(linked.values())} "
                f"links; [nvlink] joins all GPUs of a node alike, or as many neighbours, and is left out"
            )
        return
    links = next(iter(linked.values()))
    of = gpu_name(draft.base.gpu.name).words
    presets = [draft.base, *(load_cluster(name) for name in preset_names(HARDWARE))]
    switched = (one for one in presets if one.nvlink and not one.bridged_gpus)
    base = next((one for one in switched if gpu_name(one.gpu.name).words == of), None)
    if base is None or base.nvlink is None:
        draft.remarks.append(
            f"no preset tells of the NVLink of {' '.join(of)}; write a table [nvlink] for its {links} links"
        )
        return
    draft.take("nvlink", None if base is draft.base else base)
    of_link = _NVLINK_BYTES_PER_S.get(of[-1])
    if of_link is None:
        return
    rate = links * of_link
    draft.put("nvlink.bytes_per_s", rate, f"{TOPO}: NV{links}, {of_link / 1e9:g} GB/s a link")
    if base.nvlink.peer_sms is not None:
        draft.put("nvlink.peer_sms", 2 * links, f"{TOPO}: NV{links}; 2 for each, as {base.name}")
    of_all = base.nvlink.bytes_per_s  # which links to each other GPU share, where no switch is between
    if joined < topology.gpus or (rate < of_all and rate * (joined - 1) <= of_all):
        draft.put("bridged_gpus", joined, f"{TOPO}: NV{links}, links of a pair without a switch")
        draft.put("nvlink.reduces", False, f"{TOPO}: NV{links}, links of a pair without a switch")


def _neighbours(gpus: int, size: int) -> set[tuple[int, int]]:
    """Return the pairs of GPUs whose numbers are in the same so many; none where these do not fill the node."""
    if gpus % size:
        return set()
    return {(one, other) for one in range(gpus) for other in range(one - one % size, one)}


def _pcie(draft: _Draft, topology: Topology, gpus: Sequence[GpuFacts]) -> None:
    """Take PCIe as the preset has it, at the rate of the slots, with the switches of this node."""
    if draft.base.pcie is None:
        return
    alone = draft.base.pcie.peers == "switch" and draft.base.pcie.gpus_per_switch == 1
    draft.take("pcie", without=() if alone else ("gpus_per_switch", "peers"))
    known = {(gpu.pcie_generation, gpu.pcie_lanes) for gpu in gpus if gpu.pcie_generation and gpu.pcie_lanes}
    rates = {lanes * _LANE_BYTES_PER_S[generation]: f"Gen{generation} x{lanes}"
             for generation, lanes in known if generation in _LANE_BYTES_PER_S and lanes}  # fmt: skip
    if rates and not math.isclose(min(rates), draft.base.pcie.bytes_per_s):
        _at_rate(draft, min(rates), rates[min(rates)])
    if len(rates) > 1:
        draft.remarks.append(f"links of PCIe differ, {', '.join(rates.values())}; pcie.bytes_per_s is the slowest")
    groups = [sorted(group) for group in _switches(topology)]
    if alone:
        if len(groups) < topology.gpus:
            draft.remarks.append(
                f"GPUs {'; '.join(_listed(group) for group in groups)} share PCIe switches, and exchange through host "
                f"memory even so: pcie.gpus_per_switch is 1, as if each had a way of its own"
            )
        return
    sizes = sorted({len(group) for group in groups})
    even = len(sizes) == 1 and groups == [
        list(range(start, start + sizes[0])) for start in range(0, topology.gpus, sizes[0])
    ]
    draft.put("pcie.gpus_per_switch", sizes[0] if even else 1, f"{TOPO}: {TOPO_OF_SWITCHES}")
    if not even:
        draft.remarks.append(
            f"PCIe switches have GPUs {'; '.join(_listed(group) for group in groups)}, a cluster has as many "
            f"neighbours behind each: pcie.gpus_per_switch is 1"
        )
    joined = draft.data.get("bridged_gpus", topology.gpus if "nvlink" in draft.data else 1)
    if joined < topology.gpus and draft.base.socket and len(groups) > 1:
        draft.put("pcie.peers", "switch", f"{TOPO}: GPUs behind different host bridges, between which NCCL exchanges "
                  f"through host memory (p2pLevel PXB in its src/graph/paths.cc, from memory)")  # fmt: skip


TOPO_OF_SWITCHES = "GPUs with PIX or PXB between them, or to the same NIC"


def _at_rate(draft: _Draft, rate: float, slot: str) -> None:
    """Set PCIe to the rate of the slots, and in proportion what was measured at the preset's."""
    assert draft.base.pcie is not None
    share = rate / draft.base.pcie.bytes_per_s
    draft.put("pcie.bytes_per_s", rate, f"{GPUS}: {slot}")
    for key in ("bytes_per_s", "both_ways_bytes_per_s"):
        for table in ("pcie", "pcie.uplink"):
            node = draft.data["pcie"] if table == "pcie" else draft.data["pcie"].get("uplink", {})
            if node.get(key) and (table, key) != ("pcie", "bytes_per_s"):
                draft.put(f"{table}.{key}", node[key] * share, f"{GPUS}: {slot}, in proportion to {draft.called}")


def _switches(topology: Topology) -> list[set[int]]:
    """Return which GPUs are behind one PCIe switch: where NVLink hides their own way, by a NIC that they share."""
    behind = [
        {other for other in range(topology.gpus) if other != gpu and topology.between(gpu, other) in _BEHIND_SWITCH}
        | {gpu}
        for gpu in range(topology.gpus)
    ]
    for nic in topology.nics:
        near = [gpu for gpu in range(topology.gpus) if topology.between(gpu, nic) in _BEHIND_SWITCH]
        for gpu in near:
            behind[gpu] |= set(near)
    found: list[set[int]] = []
    for group in behind:
        joined = [one for one in found if one & group]
        found = [one for one in found if one not in joined] + [group.union(*joined)]
    return sorted(found, key=min)


def _sockets(draft: _Draft, topology: Topology, memory_bytes: int | None) -> None:
    """Take sockets as the preset has them, as many as GPUs are near to."""
    socket = draft.base.socket
    if socket is None or draft.base.pcie is None:
        return
    draft.take("socket")
    count = len(set(topology.numa)) or _apart(topology)
    if count and topology.gpus % count:
        draft.remarks.append(f"{topology.gpus} GPUs are near {count} NUMA nodes; socket.per_node is the preset's")
    elif count and count != socket.per_node:
        source = f"{TOPO}: NUMA nodes of GPUs"
        draft.put("socket.per_node", count, source)
        for key in ("capacity_bytes", "bytes_per_s", "write_bytes_per_s"):
            figure = getattr(socket.dram, key)
            if figure:
                whole = figure * socket.per_node / count
                value = int(whole) if isinstance(figure, int) else whole
                draft.put(f"socket.dram.{key}", value, f"{draft.called}'s host memory over {count} NUMA nodes")
    elif count:
        draft.put("socket.per_node", count, f"{TOPO}: NUMA nodes of GPUs")
    if memory_bytes:
        each = memory_bytes // draft.data["socket"]["per_node"]
        draft.put("socket.dram.capacity_bytes", each, "sysconf(SC_PHYS_PAGES), of a socket")


def _apart(topology: Topology) -> int:
    """Return 1 where the ways between GPUs show that all are near one CPU; 0 where they do not tell."""
    ways = {topology.between(gpu, 0) for gpu in range(1, topology.gpus)}
    return int(all(way in _NEAR[:-1] for way in ways))


def _nics(draft: _Draft, topology: Topology, rdma: Sequence[RdmaDevice]) -> None:
    """Take as NICs of the node the fastest ones that are nearest to a GPU, as NCCL does; the rest are for storage."""
    rates = {one.name: one.bits_per_s for one in rdma}
    unknown = sorted(name for name in topology.nics if rdma and name not in rates)
    if unknown:
        raise InputError(
            f"`ib` does not name {', '.join(unknown)}, which `topo` has; it names {', '.join(rates)}: give the output "
            f"of both tools on the same node"
        )
    fastest = max((rates[name] for name in topology.nics if rdma), default=0.0)
    if rdma and not fastest:
        if topology.nics:
            draft.remarks.append(f"no port of {', '.join(topology.nics)} is active; there is no table [nic]")
        return
    candidates = [name for name in topology.nics if not rdma or rates[name] == fastest]
    used = list(dict.fromkeys(name for gpu in range(topology.gpus) for name in _nearest(topology, gpu, candidates)))
    if not used:
        return
    base = draft.base if draft.base.nic else load_cluster(_NICS_OF)
    draft.take("nic", None if base is draft.base else base, without=("per_node", "stripe"))
    if rdma:
        layers = " and ".join(sorted({one.layer for one in rdma if one.name in used}))
        draft.put("nic.bytes_per_s", fastest / 8, f"{IB}: {fastest / 1e9:g} Gb/s {layers}")
    draft.put("nic.per_node", len(used), f"{TOPO}: {', '.join(sorted(used, key=_natural))}")
    gpus, nics = topology.gpus, len(used)
    if gpus % nics and nics % gpus:
        fewer = max(count for count in range(1, nics + 1) if gpus % count == 0 or count % gpus == 0)
        draft.put("nic.per_node", fewer, f"{TOPO}: {fewer} of {', '.join(sorted(used, key=_natural))}")
        draft.remarks.append(f"{nics} NICs for {gpus} GPUs cannot be shared evenly; nic.per_node is {fewer}")
    left = [name for name in topology.nics if name not in used]
    if left:
        draft.remarks.append(f"no NIC of the GPUs, being slower, down or further away: {', '.join(left)}")
    ways = Counter(min(_NEAR.index(topology.between(gpu, nic)) for nic in used) for gpu in range(gpus))
    far = [_NEAR[way] for way in ways if _NEAR[way] not in _BEHIND_SWITCH]
    if far:
        draft.remarks.append(
            f"NICs are behind host bridges ({', '.join(sorted(far))}), which neither nic.bytes_per_s nor nic.latency_s "
            f"tells; calibrate, or set them to what was measured"
        )


def _nearest(topology: Topology, gpu: int, nics: Sequence[str]) -> Iterator[str]:
    """Yield the NICs on the shortest ways from a GPU."""
    ways = {nic: _NEAR.index(topology.between(gpu, nic)) for nic in nics}
    yield from (nic for nic, way in ways.items() if way == min(ways.values()))


def _natural(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _listed(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in sorted(set(values)))
