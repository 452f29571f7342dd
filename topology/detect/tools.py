"""What the tools of a node print: ``nvidia-smi`` with ``topo -m``, ``--query-gpu`` or ``-q -x``; ``ibstat``."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sim.base.errors import InputError

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

QUERY = ("name", "memory.total", "power.limit", "pcie.link.gen.max", "pcie.link.width.max")
"""What ``nvidia-smi --query-gpu`` is asked for."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""The head of the matrix is underlined."""
_DEVICE = re.compile(r"[\w.:-]+")
_WAY = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|OK|N/A")
_XML = {
    "name": ("product_name",),
    "memory.total": ("fb_memory_usage/total",),
    "power.limit": tuple(
        f"{group}/{figure}"
        for group in ("gpu_power_readings", "power_readings")
        for figure in ("current_power_limit", "power_limit", "enforced_power_limit")
    ),
    "pcie.link.gen.max": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen",),
    "pcie.link.width.max": ("pci/pci_gpu_link_info/link_widths/max_link_width",),
}
"""Where the XML has what a query asks for; drivers differ in what they call it."""
_UNITS = {"": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "W": 1.0, "x": 1.0}


class Topology(NamedTuple):
    """What ``nvidia-smi topo -m`` says of a node."""

    gpus: int
    nics: tuple[str, ...]
    """Names as the RDMA tools have them, where the legend tells them."""
    ways: dict[tuple[str, str], str]
    """Between ``GPU0`` and another GPU or the name of a NIC: NV18, PIX, PXB, PHB, NODE or SYS."""
    numa: tuple[str, ...]
    """NUMA node of each GPU, as printed; empty where it is not."""

    def between(self, gpu: int, other: int | str) -> str:
        """Return the kind of way between a GPU and another one, by its number, or a NIC."""
        return self.ways[f"GPU{gpu}", f"GPU{other}" if isinstance(other, int) else other]


class GpuFacts(NamedTuple):
    """What the driver says of one GPU; None where it does not."""

    name: str
    memory_bytes: float | None
    power_w: float | None
    pcie_generation: int | None
    """That it and its slot are capable of, not that of now: idle GPUs run slower links."""
    pcie_lanes: int | None


class RdmaDevice(NamedTuple):
    """One channel adapter."""

    name: str
    bits_per_s: float
    """Of its active ports together; 0 where none is."""
    layer: str
    """InfiniBand or Ethernet."""


