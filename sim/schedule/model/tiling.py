"""How many tokens equations are written for at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.equations import Equation
from sim.schedule.model.write import TokenWriter

Tiling = Callable[[tuple[Equation, ...], TokenWriter], Iterator[Tensor]]
"""Appends equations for all rows of a writer, some at a time; yields each result once it is complete."""


def whole(equations: tuple[Equation, ...], rows: TokenWriter) -> Iterator[Tensor]:
    """All rows at once."""
    for equation in equations:
        rows.write(equation)
        yield from equation.results
