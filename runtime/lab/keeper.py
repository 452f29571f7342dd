"""The process that builds a network and keeps it: it holds all namespaces open, and ends with whoever started it.

    lab  -- stdin: the network -->  keeper  -- stdout: where each rank's namespace is, or what went wrong --> lab

Nothing is ever made in the namespace that this process begins in: it leaves that first. When it ends, however that
comes about, Linux takes down all namespaces that no process is in, and with them their links.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtime.lab.namespaces import enter, leave
from runtime.lab.network import Network, burst_bytes, window_bytes

LINK = "link0"
"""The interface of a rank that has its address."""
_QUEUE_BYTES = 2**26
"""Of a link: nothing is ever dropped, as in a network without loss; what connections have on the way is less."""
_MOST_SEGMENT = 65536
"""Of what TCP hands to a link at once, and half a bucket at most: more than a bucket would be cut into frames, each of
which wakes a timer and the receiver (at 200 Mbit/s that took cores five times as long); what nearly fills one would
lose what comes in while a timer is late.
"""
_TIMEOUT_S = 20.0

_SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_congestion_control": "reno",
}
"""Of every rank. A pause between steps is no reason to begin slowly again. Reno is in every kernel; nothing is lost
here, so it only ever opens its window, where a control that paces by its own guess of the rate (bbr) is one more limit.
"""


class Answer(msgspec.Struct, frozen=True):
    """What a keeper says."""

    namespaces: tuple[str, ...] = ()
    """Paths, by rank, as long as the keeper lives."""
    error: str = ""


class _End(NamedTuple):
    """An end of a wire: an interface in a namespace."""

    namespace: int
    interface: str
    bytes_per_s: float | None


def main() -> None:
    """Build what stdin says, and keep it until stdin is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # who started it hears them too, and is to end first
        signal.signal(number, signal.SIG_IGN)
    try:
        answer = Answer(namespaces=build(msgspec.json.decode(sys.stdin.buffer.readline(), type=Network)))
    except (OSError, subprocess.SubprocessError) as error:
        answer = Answer(error=_reason(error))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    if not answer.error:
        sys.stdin.buffer.read()
    os._exit(0)


def build(network: Network) -> tuple[str, ...]:
    """Build a network, in namespaces of its own; return the paths of those of its ranks."""
    switchboard = leave()
    namespaces = {name: leave() for name in network.ranks} | dict.fromkeys(network.switches, switchboard)
    for name in network.ranks:
        enter(namespaces[name])
        forwards, window = int(network.forwards), window_bytes(network)
        _set(_SETTINGS | {"ipv4/ip_forward": f"{forwards}", "ipv4/tcp_wmem": f"4096 {window} {window}"})
    _in(switchboard, "ip", [f"link add {_bridge(network, one)} type bridge" for one in network.switches])
    _in(switchboard, "ip", [f"link set {_bridge(network, one)} up" for one in network.switches])
    interfaces: dict[tuple[str, str], str] = {}
    """Per rank the interface towards each place next to it."""
    counts = dict.fromkeys(network.ranks, 0)
    for number, wire in enumerate(network.wires):
        one, other = (
            _end(network, namespaces, counts, f"wire{number}{'ab'[side]}", place, rate)
            for side, (place, rate) in enumerate(zip(wire.ends, wire.bytes_per_s, strict=True))
        )
        there = f"/proc/{os.getpid()}/fd/{other.namespace}"
        peer = f"peer name {other.interface} netns {there}"
        _in(one.namespace, "ip", [f"link add {one.interface} type veth {peer}"])
        for end, (place, next_to) in ((one, wire.ends), (other, wire.ends[::-1])):
            _set_up(end, _bridge(network, place) if place in network.switches else "")
            interfaces[place, next_to] = end.interface
    for rank, name in enumerate(network.ranks):
        _in(namespaces[name], "ip", [f"addr add {address(rank)}/32 dev {LINK}", "link set lo up"])
        _in(namespaces[name], "ip", _routes(network, rank, interfaces))
    return tuple(f"/proc/{os.getpid()}/fd/{namespaces[name]}" for name in network.ranks)


def address(rank: int) -> str:
    """Return the address of a rank."""
    return f"10.77.0.{rank + 1}"


def _bridge(network: Network, switch: str) -> str:
    return f"switch{network.switches.index(switch)}"


def _end(
    network: Network, namespaces: dict[str, int], counts: dict[str, int], port: str, place: str, rate: float | None
) -> _End:
    """Return an end of a wire at a place: a port of a switch, or the next interface of a rank."""
    if place in network.switches:
        return _End(namespaces[place], port, rate)
    counts[place] += 1
    return _End(namespaces[place], f"link{counts[place] - 1}", rate)


def _set_up(end: _End, bridge: str) -> None:
    """Plug an end in, and give it its rate."""
    name = end.interface
    lines = [f"link set {name} master {bridge}"] if bridge else []
    if end.bytes_per_s is not None:
        burst = burst_bytes(end.bytes_per_s)
        lines.append(f"link set {name} gso_max_size {min(burst // 2, _MOST_SEGMENT)}")
        shaped = (
            f"qdisc add dev {name} root tbf rate {round(8 * end.bytes_per_s)}bit burst {burst} limit {_QUEUE_BYTES}"
        )
        _in(end.namespace, "tc", [shaped])
    _in(end.namespace, "ip", [*lines, f"link set {name} up"])


def _routes(network: Network, rank: int, interfaces: dict[tuple[str, str], str]) -> list[str]:
    """Return a route of a rank to each other one: by its own wire to it, to a switch, or to a rank that passes on."""
    name, lines = network.ranks[rank], []
    for target, way in enumerate(network.ways[rank]):
        if target == rank:
            continue
        passes_on = way in network.ranks and way != network.ranks[target]
        via = f"via {address(network.ranks.index(way))} onlink " if passes_on else ""
        lines.append(f"route add {address(target)}/32 {via}dev {interfaces[name, way]} src {address(rank)}")
    return lines


def _set(settings: dict[str, str]) -> None:
    """Set what the kernel does in the present namespace."""
    for name, value in settings.items():
        path = Path("/proc/sys/net") / name
        if path.exists():  # a kernel without IPv6 has none to switch off
            path.write_text(value)


def _in(namespace: int, program: str, lines: list[str]) -> None:
    """Let ip or tc do what lines say, in a namespace; raises SubprocessError with what it says."""
    enter(namespace)
    text = "".join(f"{line}\n" for line in lines)
    subprocess.run([program, "-batch", "-"], input=text, text=True, check=True, capture_output=True, timeout=_TIMEOUT_S)


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd)}: {' '.join(str(error.stderr).split())}"
    return str(error)
