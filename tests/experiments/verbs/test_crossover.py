"""Crossovers on the command line."""

from __future__ import annotations

import json
import re

import pytest

from tests.experiments.verbs.typed import fails, run


@pytest.mark.sweep
def test_crossovers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--model", "llama3-8b", "--cluster", "hgx-h100", "--scope", "attention", "--pass", "forward")
    alone = (*alone, "--gpus", "4", "--seeds", "1", "--schedule", "ring,upipe")
    printed = run(capsys, "crossover", *alone, "--along", "seq=8K..64K")
    assert re.search(r"8K +│ \d+K +│ ring +│ \d+K to \d+K", printed)
    assert re.search(r"64K +│ upipe +│", printed)
    found = json.loads(run(capsys, "crossover", *alone, "--along", "seq=8K..64K", "--json"))
    assert (found["along"], found["a"], found["b"]) == ("seq", "ring", "upipe")
    assert re.fullmatch(r"Ring is faster than upipe up to \d+K.*, upipe from there to 64K", found["answer"])
    assert found["answer"] in printed
    at = next(point for point in found["points"] if point["value"] == found["crossings"][0]["value"])
    assert at["a_s"] > at["b_s"]
    assert "--along : expected KEY=LOW..HIGH" in fails(capsys, "crossover", *alone)
    assert "name two with --schedule" in fails(capsys, "crossover", *alone[:-1], "ring", "--along", "seq=8K..32K")
