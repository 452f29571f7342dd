"""A profile: measured times of kernels and transfers, each with its provenance, and the machine they were measured on.

The cost model turns them into efficiencies relative to that machine's figures, so a what-if on the figures reaches
measured costs too. Profiles are JSON: those that ship lie in ``sim/profiles``, the user's in ``profile_folder()``.
"""

from __future__ import annotations

import os
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from sim.base.errors import unknown
from sim.base.files import Kind, decoded_by, make_folder, write_whole
from sim.base.kept import kept
from sim.base.presets import Name, from_json, preset_names, read_bytes
from sim.words.options import AllocatorName, FusedName, HostOptimiserName
from sim.words.workload import Dtype

Condition = Literal["idle", "busy"]
Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
SmallSeconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Factor = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

HOST_COPIES: tuple[Literal["offload"], Literal["fetch"]] = ("offload", "fetch")
PAGEABLE_COPIES = ("offload_pageable", "fetch_pageable")
TRANSFERS = ("exchange", "all_to_all", "all_gather", "reduce_scatter", "all_reduce", *HOST_COPIES, *PAGEABLE_COPIES)


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is described."""


SLICE_BACK = "slice_back"
"""In ``issue`` and ``traffic``, beside a merge of some rows: copying them back into the whole."""


class Point(_Data, frozen=True, kw_only=True):
    """One measured time."""

    kernel: str
    """As in ``KernelUse``; or one of ``TRANSFERS``: communication, and copies to the host's memory and back."""
    variant: str = ""
    """As in ``KernelUse``; of a transfer the kind of link that limits it (nvlink, nic, …), empty: any."""
    dtype: Dtype
    shape: tuple[int, ...]
    """As in ``KernelUse``; for transfers (ranks of the communicator, bytes that each rank gives), over NICs also the
    number of nodes, without which the ranks fill nodes."""
    condition: Condition
    """busy: all other cores run the same kernel, or (transfers) every rank computes beside it."""
    median_s: Seconds
    """What kernels are predicted by: single outliers do not count."""
    mean_s: Seconds
    """What transfers are predicted by: their times scatter, and what a step adds up are means."""
    low_s: Seconds
    """First quartile."""
    high_s: Seconds
    """Third quartile."""
    runs: int
    flops: Amount = 0
    nbytes: Amount = 0
    """HBM bytes of a kernel (``KernelUse.hbm_bytes``); bytes on the wire per rank of a transfer."""

    def __post_init__(self) -> None:
        """Raise ValueError for a shape or size that no lookup could use."""
        dims = {"attention_forward": (6,), "attention_backward": (6,), "gemm": (3,)} | dict.fromkeys(TRANSFERS, (2, 3))
        expected = dims.get(self.kernel, (1,))
        if len(self.shape) not in expected or min(self.shape) < 1:
            sizes = " or ".join(map(str, expected))
            raise ValueError(f"shape {self.shape} of {self.kernel}: expected {sizes} positive sizes")
        if len(self.shape) == 3 and self.kernel in TRANSFERS and self.shape[2] > self.shape[0]:
            raise ValueError(
                f"shape {self.shape} of {self.kernel}: {self.shape[0]} ranks are on {self.shape[0]} nodes at most"
            )
        if self.kernel in TRANSFERS and self.nbytes < 1:
            raise ValueError(f"nbytes {self.nbytes} of {self.kernel}: expected 1 or more")


class Slowdown(_Data, frozen=True, kw_only=True):
    """How much longer something took beside something else than without it, both within one run."""

    slowed: Literal["kernel", "transfer"]
    kernel: str
    """As in ``KernelUse``: what is slowed, or what a transfer is slowed by."""
    variant: str = ""
    dtype: Dtype
    shape: tuple[Count, ...]
    nbytes: Amount
    """HBM bytes of the kernel."""
    beside: Literal["ranks", "exchange", "all_to_all", "all_reduce", "offload", "fetch"]
    """ranks: the same kernel on ``ranks`` ranks at once, against one; else one transfer among them, or of each to its
    host's memory or back."""
    ranks: int
    clock: Literal["wall", "thread"]
    """thread: only while the kernel's thread is on a core, so whoever else took that core is not in it."""
    alone_s: Seconds
    """Median time of what is slowed, without the other."""
    median: Factor
    """Time beside it over time alone."""
    low: Factor
    """First quartile."""
    high: Factor
    """Third quartile."""
    runs: int


