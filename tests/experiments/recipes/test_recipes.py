"""What ``make gpu`` does, on the CPU: the same steps, fewer and smaller."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.evidence.executed.record import read_record
from experiments.evidence.papers.cases import read_cases
from experiments.recipes import gpu as recipe
from experiments.recipes.__main__ import main
from experiments.recipes.carry import ROOT, folder_of, lacking, needed_by_tests, requirements, this_python
from experiments.verbs.cli import open_console
from experiments.verbs.run import Run
from experiments.verbs.validate import Validate
from sim.base.errors import InputError, RankError
from sim.schedule.methods.catalog import SCHEDULES
from sim.words.profile import load_profile, save_profile
from tests.experiments.pages.test_sweep_page import make_profile
from tests.experiments.recipes.rehearsal import in_place_of_a_gpu, small_plan

SWEEPS = ("layers", "schedules", "offloaded", "step", "step-ranks", "step-deep", "nccl")
PREDICTED = tuple(name for name in recipe.GPU_PARTS if name not in {"test", "verify", "calibrate"})


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The host in place of two GPUs, in a folder of its own; where results go."""
    monkeypatch.chdir(tmp_path)
    for name, value in in_place_of_a_gpu(2).items():
        monkeypatch.setattr(recipe, name, value)
    monkeypatch.setattr(recipe, "gpu_tests", lambda _: None)
    return tmp_path / "experiments" / "results"


