"""A sweep: which cells it has, what their repeats say, its record, its page and its figure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from experiments.evidence.executed import cells as sweeps
from experiments.evidence.executed.cells import Cell, Repeated, compared
from experiments.evidence.executed.comparison import Comparison, measured
from experiments.evidence.executed.execution import Execution
from experiments.evidence.executed.record import (
    RECORD_FILE,
    Record,
    joined,
    judged,
    provenance,
    read_record,
    save_record,
    summary,
)
from experiments.pages.sweep_page import figure, page
from experiments.verbs import validate as verb
from experiments.verbs.cli import main, open_console, parse
from experiments.verbs.shared.cells import CellSelection, cells_of, playable
from experiments.verbs.validate import validate
from sim.base.errors import InputError, RankError
from sim.schedule.methods.catalog import SCHEDULES
from sim.setup.setup import Setup
from sim.words.profile import Machine, Profile
from tests.experiments.pages.reading import HOSTILE, Read, loads_nothing
from tests.experiments.pages.test_comparison_page import make_comparison

RESULTS = Path(__file__).parents[3] / "experiments" / "results" / "2026-11-21-epyc-2-cores"
RING = Cell(2, "attention", 1, "2K", "ring", 0.10)
ULYSSES = RING._replace(schedule="ulysses")


def make_profile(**changes: Any) -> Profile:
    machine = Machine(gpu="a CPU", cores=2, threads_per_rank=1, software={"torch": "2"})
    profile = Profile(
        name="host", created="2026-01-01", command="calibrated", complete=True, machine=machine, cluster={}, points=()
    )
    return msgspec.structs.replace(profile, **changes)


def make_found(simulated_s: float, repeats: Sequence[tuple[float, float]]) -> list[Comparison]:
    """Comparisons by their measured medians, and how far the machine had drifted."""
    found, _, _ = make_comparison()
    return [
        msgspec.structs.replace(
            found, step=measured(simulated_s, [0.99 * median, median, 1.01 * median]), drift=[0.0, drift]
        )
        for median, drift in repeats
    ]


def make_record(found: dict[Cell, list[Comparison]], **changes: Any) -> Record:
    record = Record(
        profile=make_profile(), title="toy", begun="", command="", software={}, select={},
        comparisons=list(found.items()),
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes)


def make_sweep(schedules: Sequence[str] = ("ring", "ulysses")) -> Record:
    """Several scopes, ranks and lengths."""
    cells = [
        Cell(gpus, scope, 1, seq, schedule, 0.1)
        for gpus in (2, 4)
        for scope in ("attention", "layer")
        for seq in ("1K", "1000", "4K")
        for schedule in schedules
    ]
    return make_record(
        {
            cell: make_found(0.1 * (n + 1), [(0.1 * (n + 1.2), 0.0), (0.1 * (n + 0.9), 0.2)])
            for n, cell in enumerate(cells)
        }
    )


def test_a_cell_is_judged_by_its_repeats() -> None:
    """1 s simulated: errors of 0, -20 %, +25 % and -5 %, the last but one on a machine that was not quiet."""
    found = make_found(1.0, [(1.0, 0.0), (1.25, -0.04), (0.8, 0.06), (1 / 0.95, 0.05)])
    (cell,) = judged(make_record({RING: found, ULYSSES: []}))
    assert cell.errors == pytest.approx([0.0, -0.2, 0.25, -0.05])
    assert (cell.low, cell.high) == pytest.approx((-0.2, 0.25))
    assert cell.quiet == [True, True, False, True]
    assert cell.met == (2, 4)
    assert cell.met.missed
    assert cell.met_when_quiet == (2, 3)
    assert cell.when_quiet is not None
    assert cell.when_quiet.median_s == pytest.approx(1 / 0.95)
    assert cell.times.median_s == pytest.approx((1.0 + 1 / 0.95) / 2)
    assert (cell.times.low_s, cell.times.high_s) == pytest.approx((0.8, 1.25))


def test_a_sweep_is_summed_up() -> None:
    """Ulysses is predicted to be faster: right, then wrong, then the steps overlap; ring has a repeat more."""
    ring = make_found(1.0, [(1.0, 0.0), (1.0, 0.0), (1.0, 0.3), (1.0, 0.0)])
    ulysses = make_found(0.9, [(0.9, 0.0), (1.1, 0.0), (1.0, -0.1)])
    met, drift, order = summary(make_record({RING: ring, ULYSSES: ulysses}))
    assert met.startswith("1 of 2 cells met their target")
    assert "kernels took -10.0 % to +30.0 %" in drift
    assert "5 of 7 repeats were quiet" in drift
    assert "off by 3.6 % in the mean" in drift, "1 - 0.9 / 1.1 is one of five"
    assert "right in 1 of 2 clear cases" in order


@pytest.mark.sweep
def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = make_sweep()
    save_record(record, RECORD_FILE.at(tmp_path / "record.json"))
    assert read_record(str(tmp_path / "record.json")) == record


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for text, message in (("{", "truncated"), ("{}", "profile"), (None, "No such file")):
        if text:
            path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_record(str(path if text else tmp_path / "none.json"))
    save_record(make_record({RING: []}), RECORD_FILE.at(path, force=True))
    with pytest.raises(InputError, match="holds no comparison"):
        read_record(str(path))


def test_records_are_joined() -> None:
    one, two = make_found(1.0, [(1.0, 0.0)]), make_found(1.0, [(1.1, 0.0), (1.2, 0.0)])
    first, second = make_record({RING: one}, command="a"), make_record({ULYSSES: one, RING: two}, command="b")
    both = joined([first, second])
    assert both.comparisons == [(RING, one + two), (ULYSSES, one)]
    assert both.command == "a; b"
    assert joined([first]) == first
    for other in (
        make_record({ULYSSES: one}, title="x"),
        make_record({ULYSSES: one}, profile=make_profile(name="x")),
        make_record({ULYSSES: one}, select={"set": ["schedule.activations=host"]}),
    ):
        with pytest.raises(InputError, match="different profiles or workloads"):
            joined([first, other])
    with pytest.raises(InputError, match="ring, attention, S 2K, P 2 differently"):
        joined([first, make_record({RING: make_found(2.0, [(1.0, 0.0)])})])


@pytest.mark.sweep
def test_the_page_shows_every_cell_once() -> None:
    record = make_sweep()
    text = page(record)
    read = Read(text)
    rows = list(range(len(record.comparisons)))
    assert read.rows("tr") == rows
    assert sorted(read.rows("g")) == sorted(rows * 4), "in the parity plot, and in one of the error, wide and narrow"
    for cell in judged(record):
        assert text.count(f'aria-label="{cell.cell.name}\n') == 4
    said = re.sub(r"\s+", " ", " ".join(read.texts))
    for line in [*summary(record), *provenance(record)]:
        assert line in said
    assert {"attention, P = 2", "attention, P = 4", "1 layer, P = 2", "1 layer, P = 4"} <= set(read.texts)


@pytest.mark.sweep
def test_the_page_loads_nothing() -> None:
    loads_nothing(page(make_sweep()))


@pytest.mark.sweep
def test_no_schedule_breaks_out() -> None:
    evil, plain = (make_sweep(("ring", name)) for name in (HOSTILE, re.sub(r"[^\w ]", "x", HOSTILE)))
    read = Read(page(evil))
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in Read(page(plain)).tags]
    assert HOSTILE in read.texts
    ElementTree.fromstring(figure(evil))


@pytest.mark.slow
def test_schedules_have_colours_of_their_own() -> None:
    """Whichever they are: by the order of the catalog, the user's own last."""
    read = Read(page(make_sweep(("my.py:build", "ulysses", "another", "ring"))))
    looks = {
        str(of["aria-label"]).partition(",")[0]: str(of["class"]).split()[0]
        for _, of in read.tags
        if of.keys() >= {"class", "data-row", "aria-label"}
    }
    assert looks == {"ring": "hue-0", "ulysses": "hue-1", "my.py:build": "hue-2", "another": "hue-3"}


