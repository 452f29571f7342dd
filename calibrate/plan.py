"""What a calibration covers, and the steps that it consists of."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from sim.profile import Profile
from sim.workload import Dtype, ModelSpec


class Plan(NamedTuple):
    """What a calibration covers."""

    name: str
    model: ModelSpec
    """Heads, head dim: the shapes that are timed."""
    dtypes: tuple[Dtype, ...]
    quick: bool
    command: str
    attention: str = ""
    """Name of the attention kernel of a GPU; empty: the best one."""


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

    def profile(self, *, complete: bool) -> Profile:
        """Return what has been measured."""
        ...


def software() -> dict[str, str]:
    """Return the versions of what runs here."""
    return {
        "longstep": version("longstep"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernel": platform.release(),
    }
