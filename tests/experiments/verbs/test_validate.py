"""Validating: what it does not do under torchrun."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from experiments.verbs.validate import Validate, validate
from sim.base.errors import InputError


@pytest.mark.sweep
def test_validate_does_not_calibrate_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = object()
    monkeypatch.setattr("experiments.verbs.validate.calibrate", None)
    with pytest.raises(InputError, match="run longstep calibrate first, without torchrun"):
        validate(Validate(), Console(), world)
