"""Sweeps on the command line: tables that are written and shown, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.verbs.cli import main
from tests.experiments.verbs.typed import fails, run

pq = pytest.importorskip("pyarrow.parquet")  # which a machine that only runs GPU tests has not

SWEEP = (
    "sweep", "--model", "llama3-8b", "--cluster", "hgx-h100", "--layers", "1", "--scope", "layer", "--step-only",
    "--jobs", "1",
)  # fmt: skip


@pytest.mark.sweep
def test_a_sweep_is_written_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parquet, csv = tmp_path / "rows.parquet", tmp_path / "rows.csv"
    vary = ("--vary", "seq=32K,64K", "--vary", "gpus=2,3")
    printed = run(capsys, *SWEEP, *vary, "--out", str(parquet))
    assert re.search(r"│ 32K +│ 2 +│ R 2 +│ [\d.]+ ms", printed)
    assert printed.startswith("Ring takes ")
    assert "of 4 rows 0 do not fit, 2 cannot be played" in printed
    run(capsys, *SWEEP, *vary, "--out", str(csv))
    found = json.loads(run(capsys, *SWEEP, *vary, "--json"))
    rows = found["rows"]
    assert found["answer"] == printed.splitlines()[0]
    assert found["rests_on"][0].startswith("kernels: ")
    table = pq.read_table(parquet)
    assert table.to_pylist() == rows
    assert b"longstep sweep" in table.schema.metadata
    assert csv.read_text().splitlines()[1].split(",") == list(rows[0])
    assert not list(tmp_path.glob("*.journal"))
    run(capsys, *SWEEP, *vary, "--out", str(parquet))


@pytest.mark.sweep
def test_a_table_whose_rows_all_failed_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whose file is written all the same."""
    csv = tmp_path / "rows.csv"
    several = ("--schedule", "ulysses", "--gpus", "3,5", "--out", str(csv))
    with pytest.raises(SystemExit) as stop:
        main([*SWEEP, *several])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert "none of 2 rows can be played; the first: Ulysses degree 3 does not divide" in captured.err
    assert f"all reasons are in {str(csv)!r}" in captured.err
    assert csv.read_text().count("does not divide num_heads") == 2
    assert "unknown prefix 'typo'" in fails(capsys, "fit", "--set", "typo=1")
    assert "unknown schedule 'fsdp'" in fails(capsys, "fit", "--schedule", "fsdp")
    assert "unknown stack 'zigzag'" in fails(capsys, "fit", "--stack", "zigzag")
    no_map = ("winners", "--schedule", "ulysses,fpdt", "--gpus", "3", "--across", "seq=32K", "--jobs", "1")
    assert "none of 2 rows can be played; the first: Ulysses degree 3" in fails(capsys, *no_map)


@pytest.mark.sweep
def test_what_nobody_can_play_leaves_an_earlier_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    run(capsys, *SWEEP, "--vary", "seq=32K", "--out", str(csv))
    before = csv.read_text()
    assert f"{str(csv)!r} stays as it was" in fails(capsys, *SWEEP, "--vary", "jitter=5,7", "--out", str(csv))
    assert csv.read_text() == before


@pytest.mark.sweep
def test_numbers_beyond_64_bits_are_written_as_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parquet = tmp_path / "rows.parquet"
    run(capsys, *SWEEP, "--vary", f"batch=1,{10**23}", "--out", str(parquet))
    assert pq.read_table(parquet)["batch"].to_pylist() == ["1", str(10**23)]


def test_what_a_sweep_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("a,b\n")
    one = ("--vary", "seq=32K")
    assert "it is not a table of a sweep that Longstep wrote" in fails(capsys, *SWEEP, *one, "--out", str(mine))
    assert "ends in .parquet or .csv" in fails(capsys, *SWEEP, *one, "--out", str(tmp_path / "rows.txt"))
    assert "--vary seq: expected KEY=VALUES" in fails(capsys, *SWEEP, "--vary", "seq")
    assert "`vary` is empty" in fails(capsys, *SWEEP).replace("--vary", "`vary`")
    assert "--jobs 0" in fails(capsys, *SWEEP, *one, "--jobs", "0")
    assert "--vary seq: expected once" in fails(capsys, *SWEEP, *one, "--vary", "seq=64K")
    assert "ends in .parquet or .csv" in fails(capsys, *SWEEP, *one, "--out", "")