def test_a_sweep_of_one_cell() -> None:
    record = make_record({RING: make_found(1.0, [(1.0, 0.0)])})
    assert Read(page(record)).rows("tr") == [0]
    ElementTree.fromstring(figure(record))


@pytest.mark.sweep
def test_the_figure_stands_alone() -> None:
    record = make_sweep()
    text = figure(record)
    root = ElementTree.fromstring(text)
    marks = [int(group.attrib["data-row"]) for group in root.iter() if "data-row" in group.attrib]
    assert sorted(marks) == sorted(list(range(len(record.comparisons))) * 2)
    assert text.count("://") == 1, "the namespace"
    assert "var(" not in text, "converters know no variables"


def test_the_figure_of_the_readme_shows_its_records() -> None:
    """longstep validate wrote the records; after a change of the plots, --figure writes the figure anew."""
    record = read_record(str(RESULTS / "cells.json"))
    assert len(judged(record)) == 28
    assert figure(record) == (RESULTS / "parity.svg").read_text()


def test_what_a_sweep_asks_for() -> None:
    unnamed = cells_of(CellSelection())
    assert {cell.seq for cell in unnamed} == {"2K", "4K", "8K"}
    assert {(cell.scope, cell.target) for cell in unnamed} == {("attention", 0.1), ("layer", 0.1)}
    assert {cell.scope for cell in cells_of(CellSelection(scope="layer"))} == {"layer"}
    cells = cells_of(
        CellSelection(seq="1K,2K", ranks="2, 4", schedule="ring,mine.py:build", scope="attention", target=0.2)
    )
    assert len(cells) == len(set(cells)) == 8
    assert cells[0] == Cell(2, "attention", 1, "1K", "ring", 0.2)
    assert {cell.layers for cell in cells_of(CellSelection(seq="1K", layers=3)) if cell.scope == "layer"} == {3}
    spread = {cell.schedule for cell in cells_of(CellSelection(seq="1K"))}
    assert spread == {name for name, entry in SCHEDULES.items() if entry.degrees}


