"""How results look in a terminal: the tables that several verbs print."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.evidence.executed.comparison import Comparison, Measured
from experiments.evidence.peaks import PEAK
from experiments.evidence.provenance import evidence_lines
from longstep import Prediction, Setup
from longstep import Table as Figures
from sim.accounts.breakdown import PartName
from sim.accounts.reserved import Reserved
from sim.base.errors import InputError
from sim.base.units import FEW, number, percent, seconds, size
from sim.engine.results.critical import Span, shares, strip
from sim.engine.results.report import Report
from sim.engine.results.room import Limit, Room, by_basis
from sim.setup.answers.answer import Grounds, grounds, interval, named, step_time
from topology.reserved import Basis, held_by_allocator

if TYPE_CHECKING:
    from rich.progress import Progress

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal, and what is none, which cannot be written."""

_EFFORT = logging.getLogger("longstep.effort")
"""On which ``sim.setup.effort`` says what is large."""
_COLOURS = ("green", "yellow", "magenta", "cyan", "red", "blue")
_CELLS = 96
"""Parts of a step that are told apart in a line."""
_NEAR = 1.02
"""Neighbours that take no more times as long are as fast."""


def printable(text: str) -> str:
    """Return a text with everything that would steer a terminal as JSON and Python write it."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Printer(Console):
    """Prints what there is, and nothing that names in it mean to a console."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def print(self, *objects: Any, **how: Any) -> None:
        """Print, where nothing ticks."""
        with Ticker.hushed():
            super().print(*objects, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return what is printed of a text: of titles, of cells, and of all else."""
        return super().render_str(printable(text), **how)

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError, which is no failure."""
        raise BrokenPipeError


def tell_assumed(setup: Setup, console: Console, *, json: bool = False) -> None:
    """Print what nobody named and is assumed, as options; JSON has no such line."""
    if setup.assumed and not json:
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in setup.assumed.items())
        console.print(f"assumed: {options}", markup=False)


def tell_padded(setups: Sequence[Setup], console: Console, *, json: bool = False) -> None:
    """Print how far documents are padded; JSON has no such line, and a schedule that refuses them says so later."""
    told: dict[int, list[str]] = {}
    for setup in () if json else setups:
        if setup.documents is not None and setup.pad:
            with contextlib.suppress(InputError):
                found = setup.resolved()
                told.setdefault(found.workload.padding, []).append(found.schedule)
    for padding, schedules in told.items():
        if padding:
            whom = f" for {', '.join(dict.fromkeys(schedules))}" if len(setups) > 1 else ""
            some = f"{padding} token{'s' if padding > 1 else ''}"
            console.print(f"padded: {some} behind the documents{whom}, which no other token sees", markup=False)


def tell_basis(
    predictions: Sequence[Prediction], console: Console, *, everything: bool = False, of: Prediction | None = None
) -> None:
    """Print what an answer rests on, in three lines: those of one, by default the fastest; or everything, of all, as a
    table.
    """
    first = of or min(predictions, key=lambda one: one.step_time_s)
    others = [grounds(one) for one in predictions if one is not first]
    tell([grounds(first), *others], console, everything=everything)


def tell(found: Sequence[Grounds], console: Console, *, everything: bool = False, more: Sequence[str] = ()) -> None:
    """Print what answers rest on: the lines of the first, and all warnings. With ``everything`` a table has all notes,
    and ``more``.
    """
    for line in found[0].lines if found else ():
        console.print(line, markup=False)
    for note in dict.fromkeys(note for one in found for note in one.warnings):
        console.print(f"note: {note}", markup=False)
    if everything:
        table = Table("evidence", title="what it rests on", title_justify="left")
        notes = sorted({note for one in found for note in one.evidence.notes})
        lines = evidence_lines(msgspec.structs.replace(found[0].evidence, notes=notes)) if found else []
        for line in (*more, *lines):
            table.add_row(line.removeprefix("evidence: "))
        console.print(table)


def _reserved(allocated: int) -> str:
    """Return what logs have of memory that the allocator holds."""
    most = [size(held_by_allocator(allocated, expandable=segments)[1], FEW) for segments in (True, False)]
    return f"{size(allocated, FEW)} to {most[0]} with expandable segments, to {most[1]} without"


def _between(reserved: Reserved) -> str:
    """Return what the walk of an allocator says, between its ends."""
    least, most = size(reserved.least_bytes, FEW), size(reserved.most_bytes, FEW)
    return least if least == most else f"{least} to {most}"