class MeasuredJitter(_Data, frozen=True, kw_only=True):
    """How much kernels scatter while all ranks are busy."""

    share: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
    """One run of ten takes 1 + 1.645 share times the median and more: what ``--jitter`` takes (half normal)."""
    correlation: float
    """Of runs at the same time on different ranks: 1 where all are slow together, so that none waits for another."""
    runs: int


class TileModel(_Data, frozen=True, kw_only=True):
    """Time of a fused attention kernel by the blocks that the busiest SM takes: see ``sim.engine.costs.tiles``."""

    kernel: str
    dtype: Dtype
    head_dim: Count
    fixed_s: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
    tile_s: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
    """Of each block, whatever it does."""
    pair_s: Seconds
    """Of each 128 x 128 scores."""


class Issue(_Data, frozen=True, kw_only=True, omit_defaults=True):
    """What issuing an op costs the host."""

    host_s: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
    """Without its kernels."""
    launches: Amount = 1
    """Kernels that it launches, each for the GPU's ``launch_s``."""
    kernels: Amount = 0
    """Eager kernels of which it consists, each for what one of its own costs (``kernel``)."""

    @property
    def launched(self) -> int:
        """Kernels that the GPU runs."""
        return self.launches + self.kernels


class Eager(_Data, frozen=True, kw_only=True):
    """What the host takes for a kernel of eager modules beyond what ``issue`` has for one by itself: nn.Module,
    autograd, views and the Python around them.
    """

    forward_s: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
    backward_s: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]

    def times(self, factor: float) -> Eager:
        """Return what it is on a host that takes so many times as long."""
        return Eager(forward_s=factor * self.forward_s, backward_s=factor * self.backward_s)


class Spread(_Data, frozen=True, kw_only=True):
    """Measured over predicted time, of points that are predicted from the others."""

    low: Factor
    """One of twenty lies below it."""
    high: Factor
    """One of twenty lies above it."""


Bound = Literal["low", "high"]
Rates = Literal["burst", "sustained"]
"""Of kernels: in short runs, of which points are, or under seconds of load."""


class Longer(_Data, frozen=True, kw_only=True):
    """How many times as long something takes as something else, over shapes or runs."""

    longer: Factor
    """In the median."""
    low: Factor
    """One of ten takes less."""
    high: Factor
    """One of ten takes more."""


class Held(_Data, frozen=True, kw_only=True):
    """The share of a data type's peak FLOP/s that kernels get which are long enough to lower the clock themselves."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """In the median."""
    low: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """One of ten gets less."""
    high: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """One of ten gets more."""


class Sustained(Longer, frozen=True, kw_only=True):
    """How many times as long kernels bound by FLOPs take under seconds of load as in the short runs of the points."""

    rises_s: tuple[Seconds, Seconds] = (10e-6, 50e-6)
    """Kernels shorter than the first do not reach the power limit; all longer than the second do."""
    falls_s: tuple[Seconds, Seconds] = (1e-3, 10e-3)
    """Short runs of kernels shorter than the first end before the clock falls; those longer than the second do not."""
    held: Held | None = None
    """The most that those longer get under load, whatever shorter points of their shape say; None: as points say."""
    state: str = ""
    """What the driver said of clocks and power under that load."""


class PowerLaw(_Data, frozen=True, kw_only=True):
    """Rates of kernels at the power limit are as that limit to the power of ``exponent``."""

    exponent: Annotated[float, msgspec.Meta(ge=0, le=3)]
    low: Annotated[float, msgspec.Meta(ge=0, le=3)]
    high: Annotated[float, msgspec.Meta(ge=0, le=3)]
    from_w: Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
    """The least limit that sources speak of."""
    to_w: Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
    """The highest."""


class Machine(_Data, frozen=True, kw_only=True, omit_defaults=True):
    """What a profile is valid for."""

    gpu: Name
    """Name of the device, as in the cluster's gpu.name."""
    cores: int = 0
    """Of a host; 0 for GPUs."""
    threads_per_rank: int = 1
    software: dict[str, str]
    """Versions of what ran: they do not have to match, but a report names them."""
    state: dict[str, str] = {}
    """Of a GPU before and after: what its driver says of clocks, temperature and power."""


