"""Examples with their output: any change of a predicted time shows here. ``X.py > X.out`` accepts one."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.errors import ScheduleError
from sim.setup.setup import Setup

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.out")))
def test_examples_print_what_they_printed(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == (FOLDER / f"{name}.out").read_text()


def test_the_ten_lines_of_the_readme_are_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert ((FOLDER / "predict.py").read_text(), (FOLDER / "predict.out").read_text()) in blocks


def test_the_schedule_of_ones_own_in_the_readme_is_exact(tmp_path: Path) -> None:
    """It stands there word by word, is short, computes attention alone and in layers, and what is left out is found."""
    text = (FOLDER / "my_module.py").read_text()
    assert text in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(text.splitlines()) < 150
    module = tmp_path / "my_module.py"
    module.write_text(text)
    selection = Setup(schedule=f"{module}:build", gpus=4, seq="256", cluster="hgx-h100", profile="datasheet")
    for scope in ("attention", "layer"):
        checked = dataclasses.replace(selection, scope=scope).resolved().checked()
        outputs = execute_virtual(checked, torch.device("cpu"), 1)
        assert max(output_errors(checked, outputs).values()) <= BOUNDS["fp32"]
    module.write_text(re.sub(r"b.add\(Zero(.*)\)", "None", text))
    with pytest.raises(ScheduleError, match=r"rank 0 op 4 .*'scatter dk'.* before all of it is written"):
        selection.resolved().checked()
