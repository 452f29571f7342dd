"""Memory that others measured: whether steps ran, and what they held, by case files."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.evidence.headlines import headlines
from experiments.evidence.papers.cases import FOLDER, CaseFile, read_cases
from experiments.evidence.papers.memory_cases import (
    longest_rows,
    mark_rows,
    memory_cases,
    memory_tables,
    predicted_memory,
    size_rows,
)
from experiments.evidence.papers.published import Evidence, judged_groups
from experiments.recipes.evidence import EvidenceFiles, evidence
from experiments.verbs.cli import open_console
from sim.base.errors import InputError
from sim.base.presets import load_toml
from sim.plan.longest import PER_OCTAVE
from sim.plan.search.room import room

FILE = """
title = "Our cluster"
source = "run 17"
quality = "one run"
profile = "h100-sxm"

[select]
model = "tiny"
cluster = "hgx-h100"
gpus = 2
dtype = "bf16"
scope = "step"
set = ["cluster.hbm.capacity_bytes=8000000000"]

[[group]]
name = "times"
cases = [{{ schedule = "ring", seq = "1K", measured_s = 0.01 }}]

[[memory]]
name = "marks"
target = 0.1
set = ["schedule.loss=chunked"]
cases = [
  {{ schedule = "ring", seq = "1K", ran = true }},
  {{ schedule = "ulysses", about = "ours", seq = "1M", ran = false }},
  {{ schedule = "ulysses", seq = "1M", ran = true }},
  {{ schedule = "ring", seq = "1K", set = ["cluster.hbm.capacity_bytes=3300000000"], ran = true }},
  {{ schedule = "ring", seq = "1K", measured_gib = {{ optimiser = 0.1, "attention + temporaries" = 0.001 }} }},
  {more}
]
"""


def read(tmp_path: Path, more: str = "") -> CaseFile:
    path = tmp_path / "ours.toml"
    path.write_text(FILE.format(more=more))
    return load_toml("case file", str(path), CaseFile, FOLDER, "`cases`")


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_marks_and_sizes_are_judged(tmp_path: Path) -> None:
    found = predicted_memory(memory_cases(read(tmp_path)))
    rows = mark_rows(found)
    assert [row[-1] for row in rows] == [
        "right", "right", "wrong", "at the limit", "2 of 4 right, 1 at the limit, 1 wrong",
    ]  # fmt: skip
    assert rows[1][:5] == ["marks", "ours", "1M", "out of memory", "does not"]
    assert rows[1][5].startswith("-")
    assert rows[0][4] == "fits"
    terms = found[4].room.terms
    assert found[4].predicted_bytes == {
        "optimiser": terms["optimiser"],
        "attention + temporaries": terms["attention"] + terms["temporaries"],
    }
    assert [row[-1] for row in size_rows(found)] == ["10 %: missed"] * 2
    assert found[4].errors["optimiser"] == pytest.approx(terms["optimiser"] / (0.1 * 2**30) - 1, rel=1e-6)
    assert found[0].case.setup.set == ("cluster.hbm.capacity_bytes=8000000000", "schedule.loss=chunked")


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.slow
def test_longest_contexts_are_judged(tmp_path: Path) -> None:
    """By the ratio to what was measured; a replica's sequence may be as short as 1K, however many GPUs there are."""
    replicas = 'about = "replicas", schedule = "single", dp_degree = 2'
    more = ", ".join(
        f"{{ {case} }}"
        for case in (
            f'{replicas}, longest = "128K", measured_gib = {{ peak = 1.0 }}',
            f'{replicas}, longest = "1K"',
            'schedule = "ring", longest = "64K", set = ["cluster.hbm.capacity_bytes=3000000000"]',
        )
    )
    found = predicted_memory(memory_cases(read(tmp_path, more)))[-3:]
    assert [one.longest for one in found] == [found[0].longest, 16 * 1024, 0]
    assert found[0].predicted_bytes == {"peak": sum(found[0].room.terms.values())}
    lengths = (found[0].longest or 0, (found[0].longest or 0) + 128 * 1024 // PER_OCTAVE)
    fits, does_not = (room(found[0].case.setup.replace(seq=seq).resolved()) for seq in lengths)
    assert fits.free_bytes >= 0 > does_not.free_bytes
    rows = longest_rows(found)
    assert rows[0][:3] == ["marks", "replicas", "128K"]
    assert [row[-1] for row in rows] == ["right", "wrong", "wrong", "1 of 3 right"]
    assert [row[-2] for row in rows[1:]] == ["16.00", "0.00", ""]


def test_a_file_may_have_memory_alone(tmp_path: Path) -> None:
    """It has no row among those of times."""
    path = tmp_path / "ours.toml"
    text = FILE.format(more="")
    path.write_text(text[: text.index("[[group]]")] + text[text.index("[[memory]]") :])
    file, cases = read_cases(str(path))
    assert cases == []
    assert judged_groups(Evidence(file, [])) == headlines([Evidence(file, [])], []) == []
    path.write_text(text[: text.index("[[group]]")])
    with pytest.raises(InputError, match="a group holds no case"):
        read_cases(str(path))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('{ schedule = "ring" }', "says neither ran = true or false nor measured_gib"),
        ('{ schedule = "ring", ran = 1 }', "says neither ran"),
        ('{ schedule = "ring", measured_gib = { weights = 1.0 } }', "weights"),
        ('{ schedule = "ring", longest = "64k tokens" }', "expected a positive whole number of tokens"),
        ('{ schedule = "ring", seq = "1K", longest = "64K" }', "leave out seq"),
        ('{ schedule = "ring", measured_gib = { optimiser = 0.0 } }', "expected sizes above 0"),
        ('{ schedule = "mine.py:build", ran = true }', "unknown schedule 'mine.py:build'.* no file names one"),
        ('{ schedule = "ring", ran = true, measured_s = 1.0 }', "measured_s"),
        ('{ schedule = "ring", ran = true, scope = "layer" }', "set scope to step"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        memory_cases(read(tmp_path, more))


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_evidence_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path)
    chapter = tmp_path / "chapter.md"
    evidence(open_console(), [str(tmp_path / "ours.toml")], [], EvidenceFiles(str(chapter), None, None))
    verdict = "2 of 4 right, 1 at the limit, 1 wrong"
    assert "at the limit" in capsys.readouterr().out
    assert verdict in chapter.read_text()


@pytest.mark.gloo
@pytest.mark.slow
def test_upipes_marks() -> None:
    """None is wrong; Ulysses at 4M is at the limit. Peaks and states are within a tenth."""
    found = predicted_memory(memory_cases(load_toml("case file", "upipe_h100", CaseFile, FOLDER, "`cases`")))
    marks = {(one.case.about, one.case.setup.seq): one.judgement for one in found if one.case.ran is not None}
    assert len(marks) == 13
    assert [mark for mark, judgement in marks.items() if judgement != "right"] == [("usp", "4M")]
    assert marks["usp", "4M"] == "at the limit"
    named = ("peak", "parameters + gradients + optimiser")
    errors = [one.errors[what] for one in found if one.case.measured_bytes for what in named]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.1


def test_files_without_memory_show_no_table() -> None:
    file = load_toml("case file", "usp_a100", CaseFile, FOLDER, "`cases`")
    assert memory_tables(predicted_memory(memory_cases(file))) == []


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mst_a100", "bpt_a100", "fpdt_a100"])
def test_longest_contexts_that_were_published(name: str) -> None:
    found = predicted_memory(memory_cases(load_toml("case file", name, CaseFile, FOLDER, "`cases`")))
    judged = [row for row in [*longest_rows(found), *mark_rows(found)] if row[-1] in {"right", "wrong"}]
    assert len(judged) == len(found)
    assert {row[-1] for row in judged} == {"right"}
