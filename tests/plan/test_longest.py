"""The longest context that fits: the one that asking every length would find, by few of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.plan.fit import rungs, using
from sim.plan.longest import lengths_tried, longest, num_fitting
from sim.plan.search.room import room
from sim.setup.stacks import TECHNIQUES
from tests.plan.test_fit import ON_TWO, with_memory


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["zigzag", "single"])
def test_the_longest_context_is_the_last_that_fits(schedule: str) -> None:
    """A sixteenth of a power of two more does not."""
    setup = using(with_memory(1), {"schedule": schedule})
    found = longest(setup, 2**24)
    step = 2 ** (found.bit_length() - 1) // 16
    fits = [room(setup.replace(seq=tokens).resolved()).fits for tokens in (found, found + step)]
    assert fits == [True, False]


@pytest.mark.slow
def test_techniques_have_the_longest_contexts_that_halving_finds() -> None:
    """Where the GPU is full first, and where the host is."""
    of_host = {"cluster.socket.dram.capacity_bytes": 2**30}
    for name, options in rungs(list(TECHNIQUES)):
        setup = using(with_memory(1, layers=2), options)
        setup = setup.replace(pad=True, set=of_host)
        lengths = lengths_tried(setup, 2**22)
        fits, fails = -1, len(lengths)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            is_enough = room(setup.replace(seq=lengths[middle]).resolved()).free_bytes >= 0
            fits, fails = (middle, fails) if is_enough else (fits, middle)
        assert longest(setup, 2**22, near=2**16) == (lengths[fits] if fits >= 0 else 0), name


def test_lengths_of_stages_are_of_the_ranks_that_share_them() -> None:
    """Of four ranks in two stages those of two; each GPU of a schedule that splits none is in a line of stages."""
    stages = ON_TWO.replace(schedule="zigzag", gpus=4, pp_degree=2, batch=2, set={"schedule.micro_batches": 2})
    assert lengths_tried(stages, 2**13)[0] == lengths_tried(ON_TWO.replace(schedule="zigzag"), 2**13)[0]
    assert using(stages, {"schedule": "single"}).resolved().mesh.degrees["dp"] == 2


@pytest.mark.sweep
def test_the_longest_context_has_ends() -> None:
    assert longest(with_memory(0.1, schedule="zigzag"), 2**24) == 0
    assert longest(with_memory(1000, schedule="zigzag"), 2**16) == 2**16


@given(
    st.lists(st.tuples(st.integers(-100, 100), st.integers(-100, 100)), max_size=80),
    st.integers(0, 2),
    st.sets(st.integers(1, 80)),
    st.integers(0, 100),
)
def test_as_many_fit_as_when_all_are_asked(
    steps: list[tuple[int, int]], power: int, before: set[int], near: int
) -> None:
    """Whatever memories do between lengths, as long as they grow; and not many more are asked than by halving."""
    left = list(zip(*(_falling(of, power) for of in zip(*steps, strict=True)), strict=True))
    asked = list[int]()

    def left_at(length: int) -> tuple[int, ...]:
        asked.append(length)
        return left[length - 1]

    known = {length: left[length - 1] for length in before if length <= len(left)}
    found = num_fitting(range(1, len(left) + 1), left_at, known, near)
    assert found == sum(min(one) >= 0 for one in left)
    assert len({*asked, *known}) == len(asked) + len(known)
    assert len(asked) <= 4 * (1 + len(left).bit_length())


def _falling(steps: tuple[int, ...], power: int) -> list[int]:
    return sorted(((abs(step) + 1) ** power * step for step in steps), reverse=True)


LENGTHS = [(1 << octave) * 16 + step * (1 << octave) for octave in range(10) for step in range(16)]
"""Of ten octaves, of which halving asks eight."""


def test_a_line_is_followed_to_where_it_is_zero() -> None:
    for most in (20, 200, 2000, 8000):
        assert _asked_of(most) <= 5


def test_the_memory_that_is_full_first_is_followed() -> None:
    """One that is nearly empty where another one begins to fill, whose line is as steep."""
    assert _asked_of(300, 6000) <= 5


def test_what_is_known_and_what_is_near_spares_lengths() -> None:
    assert _asked_of(2000, known=16, near=1800) == 3  # what is near, and two around the zero of the line
    assert _asked_of(8, known=16) == 0


def _asked_of(*most: int, known: int = 0, near: int = 0) -> int:
    """Return how many lengths are asked of memories that are full at some of them."""
    asked = list[int]()

    def left_at(length: int) -> list[int]:
        asked.append(length)
        return [7 * (full - length) * number for number, full in enumerate(most, 1)]

    before = {known: left_at(known)} if known else {}
    assert num_fitting(LENGTHS, left_at, before, near) == sum(length <= min(most) for length in LENGTHS)
    return len(asked) - len(before)