class Ran(_Data, frozen=True, kw_only=True):
    """A kernel that passes over its operands once, one of several that stand for another kernel."""

    kernel: Name
    dtype: Dtype
    bytes_per_element: Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
    """That it reads and writes, by element of what the kernel that it stands for takes as its size."""
    launches: Annotated[float, msgspec.Meta(gt=0, lt=1e9)] = 1
    """How often."""


class FusedAttention(_Data, frozen=True, kw_only=True):
    """The fused attention kernel that was measured."""

    kernel: FusedName | Literal[""]
    """Its generation, as ``software.attention`` names it; empty where points are of several."""
    said: Name
    """What answers call it."""


class Profile(_Data, frozen=True, kw_only=True, omit_defaults=True, weakref=True):
    """All that was measured in one calibration."""

    name: Name
    created: str
    """Date and time, UTC, ISO 8601."""
    command: str
    complete: bool
    """False if the calibration was interrupted."""
    machine: Machine
    cluster: dict[str, Any]
    """The cluster's spec (``topology.specs.ClusterSpec``) with this machine's figures."""
    points: tuple[Point, ...]
    interference: tuple[Slowdown, ...] = ()
    """Only a full calibration measures all of it."""
    traffic: dict[str, Factor] = {}
    """Bytes that a kernel moves through memory over those that none could avoid (``KernelUse.hbm_bytes``), by kernel:
    where several at once show it, or its code does. 1 for others."""
    memory_efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Share of the memory's bandwidth that kernels reach which have no points of their own."""
    elementwise: dict[str, Factor] = {}
    """How many times as long as its bytes take at that rate an elementwise kernel takes, by its name, or by the mark of
    those that read one element at a time (``sim.schedule.derive.kernels.SCATTERED``)."""
    blocks_per_sm: dict[str, Count] = {}
    """Blocks of a kernel that an SM runs at once, by kernel: 1 for others."""
    persistent: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1)]] = {}
    """By kernel whose grid has a block per SM, each with a fixed share of the work: for each SM that is held when it
    begins, by how much of that time it ends later. Other grids hand out their blocks to any SM."""
    replayed_s: SmallSeconds | None = None
    """Of a small kernel, from one to the next in a CUDA graph, whose launches cost the host nothing: what
    ``--set cluster.gpu.launch_s`` may come down to, and what each kernel without points takes beside its bytes."""
    replayed: Spread | None = None
    """Bounds of that, as factors, in intervals."""
    issue: dict[str, Issue] = {}
    """Ops that cost the host more than one launch, by kernel or kind of communication. ``kernel``: any eager kernel
    that is not named; ``call``: a send or receive by itself; ``exchange``: a grouped call, ``message``: each in it."""
    eager: Eager | None = None
    """Of the modules that software runs (``sim.software.issue``); None: they cost no more than their kernels."""
    one_queue: bool = False
    """Whether GPUs begin with kernels of all streams in the order in which the host issues them, as with
    CUDA_DEVICE_MAX_CONNECTIONS=1."""
    check_s: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    """What hosts take before each collective for each rank that meets (``sim.software.software``)."""
    host: Spread | None = None
    """Bounds of what ``issue``, ``eager`` and ``check_s`` state, as factors, in intervals."""
    attention: FusedAttention | None = None
    """None where nobody has said it."""
    runs: dict[str, tuple[Ran, ...]] = {}
    """By kernel, those that software runs in its place (``sim.software.kernels``), whatever points of it there are."""
    software: Name = ""
    """What that software is called; empty where nobody has named it."""
    tiles: tuple[TileModel, ...] = ()
    """Of attention kernels, which then need few points."""
    disagreement: dict[str, Factor] = {}
    """By kernel, the factor by which sources lie above and below the mean that its points are."""
    residuals: dict[str, Spread] = {}
    """How far points are from what the others predict, and sources from their mean, by kernel."""
    beyond: dict[str, Annotated[float, msgspec.Meta(ge=1, lt=1e9)]] = {}
    """By kernel, the factor by which the 90 % interval of its time is wider at twice the longest length measured; each
    doubling more adds half as much."""
    bound: Bound | None = None
    """At which end of the 90 % interval its times lie; None: they are what is expected."""
    sustained: dict[str, Sustained] = {}
    """By kernel, what load makes of it."""
    power: PowerLaw | None = None
    """How rates under load follow the power limit (``gpu.power_w``)."""
    rates: Rates | None = None
    """Which rates predictions take; None: sustained ones for whole layers, burst for attention alone."""
    forms: dict[str, Longer] = {}
    """By kernel and variant that has no points of its own, how many times as long it takes as the kernel without
    variant: weight gradients over forward passes."""
    beside_communication: Annotated[float, msgspec.Meta(ge=1, lt=1e9)] = 1.0
    """How much longer kernels may take beside communication, in the upper end of intervals."""
    host_optimiser: HostOptimiserName | None = None
    """Whose AdamW the host runs; None where nobody has said it."""
    allocator: AllocatorName | None = None
    """What gives tensors their memory; None where nobody has said it."""
    sources: dict[str, str] = {}
    """Where figures come from that were not measured by ``command``: of points by kernel, of others by field."""
    jitter: MeasuredJitter | None = None