@pytest.mark.gloo
@pytest.mark.slow
def test_it_verifies_calibrates_and_compares(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.gpu(open_console(), plan=small_plan())
    printed = capsys.readouterr().out
    assert printed.count("dwq: largest relative error") == 4
    (folder,) = toy.iterdir()
    assert folder.name.endswith("-toy")
    assert {path.name for path in folder.iterdir()} == {
        "test.txt", "verify.txt", "calibrate.txt", "profile.json", "against.txt",
        *(f"{part}.txt" for part in PREDICTED),
        *(f"{what}.{kind}" for what in SWEEPS for kind in ("json", "html", "svg", "toml")),
    }  # fmt: skip
    verified = (folder / "verify.txt").read_text()
    assert verified.count("dwq: largest relative error") == 4
    assert verified.count("new second moments of embedding: largest relative error") == 2
    assert "about 4 minutes on one H200 (an estimate)" in (folder / "test.txt").read_text()
    said = (folder / "layers.txt").read_text()
    assert f"toy; torch {torch.__version__}, CUDA " in said
    assert "; attention: aten flash for cpu\n" in said
    assert "dwq" not in said
    cells = {
        what: [
            (cell.gpus, cell.method, cell.layers, len(found))
            for cell, found in read_record(str(folder / f"{what}.json")).comparisons
        ]
        for what in SWEEPS
    }
    assert cells == {
        "layers": [(1, "single", 1, 1)], "schedules": [(2, "ring", 1, 1)], "offloaded": [(1, "single", 4, 1)],
        "step": [(1, "single, stack fsdp", 2, 1), (1, "single, stack 5m", 2, 1)],
        "step-ranks": [(4, "ulysses, stack fsdp", 2, 1), (4, "ulysses, stack 5m", 2, 1)],
        "step-deep": [(1, "single, stack fsdp", 3, 1), (1, "single, stack 5m", 3, 1)],
        "nccl": [(2, "ring", 1, 1)],
    }  # fmt: skip
    assert "predicted by profile 'a100-sxm'" in (folder / "against.txt").read_text()
    played = {what: [case.setup for case in read_cases(str(folder / f"{what}.toml"))[1]] for what in SWEEPS}
    assert [(one.one_device, one.gpus) for one in played["schedules"]] == [(True, 2)]
    assert [(one.one_device, one.gpus) for one in played["nccl"]] == [(False, 2)]
    assert [(one.one_device, one.stack) for one in played["step-ranks"]] == [(True, "fsdp"), (True, "5m")]
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
    assert [command.sweep.one_device for command in swept] == [False, True, False, False, True, False, False]
    assert [command.sweep.layers for command in swept] == [None, None, 4, 2, 2, 4, None]
    assert "failed: out of memory" in capsys.readouterr().out
    (folder,) = toy.iterdir()
    assert "failed: out of memory" in (folder / "verify-failed.txt").read_text()
    monkeypatch.setattr(recipe, "run", lambda *_: None)
    recipe.gpu(open_console())  # what failed is done again, and nothing else
    assert "verify: took" in (printed := capsys.readouterr().out)
    assert printed.count("done before, see") == len(recipe.GPU_PARTS) - 1
    assert {path.name for path in folder.glob("verify*")} == {"verify.txt"}
    assert len(swept) == len(SWEEPS)


def test_a_part_that_was_ended_goes_on_where_it_was(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ended after two schedules, as by a kill: what was printed is there already; then for lack of time; then not."""
    clock, verified = [0.0], list[str]()

    def run(command: Run, console: Any) -> None:
        name = f"{command.selection.schedule} of {command.selection.gpus}"
        if len(verified) == 2 and clock[0] < 100:
            raise KeyboardInterrupt
        verified.append(name)
        clock[0] += 100
        console.print(f"exact: {name}")

    monkeypatch.setattr(recipe, "run", run)
    monkeypatch.setattr(recipe, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(recipe, "gpus_here", lambda _: 1)
    clock[0] = -200
    with pytest.raises(KeyboardInterrupt):
        recipe.gpu(open_console(), "verify", out="out")
    partly = Path("out", "verify-partly.txt").read_text()
    assert [f"exact: {name}" in partly for name in verified] == [True, True]
    clock[0] = 100
    recipe.gpu(open_console(), "verify", "layers", out="out", seconds=150)
    assert len(verified) == 4
    assert "time was up; begin again to go on with verify, layers" in capsys.readouterr().out
    assert {path.name for path in Path("out").iterdir()} == {"verify-partly.txt"}
    recipe.gpu(open_console(), "verify", out="out")
    assert len(verified) == len(SCHEDULES) + 1 + len(recipe.GpuPlan().stacks.split(","))
    (left,) = Path("out").iterdir()
    assert left.name == "verify.txt"
    assert all(f"exact: {name}" in left.read_text() for name in verified)
    with tarfile.open("out.tar.gz") as packed:
        assert packed.getnames() == ["out", "out/verify.txt"]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_recipe_that_is_killed_goes_on(tmp_path: Path) -> None:
    """By SIGKILL, while it verifies and while it compares."""
    command = [sys.executable, "-m", "tests.experiments.recipes.rehearsal"]
    out = tmp_path / "out"

    def killed_after(part: str, sign: Callable[[], bool]) -> None:
        with subprocess.Popen([*command, part, "--out", str(out)], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while not sign():
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()

    partly = out / "verify-partly.txt"
    killed_after("verify", lambda: partly.exists() and "done: " in partly.read_text())
    first = partly.read_text().count("done: ")
    subprocess.run([*command, "verify", "calibrate", "--out", str(out)], cwd=ROOT, check=True, capture_output=True)
    said = (out / "verify.txt").read_text()
    assert said.count("done already: ") == first
    assert len(set(re.findall("(?m)^done: .*", said))) == said.count("done: ") == 5
    killed_after("step", (out / "step.json").exists)
    kept = read_record(str(out / "step.json")).comparisons
    subprocess.run([*command, "step", "--out", str(out)], cwd=ROOT, check=True, capture_output=True)
    record = read_record(str(out / "step.json")).comparisons
    assert record[: len(kept)] == kept
    assert [len(found) for _, found in record] == [1, 1]
    assert (out / "step.txt").exists()


@pytest.mark.slow
@pytest.mark.gloo
def test_plugins_of_the_machine_do_not_meet_the_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that pytest finds by itself, and that warns, which counts as an error here."""
    (tmp_path / "warns.py").write_text(
        "import warnings\ndef pytest_configure(): warnings.warn('old', DeprecationWarning)"
    )
    found = tmp_path / "warns-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: warns\nVersion: 1\n")
    (found / "entry_points.txt").write_text("[pytest11]\nwarns = warns\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    on_gpu = "tests/runtime/execution/test_on_gpu.py"
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", on_gpu]
    alone = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "DeprecationWarning" in alone.stdout + alone.stderr, "it is found"
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **named: popen([*command[:-1], on_gpu], **named))
    recipe.gpu_tests(open_console())


def test_some_parts_of_it(toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For a GPU that is there for minutes: the profile of one run is what a later one takes."""
    done: list[Any] = []

    def made(command: Any, _: object) -> None:
        done.append(command.out)
        Path(command.out).write_text("{}")

    monkeypatch.setattr(recipe, "calibrate", made)
    monkeypatch.setattr(recipe, "hold_against_shipped", lambda *_: done.append("against"))
    monkeypatch.setattr(recipe, "validate", lambda command, _: done.append(command.sweep.profile))
    with pytest.raises(RankError, match="part layers predicts with out/profile.json, which is not there: do the"):
        recipe.gpu(open_console(), "layers", out="out")
    for part in ("calibrate", *PREDICTED):
        recipe.gpu(open_console(), part, out="out")
    assert done == ["out/profile.json", "against", *["out/profile.json"] * len(SWEEPS)]
    recipe.gpu(open_console(), "layers", out="other", profile="out/profile.json")
    assert done[-1] == "out/profile.json"
    assert not toy.exists()
    capsys.readouterr()
    monkeypatch.setattr(recipe, "gpus_here", lambda _: 1)
    recipe.gpu(open_console(), "nccl", out="one")
    assert "nccl: left out, it is for several GPUs and there is one" in capsys.readouterr().out
    assert not list(Path("one").iterdir())


def test_its_command_line(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    swept: list[Validate] = []
    monkeypatch.setattr(recipe, "validate", lambda command, _: swept.append(command))
    (tmp_path / "made.json").write_text("{}")
    main(["gpu", "layers", "offloaded", "--out", "here", "--profile", "made.json"])
    assert [command.sweep.profile for command in swept] == ["made.json"] * 2
    assert [command.out for command in swept] == ["here/layers.json", "here/offloaded.json"]
    asked: list[Any] = []
    monkeypatch.setattr(recipe, "run", lambda command, _: asked.append(command.execution.attention))
    monkeypatch.setattr(recipe, "calibrate", lambda command, _: asked.append(command.attention))
    monkeypatch.setattr(recipe, "hold_against_shipped", lambda *_: None)
    main(["gpu", "verify", "calibrate", "--out", "here", "--attention", "aten-cudnn"])
    assert len(asked) > len(SCHEDULES)
    assert set(asked) == {"aten-cudnn"}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["gpu", "--help"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["gpu", "calibrat"])
    assert stop.value.code == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    for part in recipe.GPU_PARTS.values():
        assert f"  {part.listed}\n" in listed
        assert f"{part.name} ({part.about})" in refused
        assert part.minutes < 10
    with pytest.raises(SystemExit):
        main(["demo", "calibrate"])
    assert "unrecognized arguments: calibrate" in capsys.readouterr().err


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
        "h100-pcie": ("NVIDIA H100 PCIe", 114, 85.1e9),
        "dgx-a100-40gb": ("NVIDIA A100-SXM4-40GB", 108, 42.4e9),
        "rtx-4090": ("NVIDIA GeForce RTX 4090", 128, 25.3e9),
    }
    for cluster, properties in known.items():
        pretend(monkeypatch, *properties)
        assert recipe.gpu_here()[0] == cluster
    for properties in (
        ("NVIDIA T4", 40, 16e9),
        ("NVIDIA H200 NVL", 132, 150.1e9),
    ):
        pretend(monkeypatch, *properties)
        with pytest.raises(InputError, match=f"no cluster preset has '{properties[0]}'"):
            recipe.gpu_here()


# A machine without a network, and with nothing but torch


def with_needs(name: str, found: dict[str, None]) -> None:
    """Add an installed package and all that it needs."""
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        return
    if name not in found:
        found[name] = None
        for one in wanted:
            if "extra ==" not in one:
                with_needs(re.split(r"[<>=!~\[; ]", one, maxsplit=1)[0], found)


def linked(names: Iterable[str], folder: Path) -> Path:
    """Fill a folder with some packages of those that are installed here, and with what they need."""
    found: dict[str, None] = {}
    for name in names:
        with_needs(name, found)
    folder.mkdir(parents=True)
    for name in found:
        package = distribution(name)
        for top in {path.parts[0] for path in package.files or () if path.parts[0] not in {"..", "__pycache__"}}:
            if not (folder / top).exists():
                (folder / top).symlink_to(package.locate_file(top))
    return folder


class Machine:
    """A checkout that was copied to a Python without pip, with torch, what that needs, and numpy, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self._folder = folder / "checkout", folder
        shutil.copytree(ROOT, self.checkout, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
        venv.create(folder / "python", with_pip=False, symlinks=True)
        self.python = folder / "python" / "bin" / "python"
        torch = linked(("torch", "numpy"), folder / "torch")
        next((folder / "python").glob("lib/python*/site-packages")).joinpath("torch.pth").write_text(str(torch))
        (folder / "bin").mkdir()
        for name in ("pip", "pip3", "curl", "wget"):
            (folder / "bin" / name).write_text(f"#!/bin/sh\necho {name} >> {folder}/forbidden\nexit 1\n")
            (folder / "bin" / name).chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the checkout, without a network where this machine lets us take it away."""
        path = f"{self._folder / 'bin'}:{os.environ['PATH']}"
        offline = ["unshare", "--net", "--map-root-user"]
        if shutil.which("unshare") is None or subprocess.run([*offline, "true"], check=False).returncode:
            offline = []
        kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "XDG_DATA_HOME") if name in os.environ}
        return subprocess.run(
            [*offline, *command], cwd=self.checkout, env={"PATH": path, "HOME": str(self._folder), **kept},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    @property
    def forbidden(self) -> bool:
        """Whether something tried to install or to fetch."""
        return (self._folder / "forbidden").exists()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.mark.slow
@pytest.mark.gloo
def test_a_bare_machine_is_told_what_to_carry(machine: Machine) -> None:
    told = machine.run(str(machine.python), "-m", "experiments.recipes", "gpu", "test")
    assert told.returncode == 2
    assert re.search(
        rf"^longstep: .*lacks .*msgspec>=[\d.]+, .*tyro>=[\d.]+: .* make carry CARRY=\"--python {this_python()}\"",
        told.stderr,
    )
    assert "numpy" not in told.stderr
    made = machine.run("make", "gpu", f"PYTHON={machine.python}")
    assert made.returncode == 2
    assert "has a torch that sees a GPU" in made.stderr
    assert not machine.forbidden


@pytest.mark.slow
@pytest.mark.gloo
def test_it_runs_without_pip_and_network(machine: Machine) -> None:
    """In parts, with what was carried; one rank at a time, which needs no network, not even this host's own."""
    needed = [re.split("[<>=]", one)[0] for one in (*requirements(), *needed_by_tests())]
    carried = linked(needed, folder_of(this_python(), machine.checkout))
    for name in ("numpy", "numpy.libs"):
        (carried / name).unlink(missing_ok=True)
    parts = ("test", "verify", "calibrate", "layers", "schedules", "step")
    swept = ("layers", "schedules", "step", "step-ranks")
    for part in parts:
        done = machine.run(str(machine.python), "-m", "tests.experiments.recipes.rehearsal", part, "--out", "results")
        assert done.returncode == 0, done.stdout + done.stderr
    results = machine.checkout / "results"
    assert {path.name for path in results.iterdir()} == {
        *(f"{part}.txt" for part in parts), "profile.json", "against.txt",
        *(f"{what}.{kind}" for what in swept for kind in ("json", "html", "svg", "toml")),
    }  # fmt: skip
    assert "skipped" in (results / "test.txt").read_text()
    assert (results / "verify.txt").read_text().count("dwq: largest relative error") == 3
    assert load_profile(str(results / "profile.json")).machine.software["longstep"] == "0.1.0"
    assert not machine.forbidden


def test_packages_that_are_too_old_are_missing() -> None:
    assert lacking(requirements()) == []
    assert lacking(["msgspec>=999", "msgspec>=0.1", "no-such-package>=1"]) == ["msgspec>=999", "no-such-package>=1"]
