"""Files that verbs are told to write: their own are replaced, those of others only with --force."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.verbs.cli import main
from sim.words.profile import load_profile, save_profile

FOREIGN = '{"traceEvents": [], "name": "somebody else\'s", "longstep": 1}\n'
ON_H100 = ("--model", "tiny", "--cluster", "hgx-h100", "--gpus", "2", "--seq", "1K", "--profile", "datasheet")
PIPELINE = (*ON_H100, "--scope", "step", "--schedule", "single", "--pp-degree", "2", "--layers", "2")
RESULTS = Path(__file__).parents[3] / "experiments" / "results"
RECORD = str(RESULTS / "2026-11-21-schedules-epyc-2-cores" / "schedules.json")

WRITING = [
    (("simulate", *ON_H100), "--trace", "trace.json"),
    *((("show", *ON_H100, "--format", form), "--out", "schedule") for form in ("grid", "json", "dot")),
    (("show", *PIPELINE, "--format", "pipeline"), "--out", "pipeline.csv"),
    (("validate", "--record", RECORD), "--out", "copy.json"),
    (("validate", "--record", RECORD), "--html", "page.html"),
    (("validate", "--record", RECORD), "--figure", "figure.svg"),
    (("validate", "--record", RECORD), "--cases-out", "cases.toml"),
    pytest.param(
        ("evaluate", "ring_iteration_h100"), "--html", "page.html", marks=[pytest.mark.gloo, pytest.mark.slow]
    ),
    pytest.param(("calibrate", "--published", "h800-ultraattn"), "--out", "profile.json", marks=pytest.mark.slow),
]
EXECUTING = [
    (("run", "--gpus", "2"), "--trace"),
    (("compare", "--gpus", "2"), "--trace"),
    (("compare", "--gpus", "2"), "--html"),
    (("validate", "--ranks", "2"), "--out"),
    (("calibrate", "--quick"), "--out"),
]


def refusal(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(command))
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


EMPTY = [
    ("simulate", *ON_H100, "--trace", ""),
    ("evaluate", "ring_iteration_h100", "--html", ""),
    ("report", RECORD, "--out", ""),
]


@pytest.mark.parametrize("command", EMPTY, ids=lambda command: command[0])
def test_an_empty_name_is_none(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """As a variable of a shell is that nobody has set."""
    assert "'': expected a name for" in refusal(capsys, *command)


@pytest.mark.sweep
@pytest.mark.parametrize(("command", "option", "name"), WRITING, ids=lambda value: str(value)[:40])
def test_only_what_longstep_wrote_is_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...], option: str, name: str
) -> None:
    path = tmp_path / name
    main([*command, option, str(path)])
    written = path.read_bytes()
    main([*command, option, str(path)])
    assert path.read_bytes() == written
    capsys.readouterr()
    path.write_text(FOREIGN)
    line = refusal(capsys, *command, option, str(path))
    assert f"{str(path)!r} cannot be written: it is not a" in line
    assert "--force" in line
    assert path.read_text() == FOREIGN
    main([*command, option, str(path), "--force"])
    assert path.read_bytes() == written


@pytest.mark.parametrize(("command", "option"), EXECUTING)
def test_files_of_others_are_seen_before_anything_is_executed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...], option: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(FOREIGN)
    assert "that Longstep wrote" in refusal(capsys, *command, option, str(path))
    assert "it is a device" in refusal(capsys, *command, option, "/dev/null", "--force")
    assert "File name too long" in refusal(capsys, *command, option, "x" * 300)


def test_one_file_is_no_place_for_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    line = refusal(capsys, "compare", "--gpus", "2", "--trace", path, "--html", path)
    assert "it is to hold a Chrome trace and an HTML page" in line


def test_the_profile_of_other_cases_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A profile next to cases gets a name of its own where profile.json is another one; that name may be taken, too."""
    save_profile(load_profile("h100-sxm"), tmp_path / "profile.json")
    (tmp_path / "cases-profile.json").write_text(FOREIGN)
    line = refusal(capsys, "validate", "--record", RECORD, "--cases-out", str(tmp_path / "cases.toml"))
    assert "cases-profile.json' cannot be written: it is not a profile that Longstep wrote" in line
