"""run and compare, on real processes, from the command line to their JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from calibrate.gpu import GpuCalibration
from calibrate.host import HostCalibration
from calibrate.measure.cases import KernelCase, Sizes, kernel_cases
from calibrate.plan import Plan
from experiments.evidence.executed.execution import timed_attention
from experiments.evidence.executed.record import judged, read_record
from experiments.evidence.papers.cases import read_cases
from experiments.evidence.papers.published import predicted
from experiments.verbs.cli import main
from runtime.execution.verify import BOUNDS
from sim.setup.setup import Setup
from sim.words.profile import Profile, load_profile, save_profile
from sim.words.workload import Dtype, ModelSpec, Workload, load_model
from tests.helpers import traces_in
from topology.specs import ClusterSpec

pytestmark = pytest.mark.gloo


def test_run_executes_and_verifies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    main(["run", "--gpus", "2", "--seq", "512", "--repeats", "2", "--verify", "--json", "--trace", str(trace)])
    found = json.loads(capsys.readouterr().out)
    assert len(found["step_times_s"]) == 2
    assert found["errors"].keys() == {"out", "dq", "dk", "dv"}
    assert max(found["errors"].values()) < found["error_bound"] == 2e-5
    assert found["attention"] == "aten flash for cpu"
    (executed,) = traces_in(trace.read_bytes())
    assert executed.player == "executed"
    assert executed.schedule_hash == found["schedule_hash"]
    main(["run", "--gpus", "2", "--seq", "512", "--repeats", "1", "--schedule", "ulysses"])
    printed = capsys.readouterr().out
    assert "step time, median" in printed
    assert re.search(r"attention kernel +│ aten flash for cpu ", printed)


def test_an_executed_step_that_differs_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BOUNDS, "fp32", 1e-9)
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--gpus", "1", "--seq", "64", "--repeats", "1", "--scope", "layer", "--verify"])
    assert stopped.value.code == 1
    out, err = capsys.readouterr()
    assert "differ from the reference by more than 1e-09: x 1" in err
    assert re.search(r"x 1: largest relative error +│ [0-9.e-]+ \(at most 1e-09\)", out)


@pytest.fixture(scope="module")
def measured() -> Profile:
    """A few points of this machine."""
    with HostCalibration(Plan("host", load_model("tiny"), ("fp32",), quick=True, command="test")) as calibration:
        for step in calibration.steps():
            if "1x256x256x8x" in step.label:
                step.run()
        return calibration.profile(complete=False)


@pytest.fixture
def few_points(own_profiles: Path, measured: Profile) -> None:
    """A profile of this machine with few points: what it lacks is said."""
    save_profile(measured, own_profiles / "host.json")


def test_compare_lays_both_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path, few_points: None) -> None:
    """The tables are joined on the same ops."""
    trace, html = tmp_path / "trace.json", tmp_path / "page.html"
    options = ["compare", "--gpus", "2", "--seq", "256", "--repeats", "2", "--trace", str(trace)]
    main([*options, "--html", str(html), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["error"] == pytest.approx(found["step"]["simulated_s"] / found["step"]["median_s"] - 1)
    assert found["step"]["low_s"] <= found["step"]["median_s"] <= found["step"]["high_s"]
    assert next(iter(found)) == "answer"
    assert found["answer"] in html.read_text()
    assert len(found["drift"]) == 2
    kinds = {(row["kind"], row["part"]): row["count"] for row in found["kinds"]}
    assert kinds["Attend", "forward"] == 3
    assert kinds["Exchange", "backward"] == 2 + 4
    simulated, executed = traces_in(trace.read_bytes())
    assert simulated.schedule_hash == executed.schedule_hash == found["schedule_hash"]
    assert [row[:6] for row in simulated.rows] == [row[:6] for row in executed.rows]
    assert f"<code>{found['schedule_hash']}</code>" in html.read_text()
    assert any("not in the profile" in note for note in found["report"]["evidence"]["notes"])
    main(options)
    printed = capsys.readouterr().out
    assert "Attend forward" in printed
    assert "attention kernel: aten flash for cpu" in printed
    assert re.match(r"Simulated .* is .* % (more|less) than the measured .* \(.* to .* in 2 steps\)\n", printed)
    assert "kernels: profile 'host' of " in printed
    assert ", not complete" in printed


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_steps_lie_side_by_side(capsys: pytest.CaptureFixture[str], few_points: None, schedule: str) -> None:
    """With FSDP and full checkpointing: every kind of op has a row, the optimiser's too; memory is as the walk says."""
    small = ["--set", "model.vocab_size=512", "--gpus", "2", "--seq", "256", "--repeats", "2", "--json"]
    main(["compare", "--scope", "step", "--layers", "2", "--schedule", schedule, *small])
    found = json.loads(capsys.readouterr().out)
    kinds = {(row["kind"], row["part"]): row["count"] for row in found["kinds"]}
    ranks, units = 2, 4
    assert kinds["AdamW", "backward"] == kinds["SquareSum", "backward"] == kinds["Pack", "backward"] == ranks * units
    assert kinds["AllGather", "forward"] - ranks == kinds["ReduceScatter", "backward"] == ranks * units
    assert kinds["Attend", "forward"] == kinds["Attend", "backward"] == kinds["AttendBackward", "backward"], "again"
    assert {("Embed", "forward"), ("CrossEntropy", "forward"), ("EmbedBackward", "backward")} <= kinds.keys()
    assert all(row["times"]["median_s"] > 0 for row in found["kinds"])
    assert found["step"]["error"] == pytest.approx(found["step"]["simulated_s"] / found["step"]["median_s"] - 1)
    assert found["peak_bytes"]["simulated"] == found["peak_bytes"]["executed"]


