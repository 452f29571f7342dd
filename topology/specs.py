"""What a cluster is made of, as frozen data read from TOML.

Units: SI, bandwidths per direction (datasheets sum both directions of NVLink), GB = 1e9 B. Each preset states the
source of every figure in its table ``[sources]``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sim.base.errors import InputError
from sim.base.presets import Name
from topology.base import Bytes, Count, NotNegative, Positive, Spec
from topology.collectives import CollectivesSpec
from topology.kinds import DIRECT, Fabric
from topology.reserved import OF_CPU, OF_CUDA, OF_CUDA_BESIDE_ALLOCATOR, Reserved

MOST_GPUS = 2**14
"""Of a cluster: as many as have trained one model (arXiv:2407.21783 §3.3)."""


class GpuSpec(Spec, frozen=True, kw_only=True):
    """One accelerator; for ``kind = "cpu"`` one process of the host, whose "SMs" are its threads."""

    name: Name
    kind: Literal["cuda", "cpu"] = "cuda"
    sms: Count
    peak_flops_per_s: dict[str, Positive]
    """Dense peak by data type at the boost clock: no prediction is ever faster."""
    launch_s: NotNegative
    """Time that the host thread needs to issue one op."""
    communication_sms: Annotated[int, Meta(ge=0, le=2**16)] = 0
    """SMs that the kernel of a collective inside a node holds, also while it waits for others: NCCL's channels."""
    power_w: Annotated[float, Meta(gt=0, lt=1e5)] | None = None
    """Enforced power limit, which rates under load follow; it belongs to the machine, not to the GPU's name."""

    @property
    def chip(self) -> str:
        """Its name without the memory beside it: what kernels were measured on, at whatever rate that has."""
        return re.sub(r"-\d+GB\Z", "", self.name)


class HbmSpec(Spec, frozen=True, kw_only=True):
    """The memory that kernels work on: per GPU, or the DRAM that all ranks of a CPU host share."""

    capacity_bytes: Bytes
    bytes_per_s: Positive
    reserved_bytes: Annotated[int, Meta(ge=0, le=2**60)] | None = None
    """What of a GPU's capacity no buffer can have; None: as ``reserved`` has it."""
    reserved_within_bytes: Annotated[int, Meta(ge=0, le=2**60)] | None = None
    """How much more or less that may be."""


class LinkSpec(Spec, frozen=True, kw_only=True):
    """A point-to-point link, each direction of its own."""

    bytes_per_s: Positive
    latency_s: NotNegative
    payload: Annotated[float, Meta(ge=1e-6, le=1)] = 1.0
    """Share of the rate that data gets; the rest are headers and flow control."""
    reduces: bool = False
    """Whether its switch sums what passes through it (NVLink SHARP)."""
    both_ways_bytes_per_s: Positive | None = None
    """Data rate of both directions together, where that is less than twice the rate of one direction."""
    peer_sms: Count | None = None
    """SMs that what two ranks send each other holds at most, see ``sim.engine.channels``; None: as a collective's."""

    def __post_init__(self) -> None:
        """Raise InputError where one direction would be limited by what both get."""
        if self.both_ways_bytes_per_s is not None and self.both_ways_bytes_per_s < self.bytes_per_s * self.payload:
            raise InputError(
                f"both_ways_bytes_per_s {self.both_ways_bytes_per_s:g} is less than one direction gets alone, "
                f"{self.bytes_per_s * self.payload:g}: set it to that or more"
            )


class NicSpec(LinkSpec, frozen=True, kw_only=True):
    """The NICs of a node; rate and latency are those of one NIC and the fabric behind it."""

    per_node: Count | None = None
    """How many a node has; None: one per GPU. Fewer are shared by neighbours, more are shared out evenly."""
    stripe: Count | None = None
    """How many carry one flow together, each an equal part of it; None: as many as a GPU has of its own, or one."""


class PcieSpec(LinkSpec, frozen=True, kw_only=True):
    """The link of every GPU to its PCIe switch, and the links behind that switch."""

    gpus_per_switch: Count = 1
    uplink: LinkSpec | None = None
    """From a switch to its socket, shared by the GPUs behind it; without one only their own links limit them."""
    peers: Literal["node", "switch"] = "node"
    """Which GPUs write into each other's memory; data of others passes through that of the host."""


