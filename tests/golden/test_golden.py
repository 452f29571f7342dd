"""Examples with their output: any change of a predicted time shows here. ``X.py > X.out`` accepts one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