def test_stacks_of_a_step() -> None:
    """Each is a cell of every schedule; a case file names it, and what plays it has it."""
    sweep = CellSelection(seq="1K", ranks="2", schedule="ring,ulysses", scope="step", stack="fsdp,alst", layers=2)
    cells = cells_of(sweep)
    assert [cell.method for cell in cells] == [
        f"{schedule}, stack {stack}" for schedule in ("ring", "ulysses") for stack in ("fsdp", "alst")
    ]
    assert [cell.setup(sweep.setup()).stack for cell in cells] == ["fsdp", "alst"] * 2
    assert len({cell.workload for cell in cells}) == 1
    with pytest.raises(InputError, match="unknown stack 'fdsp'.*did you mean 'fsdp'"):
        playable(cells_of(dataclasses.replace(sweep, stack="fdsp")), sweep)
    of_layers = dataclasses.replace(sweep, scope="layer")
    with pytest.raises(InputError, match="`stack` fsdp is of training steps"):
        playable(cells_of(of_layers), of_layers)
    with pytest.raises(InputError, match="`stack` : expected values separated by commas"):
        cells_of(dataclasses.replace(sweep, stack=""))


def test_memory_stands_beside_what_the_allocator_gave(capsys: pytest.CaptureFixture[str]) -> None:
    """The repeat that took most counts; a CPU has no allocator, and so no table."""
    found = make_found(1.0, [(1.0, 0.0), (1.0, 0.0)])
    of = found[0].peak_bytes
    peaks = [msgspec.structs.replace(of, simulated_hbm=99 << 20, allocated=n << 20) for n in (90, 100)]
    grown = [msgspec.structs.replace(one, peak_bytes=peak) for one, peak in zip(found, peaks, strict=True)]
    off = [msgspec.structs.replace(one, peak_bytes=peaks[0]) for one in found]
    record = make_record({RING: grown, ULYSSES._replace(scope="step", stack="alst"): off})
    said = "peak memory: -1.0 % to +10.0 % beside what the allocator gave; 1 of 2 cells within 2.0 %"
    assert said in summary(record)
    verb.show(record, open_console())
    shown = capsys.readouterr().out
    assert re.search(r"ulysses, stack alst +│ 99 MiB +│ 90 MiB +│ \+10.0 %", shown)
    verb.show(make_record({RING: found}), open_console())
    assert "allocat" not in capsys.readouterr().out


def test_cells_that_cannot_be_played_are_left_out() -> None:
    sweep = CellSelection(seq="1K", ranks="2,3,6", schedule="ring,ulysses", scope="attention")
    with pytest.raises(InputError, match="the nearest are 1023 or 1026"):
        playable(cells_of(sweep), sweep)
    sweep = CellSelection(seq="1K,1026", ranks="2,3", schedule="ring,ulysses", scope="attention")
    kept, refused = playable(cells_of(sweep), sweep)
    assert {cell[:1] + cell[3:5] for cell in kept} == {(2, "1K", "ring"), (2, "1K", "ulysses")} | {
        (2, "1026", "ring"), (2, "1026", "ulysses"), (3, "1026", "ring")
    }  # fmt: skip
    assert len(refused) == 3
    with pytest.raises(InputError, match="did you mean 'ring'"):
        playable(cells_of(CellSelection(schedule="ring,rign")), CellSelection(schedule="ring,rign"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankError("rank 1 stands still")])
