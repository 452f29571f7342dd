"""What joins the nodes of a cluster, or the GPUs of a node, as one figure: laid out from its graph.

Switches stand in rows above what they join, a dragonfly's links between groups are arcs above its spines. Nodes without
switches stand in a grid, a third dimension aslant behind it; one dimension that closes is a circle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from experiments.pages.drawn.pictures import Entry, Legend, legend
from experiments.pages.drawn.plots import HUES, SWATCH
from experiments.pages.drawn.render import render
from experiments.pages.drawn.texts import text_width
from sim.base.errors import InputError
from sim.base.units import rate
from topology.cluster import Cluster
from topology.fabric.shape import joined
from topology.fabric.switches import switched
from topology.kinds import CircuitsSpec, MeshSpec
from topology.specs import ClusterSpec

MOST_LINKS = 2048
"""That are still told apart."""
_EDGE, _HEAD, _GAP = 24.0, 44.0, 22.0
"""Pixels around the drawing, above it, and between it and its key."""
_ROW, _BOX, _SMALL = 108.0, 26.0, 8.0
"""Pixels between two rows; the height of a box with a label, and of one without."""
_WIDTH, _LEAST = 1100.0, 420.0

Point = tuple[float, float]


class Box(NamedTuple):
    """A node, a GPU or a switch; x and y are its middle."""

    x: float
    y: float
    width: float
    height: float
    label: str
    name: str
    """In full."""


class Line(NamedTuple):
    """A link, or several side by side, both directions."""

    path: str
    look: str
    width: float
    name: str


class Drawing(NamedTuple):
    """All of it, in the pixels of an SVG."""

    width: float
    height: float
    boxes: list[Box]
    lines: list[Line]
    key: Legend


class _Link(NamedTuple):
    start: str
    end: str
    kind: str
    bytes_per_s: float
    links: int = 1


def figure(spec: ClusterSpec) -> str:
    """Return the figure of a cluster as SVG; raises InputError for more links than can be told apart."""
    drawing = draw(spec)
    kind = spec.fabric.__struct_config__.tag if spec.fabric else "one switch" if spec.nodes > 1 else "one node"
    gpus = f"{spec.gpus_per_node} GPU{'s' * (spec.gpus_per_node > 1)}"
    counts = f"{spec.nodes} nodes of {gpus}" if spec.nodes > 1 else gpus
    return render(
        "fabric.svg.j2", title=f"{spec.name}: {kind}, {counts}", drawing=drawing, edge=_EDGE, head=_HEAD,
        key_at=_HEAD + drawing.height + _GAP, width=drawing.width + 2 * _EDGE,
        height=_HEAD + drawing.height + _GAP + drawing.key.height + _EDGE,
    )  # fmt: skip


def draw(spec: ClusterSpec) -> Drawing:
    """Lay a cluster's fabric out."""
    links = list(_links(spec))
    if not links:
        raise InputError(f"cluster {spec.name!r} has no link to draw: set `nodes`")
    if len(links) > MOST_LINKS:
        raise InputError(
            f"cluster {spec.name!r} has {len(links)} links, of which {MOST_LINKS} can be told apart in a picture: set "
            f"fewer `nodes`"
        )
    names = list(dict.fromkeys(name for link in links for name in (link.start, link.end)))
    if spec.nodes == 1:
        places, width, height = _rows([[one for one in names if _kind(one) == row] for row in _INSIDE])
    elif not hasattr(spec.fabric, "dims") and not isinstance(spec.fabric, CircuitsSpec):
        places, width, height = _rows(_tiers(names))
    else:
        places, width, height = _grid(spec)
    kinds = list(dict.fromkeys((link.kind, link.bytes_per_s) for link in links))
    slowest = min(link.bytes_per_s * link.links for link in links)
    lines = [
        Line(
            _path(link, places), f"hue-{kinds.index((link.kind, link.bytes_per_s)) % len(HUES)}",
            round(1.2 + math.log2(link.bytes_per_s * link.links / slowest) * 0.8, 1),
            f"{link.start} - {link.end}: {link.links} x {rate(link.bytes_per_s, 'B/s')}",
        )
        for link in links
    ]  # fmt: skip
    counts = {kind: sum(link.links for link in links if (link.kind, link.bytes_per_s) == kind) for kind in kinds}
    entries = [
        Entry(SWATCH, f"hue-{number % len(HUES)}", f"{kind[0]}: {counts[kind]} of {rate(kind[1], 'B/s')}")
        for number, kind in enumerate(kinds)
    ]
    boxes = list(_boxes(spec, places))
    return Drawing(width, height, boxes, lines, legend([[entry] for entry in entries], width))


