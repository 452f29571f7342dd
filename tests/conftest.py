"""Settings that hold for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Small tensors in several threads are no faster, and many times slower where something else runs on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples are run by test_golden, not imported for their doctests.
collect_ignore = [str(path.with_suffix(".py")) for path in (Path(__file__).parent / "golden").glob("*.out")]

hypothesis.settings.register_profile("longstep", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("longstep")


@pytest.fixture(autouse=True)
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the profiles of whoever runs the tests out of them."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "longstep" / "profiles"
