"""Cells of ``make bench LARGE=yes``: each is Python, and what a process says it took is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.recipes.bench_large import FAMILIES, Cell, cells, command, least, spent


def test_cells_are_python() -> None:
    codes = [code for cell in cells() for code in (cell.code, cell.then)]
    codes += [code for sizes, _ in FAMILIES.values() for _, code, _ in sizes]
    assert len(codes) > 20
    for code in codes:
        compile(code, "cell", "exec")


@pytest.mark.gloo
def test_a_cell_says_what_it_took(tmp_path: Path) -> None:
    """Of what it did, and not of what it did then; its output stays where it is."""
    found = spent(Cell("any", f"{command('list')}; sum(range(3_000_000))", then="sum(range(30_000))"), str(tmp_path))
    assert found.all_s == found.imports_s + found.code_s
    assert 0 <= found.then_s < found.code_s
    assert 2e7 < found.peak_bytes < 2e9


@pytest.mark.gloo
def test_a_cell_that_fails_says_why(tmp_path: Path) -> None:
    """And leaves the others their rows."""
    assert least(Cell("any", "raise ValueError('not to be had')"), str(tmp_path)) == "failed: ValueError: not to be had"