_INSIDE = ("nvswitch", "loopback", "gpu", "switch", "socket")
"""Rows of a single node, from above."""


def _links(spec: ClusterSpec) -> Iterator[_Link]:
    """Yield the links of the fabric, those of nodes to it first; of a single node those inside it."""
    if spec.nodes == 1:
        yield from _inside(spec)
        return
    graph, ports = joined(spec)
    assert spec.nic is not None
    if switched(spec) or spec.fabric is None:
        found: dict[tuple[int, str], int] = {}
        for number, switch in enumerate(ports):
            place = number // spec.ports_per_node, switch
            found[place] = found.get(place, 0) + 1
        port = spec.nic.bytes_per_s * spec.nic.payload * spec.nics_per_flow
        yield from (_Link(f"node[{node}]", switch, "NICs", port, count) for (node, switch), count in found.items())
    yield from _pairs(graph)


def _inside(spec: ClusterSpec) -> Iterator[_Link]:
    """Yield the links inside a node; of the two from a GPU to its PCIe switch only the first limits anything. A link of
    two GPUs leads from one to the other.
    """
    graph = Cluster(spec).graph.copy()
    for slot in [name for name in graph if _kind(name) in {"pcie", "pair"}]:
        for end, onward in list(graph[slot].items()):
            for start, before in list(graph.pred[slot].items()):
                if start != end:
                    edge = before["edge"] if before["edge"].resources else onward["edge"]
                    graph.add_edge(start, end, edge=edge)
        graph.remove_node(slot)
    yield from _pairs(graph)


def _pairs(graph: nx.DiGraph) -> Iterator[_Link]:
    """Yield each link of a graph once, by what it joins."""
    done = set()
    for start, end, link in graph.edges(data=True):
        if (end, start) not in done:
            done.add((start, end))
            resources, count = link["edge"].resources, link.get("links", 1)
            if resources:
                one = min(resource.capacity for resource in resources) / count
                name = resources[0].group if resources[0].group not in {"nic", "fabric"} else _between(start, end)
                yield _Link(start, end, name, one, count)


def _between(start: str, end: str) -> str:
    lower, upper = (re.sub(r"\[\d+\]", "", name).replace("gpu", "node") for name in (start, end))
    return f"{lower} - {upper}"


def _kind(name: str) -> str:
    return name.partition("[")[0]


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\[(\d+)\]", name)]


def _tier(name: str) -> str:
    return re.sub(r"\[\d+\]|rail|group|\.", "", name)


def _tiers(names: Sequence[str]) -> list[list[str]]:
    """Return the nodes and switches of a fabric by rows, the highest first, each as it counts."""
    rows: dict[str, list[str]] = {}
    for name in names:
        rows.setdefault(_tier(name), []).append(name)
    order = sorted(rows, key=lambda row: (row != "node", row == "fabric", row == "spine", row), reverse=True)
    return [sorted(rows[row], key=_numbers) for row in order]


def _rows(rows: Sequence[Sequence[str]]) -> tuple[dict[str, Point], float, float]:
    """Place rows below each other, each spread over the width; a gap stands between groups, or rails."""
    rows = [row for row in rows if row]
    most = max(len(row) for row in rows)
    width = min(_WIDTH, max(_LEAST, most * 66.0))
    arcs = any(_kind(name) == "group" for row in rows for name in row)
    top = (width / 6 if arcs else 0.0) + _BOX
    places = {}
    for number, row in enumerate(rows):
        for at, name in enumerate(row):
            places[name] = (width * (at + 0.5) / len(row), top + number * _ROW)
    return places, width, top + (len(rows) - 1) * _ROW + _BOX


