"""Figures of a host from two cases: those that made their times come back, and they are in no row."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.evidence.papers.cases import Case, CaseFile, HostFigures, fit_cases, read_cases
from experiments.evidence.papers.host_fit import host_figures
from experiments.evidence.papers.published import CasePrediction, Evidence, fitted_from, judged_groups
from sim.base.errors import InputError
from tests.experiments.evidence.case_files import OWN

FIT = """
[host_fit]
set = ["model.num_heads=1", "model.num_kv_heads=1", "schedule.messages=separate"]
cases = [
  {{ schedule = "ring", gpus = 4, seq = "1K", pass = "forward", measured_s = {0} }},
  {{ schedule = "ring", gpus = 4, seq = "1K", pass = "backward", measured_s = {1} }},{2}
]
[[group]]"""


def read(tmp_path: Path, *times: float, more: str = "") -> tuple[CaseFile, list[Case]]:
    path = tmp_path / "ours.toml"
    path.write_text(OWN.format(more="").replace("[[group]]", FIT.format(*times, more)))
    return read_cases(str(path))


def test_the_figures_that_made_two_times_come_back_from_them(tmp_path: Path) -> None:
    made = HostFigures(31e-6, 12e-6)
    first = fit_cases(read(tmp_path, 1.0, 1.0)[0])
    times = [case._replace(host=made).played.predicted().step_time_s for case in first]
    assert times[0] > 3 * 4 * made.call_s  # 3 hops of k and v, each sent and received
    assert host_figures(fit_cases(read(tmp_path, *times)[0])) == pytest.approx(made, rel=0.01)
    assert host_figures([]) is None


def test_rows_are_shown_with_and_without_the_fit_and_never_have_its_cases(tmp_path: Path) -> None:
    file, cases = read(tmp_path, 0.001, 0.002)
    assert [case.setup.seq for case in cases] == ["64K", "64K"]
    found = [CasePrediction(case, 2 * case.measured_s, 0.0, 1.0, "host", 8) for case in cases]
    fitted = [CasePrediction(case, case.measured_s, 0.0, 0.0, "host", 8) for case in cases]
    evidence = Evidence(file, found, HostFigures(31e-6, 12e-6), fitted)
    rows = judged_groups(evidence)
    assert [row[0] for row in rows] == ["two schedules", "two schedules, host fitted"]
    assert [row[2] for row in rows] == ["100.0 %", "0.0 %"]
    (line,) = fitted_from(evidence)
    assert line.startswith("host fitted: 31 us a call, 12 us a kernel, from cases that are in no row: ring, 4 GPUs, 1K")


def test_what_is_wrong_in_a_fit(tmp_path: Path) -> None:
    third = '\n{ schedule = "ring", gpus = 4, seq = "2K", pass = "forward", measured_s = 1.0 }'
    with pytest.raises(InputError, match="3 cases give two figures of a profile: give 2"):
        fit_cases(read(tmp_path, 1.0, 1.0, more=third)[0])
    with pytest.raises(InputError, match="no figures of the host above 0"):
        host_figures(fit_cases(read(tmp_path, 1.0, 1e-6)[0]))
