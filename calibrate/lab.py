"""Calibrates a lab once: what messages and collectives get of a link whose rate is set, and what they cost the cores.

The kernels are those of the host's profile. Transfers are timed on one flat network at one rate; predictions at other
rates, and on other networks, follow from the rates alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple, get_args

import msgspec
import torch
import torch.distributed as dist

from calibrate.lab_network import lab_network
from calibrate.measure.interference import short_cases
from calibrate.measure.kernels import RepeatedKernel
from calibrate.measure.links import LinkCase, LinkKernel, LinkTimes, time_link
from runtime.execution.groups import start_together
from runtime.lab.lab import Lab
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from sim.base.errors import InputError
from sim.engine.costs.measured import measured_cluster
from sim.schedule.ir.program import Program
from sim.words.profile import TRANSFERS, Point, Profile
from sim.words.workload import Dtype, ModelSpec
from topology.cluster import Cluster
from topology.lab import PAYLOAD, lab_spec
from topology.specs import ClusterSpec

SET_BYTES_PER_S = 25e6
"""200 Mbit/s: low enough that no core limits a transfer, high enough that large ones take little time."""
_SIZES = (12, 16, 19, 21)
"""Powers of two of bytes: what takes a latency to what takes 0.1 s."""
_FAST_BYTES_PER_S = 125e6
"""1 Gbit/s: where bytes, and not the timers and wake-ups of a link, are most of what a transfer takes of the cores."""
_BESIDE = {SET_BYTES_PER_S: 2**20, _FAST_BYTES_PER_S: 2**22}
"""Bytes that take some 40 ms at each rate, about as long as the attention beside which they are timed."""
_CHECK_KERNEL_S, _CHECK_S = 0.025, 0.04
"""About how long a lap of the kernels of a check takes, and each of its transfers."""
_CHECK_LAPS = 25
"""So many short ones that a burst of a few, which this machine always has, does not move their median: of five laps of
0.1 s it did, by over 5 % between a third of all checks on an idle machine.
"""
_MOST_CHECK_BYTES = 2**24
_WOKEN_TIMES = 5
"""Runs of a case whose times scatter by half from one to the next, of which the median counts."""
_CHECK_TRANSFERS = 3
_CHECK_KERNEL = "lab check"


def lab_cases() -> list[LinkCase]:
    """Return the transfers that are timed, small ones first."""
    return [LinkCase(kind, 2**n, "idle") for n in _SIZES for kind in get_args(LinkKernel)]


def _woken_cases() -> list[LinkCase]:
    """Return small collectives beside attention of all ranks: their steps wake threads, which wait for their turns."""
    return [LinkCase(kind, 2 ** _SIZES[0], "busy") for kind in ("all_gather", "reduce_scatter", "all_reduce")]


def calibrated_lab(
    host: Profile, ranks: int, model: ModelSpec, dtype: Dtype, advance: Callable[[str], None] = lambda _: None
) -> Profile:
    """Return the profile of a lab of so many ranks on a host that was calibrated; ``advance`` hears what is done. Its
    kernels are those of the host, its cluster is the flat network at the rate that was set.

    Raises InputError where no lab can be built.
    """
    points = _transfers(host, ranks, model, dtype, advance)
    spec = lab_spec(measured_cluster(host), "flat", ranks, SET_BYTES_PER_S)
    assert spec.host
    assert spec.loopback
    cores, s_per_byte = cores_by_rate(*_cores_taken(host, ranks, spec.host.cores, model, dtype, advance))
    least_s = min(point.median_s for point in points if point.kernel == "exchange")
    spec = msgspec.structs.replace(
        spec,
        loopback=msgspec.structs.replace(spec.loopback, latency_s=least_s),
        host=msgspec.structs.replace(spec.host, transfer_cores=cores, transfer_s_per_byte=s_per_byte),
    )
    return msgspec.structs.replace(
        host,
        name=f"{host.name}, lab",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        cluster=spec.figures(),
        points=(*(point for point in host.points if point.kernel not in TRANSFERS), *points),
    )


def _transfers(
    host: Profile, ranks: int, model: ModelSpec, dtype: Dtype, advance: Callable[[str], None]
) -> list[Point]:
    """Return what transfers take between two ranks and between all."""
    points = []
    for count in sorted({2, ranks}):
        with _session(host, count, SET_BYTES_PER_S) as session:
            for case in lab_cases():
                advance(f"{case.label}, {count} ranks")
                points.append(time_link(session, case, model, dtype).point)
            for case in _woken_cases() if count == ranks else ():
                advance(f"{case.label}, {count} ranks")
                times = [time_link(session, case, model, dtype).point for _ in range(_WOKEN_TIMES)]
                points.append(sorted(times, key=lambda one: one.mean_s)[_WOKEN_TIMES // 2])
    return points


def _cores_taken(
    host: Profile, ranks: int, cores: float, model: ModelSpec, dtype: Dtype, advance: Callable[[str], None]
) -> list[float]:
    """Return the cores that one side of an exchange takes at each rate of ``_BESIDE``."""
    taken = []
    for bytes_per_s, nbytes in _BESIDE.items():
        advance(f"cores that transfers take at {bytes_per_s:g} B/s")
        with _session(host, ranks, bytes_per_s) as session:
            timed = time_link(session, LinkCase("exchange", nbytes, "busy"), model, dtype)
            taken.append(cores_taken(timed, cores))
    return taken


def goodput(profile: Profile) -> float:
    """Return the share of what headers leave of a link that the largest messages got when a lab was calibrated."""
    exchanges = (point for point in profile.points if point.kernel == "exchange")
    large = max(exchanges, key=lambda one: (one.nbytes, one.shape[0]))
    return large.nbytes / large.median_s / (SET_BYTES_PER_S * PAYLOAD)


def require_calibrated(profile: Profile, ranks: int) -> None:
    """Raise InputError where a profile is not that of a lab of so many ranks."""
    spec = measured_cluster(profile)
    if spec.host is None or spec.host.transfer_s_per_byte is None or spec.gpus_per_node != ranks:
        raise InputError(
            f"profile {profile.name!r} is not the calibration of a lab of {ranks} ranks: name another file as "
            f"`calibration`, which is then made"
        )


@contextmanager
def _session(host: Profile, ranks: int, bytes_per_s: float) -> Iterator[Session]:
    """Start ranks on a flat network of a rate."""
    spec = lab_spec(measured_cluster(host), "flat", ranks, bytes_per_s)
    with Lab(lab_network(Cluster(spec))) as lab, Session(ranks, networks=lab.namespaces) as session:
        yield session


def cores_taken(timed: LinkTimes, cores: float) -> float:
    """Return the cores that one side of a running exchange takes from kernels of all ranks, each of which sends and
    receives: what all cores lose of the time that attention takes there, while the exchange runs. That counts the
    interrupts in the midst of kernels, and caches that are filled again, which no thread's clock shows.
    """
    ranks, _ = timed.point.shape
    together_s = min(timed.point.median_s, statistics.median(timed.during_s))
    return max(statistics.median(timed.lost_s), 0.0) / together_s * min(cores, ranks) / (2 * ranks)


def cores_by_rate(slow: float, fast: float) -> tuple[float, float]:
    """Return the cores that one side of a running transfer takes at any rate, and what a byte takes beside that, from
    what it took at both rates.

    >>> cores, s_per_byte = cores_by_rate(0.05 + 25e6 * 1e-9, 0.05 + 125e6 * 1e-9)
    >>> round(cores, 6), round(s_per_byte, 15)
    (0.05, 1e-09)
    """
    per_byte = max((fast - slow) / (_FAST_BYTES_PER_S - SET_BYTES_PER_S), 0.0)
    return max(slow - per_byte * SET_BYTES_PER_S, 0.0), per_byte


def lab_cluster(profile: Profile, network: str, ranks: int, bytes_per_s: float) -> ClusterSpec:
    """Return a network of a lab at a rate, on the machine that a lab's profile was measured on."""
    return lab_spec(measured_cluster(profile), network, ranks, bytes_per_s)


