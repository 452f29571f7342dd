"""``longstep balance``: how evenly ranks attend a batch of documents, with your layout and with what planners give."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

import longstep
from experiments.evidence.executed.executed_skew import executed_skews
from experiments.evidence.provenance import note_lines
from experiments.pages.balance_page import page
from experiments.pages.drawn.render import PAGE_FILE
from experiments.verbs.shared.kinds import OptionalInt, OptionalText, Texts
from experiments.verbs.shared.selection import listed
from experiments.verbs.shared.terminal import answered, print_json, progress, tell, tell_assumed
from experiments.verbs.shared.writes import Writes
from sim.balance.balance import of_several
from sim.balance.micro_batches import PACKERS, drawn, is_distribution
from sim.balance.planners import PLANNERS
from sim.base.errors import InputError
from sim.base.files import require_outputs
from sim.base.presets import read_bytes
from sim.base.units import FEW, length, number, seconds, size
from sim.batches.files import typed_lengths
from sim.setup.names import CLUSTER, MODEL, at_least_one, cluster_spec, tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance(Writes):
    """Show how evenly ranks attend a batch of documents: pairs, bytes and predicted seconds, by planner."""

    documents: str = "wlb-llm"
    """Lengths of your documents: 5000,3000,192, or FILE.txt, .jsonl or .parquet, packed in this order; or a published
    distribution (magi, prolong, wikipedia, wlb-llm) that --seq tokens are drawn from."""
    column: str = "length"
    """Column of the file with the lengths."""
    seq: str = "128K"
    """Tokens that are drawn from a distribution; with --pp-degree those of a micro-batch."""
    pp_degree: OptionalInt = None
    """Stages of a pipeline: then documents come into micro-batches, and each packing is played as a training step."""
    micro_batches: OptionalInt = None
    """Micro-batches of a step, by default two for each stage."""
    pack: OptionalText = None
    """Packers to compare there: concatenated, heaviest-first, fixed-length and wlb-llm; by default all."""
    mask: str = "causal"
    """What each document keeps of itself: causal, full, window:TOKENS, lambda:SINK:WINDOW, blockwise:SIZE:LOCAL[:SINK]
    or shared-question:ANSWERS:SHARE (DCP, arXiv:2510.10620)."""
    seed: int = 0
    """Seed of what is drawn."""
    seeds: int = 1
    """Batches to draw, from --seed on: the table then has medians over them, with the least and the most."""
    layout: OptionalText = None
    """FILE.txt with your layout: all positions of the batch as your framework shards them, equal parts per rank."""
    planners: OptionalText = None
    """NAMEs, such as zigzag,dcp; by default all, with --pp-degree all-gather."""
    model: str = MODEL
    """NAME, FILE.toml, or a config.json of Hugging Face."""
    cluster: str = CLUSTER
    """NAME, a GPU such as H100, so many GPUs such as 16xH100, or FILE.toml."""
    gpus: OptionalInt = None
    """Ranks that share the batch; by default one node. With --pp-degree of all stages, by default a node each."""
    dtype: OptionalText = None
    """fp64, fp32, bf16 or fp16; by default the model's."""
    profile: OptionalText = None
    """NAME, FILE.json, or datasheet; by default the one that the cluster names."""
    set: Texts = ()
    """KEY=VALUE of cluster or model, as often as wanted."""
    yes: bool = False
    """Go on however long it takes: what takes over 20 s or 4 GB is else refused, with what it would take."""
    page: OptionalText = None
    """Write an HTML page with the seconds of every rank to this file."""
    kernels_only: bool = False
    """Leave out the simulation of transfers, which takes most of the time."""
    execute: bool = False
    """Execute every plan on this machine, too, one rank at a time, and show its slowest / mean beside the simulated."""
    json: bool = False
    """Print JSON instead of tables: the answer, the figures of all planners, and by rank and by hop those of each."""
    evidence: bool = False
    """Also print all that the answer rests on, as a table."""


