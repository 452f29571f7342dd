"""What a calibration covers, and the steps that it consists of."""

from __future__ import annotations

import platform
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, Self

import torch

from runtime.processes.launch import Session
from sim.base.errors import RankError
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


class Calibration(ABC):
    """A calibration under way: ``steps`` in turn, then ``profile``; whatever has been measured by then counts.

    A context manager, since it starts processes.
    """

    def __init__(self, plan: Plan, device: str = "cpu") -> None:
        self._plan, self._device = plan, device
        self._session: Session | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._session:
            self._session.__exit__(kind)

    def end_session(self) -> None:
        """End the processes, after a measurement that failed; the next one starts new ones."""
        session, self._session = self._session, None
        if session:
            session.__exit__(RankError)

    def _on(self, ranks: int) -> Session:
        """Return a session of that many ranks: the present one, or a new one in its place."""
        if self._session is None or self._session.ranks != ranks:
            if self._session:
                self._session.close()
            self._session = Session(ranks, device=self._device, attention=self._plan.attention)
        return self._session

    @abstractmethod
    def steps(self) -> list[Step]:
        """Return all measurements; an early end leaves those that matter most."""

    @abstractmethod
    def profile(self, *, complete: bool) -> Profile:
        """Return what has been measured."""


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
