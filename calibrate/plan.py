"""What a calibration covers, and the steps that it consists of."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch

from sim.words.profile import Profile
from sim.words.workload import Dtype, ModelSpec


class Plan(NamedTuple):
    """What a calibration covers."""

    name: str
    model: ModelSpec
    """Heads, head dim: the shapes that are timed."""
    dtypes: tuple[Dtype, ...]
    quick: bool
    command: str
    attention: str = ""
    """Name of the attention kernel of a GPU; empty: the fastest one."""


class Step(NamedTuple):
    """One measurement to make."""

    label: str
    run: Callable[[], None]


class Calibration(Protocol):
    """A calibration under way: ``steps`` in turn, then ``profile``; whatever has been measured by then counts.

    A context manager, since it starts processes.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def steps(self) -> list[Step]:
        """Return all measurements; an early end leaves those that matter most."""
        ...

    def end_session(self) -> None:
        """End the processes, after a measurement that failed; the next one starts new ones."""
        ...

    def profile(self, *, complete: bool) -> Profile:
        """Return what has been measured."""
        ...


def software() -> dict[str, str]:
    """Return the versions of what runs here."""
    return {
        "longstep": _own_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "kernel": platform.release(),
    }


def _own_version() -> str:
    """Return Longstep's version, also where it is a checkout that was not installed."""
    try:
        return version("longstep")
    except PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        declared: str = tomllib.loads(project.read_text())["project"]["version"]
        return declared
