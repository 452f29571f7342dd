"""What is asked of a piece of software: parts, and what is to be counted of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from calibrate.software.counting.count import Run
from calibrate.software.counting.sizes import Sizes


class Asked(NamedTuple):
    """A part that is to be counted."""

    what: str
    run: Callable[[Sizes], Run]
    peak: bool = False
    """Whether its peak is of interest, and not that of what it is a part of."""
    step: bool = False
    """Whether it is a step of an optimiser, which has no passes."""


class Software(NamedTuple):
    """A piece of software."""

    what: str
    packages: tuple[str, ...]
    parts: Mapping[str, Asked]
