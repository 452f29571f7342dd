"""The page of a ladder: bars of the memory by term, and the table that they pick rows of."""

from __future__ import annotations

import re
from typing import Any

import pytest

from experiments.pages.ladder_page import bars, page
from sim.accounts.memory import TERMS
from topology.cluster import load_cluster

GIB = 2**30


def row(name: str, longest: int, **terms: float) -> dict[str, Any]:
    sizes = {term: int(terms.get(term, 0) * GIB) for term in TERMS}
    peak = sum(sizes.values())
    return {
        "techniques": name, "longest": longest, "seq": 2**20, "step_time_s": 2.5, "fits": peak <= 80 * GIB,
        "free_bytes": 80 * GIB - peak, "peak_hbm_bytes": peak, "peak_host_bytes": 0, **sizes,
    }  # fmt: skip


ROWS = [row("none", 0, parameters=100, optimiser=60), row("+ <FSDP>", 2**19, parameters=20, attention=20)]


def test_a_bar_is_as_long_as_its_term() -> None:
    plot = bars(ROWS, 80 * GIB)
    (end,) = {x for trend in plot.trends for x, _ in trend.points}
    per_gib = (end - plot.frame.left) / 80
    lengths = [round((mark.ends[1] - mark.ends[0]) / per_gib) for mark in plot.marks]
    assert lengths == [100, 60, 20, 20]
    assert [mark.row for mark in plot.marks] == [0, 0, 1, 1]
    assert plot.marks[1].x == pytest.approx(plot.marks[0].ends[1])
    assert plot.marks[-1].ends[1] <= plot.frame.right


def test_the_page_says_what_does_not_fit() -> None:
    text = page("techniques of <a model>", ROWS, load_cluster("hgx-h100"))
    assert "techniques of &lt;a model&gt;" in text
    assert (
        '</h1>\n<p class="answer">With &lt;FSDP&gt; contexts up to 512K fit, without it none; at 1M a GPU holds' in text
    )
    assert "+ &lt;FSDP&gt;" in text
    assert "peak allocated + 2.93 GiB beside it (driver, context, NCCL, allocator) + what is left = 80 GiB" in text
    assert re.findall(r'class="missed">([^<]*)', text) == ["-80 GiB"]
    assert ">none</td>" in text
    assert ">512K</td>" in text
