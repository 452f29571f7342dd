"""Bands and exact pair counts, held against counting one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.base.errors import ScheduleError
from sim.schedule.ir.masks import (
    CAUSAL,
    FULL,
    Band,
    DocumentBlock,
    Span,
    block_band,
    count_pairs,
    same_pairs,
    sharing_a_pair,
)


def spans(step: int | None = None) -> st.SearchStrategy[Span]:
    steps = st.integers(1, 5) if step is None else st.just(step)
    return st.builds(
        lambda start, size, by: Span(start, start + size * by, by), st.integers(0, 40), st.integers(1, 9), steps
    )


@st.composite
def bands(draw: st.DrawFn) -> Band:
    right = draw(st.none() | st.integers(-20, 20))
    left = draw(st.none() | st.integers(0, 25).map(lambda width: width - (right or 0)))
    return Band(left, right)


def kept(band: Band, query: int, key: int) -> bool:
    return (band.left is None or query - band.left <= key) and (band.right is None or key <= query + band.right)


@given(bands(), spans(), spans())
def test_count_pairs_counts_one_by_one(band: Band, queries: Span, keys: Span) -> None:
    assert count_pairs(band, queries, keys) == sum(kept(band, q, k) for q in range(*queries) for k in range(*keys))


@pytest.mark.sweep
@given(bands(), st.integers(1, 4).flatmap(lambda step: st.tuples(spans(step), spans(step))))
def test_block_band_keeps_the_same_pairs_by_index(band: Band, pair: tuple[Span, Span]) -> None:
    queries, keys = pair
    local = block_band(band, queries, keys)
    wanted = {(i, j) for i, q in enumerate(range(*queries)) for j, k in enumerate(range(*keys)) if kept(band, q, k)}
    found = {(i, j) for i in range(queries.size) for j in range(keys.size) if local is not None and kept(local, i, j)}
    assert found == wanted
    assert (local is None) == (not wanted)


def test_blocks_of_a_causal_ring() -> None:
    first, second = Span(0, 4), Span(4, 8)
    assert block_band(CAUSAL, second, second) == CAUSAL
    assert block_band(CAUSAL, second, first) == FULL
    assert block_band(CAUSAL, first, second) is None


def test_blocks_of_a_striped_ring_lose_the_diagonal() -> None:
    assert block_band(CAUSAL, Span(1, 9, 2), Span(0, 8, 2)) == Band(right=0)
    assert block_band(CAUSAL, Span(0, 8, 2), Span(1, 9, 2)) == Band(right=-1)


def test_different_strides_are_refused_where_the_mask_cuts() -> None:
    with pytest.raises(ScheduleError, match="same stride"):
        block_band(CAUSAL, Span(0, 8), Span(0, 8, 2))


def test_bands_that_differ_only_outside_the_block_are_the_same() -> None:
    assert same_pairs(Band(right=7), FULL, 4, 4)
    assert same_pairs(Band(right=0), Band(right=0, left=3), 4, 4)
    assert not same_pairs(Band(right=0), Band(right=0, left=2), 4, 4)


def test_exact_counts_at_a_million_tokens() -> None:
    seq = 2**20
    assert count_pairs(CAUSAL, Span(0, seq), Span(0, seq)) == seq * (seq + 1) // 2


@st.composite
def parts(draw: st.DrawFn) -> DocumentBlock:
    (top, rows), (left, columns) = (draw(st.tuples(st.integers(0, 6), st.integers(1, 6))) for _ in range(2))
    limits = st.none() | st.integers(-5, 5)
    return DocumentBlock(Span(top, top + rows), Span(left, left + columns), Band(draw(limits), draw(limits)))


@given(st.lists(parts(), min_size=1, max_size=4))
def test_parts_that_share_a_pair_are_found_one_by_one(found: list[DocumentBlock]) -> None:
    cells = [
        {(i, j) for i in range(*rows) for j in range(*columns) if kept(band, i - rows.start, j - columns.start)}
        for rows, columns, band in found
    ]
    shared = sharing_a_pair(tuple(found))
    assert (shared is None) == (sum(map(len, cells)) == len(set().union(*cells)))
    if shared:
        (first, *_), (second, *_) = ([at for at, part in enumerate(found) if part == one] for one in shared)
        assert shared[0] == shared[1] or cells[first] & cells[second]