def test_what_was_found_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    """A sweep that stops after three of four comparisons."""
    found = make_found(1.0, [(1.0, 0.0), (1.1, 0.0), (1.2, 0.0)])

    def compared(sweep: object, keep: Any, advance: object, workers: object) -> None:
        for cell, result in zip((RING, ULYSSES, RING), found, strict=True):
            keep(cell, result)
        raise error

    monkeypatch.setattr(verb, "compared", compared)
    monkeypatch.setattr(verb, "begun", lambda *_: make_record({}))
    monkeypatch.setattr(verb, "profile_names", lambda: ["host"])
    out, html = tmp_path / "record.json", tmp_path / "page.html"
    with pytest.raises(SystemExit) as stop:
        main([
            "validate", "--seq", "2K", "--ranks", "2", "--scope", "attention", "--out", str(out), "--html", str(html)
        ])  # fmt: skip
    assert stop.value.code == (1 if isinstance(error, RankError) else 130)
    assert read_record(str(out)).comparisons == [(RING, [found[0], found[2]]), (ULYSSES, [found[1]])]
    assert "1 of 1" in capsys.readouterr().out
    assert Read(html.read_text()).rows("tr") == [0, 1]


def test_a_cell_that_fails_does_not_end_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on in a session of their own; what there is already, and what there is no time for, is not done."""
    opened, done = list[int](), list[Cell]()
    cells = [RING._replace(seq=seq) for seq in ("256", "512", "1K", "2K")]
    clock = [0.0]

    @contextmanager
    def open_session(checked: Any, *_: object) -> Iterator[None]:
        opened.append(checked.schedule.header.workload.seq)
        yield

    def compare(prediction: Any, *_: object) -> tuple[None, None]:
        clock[0] += 10
        if prediction.checked.schedule.header.workload.seq == 512:
            raise RankError("rank 1 ran out of memory")
        return None, None

    def swept(**fields: Any) -> str:
        opened.clear()
        done.clear()
        sweep = Repeated(cells, Setup(model="tiny", cluster="host"), 2, Execution(), **fields)
        with pytest.raises(RankError) as failed:
            compared(sweep, lambda cell, _: done.append(cell), lambda: None, None)
        return str(failed.value)

    monkeypatch.setattr(sweeps, "open_session", open_session)
    monkeypatch.setattr(sweeps, "comparison", compare)
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    first, fails, third, last = cells
    assert swept() == f"1 of 4 cells failed: {fails.name}: rank 1 ran out of memory"
    assert done == [first, third, last] * 2
    assert opened == [256, 1024, 256]
    swept(had={first: 2, third: 1})
    assert done == [last, third, last]
    cells.remove(fails)
    assert swept(seconds=25.0) == "time was up after 25 s: 3 comparisons are left; --out and --go-on go on"
    assert done == cells


@pytest.mark.sweep
def test_a_sweep_goes_on_with_what_its_record_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = make_found(1.0, [(1.0, 0.0), (1.1, 0.0)])
    asked: list[dict[Cell, int]] = []

    def once(sweep: Repeated, keep: Any, *_: object) -> None:
        asked.append({cell: count for cell, count in sweep.had.items() if count})
        for cell in sweep.cells:
            if not sweep.had[cell]:
                keep(cell, found[0 if cell == RING else 1])
                return

    monkeypatch.setattr(verb, "compared", once)
    monkeypatch.setattr(verb, "begun", lambda *_: make_record({}))
    monkeypatch.setattr(verb, "profile_names", lambda: ["host"])
    out = str(tmp_path / "record.json")
    command = ["validate", "--seq", "2K", "--ranks", "2", "--scope", "attention", "--schedule", "ring,ulysses"]
    for _ in range(3):
        main([*command, "--repeats", "1", "--out", out, "--go-on"])
    assert asked == [{}, {RING: 1}, {RING: 1, ULYSSES: 1}]
    assert read_record(out).comparisons == [(RING, [found[0]]), (ULYSSES, [found[1]])]
    for wrong, says in ((["--go-on"], "name it by --out"), (["--seconds", "0"], "expected seconds above 0")):
        with pytest.raises(InputError, match=says):
            validate(parse([*command, *wrong])[1], open_console())


@pytest.mark.sweep
def test_a_record_is_shown_without_measuring(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, drawn = tmp_path / "record.json", tmp_path / "figure.svg"
    save_record(make_sweep(), RECORD_FILE.at(record))
    main(["validate", "--record", str(record), "--figure", str(drawn), "--out", str(tmp_path / "copy.json")])
    assert capsys.readouterr().out.count("ulysses") == 12
    assert drawn.read_text() == figure(make_sweep())
    assert read_record(str(tmp_path / "copy.json")) == make_sweep()
