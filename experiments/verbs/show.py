"""``longstep list`` and ``longstep show``: what there is, and what a schedule does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

import longstep
from experiments.verbs.cli import with_flags
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import Selection
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError, ScheduleError
from sim.base.files import Kind, decoded_by, marked, require_outputs
from sim.base.presets import preset_names
from sim.base.units import rate
from sim.schedule.derive.show import LEGEND, dot, grid, logical_times
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import NAMED
from sim.schedule.model.pipeline.files import PIPELINE_FILE
from sim.schedule.model.pipeline.stages import Stages
from sim.setup.names import one_of, text_of
from sim.setup.stacks import STACKS
from sim.software.software import load_software, software_names
from sim.words.profile import load_profile, profile_names
from sim.words.workload import load_model
from topology.cluster import load_cluster

if TYPE_CHECKING:
    from topology.fabric.shape import Shape

KINDS = ("models", "clusters", "schedules", "software", "stacks", "profiles")
FORMATS = ("grid", "json", "dot", "fabric", "pipeline")
_MARKS = {"grid": "# longstep show\n", "dot": "// longstep show\n"}
"""First lines of files, by which ``--out`` knows its own."""


@dataclasses.dataclass(frozen=True)
class List:
    """List what there is: models, clusters, schedules, software, stacks or profiles; all of them if none is named."""

    kind: Annotated[str, tyro.conf.Positional] = "all"
    """models, clusters, schedules, software, stacks or profiles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show(Writes):
    """Show a schedule: its grid of logical time x rank, its JSON, or its graph; or what joins nodes of a cluster."""

    selection: Annotated[Selection, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Selection)
    format: str = "grid"
    """grid, json or dot of the schedule; pipeline: what its stages do, as torch's pipelining reads it; or fabric: the
    shape of what joins the nodes of --cluster, as a picture with --out FILE.svg, also of a single node."""
    ranks: OptionalText = None
    """Ranks to show in the grid or graph, such as 0,1,7; by default the first eight."""
    out: OptionalText = None
    """Write to this file instead of the terminal."""


def list_names(command: List, console: Console) -> None:
    """Print what there is."""
    kinds = KINDS if command.kind == "all" else (one_of("kind", command.kind, KINDS),)
    tables = {
        "models": _models,
        "clusters": _clusters,
        "schedules": _schedules,
        "software": _software,
        "stacks": _stacks,
        "profiles": _profiles,
    }
    for kind in kinds:
        console.print(tables[kind]())


def show(command: Show, console: Console) -> None:
    """Print a schedule in one of its forms."""
    one_of("format", command.format, FORMATS)
    if command.format == "fabric":
        _show_fabric(command, console)
        return
    out = command.output(command.out, PIPELINE_FILE if command.format == "pipeline" else _SHOWN)
    require_outputs([out])
    found = command.selection.setup().resolved()
    try:
        checked = found.checked()
    except ScheduleError as error:
        if error.grid:
            console.print(error.grid, markup=False)
        raise
    schedule, matching = checked.schedule, checked.matching
    ranks = _ranks(command.ranks, schedule.num_ranks)
    waits = [found.waits for found in checked.dependencies]
    if command.format == "json":
        text = schedule.to_json().decode()
    elif command.format == "dot":
        text = dot(schedule, matching, waits, ranks)
    elif command.format == "pipeline":
        if found.mesh.pp == 1:
            raise InputError("`format` pipeline: the schedule has one stage; set `pp_degree` 2 or more")
        text = Stages(found.mesh, found.workload, found.options).to_csv().decode()
    else:
        cells = grid(schedule, logical_times(schedule, matching, waits), ranks)
        text = "\n".join([found.title, *_columns(cells, ranks), LEGEND])
    if out:
        out.write((_MARKS.get(command.format, "") + text).encode())
    else:
        console.print(text, markup=False)


