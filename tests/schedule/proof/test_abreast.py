"""The proof of many ranks abreast, held against that rank by rank: it finds the same, and accepts nothing more."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.masks import Band, Span, count_pairs, keeps_mask
from sim.schedule.ir.program import Schedule
from sim.schedule.proof import abreast
from sim.schedule.proof.abreast import AbreastPlayer, is_proved_abreast
from sim.schedule.proof.abstract import AbstractPlayer
from sim.schedule.proof.check import Checked, check
from sim.schedule.proof.contents import Unclassed, coalesced
from sim.schedule.proof.many import ROOM, Apart, Many, Number, many
from sim.schedule.proof.wellformed import check_program
from sim.words.mesh import Mesh
from sim.words.workload import MaskName, Workload
from tests.helpers import VARIANTS, by_tier, make_checked, make_model
from tests.schedule.proof.mutation_operators import OPERATORS

RINGS = [
    name
    for name, one in VARIANTS.items()
    if one.schedule in {"ring", "zigzag", "striped", "burst", "double-ring"} and "rotation" not in one.options
]
"""Their ranks send to each other, and take part in no collective."""


def of_ring(name: str, ranks: int, mask: MaskName = "causal") -> Schedule:
    return make_checked(name, _workload(mask=mask), ranks).schedule


def _workload(seq: int = 48, mask: MaskName = "causal") -> Workload:
    return Workload(model=make_model(8, 4, head_dim=4), seq=seq, dtype="fp64", mask=mask, passes="both")


@pytest.mark.parametrize("name", by_tier({"ring", "zigzag", "ring, packed"}, {"striped", "double-ring"}, RINGS))
@pytest.mark.parametrize("ranks", by_tier({4}, set(), [4, 8]))
def test_every_buffer_ends_with_what_each_rank_by_itself_leaves(name: str, ranks: int) -> None:
    checked = Checked(of_ring(name, ranks))
    everything = checked.schedule, checked.matching, checked.dependencies
    alone, together = AbstractPlayer(*everything), AbreastPlayer(*everything)
    alone.run()
    together.run()
    for rank, memory in enumerate(alone.memory):
        for number, own in enumerate(memory.held()):
            found = together.held(rank, number)
            assert sorted(coalesced(list(found.pieces))) == sorted(coalesced(list(own.pieces)))
            assert found.complete == own.complete


@pytest.mark.parametrize("seed", by_tier({0}, set(), [*range(12)]))
def test_no_mutant_is_accepted_that_each_rank_by_itself_refuses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abreast, "FEW", 1)
    draw, verdicts = Random(seed), Counter[bool]()
    schedule = of_ring(draw.choice(RINGS), draw.choice((2, 3, 4)), mask=draw.choice(("causal", "full")))
    for mutate in OPERATORS.values():
        changed = mutate(draw, schedule)
        if changed is None:
            continue
        checked = Checked(changed)
        try:
            for program in changed.programs:
                check_program(program, changed, set())
            accepted = is_proved_abreast(changed, checked.matching, checked.dependencies)
        except InputError:
            continue
        verdicts[accepted] += 1
        assert not accepted or _is_proved_alone(checked)
    assert verdicts[False] > 5


def _is_proved_alone(checked: Checked) -> bool:
    try:
        AbstractPlayer(checked.schedule, checked.matching, checked.dependencies).run()
    except ScheduleError:
        return False
    return True


def test_check_proves_rings_of_many_ranks_abreast(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = abreast.FEW
    schedule = VARIANTS["zigzag"].build(_workload(seq=4 * ranks), Mesh(ring=ranks))
    monkeypatch.setattr(AbstractPlayer, "run", None)
    check(schedule)


def answers(function: Callable[..., int], *given: Number, of: int) -> dict[int, int]:
    """Return what a function says of each of so many ranks, in parts where they differ."""
    found: dict[int, int] = {}
    left = [np.arange(of)]
    while left:
        some = left.pop()
        try:
            said = function(
                *(many(one.each[some], one.low, one.high) if isinstance(one, Many) else one for one in given)
            )
        except Apart as apart:
            left += [some[apart.where], some[~apart.where]]
            continue
        found.update(
            zip(some.tolist(), said.each.tolist() if isinstance(said, Many) else [said] * len(some), strict=True)
        )
    return found


def pairs(left: int | None, right: int | None, step: int, *at: Any) -> int:
    queries, keys = Span(at[0], at[0] + 6 * step, step), Span(at[1], at[1] + 4 * step, step)
    kept = keeps_mask(Band(left, right), Band(left, right), queries, keys, 0)
    return count_pairs(Band(left, right), queries, keys) * (2 if kept else 1)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_of_many_is_said_of_each(seed: int) -> None:
    draw = Random(seed)
    rule = partial(pairs, draw.choice([None, 3]), draw.choice([None, 0, 2]), draw.choice([1, 2, 4]))
    given = [[4 * draw.randrange(12) for _ in range(8)] for _ in range(2)]
    found = answers(rule, *(many(np.array(one), 0, 48) for one in given), of=8)
    assert found == {rank: rule(*one) for rank, one in enumerate(zip(*given, strict=True))}


def test_numbers_beyond_64_bits_are_not_played() -> None:
    large = many(np.array([ROOM // 2, ROOM // 4]), 0, ROOM // 2)
    for combined in (operator.add, operator.mul, lambda a, b: a - -b):
        with pytest.raises(Unclassed):
            combined(large, large)
    for by in (0, -2, many(np.array([0, 2]), 0, 2)):
        with pytest.raises(Unclassed):
            large // by
        with pytest.raises(Unclassed):
            large % by