def _grid(spec: ClusterSpec) -> tuple[dict[str, Point], float, float]:
    """Place nodes without switches: a ring in a circle, else by their coordinates, the last one to the right."""
    dims = getattr(spec.fabric, "dims", (spec.nodes,))
    sides = [size for size in dims if size > 1] or [1]
    if len(sides) == 1 and not isinstance(spec.fabric, MeshSpec):
        radius = min(700.0, max(110.0, spec.nodes * 11.0))
        angles = [2 * math.pi * node / spec.nodes - math.pi / 2 for node in range(spec.nodes)]
        middle = radius + 36
        places = {
            f"gpu[{node}]": (middle + radius * math.cos(angle), middle + radius * math.sin(angle))
            for node, angle in enumerate(angles)
        }
        return places, max(_LEAST, 2 * middle), 2 * middle
    step = max(26.0, min(90.0, (_WIDTH - 140) / max(sides)))
    deep = sides[-3] if len(sides) > 2 else 1
    step = max(step, 38.0 * deep) if deep > 1 else step
    axes = [(step, 0.0), (0.0, step), (step / deep, -step * 0.6 / deep)]
    axes += [((sides[-1] + 1) * step, 0.0), (0.0, (sides[-2] + 1) * step), (0.0, 0.0)] if len(sides) > 3 else []
    raw = {}
    for node in range(spec.nodes):
        x = y = 0.0
        left = node
        for size, (right, down) in zip(reversed(sides), axes, strict=False):
            left, at = divmod(left, size)
            x, y = x + at * right, y + at * down
        raw[f"gpu[{node}]"] = (x, y)
    edge = 70.0
    low = min(x for x, _ in raw.values()), min(y for _, y in raw.values())
    places = {name: (x - low[0] + edge, y - low[1] + edge) for name, (x, y) in raw.items()}
    return places, max(_LEAST, max(x for x, _ in places.values()) + edge), max(y for _, y in places.values()) + edge


def _path(link: _Link, places: dict[str, Point]) -> str:
    """Return the way of a link: straight, but around what is between, and above the spines between groups."""
    (x, y), (end_x, end_y) = places[link.start], places[link.end]
    if "spine" in link.start and "spine" in link.end:
        rise = 12 + abs(end_x - x) / 3
        return f"M{x:.1f} {y:.1f}Q{(x + end_x) / 2:.1f} {y - rise:.1f} {end_x:.1f} {end_y:.1f}"
    between = [place for name, place in places.items() if name not in (link.start, link.end)]
    if _tier(link.start) != _tier(link.end) or not any(_on_line(one, (x, y), (end_x, end_y)) for one in between):
        return f"M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}"
    long = math.hypot(end_x - x, end_y - y)
    bend = min(46.0, long / 4)
    aside = -(end_y - y) / long * bend, (end_x - x) / long * bend
    return (
        f"M{x:.1f} {y:.1f}Q{(x + end_x) / 2 - 2 * aside[0]:.1f} {(y + end_y) / 2 - 2 * aside[1]:.1f} "
        f"{end_x:.1f} {end_y:.1f}"
    )


def _on_line(point: Point, start: Point, end: Point) -> bool:
    """Return whether a point is between two others, within a few pixels."""
    (x, y), (a, b), (c, d) = point, start, end
    long = math.hypot(c - a, d - b)
    along = ((x - a) * (c - a) + (y - b) * (d - b)) / long
    return 0 < along < long and abs((x - a) * (d - b) - (y - b) * (c - a)) / long < 4


def _boxes(spec: ClusterSpec, places: dict[str, Point]) -> Iterator[Box]:
    """Yield a box for each place, with its name if the boxes of its row have room for theirs, else its number."""
    rows: dict[int, list[str]] = {}
    for name, (_, y) in places.items():
        rows.setdefault(round(y), []).append(name)
    aslant = len([size for size in getattr(spec.fabric, "dims", ()) if size > 1]) > 2
    for names in rows.values():
        middles = sorted(places[name][0] for name in names)
        room = min((right - left for left, right in pairwise(middles)), default=_WIDTH) - 3
        labels = {name: _label(spec, name) for name in names}
        if aslant or max(map(text_width, labels.values())) + 12 > room:
            labels = {name: str(_numbers(name)[-1]) if _numbers(name) else name for name in names}
        fits = max(map(text_width, labels.values())) + 6 <= room
        for name in names:
            x, y = places[name]
            label = labels[name] if fits else ""
            wide = min(text_width(label) + 12, room) if fits else min(_SMALL, room)
            yield Box(round(x, 1), round(y, 1), wide, _BOX if fits else _SMALL, label, name)


def _label(spec: ClusterSpec, name: str) -> str:
    """Return a short name: the last part, its number without brackets; of nodes without switches that of the node."""
    kind = name.rpartition(".")[2]
    return re.sub(r"\[(\d+)\]", r" \1", kind.replace("gpu", "node") if spec.nodes > 1 else kind)
