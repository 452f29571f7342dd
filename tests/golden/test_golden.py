"""Examples with their output: any change of a predicted time shows here. ``X.py > X.out`` accepts one."""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.base.errors import ScheduleError
from sim.setup.names import OwnSchedule
from sim.setup.setup import Setup

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.out")))
def test_examples_print_what_they_printed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As programs of their own, in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out == (FOLDER / f"{name}.out").read_text()


def own_schedule(folder: Path, text: str = (FOLDER / "my_module.py").read_text(), dtype: str = "fp32") -> Setup:
    """Return a selection of the schedule in ``my_module.py``, or of what ``text`` makes of it."""
    module = folder / "my_module.py"
    module.write_text(text)
    return Setup(
        schedule=OwnSchedule(f"{module}:build"),
        model="tiny",
        gpus=4,
        seq="256",
        cluster="hgx-h100",
        profile="datasheet",
        dtype=dtype,
        scope="attention",
    )


@pytest.mark.sweep
@pytest.mark.parametrize(("scope", "passes"), [("attention", "both"), ("attention", "backward"), ("layer", "both")])
@pytest.mark.parametrize(
    ("dtype", "factor"), [("fp32", 1), pytest.param("bf16", 3, marks=pytest.mark.slow)]
)  # it sums gradients in the model's type
def test_the_schedule_of_ones_own_is_exact(tmp_path: Path, scope: str, passes: str, dtype: str, factor: int) -> None:
    selection = dataclasses.replace(own_schedule(tmp_path, dtype=dtype), scope=scope, passes=passes)
    checked = selection.resolved().checked()
    outputs = execute_virtual(checked, torch.device("cpu"), 1)
    assert max(output_errors(checked, outputs).values()) <= factor * BOUNDS[checked.schedule.header.workload.dtype]


def test_what_the_schedule_of_ones_own_leaves_out_is_found(tmp_path: Path) -> None:
    text = re.sub(r"b.add\(Zero(.*)\)", "None", (FOLDER / "my_module.py").read_text())
    with pytest.raises(ScheduleError, match=r"rank 0 op 6 .*'scatter dk'.* before all of it is written"):
        own_schedule(tmp_path, text).resolved().checked()