def balance(command: Balance, console: Console) -> None:
    """Print what every planner gives the ranks; of the first one also rank by rank and hop by hop."""
    if command.pp_degree is not None:
        _pipeline(command, console)
        return
    out = command.output(command.page, PAGE_FILE)
    require_outputs([out])
    at_least_one("seeds", command.seeds)
    if command.micro_batches is not None or command.pack is not None:
        raise InputError("`micro_batches` and `pack` are of pipelines: set `pp_degree`, or leave them out")
    setup = longstep.Setup(
        model=command.model, cluster=command.cluster, gpus=command.gpus, dtype=command.dtype, profile=command.profile,
        set=command.set, scope="attention", yes=command.yes,
    )  # fmt: skip
    tell_assumed(setup, console, json=command.json)
    if command.execute and (command.kernels_only or command.seeds > 1):
        raise InputError("`execute` plays what was simulated of one batch: leave out `kernels_only` and `seeds`")
    chosen = list(PLANNERS) if command.planners is None else listed(command.planners, "`planners`", "dcp")
    if command.seeds > 1:
        _several(setup, chosen, command, console)
        return
    found = longstep.balance(
        setup,
        _documents(command, command.seed),
        chosen,
        mask=command.mask,
        order=_order(command.layout),
        play=not command.kernels_only,
    )
    of_batch = f"{len(found.batch.documents)} documents of {length(min(found.batch.documents))} to "
    of_batch += (
        f"{length(max(found.batch.documents))} tokens, {length(found.batch.num_tokens)} in all, mask {found.mask}"
    )
    title = f"attention of one layer of {command.model} over {found.ranks} GPUs of {command.cluster}: {of_batch}"
    if out:
        out.write(page(title, found).encode())
    executed = executed_skews(found) if command.execute else []
    if command.json:
        by = {one.planned.planner: {"ranks": one.by_rank, "hops": one.by_hop} for one in found.found}
        beside = {"executed": executed} if command.execute else {}
        said = {"answer": found.answer, "rests_on": found.rests_on, "documents": found.batch.documents}
        print_json({**said, "mask": found.mask, "planners": found.rows.rows, "of": by, **beside}, console)
        return
    console.print(found.answer, markup=False)
    console.print(_planners_table(title, found.rows.rows))
    if executed:
        console.print(_executed_table(executed))
    if found.found:
        first = found.found[0]
        console.print(_table(f"{first.planned.planner}, by rank", first.by_rank))
        console.print(_table(f"{first.planned.planner}, by hop: of all ranks", first.by_hop))
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    known = {*(found.grounds.evidence.notes if found.grounds else ())}
    more = note_lines([note for note in found.extrapolated if note not in known])
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence, more=more)


def _several(setup: longstep.Setup, planners: list[str], command: Balance, console: Console) -> None:
    """Print medians over several batches, with the least and the most."""
    if not is_distribution(command.documents):
        raise InputError(f"`seeds` {command.seeds}: a file is one batch; leave it out, or name a distribution")
    if command.layout or command.page:
        raise InputError(f"`seeds` {command.seeds}: `layout` and `page` are of one batch; leave them out, or `seeds`")
    rows: list[dict[str, Any]] = []
    with progress("planning") as show:
        for number in range(command.seeds):
            found = longstep.balance(
                setup,
                _documents(command, command.seed + number),
                planners,
                mask=command.mask,
                play=not command.kernels_only,
            )
            rows += [{"seed": command.seed + number, "mask": found.mask, **row} for row in found.rows]
            show(number + 1, command.seeds)
    several = longstep.Table(rows).answering(of_several(command.seeds, rows), found.grounds)
    if command.json:
        print_json(answered(several), console)
        return
    console.print(several.answer, markup=False)
    heads = ("planner", "attention", "slowest / mean", "received", "planned in")
    title = (
        f"attention of one layer of {command.model} over {found.ranks} GPUs of {command.cluster}: {command.seeds} "
        f"batches of "
    )
    table = Table(
        *heads, title=f"{title}{command.seq} tokens of {command.documents}, mask {found.mask}", title_justify="left"
    )
    for name in dict.fromkeys(row["planner"] for row in rows):
        mine = [row for row in rows if row["planner"] == name and not row["error"]]
        if not mine:
            continue
        planned = "" if mine[0]["planning_s"] is None else _spread(mine, "planning_s", _few)
        table.add_row(
            name,
            _spread(mine, "slowest_s" if command.kernels_only else "attention_s", _few),
            _spread(mine, "skew", "{:.2f}".format),
            _spread(mine, "received_bytes", lambda nbytes: size(int(nbytes))),
            planned,
        )
    console.print(table)
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence)


def _pipeline(command: Balance, console: Console) -> None:
    """Print what a pipeline makes of the documents, by packer."""
    if command.seeds > 1 or command.layout or command.page or command.execute or command.kernels_only:
        raise InputError(
            f"`pp_degree` {command.pp_degree} plays one step of each packer: leave out `seeds`, `layout`, `page`, "
            f"`execute` and `kernels_only`"
        )
    stages = at_least_one("pp_degree", command.pp_degree or 0)
    count = 2 * stages if command.micro_batches is None else at_least_one("micro_batches", command.micro_batches)
    spec = cluster_spec(command.cluster)
    gpus = command.gpus or spec.gpus_meant or stages * spec.gpus_per_node
    beside = (f"schedule.micro_batches={count}",) if count > 1 else ()
    setup = longstep.Setup(
        "ring", model=command.model, cluster=command.cluster, gpus=gpus, pp_degree=stages, batch=count,
        seq=command.seq, documents=_typed(command), mask=command.mask, dtype=command.dtype, profile=command.profile,
        seed=command.seed, seeds=1, set=(*command.set, *beside), yes=command.yes,
    )  # fmt: skip
    tell_assumed(setup, console, json=command.json)
    packers = list(PACKERS) if command.pack is None else listed(command.pack, "`pack`", "concatenated,wlb-llm")
    planners = ["all-gather"] if command.planners is None else listed(command.planners, "`planners`", "dcp")
    found = longstep.balance_micro_batches(setup, packers, planners)
    if command.json:
        print_json(answered(found), console)
        return
    console.print(found.answer, markup=False)
    title = (
        f"step of {command.model} in {stages} stages on {gpus} GPUs of {command.cluster}: {count} micro-batches of "
        f"{command.seq} tokens, documents {command.documents}, mask {command.mask}"
    )
    console.print(_packers_table(title, found.rows))
    tell([found.grounds] if found.grounds else [], console, everything=command.evidence)