class DramSpec(Spec, frozen=True, kw_only=True):
    """Host memory of one socket; reads and writes share its bandwidth."""

    capacity_bytes: Bytes
    bytes_per_s: Positive
    write_bytes_per_s: Positive | None = None
    """What writes get at most of that."""


class CxlSpec(Spec, frozen=True, kw_only=True):
    """Memory of one socket behind CXL links, a second tier of its host memory (CXL.mem, type 3 devices). Pages of what
    offload keeps there are interleaved over both tiers by fixed weights, as Linux does (mempolicy weighted interleave,
    6.9, from memory), so a copy flows to both at once.
    """

    capacity_bytes: Bytes
    bytes_per_s: Positive
    """Of reads and writes together."""
    latency_s: NotNegative = 0.0
    """What its part of a copy begins later."""
    share: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Share of the pages; None: as much as it has of the capacity of both."""


class SocketSpec(Spec, frozen=True, kw_only=True):
    """The CPUs of a node of GPUs: each has the memory and the PCIe switches of an equal share of the GPUs."""

    per_node: Annotated[int, Meta(ge=1, le=64)] = 1
    dram: DramSpec
    link: LinkSpec | None = None
    """Between any two of them; without one data does not pass from one to another."""
    cxl: CxlSpec | None = None

    @property
    def cxl_share(self) -> float:
        """Which share of the pages that offload keeps on the host are in the second tier."""
        if self.cxl is None:
            return 0.0
        return self.cxl.share or self.cxl.capacity_bytes / (self.cxl.capacity_bytes + self.dram.capacity_bytes)


class HostSpec(Spec, frozen=True, kw_only=True):
    """The cores of a node; ranks on them and the threads of their transfers share these cores."""

    cores: Positive
    """Cores that ranks can use; fewer than the physical ones where busy cores slow each other."""
    wakeup_s: NotNegative = 0.0
    """Time that a waking thread waits for its turn when every core is busy (scheduler time slice)."""
    handoff_s: NotNegative = 0.0
    """Time until a thread goes on after another one has ended what it waited for."""
    transfer_cores: NotNegative = 0.0
    """Cores that one side of a running transfer keeps busy (copies through the TCP stack)."""
    transfer_s_per_byte: NotNegative | None = None
    """What a core takes for a byte that a rank sends or receives, beside the ``transfer_cores`` that it takes at any
    rate. Where it is given, links are so slow that their threads mostly sleep: those get a core at once, and kernels
    what they leave."""
    shared: bool = False
    """Whether all nodes are parts of one machine, such as network namespaces, and share its cores and its memory."""


class PerGpu(Spec, frozen=True, kw_only=True):
    """What is special about one device of the cluster."""

    speed: Positive = 1.0
    """Clock relative to the spec: 0.95 computes 5 % slower."""
    link: Positive = 1.0
    """Rate of its own links relative to the spec, of both directions: 0.25 is a port that came up at a quarter."""


class ClusterSpec(Spec, frozen=True, kw_only=True):
    """A whole machine. ``nvlink``, ``pcie``, ``socket``, ``nic`` and ``loopback`` say which links there are; see
    ``fabrics``.
    """

    name: Name
    nodes: Count = 1
    gpus_per_node: Count
    gpus_meant: Count | None = None
    """How many GPUs were asked for by name; None: as many as a setup says, and as many nodes as these need."""
    taken: str = ""
    """What the name that it was asked for by left open, and how it was taken."""
    gpu: GpuSpec
    hbm: HbmSpec
    nvlink: LinkSpec | None = None
    bridged_gpus: Count | None = None
    """NVLink joins each two of so many neighbours by a link of its own, with the figures of ``nvlink``, as bridges and
    xGMI do; None: a switch joins all GPUs of a node."""
    pcie: PcieSpec | None = None
    socket: SocketSpec | None = None
    nic: NicSpec | None = None
    fabric: Fabric | None = None
    """How nodes are joined; None: by a switch that does not block."""
    collectives: CollectivesSpec = CollectivesSpec()
    loopback: LinkSpec | None = None
    host: HostSpec | None = None
    per_gpu: dict[int, PerGpu] = msgspec.field(default_factory=dict)
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Where each figure comes from, by dotted path."""
    profile: str = ""
    """Name of the profile that predictions take unless another one is named; empty: none, so rates of datasheets."""

    def __post_init__(self) -> None:
        """Raise InputError where parts do not fit together."""
        total = self.nodes * self.gpus_per_node
        if not 1 <= total <= MOST_GPUS:
            raise InputError(
                f"cluster {self.name!r} has {self.nodes} x {self.gpus_per_node} GPUs: expected 1 to {MOST_GPUS}; set "
                f"`nodes` or its gpus_per_node"
            )
        if self.gpus_meant and not total - self.gpus_per_node < self.gpus_meant <= total:
            raise InputError(
                f"{self.gpus_meant} GPUs are meant of cluster {self.name!r}, and do not fill its {self.nodes} x "
                f"{self.gpus_per_node}: ask for as many as its nodes have, or set its nodes and gpus_per_node alone"
            )
        for index in self.per_gpu:
            if not 0 <= index < total:
                raise InputError(f"gpu[{index}] is beyond the {total} GPUs of cluster {self.name!r}: 0 to {total - 1}")
        if self.gpu.communication_sms >= self.gpu.sms and self.gpu.communication_sms:
            raise InputError(
                f"gpu.communication_sms {self.gpu.communication_sms} leaves none of {self.gpu.sms} SMs to kernels: "
                f"set it below that"
            )
        if self.gpu.kind == "cpu" and (self.host is None or self.loopback is None):
            raise InputError(f"cluster {self.name!r}: a gpu of kind 'cpu' needs the tables [host] and [loopback]")
        if self.gpus_per_node > 1 and not (self.nvlink or self.pcie or self.loopback):
            raise InputError(
                f"cluster {self.name!r}: {self.gpus_per_node} GPUs a node need [nvlink], [pcie] or [loopback]"
            )
        if self.nodes > 1 and self.nic is None:
            raise InputError(f"cluster {self.name!r}: {self.nodes} nodes need a table [nic]")
        self._check_bridges()
        self._check_nics()
        self._check_fabric()
        sums = self.nvlink is not None and self.nvlink.reduces
        if wrong := self.collectives.wrong(self.fabric, self.nodes, sums=sums):
            raise InputError(f"collectives of cluster {self.name!r}: {wrong}")
        if self.socket and self.pcie is None:
            raise InputError(f"cluster {self.name!r}: [socket] is reached by PCIe, and there is no table [pcie]")
        if self.pcie and self.pcie.peers == "switch" and self.socket is None:
            raise InputError(
                f'cluster {self.name!r}: pcie.peers = "switch" sends data through host memory, and there is no table '
                f"[socket]"
            )

    @property
    def gpus_per_nvlink(self) -> int:
        """How many neighbours NVLink joins: 1 where there is none."""
        return (self.bridged_gpus or self.gpus_per_node) if self.nvlink else 1

    @property
    def nics_per_node(self) -> int:
        """The number of NICs of a node."""
        return (self.nic and self.nic.per_node) or self.gpus_per_node

    @property
    def nics_per_flow(self) -> int:
        """The number of NICs that carry one flow together."""
        return (self.nic and self.nic.stripe) or max(1, self.nics_per_node // self.gpus_per_node)

    @property
    def uneven(self) -> bool:
        """Whether some GPU's own links have another rate than all others."""
        return any(special.link != 1.0 for special in self.per_gpu.values())

    @property
    def has_links_apart(self) -> bool:
        """Whether no two GPUs of a node share a link, and all have the same ways to others: each has its own port to a
        switch that joins all, and its own NICs.
        """
        joined = self.nvlink is not None and self.bridged_gpus is None
        return joined and (self.nodes == 1 or self.ports_per_node >= self.gpus_per_node)

    @property
    def ports_per_node(self) -> int:
        """The number of ports of the fabric that a node has. NICs of one stripe are one port."""
        return self.nics_per_node // self.nics_per_flow

    @property
    def stripe_width(self) -> int:
        """How many times as many NICs carry a flow as there are for each GPU."""
        return self.nics_per_flow // max(1, self.nics_per_node // self.gpus_per_node)

    @property
    def reserved(self) -> Reserved:
        """What of a device's memory buffers cannot have."""
        return self._stated(OF_CUDA)

    @property
    def reserved_beside_allocator(self) -> Reserved:
        """What of it an allocator cannot have."""
        return self._stated(OF_CUDA_BESIDE_ALLOCATOR)

    def _stated(self, of_cuda: Reserved) -> Reserved:
        stated, own = of_cuda if self.gpu.kind == "cuda" else OF_CPU, self.hbm
        return Reserved(
            stated.nbytes if own.reserved_bytes is None else own.reserved_bytes,
            stated.within_bytes if own.reserved_within_bytes is None else own.reserved_within_bytes,
        )

    def of_nodes(self, nodes: int) -> ClusterSpec:
        """Return it with so many nodes; raises InputError where its GPUs were counted, and fill other ones."""
        if self.gpus_meant and nodes != self.nodes:
            raise InputError(
                f"`nodes` {nodes}: {self.gpus_meant} GPUs were asked for by name, which fill {self.nodes} of "
                f"{self.name!r} with {self.gpus_per_node} each; leave out one of both"
            )
        return msgspec.structs.replace(self, nodes=nodes)

    def _check_bridges(self) -> None:
        """Raise InputError where bridges cannot join neighbours evenly, or others have no way."""
        bridged = self.bridged_gpus
        if bridged is None:
            return
        if self.nvlink is None or self.gpus_per_node % bridged:
            raise InputError(
                f"bridged_gpus {bridged} of cluster {self.name!r}: expected a divisor of its {self.gpus_per_node} GPUs "
                f"a node, and the figures of a bridge in [nvlink]; leave it out where a switch joins all"
            )
        if bridged < self.gpus_per_node and self.pcie is None:
            raise InputError(
                f"bridged_gpus {bridged} of cluster {self.name!r}: the others of its {self.gpus_per_node} GPUs a node "
                f"are reached over PCIe, and there is no table [pcie]"
            )
        if self.nvlink.reduces:
            raise InputError(f"nvlink.reduces of cluster {self.name!r}: switches sum, and bridged_gpus has none")

    def _check_nics(self) -> None:
        """Raise InputError where GPUs cannot share the NICs of their node evenly."""
        gpus, nics, stripe = self.gpus_per_node, self.nics_per_node, self.nics_per_flow
        if gpus % nics and nics % gpus:
            raise InputError(
                f"nic.per_node {nics} of cluster {self.name!r}: expected a divisor or a multiple of its {gpus} GPUs a "
                f"node, so that all get as much; set it to such, or leave it out for one NIC per GPU"
            )
        own = max(1, nics // gpus)
        if nics % stripe or stripe % own:
            allowed = ", ".join(str(count) for count in range(own, nics + 1, own) if nics % count == 0)
            raise InputError(
                f"nic.stripe {stripe} of cluster {self.name!r}: of {nics} NICs for {gpus} GPUs a flow takes all that "
                f"its GPU has to itself, and stripes are equal; set it to one of {allowed}"
            )

    def _check_fabric(self) -> None:
        """Raise InputError where nodes do not fill the fabric that joins them."""
        if self.fabric is None:
            return
        if isinstance(self.fabric, DIRECT) and (self.gpus_per_node > 1 or self.nic is None):
            raise InputError(
                f"cluster {self.name!r}: a fabric without switches links nodes of one GPU each at the figures of "
                f"[nic]; set gpus_per_node 1, and give it that table"
            )
        if self.nic is None:
            raise InputError(f"cluster {self.name!r}: a [fabric] joins NICs, and there is no table [nic]")
        if wrong := self.fabric.wrong(self.nodes, self.ports_per_node):
            raise InputError(f"fabric of cluster {self.name!r}: {wrong}")

    def figures(self) -> dict[str, Any]:
        """Return the spec as plain data, as a machine's profile keeps it: without the name of a profile, what is
        reserved of its memory, and how it was asked for.
        """
        found: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        del found["profile"], found["gpus_meant"], found["taken"]
        del found["hbm"]["reserved_bytes"], found["hbm"]["reserved_within_bytes"]
        if self.bridged_gpus is None:
            del found["bridged_gpus"]
        if self.fabric is None:
            del found["fabric"]
        if self.collectives == CollectivesSpec():
            del found["collectives"]
        if self.socket and self.socket.cxl is None:
            del found["socket"]["cxl"]
        return found
