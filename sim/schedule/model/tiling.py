"""How many tokens equations are written for at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.equations import Equation
from sim.schedule.model.params import Params
from sim.schedule.model.write import TokenWriter

Tiling = Callable[[tuple[Equation, ...], TokenWriter], Iterator[Tensor]]
"""Appends equations for all rows of a writer, some at a time; yields each result once it is complete."""


def whole(equations: tuple[Equation, ...], rows: TokenWriter) -> Iterator[Tensor]:
    """All rows at once."""
    for equation in equations:
        rows.write(equation)
        yield from equation.results


def write_all(equations: tuple[Equation, ...], rows: TokenWriter, params: Params, tiling: Tiling) -> None:
    """Append equations; gradients of weights are summed over the ranks as soon as they are there."""
    for tensor in tiling(equations, rows):
        if tensor.kind == "weight gradient":
            params.reduce(tensor.later(rows.layer), rows.values[tensor])