@pytest.mark.slow
def test_validate_compares_all_cells_in_turn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, few_points: None
) -> None:
    out, html, cases = tmp_path / "record.json", tmp_path / "page.html", tmp_path / "cases.toml"
    sweep = ["--seq", "256", "--ranks", "1,2", "--schedules", "single,ring", "--scope", "attention", "--repeats", "2"]
    main(["validate", *sweep, "--out", str(out), "--html", str(html), "--cases-out", str(cases)])
    printed = capsys.readouterr().out
    assert "left out: single, attention, S 256, P 2: --gpus 2 is not the one rank" in printed
    assert "attention kernel: aten flash for cpu\n" in printed
    record = read_record(str(out))
    assert [(cell.gpus, cell.schedule, len(found)) for cell, found in record.comparisons] == [
        (1, "single", 2),
        (1, "ring", 2),
        (2, "ring", 2),
    ]
    assert record.title == "tiny, forward and backward, fp32, causal"
    assert record.software.keys() == record.profile.machine.software.keys()
    assert "by: longstep" in html.read_text()
    found = list(predicted(read_cases(str(cases))[1]))
    assert [one.error for one in found] == pytest.approx([one.times.error for one in judged(record)], abs=1e-5)


@pytest.mark.slow
def test_every_rank_on_one_device(capsys: pytest.CaptureFixture[str], few_points: None) -> None:
    """Executed exactly, and compared: four ranks of a ring in one process, whose hops are copies."""
    options = ["--gpus", "4", "--seq", "256", "--repeats", "1", "--one-device", "--json"]
    main(["run", *options, "--schedule", "usp", "--scope", "layer", "--verify"])
    found = json.loads(capsys.readouterr().out)
    assert found["errors"].keys() >= {"x 1", "dx", "dwq"}
    assert max(found["errors"].values()) < found["error_bound"] == 2e-5
    main(["compare", *options])
    found = json.loads(capsys.readouterr().out)
    kinds = {(row["kind"], row["part"]): row["count"] for row in found["kinds"]}
    assert kinds["Attend", "forward"] == 4 + 3 + 2 + 1
    assert kinds["Copy", "forward"] == 2 * 4 * 3
    assert not any(kind in {"Exchange", "AllToAll"} for kind, _ in kinds)
    assert found["peak_bytes"]["simulated"] == found["peak_bytes"]["executed"]
    main(["simulate", "--gpus", "4", "--seq", "256", "--one-device", "--cluster", "hgx-h100"])
    assert "4 ranks on one H100-SXM-80GB" in capsys.readouterr().out


def test_the_attention_of_a_profile_is_what_runs() -> None:
    """Where it is for the data type, and for windows."""

    def timed(kernel: str, dtype: str, window: str | None = None) -> str:
        setup = Setup(
            cluster="hgx-h200", model="llama3-8b", profile="h200-sxm", dtype=dtype, window=window, scope="attention"
        )
        chosen = setup.resolved()
        assert chosen.profile
        machine = msgspec.structs.replace(chosen.profile.machine, software={"attention": kernel})
        profile = msgspec.structs.replace(chosen.profile, machine=machine)
        return timed_attention(profile, chosen.workload)

    assert timed("flash-attn-3", "bf16") == "flash-attn-3"
    assert timed("flash-attn-3", "fp32") == ""
    assert timed("aten flash for cpu", "bf16") == ""
    assert timed("aten-cudnn", "bf16") == "aten-cudnn"
    assert timed("aten-cudnn", "bf16", window="1K") == ""
    assert timed_attention(None, Workload(model=load_model("tiny"), seq=256)) == ""


def test_a_calibration_of_a_gpu_from_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Played on the host: what it prints, what it keeps, and a comparison that rests on it."""
    plans: list[Plan] = []

    def on_the_host(plan: Plan, spec: ClusterSpec) -> GpuCalibration:
        plans.append(plan)
        return GpuCalibration(plan, spec)

    def few(model: ModelSpec, dtype: Dtype, sizes: Sizes) -> list[KernelCase]:
        return [case for case in kernel_cases(model, dtype, sizes) if case.use.shape[0] == 1 or case.rough_s < 1e-4][
            :12
        ]

    monkeypatch.setattr("experiments.verbs.calibrate._calibration", on_the_host)
    monkeypatch.setattr("calibrate.gpu.kernel_cases", few)
    profile = tmp_path / "profile.json"
    main(["calibrate", "--quick", "--out", str(profile)])
    printed = capsys.readouterr().out
    assert "us to issue a small kernel" in printed
    assert "\n  attention: aten flash for cpu\n" in printed
    assert [plan.quick for plan in plans] == [True]
    found = load_profile(str(profile))
    assert found.complete
    assert len(found.points) == 12
    assert found.machine.software["attention"] == "aten flash for cpu"
    main(["compare", "--one-device", "--gpus", "2", "--seq", "256", "--repeats", "1", "--profile", str(profile)])
    assert "Attend forward" in capsys.readouterr().out