def report_table(predicted: Prediction) -> Table:
    """Return the figures of one simulated step."""
    report = predicted.report
    table = Table("figure", "value", title=predicted.title, title_justify="left")
    if predicted.techniques:
        table.add_row("techniques", ", ".join(predicted.techniques))
    table.add_row("step time", step_time(predicted))
    if report.interval_s:
        table.add_row("  90 % interval", interval(predicted))
    if len(report.step_times_s) > 1:
        fastest_s, *_, slowest_s = report.step_times_s
        table.add_row(f"  of {len(report.step_times_s)} seeds", f"{seconds(fastest_s)} to {seconds(slowest_s)}")
    table.add_row("tokens per second and GPU", number(report.tokens_per_s_per_gpu, FEW))
    if report.mfu is not None:
        table.add_row("MFU", f"{100 * report.mfu:.3g} %")
    if found := report.training:
        if found.hfu is not None:
            table.add_row("HFU, with what is computed again", f"{100 * found.hfu:.3g} %")
        hours = f"{found.hours_per_billion_tokens:.4g} hours, {found.gpu_hours_per_billion_tokens:.4g} GPU-hours"
        table.add_row("a billion tokens", hours)
    table.add_row(PEAK, size(report.peak_hbm_bytes))
    if report.room:
        if report.room.limits[0].memory == "GPU":
            walked = report.peak_reserved
            table.add_row("peak reserved", _between(walked) if walked else _reserved(report.peak_hbm_bytes))
        for name, shown in _room_rows(report.room):
            table.add_row(name, shown)
    else:
        table.add_row("  by category", ", ".join(f"{name} {size(n)}" for name, n in report.memory.items()))
    if report.peak_host_bytes:
        table.add_row("peak host memory", size(report.peak_host_bytes))
    table.add_row("fits", fits(report))
    table.add_row(f"critical rank {report.critical_rank}", parts_line(report.breakdown))
    for name, shown in _stage_rows(report):
        table.add_row(name, shown)
    table.add_row("bound by", report.bound_by)
    if report.saves:
        saved = ", ".join(f"{name} {100 * share:.2g} %" for name, share in report.saves.items())
        table.add_row("  doubling saves", saved)
    table.add_row("lower bounds", ", ".join(f"{name} {seconds(s)}" for name, s in report.floors.items()))
    table.add_row("schedule", report.schedule_hash)
    return table


