"""Predictions of case files: what they take, and how they are judged and shown."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.evidence.papers.cases import Case, read_cases
from experiments.evidence.papers.published import (
    CasePrediction,
    Evidence,
    judged_groups,
    order,
    predicted,
    profile_sha256,
    provenance,
    r_squared,
)
from experiments.verbs.cli import main
from sim.accounts.trace import Row
from sim.base.errors import InputError, LengthError
from sim.schedule.methods.single_op import Attended, Sent
from sim.setup.names import DATASHEET
from sim.setup.setup import Setup
from tests.experiments.evidence.case_files import OPS, OWN, one_case
from tests.experiments.pages.reading import HOSTILE, Read, loads_nothing
from tests.helpers import slow_but, trace_of


def prediction(step_s: float, measured_s: float, schedule: str = "ring", **fields: str) -> CasePrediction:
    case = Case("group", Setup(schedule=schedule, scope="attention", **fields), measured_s)  # type: ignore[arg-type]
    return CasePrediction(case, step_s, 0.9 * step_s, 1.1 * step_s, "compute", 2)


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_cases_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, shown = tmp_path / "ours.toml", tmp_path / "page.html"
    path.write_text(OWN.format(more="").replace("Our cluster", "Our cluster " + HOSTILE.replace('"', "")))
    main(["evaluate", str(path), "--html", str(shown)])
    printed = capsys.readouterr().out
    text = shown.read_text()
    loads_nothing(text)
    assert HOSTILE not in text
    assert Read(text).rows("tr") == [0, 1]
    assert sorted(Read(text).rows("g")) == [0, 0, 1, 1], "wide and narrow"
    assert "Our cluster" in printed
    assert "two schedules" in printed
    assert "1 of 1" in printed


def test_how_predictions_are_judged() -> None:
    """Twice: the first pair is in the right order, the second one in the wrong one, the third too close to tell."""
    found = [
        prediction(1.0, 1.0),
        prediction(2.0, 3.0, "zigzag"),
        prediction(1.0, 2.0, seq="16K"),
        prediction(2.0, 1.0, "zigzag", seq="16K"),
        prediction(1.0, 1.0, seq="32K"),
        prediction(3.0, 1.01, "zigzag", seq="32K"),
    ]
    assert order(found) == (1, 2)
    assert [one.covered for one in found[:2]] == [True, False]
    assert found[1].error == pytest.approx(-1 / 3)
    assert r_squared([prediction(1.0, 1.0), prediction(2.0, 2.0)]) == 1
    # Logs 0 and 1, predicted as 0 and 0: all of the variance around 1/2 is 1/2, what is missed is 1.
    assert r_squared([prediction(1.0, 1.0), prediction(1.0, 2.718281828)]) == pytest.approx(-1)


def test_the_hash_is_that_of_the_file() -> None:
    data = (Path(__file__).parents[3] / "sim/profiles/a100-sxm.json").read_bytes()
    assert profile_sha256("a100-sxm") == hashlib.sha256(data).hexdigest()


def test_what_goes_wrong_comes_back_from_workers() -> None:
    error = pickle.loads(pickle.dumps(LengthError(8001, 6)))
    assert str(error) == str(LengthError(8001, 6))
    assert error.above == 8004


def test_groups_are_judged_once_more_together(tmp_path: Path) -> None:
    text = OWN.format(more="") + OWN.format(more="").partition("[[group]]")[2].replace("two schedules", "again").join(
        ["\n[[group]]", '\n[[together]]\nname = "both"\nof = ["two schedules", "again"]\ntarget = 0.01\n']
    )
    path = tmp_path / "ours.toml"
    path.write_text(text)
    file, cases = read_cases(str(path))
    rows = judged_groups(Evidence(file, [prediction(0.011, one.measured_s)._replace(case=one) for one in cases]))
    assert [(row[0], row[1], row[8]) for row in rows] == [
        ("two schedules", "2", "50 %: missed"), ("again", "2", "50 %: missed"), ("both", "4", "1 %: missed"),
        ("all", "4", ""),
    ]  # fmt: skip
    for change, message in (
        (('"again"]', '"agan"]'), "did you mean 'again'"),
        (('["two schedules", "again"]', "[]"), "of names no group"),
        (('name = "again"', 'name = "both"'), "two groups have one name"),
    ):
        path.write_text(text.replace(*change))
        with pytest.raises(InputError, match=message):
            read_cases(str(path))


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_at_datasheet_rates_nothing_is_known_of_errors(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(OWN.format(more="").replace("a800-ultraattn", DATASHEET))
    file, cases = read_cases(str(path))
    found = list(predicted(cases))
    assert not any(one.bounded or one.covered for one in found)
    assert provenance(file)[-1].strip() == "rates of datasheets"
    assert judged_groups(Evidence(file, found))[0][7] == ""


TAKEN = {
    'measure = "Attend", gpus = 1, queries = 16384, keys = 16384': 0.0033935544,
    'measure = "Attend", schedule = "single", seq = "16K", pass = "forward"': 0.0033935544,
    'measure = "Exchange", gpus = 2, set = ["cluster.gpus_per_node=1"], nbytes = 16777216': 0.000478,
    # 2K tokens of K and V a rank: 2 x 2048 x 16 x 128 x 2 bytes, 16 MiB.
    'measure = "Exchange", seq = "4K", pass = "forward", gpus = 2, set = ["cluster.gpus_per_node=1"]': 0.000478,
    # Seven of eight parts of 256 MiB are sent: points of 234881024 bytes.
    'measure = "AllToAll", nbytes = 268435456': 0.00076391,
    'measure = "AllGather", nbytes = 268435456': 0.00072879,
    'measure = "ReduceScatter", nbytes = 268435456': 0.00072172,
    # Nine of eight parts, since the switch adds them up: a point of 301989888 bytes.
    'measure = "AllReduce", nbytes = 268435456': 0.0010921,
}


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_ops_take_what_their_profile_has_measured(tmp_path: Path) -> None:
    cases = [one_case(tmp_path, f"{fields}, jitter = 0, measured_s = {2 * taken}") for fields, taken in TAKEN.items()]
    for found, seconds in zip(predicted(cases), TAKEN.values(), strict=True):
        assert found.predicted_s == pytest.approx(seconds, rel=1e-6)
        assert found.error == pytest.approx(-0.5, abs=1e-6)
        assert found.low_s < found.predicted_s < found.high_s


def test_an_op_takes_its_mean_time_at_work() -> None:
    """Attention takes one second and three, without the four for which it has waited; the step takes eight."""
    rows = [
        Row(0, 0, "compute", "Attend", "forward", "", posted_s=0.0, begin_s=0.0, end_s=1.0),
        Row(1, 0, "compute", "Attend", "forward", "", posted_s=1.0, begin_s=5.0, end_s=8.0),
        Row(1, 1, "link", "Exchange", "forward", "", posted_s=0.0, begin_s=0.0, end_s=7.0),
    ]
    trace = trace_of(rows)
    case = Case("group", Setup(scope="attention"), 1.0)
    assert [case._replace(measure=of).seconds(trace) for of in ("", "Attend", "Exchange")] == [8, 2, 7]


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_how_ops_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, shown = tmp_path / "ops.toml", tmp_path / "page.html"
    cases = [
        'measure = "AllToAll", nbytes = 2097152, measured_s = 1',
        'measure = "Attend", queries = 64, keys = 256, gpus = 1, measured_s = 0.00001',
        'measure = "Merge", seq = "8K", measured_s = 0.0001',
    ]
    path.write_text(OPS.format(" },\n  { ".join(cases)))
    main(["evaluate", str(path), "--html", str(shown)])
    assert "AllToAll, 8 GPUs, 2 MiB" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    cells = [re.findall(r">([^<]*)</td>", row) for row in shown.read_text().split("<tr data-row")[1:]]
    assert [(name, size, mask, passes) for name, _, _, _, size, mask, passes, *_ in cells] == [
        ("AllToAll", "2 MiB", "", ""),
        ("Attend", "64 x 256", "full", ""),
        ("Merge in ring", "8K", "full", "both"),
    ]


def test_sizes_of_the_ring_of_four_hosts() -> None:
    """128000 tokens on 4 hosts, 16 query heads and 1 key/value head a GPU, 128 elements of 2 bytes."""
    tokens, row = 128000 // 4, 128 * 2
    sizes = [case.alone for case in read_cases("ring_iteration_h100")[1]]
    new = [3200 // 4, 12800 // 4]
    attention = [Attended(queries=n, keys=tokens - n // 2) for n in new]
    sent = [Sent(nbytes=2 * tokens * row)] * 2 + [Sent(nbytes=n * 16 * row) for n in new]
    assert sizes == [*attention, *sent, *(Sent(nbytes=4 * n * 16 * (row + 4)) for n in new)]


@pytest.mark.gloo
def test_cases_are_predicted_by_workers_that_are_no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork holds the locks that another thread, such as that of the progress, held when it was made."""

    def fork() -> int:
        raise AssertionError("forked")

    monkeypatch.setattr(os, "fork", fork)
    (found,) = predicted([Case("group", Setup(profile=DATASHEET, cluster="hgx-h100", gpus=2, scope="attention"), 1.0)])
    assert found.predicted_s > 0


@pytest.mark.parametrize("ended_by", slow_but({signal.SIGKILL}, [signal.SIGTERM, signal.SIGKILL]))
@pytest.mark.gloo
def test_no_worker_outlives_its_command(ended_by: signal.Signals) -> None:
    script = "from experiments.verbs.cli import main; main(['evaluate', 'usp_l20'])"
    command = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    workers: set[int] = set()
    while len(workers) < 2 and command.poll() is None:
        workers |= {pid for pid in _children(command.pid) if b"spawn_main" in _command_line(pid)}
    command.send_signal(ended_by)
    command.wait()
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(map(_command_line, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_command_line, workers))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_line(pid: int) -> bytes:
    """Return how a process was started; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
