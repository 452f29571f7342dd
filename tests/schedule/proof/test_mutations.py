"""A small sample of what ``mutations`` does at large: nothing wrong is accepted, and the sample would see it."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from sim.schedule.proof import check
from tests.helpers import slow_but
from tests.schedule.proof.mutation_operators import OPERATORS
from tests.schedule.proof.mutation_steps import STEP_OPERATORS
from tests.schedule.proof.mutations import Sort, mutants, operators

SAMPLE = len(OPERATORS)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", slow_but({2026}, [2026, *range(8)]))
def test_no_mutant_is_accepted_that_is_wrong(seed: int) -> None:
    found = list(mutants(SAMPLE, seed=seed))
    assert [mutant for mutant in found if mutant.verdict in {"wrong", "other"}] == []
    assert {mutant.operator for mutant in found} == OPERATORS.keys()
    assert Counter(mutant.verdict for mutant in found).keys() == {"refused", "exact"}


@pytest.mark.slow
@pytest.mark.parametrize("of", get_args(Sort))
@pytest.mark.parametrize("seed", range(2))
def test_no_mutant_of_any_sort_is_accepted_that_is_wrong(of: Sort, seed: int) -> None:
    every = operators(of)
    found = list(mutants(2 * len(every), seed=seed, of=of))
    assert [mutant for mutant in found if mutant.verdict in {"wrong", "other"}] == []
    assert {mutant.operator for mutant in found} == every.keys()
    assert Counter(mutant.verdict for mutant in found).keys() == {"refused", "exact"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("of", "kinds"),
    [
        ("layers", ("header", "addend")),
        ("steps", ("state op",)),
        ("documents", ("rectangles",)),
        ("parallel", ("op:", "sum:", "pass")),
    ],
)
def test_some_mutants_of_each_sort(of: Sort, kinds: tuple[str, ...]) -> None:
    """One of each way to change headers, what is summed, kernels of weights and of an optimiser, rectangles, and what
    stages and ranks with parts of weights compute and send.
    """
    named = [number for number, name in enumerate(operators(of)) if name.startswith(kinds)]
    found = [mutant for number in named for mutant in mutants(1, 2026, number, of)]
    assert len(found) == len(named) >= 5
    assert {mutant.verdict for mutant in found} <= {"refused", "exact"}, found


@pytest.mark.sweep
def test_a_mutant_is_the_same_whoever_came_before() -> None:
    whole = list(mutants(8, seed=7))
    assert list(mutants(3, seed=7, first=5)) == whole[5:]


@pytest.mark.slow
def test_what_a_blind_check_lets_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof-reader's contents and claims, mutants of every sort are accepted and found to be wrong."""
    monkeypatch.setattr(check.AbstractPlayer, "run", lambda _: None)
    monkeypatch.setattr(check, "_check_claims", lambda *_: None)
    wrong = [mutant for mutant in mutants(len(OPERATORS), seed=2026) if mutant.verdict == "wrong"]
    assert len({mutant.operator for mutant in wrong}) >= 6, wrong
    own = list(operators("steps")).index(next(iter(STEP_OPERATORS)))
    of_steps = mutants(len(STEP_OPERATORS), seed=2026, first=own, of="steps")
    wrong = [mutant for mutant in of_steps if mutant.verdict == "wrong"]
    assert len({mutant.operator for mutant in wrong}) >= 6, wrong
