"""The machine that Longstep runs on: what can be known of it without measuring."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

import msgspec

from topology.specs import ClusterSpec


class HostFacts(NamedTuple):
    """What the operating system says."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_facts() -> HostFacts:
    """Return what the operating system reports about this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostFacts(_cpu_name(), num_cores(), memory)


def device_name(facts: HostFacts, threads_per_rank: int) -> str:
    """Return the name of "a GPU" of a CPU host: all that a profile of it depends on."""
    return f"{facts.cpu}, {facts.cores} cores, {threads_per_rank} per rank"


def with_facts(spec: ClusterSpec, facts: HostFacts) -> ClusterSpec:
    """Return the nominal spec of a host with what is known of this one."""
    assert spec.host is not None
    return msgspec.structs.replace(
        spec,
        gpu=msgspec.structs.replace(spec.gpu, name=device_name(facts, spec.gpu.sms)),
        hbm=msgspec.structs.replace(spec.hbm, capacity_bytes=facts.memory_bytes),
        host=msgspec.structs.replace(spec.host, cores=facts.cores),
        sources={
            **spec.sources,
            "gpu.name": "/proc/cpuinfo",
            "hbm.capacity_bytes": "sysconf(SC_PHYS_PAGES)",
            "host.cores": "sched_getaffinity",
        },
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