def _stage_rows(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what there is to say of the stages of a pipeline."""
    if not report.stages:
        return
    yield "bubbles, by stage", f"{', '.join(f'{100 * stage.bubbles:.3g}' for stage in report.stages)} % of the step"
    if isinstance(report.uneven, float):
        yield "of uneven micro-batches", f"{100 * report.uneven:.3g} % of the step"
    yield "peak allocated, by stage", ", ".join(size(stage.peak_hbm_bytes) for stage in report.stages)
    if reserved := [stage.peak_reserved for stage in report.stages if stage.peak_reserved]:
        yield "peak reserved, by stage", ", ".join(map(_between, reserved))


def ties(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield a line for each schedule that may be as fast as the fastest."""
    first, *others = sorted(predictions, key=lambda one: one.step_time_s)
    for other in others:
        ratio = other.over(first)
        if ratio and ratio.tied:
            within = f"90 % interval {ratio.low:.3g} to {ratio.high:.3g}"
            told = f"{named(other)} takes {ratio.expected:.3g} times as long, {within}"
            yield f"tied with {named(first)}, as far as ratios of measured steps were off: {told}"


def critical_path_shown(spans: Sequence[Span]) -> Iterator[Text | str]:
    """Yield what a critical path goes to, in all and over time."""
    found = shares(spans)
    colours = dict(
        zip(found, ("green", "yellow", "magenta", "cyan", "red", "blue", "white", "bright_black"), strict=False)
    )
    letters = {on: chr(ord("A") + number) for number, on in enumerate(found)}
    yield "critical path: " + ", ".join(f"{letters[on]} {on} {100 * share:.1f} %" for on, share in found.items())
    yield Text.assemble("  ", *((letters[on], colours.get(on, "")) for on in strip(spans, _CELLS)))


def neighbours_shown(title: str, found: Figures, memory: str) -> Iterator[Table | str]:
    """Yield what is one change away from a step, and what that says of it; ``memory`` is what lies beside peaks."""
    heads = ("change", "step", "for a token", PEAK, "fits", "extrapolated")
    table = Table(*heads, title=title, title_justify="left", caption=memory, caption_justify="left")
    played = [row for row in found.rows if not row["error"]]
    for row in played:
        room = {True: "yes", False: "no", None: "not known"}[row["fits"]]
        table.add_row(
            row["change"] or "none", seconds(row["step_time_s"]), f"x {row['ratio']:.3f}",
            size(row["peak_hbm_bytes"]), room, f"{100 * row['extrapolated']:.0f} %",
        )  # fmt: skip
    yield table
    yield _sharpness([row for row in played if row["change"]])
    for row in found.rows:
        if row["error"]:
            yield f"{row['change']}: {row['error']}"


def _sharpness(others: Sequence[Mapping[str, Any]]) -> str:
    """Return whether a step is the best of its neighbours, and by how much."""
    faster = [row for row in others if row["ratio"] < 1 / _NEAR and row["fits"] is not False]
    if faster:
        return f"not the fastest here: {faster[0]['change']} takes x {faster[0]['ratio']:.3f} for a token"
    near = sum(row["ratio"] < _NEAR for row in others)
    basin = "broad basin" if 2 * near > len(others) else "ridge" if near else "sharp peak"
    return f"{basin}: of {len(others)} neighbours {near} are as fast within {100 * (_NEAR - 1):.0f} %"


def sweep_table(title: str, keys: Sequence[str], found: Figures) -> Table:
    """Return what-ifs in their order: what was varied, and what became of the step."""
    table = Table(*keys, "step", "90 % interval", "bound by", "waiting", title=title, title_justify="left")
    for row in found.rows:
        varied = [row[key] for key in keys]
        if row["error"]:
            table.add_row(*varied, "", "", "", row["error"])
            continue
        within = "not known" if row["low_s"] is None else f"{seconds(row['low_s'])} to {seconds(row['high_s'])}"
        waits = row["synchronisation"] + row["idle"]
        parts = f"{100 * waits / row['step_time_s']:.3g} %" if row["step_time_s"] else ""
        table.add_row(*varied, seconds(row["step_time_s"]), within, row["bound_by"], parts)
    return table


def elasticities_table(title: str, found: Figures) -> Table:
    """Return how a step depends on the figures of its machine."""
    table = Table("figure", "elasticity", "bound changes nearby", title=title, title_justify="left")
    for row in found.rows:
        table.add_row(row["figure"], f"{row['elasticity']:.3f}", "yes" if row["bound_changes_nearby"] else "")
    return table


def memory_prices_shown(found: Figures) -> Iterator[str]:
    """Yield for each memory what more of it would buy."""
    for row in found.rows:
        name = f"{row['memory']} memory of {size(row['capacity_bytes'])}"
        cut = "" if row["sure"] else "; cut short, there may be more to win"
        if row["step_time_s"] is None:
            more = f", {size(row['more_bytes'])} more for {row['more_options']}" if row["more_bytes"] else ""
            yield f"{name}: nothing fits{more}{cut}"
            continue
        now = f"{row['options']}: {seconds(row['step_time_s'])}, {size(row['free_bytes'])} free"
        if row["more_bytes"] is None:
            yield f"{name}: elasticity 0, it does not bind the fastest way that fits, {now}{cut}"
            continue
        more = f"with {size(row['more_bytes'])} more {row['more_options']} takes {seconds(row['more_step_time_s'])}"
        yield f"{name}: elasticity {row['elasticity']:.3g}, {more}; the fastest that fits is {now}{cut}"


def fits(found: Report) -> str:
    """Return whether a prediction fits into memory; of a training step how much is left, or what is exceeded by how
    much.
    """
    if found.room is None:
        return "buffers yes, rest not known" if found.fits is None else "no: buffers alone exceed the memory"
    left = [_left(limit) for limit in found.room.limits if limit.fits is found.fits]
    return f"{found.verdict}: {', '.join(left)}"


def _left(limit: Limit) -> str:
    """Return how much of a memory is left, or missing."""
    free = f"{size(abs(limit.free_bytes))} {'left' if limit.free_bytes >= 0 else 'too little'} of {limit.memory}"
    return f"{free}, known to {size(limit.known_to_bytes)}" if limit.fits is None else free


def _taken(limit: Limit) -> Iterator[str]:
    """Yield what is taken of a memory."""
    needed = "buffers" if limit.memory != "GPU" else "needed by its allocator" if limit.allocator else PEAK
    yield f"{needed} {size(limit.held_bytes)}" + (f", or {size(limit.early_bytes)} less" if limit.early_bytes else "")
    if limit.reserved_bytes:
        parts = ", ".join(part.name for part in limit.beside)
        yield f"beside it {size(limit.reserved_bytes)} ({parts}), more or less {size(limit.within_bytes)}"
    yield f"{'left' if limit.free_bytes >= 0 else 'missing'} {size(abs(limit.free_bytes))}"


_BASES: dict[Basis, str] = {"measured": "measured by others", "derived": "derived", "assumed": "assumed"}


def _room_rows(room: Room) -> Iterator[tuple[str, str]]:
    """Yield what the memory of a training step goes to, and what that rests on."""
    yield "  by term", ", ".join(f"{name} {size(nbytes)}" for name, nbytes in room.terms.items() if nbytes)
    states, saved = room.formula.states_bytes, room.formula.saved_bytes
    layers = "" if saved is None else f", inputs of layers {size(saved)}"
    yield "  by formula", f"model states {size(states)}{layers}"
    yield "  they are", "; ".join(f"{_BASES[basis]}: {', '.join(names)}" for basis, names in by_basis().items())
    for limit in room.limits:
        yield f"of {size(limit.capacity_bytes)} of {limit.memory}", ", ".join(_taken(limit))


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[..., None]]:
    """Yield what shows on stderr how many are done, of how many, and perhaps the seconds that the others will take."""
    from rich.progress import Progress  # which one prediction does without

    console = Console(stderr=True)
    with (
        Ticker.hushed(),
        Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task(doing, total=None)

        def show(done: int, count: int, left_s: float | None = None) -> None:
            told = doing if left_s is None else f"{seconds(left_s)} left"
            bar.update(task, completed=done, total=count, description=told, refresh=True)

        yield show


def progress_bar(console: Console) -> Progress:
    """Return a bar on standard error, which is gone when it is done."""
    from rich.progress import Progress  # see above

    return Progress(console=type(console)(stderr=True), transient=True)


class Ticker(logging.Handler):
    """Shows on a terminal for how long a command has been at work, once that is two seconds, with what the library said
    last of the size of it.
    """

    _SOON_S = 2.0
    """What is done sooner shows nothing."""
    _at_work: ClassVar[Ticker | None] = None

    def __init__(self, doing: str) -> None:
        super().__init__(logging.INFO)
        self._doing, self._began = doing, time.monotonic()
        self._ended, self._writing = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Take what the library says."""
        self._doing = record.getMessage()

    def __enter__(self) -> Self:
        """Begin, where stderr is a terminal."""
        if sys.stderr.isatty():
            Ticker._at_work = self
            _EFFORT.addHandler(self)
            _EFFORT.setLevel(logging.INFO)
            _EFFORT.propagate = False
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, and leave nothing on the terminal."""
        if Ticker._at_work is self:
            Ticker._at_work = None
            _EFFORT.removeHandler(self)
            self._ended.set()
            self._thread.join()

    @staticmethod
    def hushed() -> AbstractContextManager[object]:
        """Return what shows nothing of the time while something else is shown."""
        return Ticker._at_work.wiped() if Ticker._at_work else contextlib.nullcontext()

    @contextlib.contextmanager
    def wiped(self) -> Iterator[None]:
        """Wipe what is shown, and show nothing inside."""
        with self._writing:
            self._wipe()
            yield

    def _tick(self) -> None:
        wait_s = self._SOON_S
        while not self._ended.wait(wait_s):
            wait_s = 0.5
            if self._writing.acquire(blocking=False):  # else something else is shown
                width = shutil.get_terminal_size().columns - 1
                told = f"{time.monotonic() - self._began:.0f} s: {printable(self._doing)}"
                sys.stderr.write(f"\r{told[:width]}\x1b[K")
                sys.stderr.flush()
                self._writing.release()
        self._wipe()

    def _wipe(self) -> None:
        if time.monotonic() - self._began >= self._SOON_S:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def answered(found: Figures) -> dict[str, Any]:
    """Return rows with what they say, and what that rests on, as JSON has them."""
    return {"answer": found.answer, "rests_on": found.rests_on, "rows": found.rows}


def print_json(found: Any, console: Console) -> None:
    """Print data as JSON."""
    console.print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode(), markup=False)


def parts_line(parts: Mapping[PartName, float]) -> str:
    """Return the parts of a step that take any time."""
    total = sum(parts.values())
    shown = [f"{name} {seconds(s)} ({100 * s / total:.3g} %)" for name, s in parts.items() if s > 0]
    return ", ".join(shown)


def comparison_table(name: str, found: Comparison) -> Table:
    """Return simulated against measured, per op kind and for the step."""
    table = Table("op kind", "ops", "simulated", "measured", "least", "most", "error", title=name, title_justify="left")
    for row in found.kinds:
        table.add_row(f"{row.kind} {row.part}", str(row.count), *_cells(row.times))
    table.add_section()
    table.add_row("step", "", *_cells(found.step))
    return table


def _cells(times: Measured) -> list[str]:
    shown = [seconds(value) for value in (times.simulated_s, times.median_s, times.low_s, times.high_s)]
    return [*shown, percent(times.error)]