def _typed(command: Balance) -> str | tuple[int, ...]:
    """Return the name of a distribution, or the lengths that are listed or in a file."""
    return command.documents if is_distribution(command.documents) else _documents(command, command.seed)


def _packers_table(title: str, rows: list[dict[str, Any]]) -> Table:
    heads = ("packer", "over ranks", "step", "tokens/s/GPU", "slowest / mean", "bubbles", "uneven", "tokens", "longest")
    about = "slowest / mean: predicted seconds of micro-batches; uneven: what of the bubbles equal ones would not have"
    table = Table(*heads, title=title, title_justify="left", caption=about, caption_justify="left")
    for row in rows:
        if row["error"]:
            table.add_row(row["packer"], row["planner"], *[""] * 6, row["error"])
            continue
        shares = [f"{100 * row[name]:.1f} %" for name in ("bubbles", "uneven")]
        sizes = [length(row[name]) for name in ("tokens", "longest")]
        rate, skew = number(row["tokens_per_s_per_gpu"], FEW), f"{row['imbalance']:.2f}"
        table.add_row(row["packer"], row["planner"], _few(row["step_time_s"]), rate, skew, *shares, *sizes)
    return table


def _few(taken: float) -> str:
    return seconds(taken, FEW)


def _spread(rows: list[dict[str, Any]], name: str, shown: Callable[[float], str]) -> str:
    """Return the median of a figure, with its least and its most."""
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return ""
    return f"{shown(statistics.median(values))} ({shown(min(values))} to {shown(max(values))})"


def _documents(command: Balance, seed: int) -> tuple[int, ...]:
    """Return the lengths that are listed or in a file, or those drawn from a distribution."""
    found = drawn(command.documents, tokens("seq", command.seq), seed)
    return found or typed_lengths(command.documents, command.column)


def _order(path: str | None) -> tuple[int, ...] | None:
    """Return the positions in a file; raises InputError for what is none."""
    if path is None:
        return None
    try:
        return tuple(map(int, read_bytes("layout", path, "`layout`").decode().replace(",", " ").split()))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"`layout` {path}: {error}: expected positions from 0, each once") from None


def _planners_table(title: str, rows: list[dict[str, Any]]) -> Table:
    heads = ("planner", "attention", "slowest rank", "slowest / mean", "pairs", "tokens", "received", "planned in")
    about = "forward and backward: attention with transfers, kernels of the slowest rank; pairs, tokens: most over mean"
    table = Table(*heads, title=title, title_justify="left", caption=about, caption_justify="left")
    for row in rows:
        if row["error"]:
            table.add_row(row["planner"], "", "", "", "", "", "", row["error"])
            continue
        skews = [f"{row[name]:.2f}" for name in ("skew", "pairs_skew", "token_skew")]
        planned = "" if row["planning_s"] is None else _few(row["planning_s"])
        taken = "" if row["attention_s"] is None else _few(row["attention_s"])
        table.add_row(row["planner"], taken, _few(row["slowest_s"]), *skews, size(row["received_bytes"]), planned)
    return table


def _executed_table(rows: list[dict[str, Any]]) -> Table:
    about = "of attention kernels, ranks one at a time"
    heads = ("planner", "simulated", "executed", "off", "slowest rank")
    table = Table(*heads, title="slowest / mean", title_justify="left", caption=about, caption_justify="left")
    for row in rows:
        skews = [f"{row[name]:.2f}" for name in ("simulated", "executed")]
        table.add_row(row["planner"], *skews, f"{row['off']:+.2f}", seconds(row["slowest_s"]))
    return table


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return a row for each rank or hop."""
    table = Table(
        *[name.removesuffix("_s").replace("_bytes", "") for name in rows[0]], title=title, title_justify="left"
    )
    for row in rows:
        table.add_row(*(_shown(name, value) for name, value in row.items()))
    return table


def _shown(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return size(int(value))
    return _few(value) if name.endswith("_s") or name == "seconds" else str(value)
