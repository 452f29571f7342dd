"""Setups and predictions: what they take from a script, and what they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import longstep
from sim.errors import InputError
from tests.helpers import traces_in

SMALL = {"model": "llama3-8b", "seq": "1K", "cluster": "hgx-h100", "gpus": 2}


def test_a_trace_replaces_traces_only(tmp_path: Path) -> None:
    predicted, path = longstep.predict("ring", **SMALL), tmp_path / "trace.json"
    predicted.save_trace(path)
    predicted.save_trace(str(path))
    assert [trace.step_time_s for trace in traces_in(path.read_bytes())] == [pytest.approx(predicted.step_time_s)]
    path.write_text("somebody else's")
    with pytest.raises(InputError, match="is not a Chrome trace that Longstep wrote.*`force`"):
        predicted.save_trace(path)
    assert path.read_text() == "somebody else's"
    predicted.save_trace(path, force=True)
    assert traces_in(path.read_bytes())