class Checked(NamedTuple):
    """What a fixed kernel on all ranks and a fixed transfer between two took, in seconds."""

    kernel_s: float
    transfer_s: float


class Checks:
    """A fixed kernel and a fixed transfer on a session in a lab, to be timed before and after what is measured."""

    def __init__(self, session: Session, cluster: Cluster, model: ModelSpec, dtype: Dtype) -> None:
        self._session = session
        route = cluster.route(0, session.ranks - 1)
        self.nbytes = min(max(round(route.bytes_per_s * _CHECK_S), 2**16), _MOST_CHECK_BYTES)
        """Of the transfer, from the first rank to the last."""
        self.least_s = self.nbytes / route.bytes_per_s
        """What it takes at the rates that were set."""
        case = short_cases(model, dtype)[0]
        once_s = max(session.call(_set_up, case.program.to_json()))
        self._runs = max(round(_CHECK_KERNEL_S / once_s), 3)

    def timed(self) -> Checked:
        """Return both times, medians: of laps of the kernel, each until the last rank has done its runs, and of
        transfers. How ranks that share cores take turns moves the mean of their times, and not the time of the last.
        """
        laps = zip(*self._session.call(_work, self._runs, _CHECK_LAPS), strict=True)
        kernel_s = statistics.median(map(max, laps))
        transfer_s: float = self._session.call(_send, self.nbytes)[0]
        return Checked(kernel_s, transfer_s)


def _set_up(context: RankContext, program_json: bytes) -> float:
    """Make the operands of the kernel; return the seconds of a run while all ranks run it."""
    repeated = RepeatedKernel(Program.from_json(program_json), context)
    context.state[_CHECK_KERNEL] = repeated
    repeated.once_each()
    return min(_work(context, 5, 3)) / 5


def _work(context: RankContext, runs: int, laps: int) -> list[float]:
    """Return the seconds of each lap of so many runs of the kernel, which all ranks begin together."""
    repeated: RepeatedKernel = context.state[_CHECK_KERNEL]
    times = []
    for _ in range(laps):
        start_together(context.ranks, context.device)
        begin_s = time.perf_counter()
        for _ in range(runs):
            repeated.once()
        times.append(time.perf_counter() - begin_s)
    return times


def _send(context: RankContext, nbytes: int) -> float:
    """Send from the first rank to the last, which says when it has all; return the median time, as the first saw it."""
    start_together(context.ranks, context.device)
    sent, told = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    last, times = context.ranks - 1, []
    for _ in range(_CHECK_TRANSFERS):
        begin_s = time.perf_counter()
        if context.rank == 0:
            dist.send(sent, last)
            dist.recv(told, last)
        elif context.rank == last:
            dist.recv(sent, 0)
            dist.send(told, 0)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)