def read_topology(text: str) -> Topology:
    """Read what ``nvidia-smi topo -m`` prints; raises InputError for what it does not print."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    head = next((number for number, line in enumerate(lines) if line[:1] == ["GPU0"] and "CPU" in line), None)
    if head is None:
        raise _unlike("topo", "nvidia-smi topo -m", "no line names GPU0 and CPU Affinity")
    columns = lines[head][: lines[head].index("CPU")]
    if strange := next((name for name in columns if not _DEVICE.fullmatch(name)), ""):
        raise _unlike("topo", "nvidia-smi topo -m", f"{strange!r} names no device")
    rows: dict[str, list[str]] = {line[0]: line[1:] for line in lines[head + 1 :] if line and line[0] in columns}
    for name in columns:
        cells = rows.get(name, [])[: len(columns)]
        if len(cells) < len(columns) or not all(_WAY.fullmatch(cell) for cell in cells):
            raise _unlike("topo", "nvidia-smi topo -m", f"the row of {name} does not tell {len(columns)} ways")
    pairs = [line for line in lines if len(line) == 2 and re.fullmatch(r"NIC\d+:", line[0])]
    legend = {number[:-1]: name for number, name in pairs if _DEVICE.fullmatch(name)}
    gpus = [name for name in columns if re.fullmatch(r"GPU\d+", name)]
    nics = [name for name in columns if name not in gpus]
    named = dict.fromkeys(gpus, "") | {name: legend.get(name, name) for name in nics}
    ways = {
        (one, named[other] or other): rows[one][columns.index(other)]
        for one in gpus
        for other in columns
        if other != one
    }
    numa = [(rows[name][len(columns) + 1 :] or [""])[0] for name in gpus]
    told = all(re.fullmatch(r"[\d,-]*\d", one) for one in numa)
    return Topology(len(gpus), tuple(named[name] for name in nics), ways, tuple(numa) if told else ())


def read_gpus(text: str) -> list[GpuFacts]:
    """Read what ``nvidia-smi --query-gpu=... --format=csv`` prints with its head, or ``nvidia-smi -q -x``; raises
    InputError for anything else.
    """
    rows = list(_of_xml(text) if text.lstrip().startswith("<") else _of_csv(text))
    if not rows or not all(row.get("name") for row in rows):
        raise _unlike(
            "gpus", f"nvidia-smi --query-gpu={','.join(QUERY)} --format=csv", "it names no GPU in a column `name`"
        )
    return [
        GpuFacts(
            row["name"],
            _figure(row.get("memory.total", "")),
            _figure(row.get("power.limit", "")),
            _whole(row.get("pcie.link.gen.max", "")),
            _whole(row.get("pcie.link.width.max", "")),
        )
        for row in rows
    ]


def read_rdma(text: str) -> list[RdmaDevice]:
    """Read what ``ibstat`` prints; raises InputError for anything else."""
    found: list[RdmaDevice] = []
    for part in re.split(r"^\s*CA '", text, flags=re.MULTILINE)[1:]:
        name = part.partition("'")[0]
        ports = re.split(r"^\s*Port \d+:", part, flags=re.MULTILINE)[1:]
        active = [port for port in ports if re.search(r"^\s*State:\s*Active", port, re.MULTILINE)]
        rates = [float(rate) for port in active for rate in re.findall(r"^\s*Rate:\s*([\d.]+)", port, re.MULTILINE)]
        layers = re.findall(r"^\s*Link layer:\s*(\S+)", part, re.MULTILINE)
        found.append(RdmaDevice(name, sum(rates) * 1e9, layers[0] if layers else ""))
    if not found:
        raise _unlike("ib", "ibstat", "no line begins with CA '")
    return found


def _of_csv(text: str) -> Iterator[dict[str, str]]:
    """Yield the figures of each GPU with their units, which the head may have."""
    try:
        head, *rows = csv.reader(io.StringIO(text), skipinitialspace=True) if text.strip() else [[]]
    except csv.Error as error:
        raise _unlike("gpus", "nvidia-smi --query-gpu --format=csv", f"it is no CSV ({error})") from error
    columns = [re.fullmatch(r"([\w.]+)(?: \[(\w+)\])?", name.strip()) for name in head]
    for row in rows:
        pairs = [(column, value.strip()) for column, value in zip(columns, row, strict=False) if column]
        yield {
            column[1]: f"{value} {column[2]}" if column[2] and re.fullmatch(r"[\d.]+", value) else value
            for column, value in pairs
        }


def _of_xml(text: str) -> Iterator[dict[str, str]]:
    from xml.etree import ElementTree as ET  # noqa: PLC0415 - only this file needs it, and few such files are read

    try:
        root = ET.fromstring(text)  # noqa: S314 - the user's own file; expat bounds what entities expand to
    except ET.ParseError as error:
        raise _unlike("gpus", "nvidia-smi -q -x", f"it is no XML ({error})") from error
    for gpu in root.iter("gpu"):
        yield {key: next(_texts(gpu, paths), "") for key, paths in _XML.items()}


def _texts(gpu: Element, paths: Sequence[str]) -> Iterator[str]:
    """Yield what stands at some paths and is a figure or a name."""
    found = (gpu.findtext(path, "").strip() for path in paths)
    yield from (text for text in found if text and text not in {"N/A", "Requested functionality has been deprecated"})


def _figure(text: str) -> float | None:
    """Return a figure in its base unit; None for [N/A], [Not Supported] and what is not there."""
    match = re.fullmatch(r"([\d.]+) ?([A-Za-z]*)", text)
    return float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else None


def _whole(text: str) -> int | None:
    figure = _figure(text)
    return None if figure is None else int(figure)


def _unlike(option: str, tool: str, why: str) -> InputError:
    return InputError(f"`{option}`: this is not what {tool} prints: {why}; give a file of its whole output")
