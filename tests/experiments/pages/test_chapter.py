"""The chapter of evidence: of small case files and records whose errors are known, and the one that is committed."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

import msgspec
import pytest

from experiments.evidence.executed.record import (
    RECORD_FILE,
    Kept,
    judged,
    kept_records,
    quiet_repeats,
    read_record,
    save_record,
    summary,
)
from experiments.evidence.headlines import HEADLINE_HEADS, headlines
from experiments.evidence.papers.cases import FOLDER, written_cases
from experiments.evidence.papers.coverage import REGIME_HEADS
from experiments.evidence.papers.published import measured_on, rests_on
from experiments.pages.chapter import SHOWN, executed_section, front_table, on_front_page
from experiments.recipes.evidence import EvidenceFiles, evidence
from experiments.verbs.cli import open_console
from sim.base.errors import InputError
from sim.base.presets import preset_names
from sim.engine.intervals.interval import Interval
from sim.engine.intervals.learned import Learned
from tests.experiments.evidence.case_files import OPS
from tests.experiments.pages.test_sweep_page import RING, ULYSSES, make_found, make_record

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "experiments" / "results"
ATTEND = 'measure = "Attend", gpus = 1, queries = 16384, keys = 16384, measured_s = 0.0067871088'
"""Predicted: half of it."""
GATHER = 'measure = "AllGather", gpus = 8, nbytes = 268435456, measured_s = 0.000582986'
"""Predicted: five quarters of it."""


def own_cases(tmp_path: Path) -> str:
    text = OPS.format(f"{ATTEND} }},\n  {{ {GATHER}")
    text = text.replace('quality = "one run"', 'quality = "a*b | c"\nnotes = "Why **so**."')
    path = tmp_path / "own.toml"
    text = text.replace("\n[select]", "target = 0.2\n\n[select]")
    path.write_text(text.replace('name = "ops"', 'name = "ops"\nblind = 0.4\ntarget = 0.3'))
    return str(path)


def tables(text: str) -> list[list[list[str]]]:
    """Return all tables: rows of cells, without the line below the heads."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    split = [[[cell.strip() for cell in row[1:-1].split(" | ")] for row in table.splitlines()] for table in found]
    return [[table[0], *table[2:]] for table in split]


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_a_chapter_of_small_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two repeats, ring is met once and 20 % too slow once; Ulysses is 20 % too fast, and so wrongly the faster."""
    ring, ulysses = make_found(1.0, [(1.0, 0.0), (1.0 / 1.2, 0.0)]), make_found(0.8, [(1.0, 0.0), (1.0, 0.0)])
    (tmp_path / "some run").mkdir()
    record = make_record({RING: ring, ULYSSES: ulysses}, title="toy | all", command="longstep validate")
    save_record(record, RECORD_FILE.at(tmp_path / "some run" / "record.json"))
    (tmp_path / "some run" / "no-record.json").write_text("{}")
    (tmp_path / "some run" / "notes.md").write_text("The machine was *loud*.\n")
    (tmp_path / "some run" / "record.svg").write_text("<svg/>")
    out = tmp_path / "README.md"
    monkeypatch.setattr(sys, "argv", ["/somewhere/recipes/__main__.py", "evidence"])
    monkeypatch.setattr("experiments.pages.chapter.SHOWN", 2)
    front, errors = tmp_path / "front.md", tmp_path / "errors.json"
    front.write_text("# Toy\n\n| measured | old |\n| --- | --- |\n| a | b |\n\nBehind.\n")
    files = EvidenceFiles(str(out), str(front), str(errors))
    evidence(open_console(), [own_cases(tmp_path)], [str(tmp_path / "some run")], files)
    printed, text = capsys.readouterr().out, out.read_text()
    assert "Our kernels" in printed
    assert "ulysses" in printed
    few, regimes, cells, groups = tables(text)
    assert few == [
        list(HEADLINE_HEADS),
        [
            "executed: steps on a CPU",
            "2",
            "14.5 %",
            "-5.5 %",
            "1 of 2",
            "-20.0 %",
            "-14.154",
            "0 of 1",
            "",
            "of each cell",
            "0 of 2",
        ],
    ], "ops alone are no row"
    assert tables(front.read_text()) == tables(front_table(few[1:]) + "\n")
    assert front.read_text().startswith("# Toy\n\n| measured |")
    assert front.read_text().endswith("| 0 of 2 |\n\nBehind.\n")
    assert msgspec.json.decode(errors.read_bytes(), type=Learned).sets == []  # ops alone, and steps of no machine
    assert regimes == [
        list(REGIME_HEADS),
        ["kernels", "Our kernels", "1", "0 %", "50.0 %", regimes[1][5], regimes[1][6], "points of the profile", "", ""],
        ["kernels", "all", "1", "0 %", "50.0 %", regimes[1][5], regimes[1][6], "", "too few", "too few"],
        ["links", "Our kernels", "1", "0 %", "25.0 %", regimes[3][5], regimes[3][6], "points of the profile", "", ""],
        ["links", "all", "1", "0 %", "25.0 %", regimes[3][5], regimes[3][6], "", "too few", "too few"],
    ]
    assert cells[1:] == [
        ["2", "attention", "2K", "ring", "1 s", "916.7 ms", "+9.1 % [+0.0 %, +20.0 %]", "10 %", "1 of 2"],
        ["2", "attention", "2K", "ulysses", "800 ms", "1 s", "-20.0 % [-20.0 %, -20.0 %]", "10 %", "0 of 2"],
    ]
    assert dict(zip(groups[0], groups[1], strict=True)) == {
        "group": "ops", "cases": "2", "mean": "37.5 %", "blind": "40.0 %", "worst": "-50.0 %", "bias": "-12.5 %",
        "R² of log": "0.824", "order": "0 of 0", "in 90 %": "0 %", "target": "30 %: missed",
        "worst is": "Attend, 1 GPUs, 16384 x 16384, full",
    }  # fmt: skip
    assert re.search(r"^### toy \\\| all: 2 cells on a CPU$", text, re.MULTILINE)
    assert "- record: [record.json](some run/record.json)" in text
    assert "The machine was *loud*." in text
    assert "(some run/record.svg)" in text
    assert "- quality: a\\*b \\| c" in text
    assert "\n\nWhy **so**.\n\n" in text
    for line in (*summary(record), "profile 'h100-sxm', sha256", "profile sha256"):
        assert f"- {line}" in text
    assert "```text\npython -m experiments.recipes evidence\n```" in text


def test_a_machine_is_one_row_with_its_intervals() -> None:
    found = make_found(1.0, [(1.0, 0.0)])
    report = found[0].report
    inside, outside = (
        [msgspec.structs.replace(found[0], report=msgspec.structs.replace(report, interval_s=Interval(*ends)))]
        for ends in ((0.9, 1.1), (0.8, 0.9))
    )
    records = [make_record({RING: inside}), make_record({RING: outside, ULYSSES: found})]
    (row,) = headlines([], records)
    assert (row.cases, row.mean, row.covered) == (3, 0.0, 0.5)
    assert (row.target, row.met) == ("of each cell", "3 of 3")


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no record"):
        kept_records(str(tmp_path))


def test_where_there_are_no_headlines_none_are_replaced(tmp_path: Path) -> None:
    """That is said before all case files are predicted, which takes minutes."""
    with pytest.raises(InputError, match=r"has no table that begins with \| measured \|"):
        on_front_page("| other | heads |\n| --- | --- |\n", [])
    front, chapter = tmp_path / "front.md", str(tmp_path / "chapter.md")
    front.write_text("# No table\n")
    for page, why in ((str(front), "has no table"), (str(tmp_path / "none.md"), "cannot be read")):
        with pytest.raises(InputError, match=why):
            evidence(open_console(), files=EvidenceFiles(chapter, page, None))
    assert [path.name for path in tmp_path.iterdir()] == ["front.md"]
    assert front.read_text() == "# No table\n"


def committed() -> str:
    return (RESULTS / "README.md").read_text()


@pytest.mark.sweep
def test_the_committed_chapter_names_all_sources() -> None:
    """Each case file with the profile that ships now; what its table says, the rows at the top say, too."""
    text = committed()
    few, alone, *rest = tables(text)
    assert len(front_table(few[1:]).splitlines()) - 2 <= 14, "a front page is read where it is short"
    assert few[0] == alone[0] == [*HEADLINE_HEADS]
    rows = {row[0]: row for row in (*few[1:], *alone[1:])}
    groups = [table for table in rest if table[0][0] == "group"]
    read = [written_cases(name) for name in preset_names(FOLDER)]
    files = [file for file, _ in read]
    apart = [file.title for file, cases in read if all(case.setup.scope == "attention" for case in cases)]
    assert [name for name in rows if name.startswith(tuple(f"published: {title}" for title in apart))] == [
        row[0] for row in alone[1:]
    ]
    for file in files:
        assert f"### {file.title}" in text
        for line in (*rests_on(file), *measured_on(file)):
            assert f"- {line}" in text
    for file, table in zip([file for file in files if file.group], groups, strict=True):
        names = [group.name for group in file.group] + [some.name for some in file.together]
        all_of = [*names, *(["all"] if len(names) > 1 else [])]
        fitted = [f"{name}, host fitted" for name in all_of if file.host_fit]
        assert [row[0] for row in table[1:]] == [*all_of, *fitted]
        last = dict(zip(table[0], table[len(all_of)], strict=True))
        shown = [name for name in rows if name.startswith(f"published: {file.title}")]
        ops_alone = all("measure" in case for group in file.group for case in group.cases)
        alone = {group.name for group in file.group} - {name for some in file.together for name in some.of}
        assert len(shown) == (len(file.together) + len(alone) if file.together else int(not ops_alone))
        assert not shown or sum(int(rows[name][1]) for name in shown) == int(last["cases"])
        if shown and not file.together:
            row = dict(zip(few[0], rows[shown[0]], strict=True))
            shown_of = [row[head] for head in ("mean error", "bias", "worst")]
            assert shown_of == [last[head] for head in ("mean", "bias", "worst")]


def test_the_front_page_says_how_many_sets_of_attention_alone_miss() -> None:
    _, (_, *rows), *_ = tables(committed())
    missed = sum(row[-1] == "missed" for row in rows)
    said = f"attention alone, where {missed} of {len(rows)} sets miss their target"
    assert said in (ROOT / "README.md").read_text()


def test_the_committed_chapter_shows_the_committed_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the letter: make evidence writes it anew."""
    monkeypatch.chdir(ROOT)
    text, records = committed(), kept_records("experiments/results")
    assert len(records) == len({kept.path for kept in records}) > 1
    for kept in records:
        assert "\n\n".join(executed_section(Kept(kept.path, kept.record), Path("experiments/results"))) in text
    for row in headlines([], [kept.record for kept in records]):
        (shown,) = [cells for cells in tables(text)[0] if cells[0] == row.what]
        assert [cell for cell, own in zip(shown, row.row, strict=True) if own] == [own for own in row.row if own]


def test_the_front_page_says_what_the_quiet_repeats_of_a_slower_machine_show() -> None:
    cells = judged(read_record(str(RESULTS / "2026-11-25-xeon-2-cores" / "cells.json")))
    error = statistics.mean(abs(error) for cell in cells for error in cell.quiet_errors)
    said = f"quiet repeats ({quiet_repeats(cells)}) the mean error is {100 * error:.1f} %"
    assert said in (ROOT / "README.md").read_text()


def test_the_front_page_shows_the_first_table_of_the_chapter() -> None:
    """But sets of few steps."""
    rows = tables(committed())[0][1:]
    few = {row[0] for row in rows if int(row[1]) < SHOWN}
    assert few
    assert not any(name in (ROOT / "README.md").read_text() for name in few)
    assert front_table(rows) in (ROOT / "README.md").read_text()
    assert any("H100" in row[0] for row in rows)