def _columns(cells: Sequence[Sequence[str]], ranks: Sequence[int]) -> list[str]:
    """Return the grid of logical time x rank in lines, a column for each rank."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(ranks))]
    head = "time  " + "  ".join(f"rank {rank}".ljust(width) for rank, width in zip(ranks, widths, strict=True))
    body = [
        f"{time:4}  " + "  ".join(cell.ljust(max(width, 6)) for cell, width in zip(row, widths, strict=True))
        for time, row in enumerate(cells)
    ]
    return [head, *(line.rstrip() for line in body)]


def _show_fabric(command: Show, console: Console) -> None:
    """Print what joins the nodes of a cluster in words, or draw it, and what is in a single node."""
    from experiments.pages.drawn.render import FIGURE_FILE
    from experiments.pages.fabric_page import figure  # which draws nothing for others

    if command.ranks:
        raise InputError("`ranks` are of a schedule; leave them out with `format` fabric")
    if command.out and not command.out.endswith(".svg"):
        raise InputError(f"`out` {command.out}: expected a name that ends in .svg")
    out, selection = command.output(command.out, FIGURE_FILE), command.selection
    require_outputs([out])
    selection.require_one()
    of_cluster = [text.removeprefix("cluster.") for text in selection.set if text.startswith("cluster.")]
    spec = longstep.cluster(selection.cluster, nodes=selection.fields()["nodes"], set=of_cluster).spec
    if out:
        out.write(figure(spec).encode())
    if out is None or spec.nodes > 1:
        console.print(_in_words(longstep.fabric(spec)), markup=False)


def _in_words(found: Shape) -> str:
    ways = (
        f"{found.paths_least}"
        if found.paths_least == found.paths_most
        else f"{found.paths_least} to {found.paths_most}"
    )
    ends = "switches with ports" if found.switches else "nodes"
    halves = rate(found.bisection_bytes_per_s, "B/s")
    lines = [
        f"{found.kind}: {found.nodes} nodes, {found.ports} ports, {found.switches} switches",
        *(f"  {one.lower} - {one.upper}: {one.number} links of {rate(one.bytes_per_s, 'B/s')}" for one in found.links),
        f"diameter: {found.diameter} links from port to port",
        f"shortest ways between two {ends}: {ways}",
        f"bisection: {halves} per direction; the ports of a half send {found.blocking:.3g} times as much",
    ]
    return "\n".join(lines)


def _is_shown(file: BinaryIO) -> bool:
    if marked(*_MARKS.values())(file):
        return True
    file.seek(0)
    return decoded_by(Schedule.from_json)(file)


_SHOWN = Kind("a schedule", _is_shown)


def _ranks(text: str | None, count: int) -> list[int]:
    if text is None:
        return list(range(min(count, 8)))
    ranks = [int(part) if part.strip().isdigit() else -1 for part in text.split(",")]
    for rank, part in zip(ranks, text.split(","), strict=True):
        if not 0 <= rank < count:
            raise InputError(f"`ranks` {part.strip()!r}: expected ranks from 0 to {count - 1}, separated by commas")
    return ranks


def _models() -> Table:
    table = Table(
        "model", "layers", "E", "H", "H_kv", "D", "F", "V", "dtype", "source", title="models", title_justify="left"
    )
    for name in preset_names("sim/models"):
        m = load_model(name)
        values = (m.num_layers, m.embed_dim, m.num_heads, m.num_kv_heads, m.head_dim, m.ffn_dim, m.vocab_size)
        table.add_row(name, *map(str, values), m.dtype, m.source)
    return table


def _clusters() -> Table:
    table = Table("cluster", "GPU", "per node", "GB/s per direction", title="clusters", title_justify="left")
    for name in preset_names("topology/hardware"):
        spec = load_cluster(name)
        links = {"nvlink": spec.nvlink, "pcie": spec.pcie, "nic": spec.nic, "loopback": spec.loopback}
        rates = ", ".join(f"{link} {found.bytes_per_s / 1e9:g}" for link, found in links.items() if found)
        table.add_row(name, spec.gpu.name, str(spec.gpus_per_node), rates)
    return table


def _schedules() -> Table:
    table = Table("schedule", "paper", "bytes sent per rank, forward", title="schedules", title_justify="left")
    for name, entry in NAMED.items():
        table.add_row(name, entry.paper, entry.communication)
    table.add_row("my_module.py:build", "yours", "")
    return table


def _software() -> Table:
    table = Table("software", "what it is", "kernels", "schedule.KEY=VALUE", title="software", title_justify="left")
    for name in software_names():
        one = load_software(name)
        kernels = [f"{field}={value}" for field, value in msgspec.to_builtins(one.kernels).items() if value]
        options = [f"{key}={text_of(value)}" for key, value in one.schedule.items()]
        table.add_row(name, one.said, "\n".join(kernels) or "those of the profile", "\n".join(options) or "defaults")
    return table


def _stacks() -> Table:
    table = Table(
        "stack", "schedule", "schedule.KEY=VALUE", "what it is", "source", title="stacks", title_justify="left"
    )
    for name, stack in STACKS.items():
        options = "\n".join(f"{key}={value}" for key, value in stack.options.items())
        table.add_row(name, stack.schedule, options or "defaults", stack.about, stack.source)
    return table


def _profiles() -> Table:
    table = Table("profile", "measured on", "when", "points", title="profiles", title_justify="left")
    for name in profile_names():
        try:
            profile = load_profile(name)
        except InputError as error:  # one file that is broken hides no others
            table.add_row(name, with_flags(str(error)), "", "")
            continue
        state = "" if profile.complete else " (not complete)"
        table.add_row(name, profile.machine.gpu, profile.created + state, str(len(profile.points)))
    table.add_row("datasheet", "any cluster, at the rates of its datasheet", "", "")
    return table
