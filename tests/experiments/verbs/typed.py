"""Commands as they are typed, in this process: what they print, and the one line that they complain with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.verbs.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command prints; it has to succeed, silently on stderr."""
    main(list(arguments))
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that a command complains with."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("longstep: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, "simulate", "--json", *arguments))
    return found


ATTENTION = ("--scope", "attention")
HERE = ("--model", "tiny", "--cluster", "host")
H100 = ("--cluster", "hgx-h100", "--model", "llama3-8b", "--seq", "128K", *ATTENTION)
