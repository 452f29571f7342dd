"""What ``make gpu`` does, on the CPU: the same steps, fewer and smaller."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from calibrate.host import HostCalibration
from calibrate.plan import Plan
from experiments.evidence.cases import read_cases
from experiments.evidence.record import read_record
from experiments.recipes import gpu as recipe
from experiments.verbs.calibrate import Calibrate
from experiments.verbs.cli import open_console
from experiments.verbs.run import Run
from experiments.verbs.validate import Validate
from sim.errors import InputError, RankError
from sim.profile import load_profile, save_profile
from sim.workload import load_model
from tests.experiments.test_sweep_page import make_profile


def few_points(command: Calibrate, _: object) -> None:
    """Calibrate, but for a few kernels only."""
    assert command.out
    plan = Plan("toy", load_model("tiny"), ("fp32",), quick=True, command="test")
    with HostCalibration(plan) as calibration:
        for step in calibration.steps():
            if "1x256x256x8x" in step.label:
                step.run()
        save_profile(calibration.profile(complete=False), Path(command.out))


SWEEPS = ("layers", "schedules", "offloaded", "nccl")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The host in place of a GPU, in a folder of its own; where results go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe, "gpu_here", lambda: ("host", "toy"))
    monkeypatch.setattr(recipe, "gpus_here", lambda _: 2)
    monkeypatch.setattr(recipe, "gpu_tests", lambda: None)
    monkeypatch.setattr(recipe, "calibrate", few_points)
    monkeypatch.setattr(recipe, "shipped_of", lambda _: [load_profile("a100-sxm")])
    return tmp_path / "experiments" / "results"


@pytest.mark.gloo
def test_it_verifies_calibrates_and_compares(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = recipe.GpuPlan(
        schedules=("single", "ring"), verified="16", model="tiny", alone="256", together="256", ranks="2",
        offloaded="128",
    )  # fmt: skip
    recipe.gpu(open_console(), plan=plan)
    printed = capsys.readouterr().out
    assert printed.count("dwq: largest relative error") == 4
    (folder,) = toy.iterdir()
    assert folder.name.endswith("-toy")
    assert {path.name for path in folder.iterdir()} == {
        "profile.json", "against.txt",
        *(f"{what}.{kind}" for what in SWEEPS for kind in ("json", "html", "svg", "toml")),
    }  # fmt: skip
    cells = {
        what: [
            (cell.gpus, cell.schedule, cell.layers, len(found))
            for cell, found in read_record(str(folder / f"{what}.json")).comparisons
        ]
        for what in SWEEPS
    }
    assert cells == {
        "layers": [(1, "single", 1, 1)], "schedules": [(2, "ring", 1, 1)], "offloaded": [(1, "single", 4, 1)],
        "nccl": [(2, "ring", 1, 1)],
    }  # fmt: skip
    assert "predicted by profile 'a100-sxm'" in (folder / "against.txt").read_text()
    played = {what: [case.setup for case in read_cases(str(folder / f"{what}.toml"))[1]] for what in SWEEPS}
    assert [(one.one_device, one.gpus) for one in played["schedules"]] == [(True, 2)]
    assert [(one.one_device, one.gpus) for one in played["nccl"]] == [(False, 2)]
    assert [(one.layers, one.set) for one in played["offloaded"]] == [(4, ("schedule.activations=host",))]


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, sms: int, memory: float) -> None:
    """Let torch see a GPU."""
    import torch

    found = SimpleNamespace(name=name, multi_processor_count=sms, total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)


def test_a_part_that_fails_does_not_end_it(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    swept: list[Validate] = []

    def out_of_memory(command: Run, _: object) -> None:
        if command.selection.schedule == "ring":
            raise RankError("out of memory")

    monkeypatch.setattr(recipe, "run", out_of_memory)
    monkeypatch.setattr(recipe, "calibrate", lambda command, _: save_profile(make_profile(), Path(command.out)))
    monkeypatch.setattr(recipe, "shipped_of", lambda _: [])
    monkeypatch.setattr(recipe, "validate", lambda command, _: swept.append(command))
    with pytest.raises(RankError, match="2 parts failed: out of memory"):
        recipe.gpu(open_console())
    assert [command.sweep.one_device for command in swept] == [False, True, False, False]
    assert "failed: out of memory" in capsys.readouterr().out


def test_some_parts_of_it(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU that is there for minutes: the profile of one run is what a later one takes."""
    done: list[str] = []
    monkeypatch.setattr(recipe, "calibrate", lambda command, _: done.append(command.out))
    monkeypatch.setattr(recipe, "hold_against_shipped", lambda *_: done.append("against"))
    monkeypatch.setattr(recipe, "validate", lambda command, _: done.append(command.sweep.profile))
    recipe.gpu(open_console(), "calibrate")
    recipe.gpu(open_console(), "compare")
    (folder,) = toy.iterdir()
    assert folder.name.endswith("-toy")
    profile = done[0]
    assert profile.endswith("-toy/profile.json")
    assert done == [profile, "against", *[profile] * len(SWEEPS)]
    with pytest.raises(InputError, match="test, verify, calibrate, compare"):
        recipe.gpu(open_console(), "calibrat")


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="needs a GPU: torch sees none"):
        recipe.gpu_here()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    known = {
        "hgx-h200": ("NVIDIA H200", 132, 150.1e9),
        "dgx-a100": ("NVIDIA A100-SXM4-80GB", 108, 85.1e9),
        "a100-pcie": ("NVIDIA A100 80GB PCIe", 108, 85.1e9),
        "l20-pcie": ("NVIDIA L20", 92, 47.7e9),
    }
    for cluster, properties in known.items():
        pretend(monkeypatch, *properties)
        assert recipe.gpu_here()[0] == cluster
    for properties in (
        ("NVIDIA H100 PCIe", 114, 85.1e9),
        ("NVIDIA A100-SXM4-40GB", 108, 42.4e9),
        ("NVIDIA T4", 40, 16e9),
        ("NVIDIA H200 NVL", 132, 150.1e9),
    ):
        pretend(monkeypatch, *properties)
        with pytest.raises(InputError, match=f"no cluster preset has '{properties[0]}'"):
            recipe.gpu_here()