def at_rates(profile: Profile, rates: Rates) -> Profile:
    """Return a profile that says which rates it predicts: always the same object, beside which its tables are kept."""
    return profile if profile.rates == rates else _rated(profile)[rates]


@kept
def _rated(profile: Profile) -> dict[Rates, Profile]:
    return {rates: msgspec.structs.replace(profile, rates=rates) for rates in get_args(Rates)}


def with_replayed(profile: Profile, replayed_s: float) -> Profile:
    """Return a profile whose small kernels take other seconds: for the same ones always the same object."""
    known = _replaying(profile)
    if replayed_s not in known:
        known[replayed_s] = msgspec.structs.replace(profile, replayed_s=replayed_s)
    return known[replayed_s]


@kept
def _replaying(profile: Profile) -> dict[float, Profile]:  # noqa: ARG001 - beside which they are kept
    return {}


def profile_folder() -> Path:
    """Return the folder of the user's own profiles, by the XDG base directory specification."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "longstep" / "profiles"


def profile_names() -> list[str]:
    """Return the names of all profiles that ``--profile`` takes."""
    return sorted({*preset_names("sim/profiles", ".json"), *_own_names()})


def _own_names() -> list[str]:
    """Return the names of the user's own profiles; none where their folder cannot be read."""
    try:
        return [path.stem for path in profile_folder().glob("*.json")]
    except OSError:
        return []


def load_profile(name: str) -> Profile:
    """Return a profile by name (the user's own before those that ship) or from a JSON file."""
    return _decoded(name, profile_bytes(name))


def shipped_profile(name: str) -> Profile:
    """Return a profile that ships by its place in ``sim/profiles``, whatever of the user's own has its name."""
    return _decoded(name, _shipped(name))


@lru_cache(maxsize=16)
def _decoded(name: str, data: bytes) -> Profile:
    """Return the profile that a file holds: for the same bytes the same object, beside which its tables are kept."""
    return from_json(data, Profile, f"profile {name!r}", "longstep calibrate makes a new one")


def profile_bytes(name: str) -> bytes:
    """Return the file of a profile, found as ``load_profile`` finds it."""
    if name.endswith(".json") or "/" in name:
        return read_bytes("profile", name, "`profile`")
    if name in _own_names():
        return read_bytes("profile", str(profile_folder() / f"{name}.json"), "`profile`")
    if name in preset_names("sim/profiles", ".json"):
        return _shipped(name)
    where = "`profile` (longstep calibrate makes one)"
    raise unknown("profile", name, [*profile_names(), "datasheet", "FILE.json"], where)


@cache
def _shipped(name: str) -> bytes:
    """Return the file of a profile that ships, which nobody changes: the same object, whose hash is found once."""
    return resources.files("sim").joinpath("profiles", f"{name}.json").read_bytes()


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile; a reader sees the old file or the whole new one, never a half-written one."""
    make_folder(path.parent)
    write_whole(path, encode_profile(profile))


def encode_profile(profile: Profile) -> bytes:
    """Return what the file of a profile holds."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1)


PROFILE_FILE = Kind("a profile", decoded_by(msgspec.json.Decoder(Profile).decode))
OWN_PROFILE_FILE = Kind("a profile", lambda _: True)
"""In the user's folder of profiles, in which only Longstep writes; those of older versions may not be readable."""
