"""Torch's caching allocator by hand, and what holds of whatever is taken and given back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.accounts.allocator import Block, CachingAllocator, OutOfMemoryError
from sim.words.options import AllocatorName

MIB = 2**20


def test_small_tensors_share_segments_of_2_mib_in_blocks_of_512_bytes() -> None:
    allocator = CachingAllocator()
    taken = [allocator.take(1) for _ in range(4096)]
    assert ({block.size for block in taken}, allocator.reserved) == ({512}, 2 * MIB)
    assert allocator.take(MIB).size == MIB
    assert allocator.reserved == 4 * MIB


def test_tensors_below_10_mib_share_segments_of_20_mib_and_others_have_their_own() -> None:
    allocator = CachingAllocator()
    for _ in range(6):
        allocator.take(3 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.take(3 * MIB)  # 2 MiB are left of the first segment
    assert allocator.reserved == 40 * MIB
    assert allocator.take(59 * MIB // 2).size == 30 * MIB, "1 MiB or less is not split off"
    assert allocator.reserved == 70 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_split() -> None:
    """Of 40 and 30 MiB 25 MiB are cut from the latter; 5 MiB are left of it, which 4 MiB take whole: 1 MiB is too
    little to split off.
    """
    allocator = CachingAllocator()
    larger, smaller = allocator.take(40 * MIB), allocator.take(30 * MIB)
    allocator.give(larger)
    allocator.give(smaller)
    first, second = allocator.take(25 * MIB), allocator.take(4 * MIB)
    assert (first.at, first.size) == (smaller.at, 25 * MIB)
    assert (second.at, second.size) == (smaller.at + 25 * MIB, 5 * MIB)
    assert allocator.reserved == 70 * MIB


def test_free_neighbours_are_one_block_again() -> None:
    """Four of 10 MiB in a segment of 40, given back in a row of holes first: only then they make room for 40."""
    allocator = CachingAllocator()
    allocator.give(allocator.take(40 * MIB))
    parts = [allocator.take(10 * MIB) for _ in range(4)]
    for part in (parts[0], parts[2]):
        allocator.give(part)
    allocator.give(allocator.take(20 * MIB))
    assert allocator.reserved == 60 * MIB, "two holes of 10 are none of 20"
    for part in (parts[1], parts[3]):
        allocator.give(part)
    allocator.take(40 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_block_that_waits_for_an_event_is_not_taken_before() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(16 * MIB), waits=True)
    other = allocator.take(16 * MIB)
    assert allocator.reserved == 32 * MIB
    allocator.give(other)
    allocator.pass_events()
    assert [allocator.take(16 * MIB) for _ in range(2)]
    assert (allocator.reserved, allocator.peak) == (32 * MIB, 32 * MIB)


@pytest.mark.parametrize("waits", [False, True])
def test_free_segments_go_back_where_cuda_has_no_more(waits: bool) -> None:
    """Of 100 MiB: one of 40, also from behind an event, then one of 44; one of 50 in which 20 are taken does not."""
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.give(allocator.take(40 * MIB), waits=waits)
    larger, other = allocator.take(50 * MIB), allocator.take(44 * MIB)
    assert (allocator.reserved, allocator.peak) == (94 * MIB, 94 * MIB)
    allocator.give(other)
    allocator.take(46 * MIB)
    assert allocator.reserved == 96 * MIB
    allocator.give(larger)
    part = allocator.take(20 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.take(40 * MIB)
    assert allocator.take(30 * MIB).at == part.at + 20 * MIB
    allocator.reset_peak()
    assert allocator.peak == 96 * MIB


def test_expandable_segments_grow_by_pages_of_20_mib_and_give_pages_back() -> None:
    """What is free at the end becomes a part of a larger tensor. Of 250 MiB 240 are taken once the pages from 40 to 100
    MiB have gone back. With those from 100 to 200 they are one hole, and 91 MiB behind the 10 that are left take five.
    """
    allocator = CachingAllocator("expandable", limit=250 * MIB)
    _, second = allocator.take(30 * MIB), allocator.take(30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.give(second)
    second = allocator.take(70 * MIB)
    assert (second.at, allocator.reserved) == (30 * MIB, 100 * MIB)
    third = allocator.take(100 * MIB)
    allocator.give(second)
    fourth = allocator.take(90 * MIB)
    assert (fourth.at, allocator.reserved) == (200 * MIB, 240 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.take(70 * MIB)
    allocator.give(third)
    assert (allocator.take(101 * MIB).at, allocator.reserved) == (30 * MIB, 240 * MIB)


NAMES: tuple[AllocatorName, ...] = ("caching", "expandable")
SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 60 * MIB))
STEPS = st.lists(st.tuples(st.sampled_from(("take", "take", "give", "wait", "pass")), SIZES), max_size=60)


@pytest.mark.sweep
@given(st.sampled_from(NAMES), STEPS, st.sampled_from((None, 300 * MIB)))
def test_what_is_taken_lies_apart_in_what_is_reserved(
    name: AllocatorName, steps: list[tuple[str, int]], limit: int | None
) -> None:
    allocator, taken = CachingAllocator(name, limit), list[tuple[Block, int]]()
    for what, size in steps:
        if what == "take":
            try:
                taken.append((allocator.take(size), size))
            except OutOfMemoryError:
                assert limit
        elif what == "pass":
            allocator.pass_events()
        elif taken:
            allocator.give(taken.pop(size % len(taken))[0], waits=what == "wait")
        assert all(block.size >= nbytes for block, nbytes in taken)
        spans = sorted((block.pool.segment, block.at, block.at + block.size) for block, _ in taken)
        assert all(end <= at for (pool, _, end), (other, at, _) in pairwise(spans) if pool == other)
        assert sum(block.size for block, _ in taken) <= allocator.reserved <= allocator.peak
        assert limit is None or allocator.reserved <= limit
    for block, _ in taken:
        allocator.give(block)
    allocator.pass_events()
    if limit:
        assert allocator.take(limit).size == allocator.reserved == limit, "all of it has gone back"
