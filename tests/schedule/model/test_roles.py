"""Ranks that do the same are written once: their programs are those that each of them writes by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Rope
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.renaming import Renaming, tokens_later
from sim.schedule.model import layer
from sim.schedule.write.builder import ProgramBuilder
from sim.words.workload import Workload
from tests.helpers import VARIANTS, by_tier, make_model

TRADING = [name for name, variant in VARIANTS.items() if variant.schedule in {"ulysses", "usp", "upipe", "fpdt"}]
WORKLOADS: dict[str, dict[str, Any]] = {
    "layer": {"scope": "layer", "layers": 3},
    "step": {"scope": "step", "layers": 2, "batch": 2},
    "documents": {"scope": "step", "documents": (16, 20, 12)},
    "window": {"scope": "step", "window": 9},
    "padded": {"scope": "step", "padding": 5},
    "forward": {"scope": "layer", "passes": "forward"},
}


def schedule_of(name: str, what: str, dp: int) -> Schedule:
    variant = VARIANTS[name]
    workload = Workload(model=make_model(8, 4), **{"seq": 48, **WORKLOADS[what]})
    mesh = variant.mesh(4, workload.model)
    return variant.build(workload, msgspec.structs.replace(mesh, dp=dp))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("what", WORKLOADS)
@pytest.mark.parametrize("name", by_tier({"ulysses"}, {"usp of 2", "usp, rings inside", "upipe, kept"}, TRADING))
def test_a_rank_is_written_as_it_writes_itself(name: str, what: str, dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[int] = []
    monkeypatch.setattr(layer, "ProgramBuilder", lambda *given: writers.append(given[0]) or ProgramBuilder(*given))
    once = schedule_of(name, what, dp).to_json()
    few = len(writers)
    monkeypatch.setattr(layer, "tokens_later", lambda *_: None)
    each = schedule_of(name, what, dp)
    assert each.to_json() == once
    mesh = each.header.mesh
    if what != "documents":  # whose positions begin anew
        assert few == mesh.ring
        assert len(writers) == few + (mesh.size if not each.replicated else mesh.size // dp)


def test_tokens_in_like_spans_are_renamed_and_others_are_not() -> None:
    here, there = (Span(0, 8), Span(24, 32)), (Span(8, 16), Span(16, 24))
    later = tokens_later(here, there)
    assert later == ((Span(0, 8), 8), (Span(24, 32), -8))
    assert Renaming(tokens=later).of_tokens((Span(2, 4), Span(24, 32))) == (Span(10, 12), Span(16, 24))
    with pytest.raises(LookupError):
        Renaming(tokens=later).of_tokens((Span(4, 12),))
    assert tokens_later(here, here) == ()
    assert tokens_later(here, (Span(8, 24),)) is None
    assert tokens_later(here, (Span(8, 16), Span(16, 20))) is None
    assert tokens_later((Span(0, 8),), there) is None


def test_ranks_that_turn_by_other_positions_share_all_but_these() -> None:
    schedule = schedule_of("ulysses", "layer", 1)
    first, other = (schedule.program(rank).calls for rank in (0, 1))
    for one, same in zip(first, other, strict=True):
        assert same.fragment.shared is one.fragment.shared
        assert same.fragment.formed is one.fragment.formed
    turned = [
        [op.tokens for call in calls for op in call.fragment.ops if isinstance(op, Rope)] for calls in (first, other)
    ]
    assert {tokens for (tokens,) in turned[0]} == {Span(0, 12)}
    assert {tokens for (tokens,) in turned[1]} == {Span(12, 24)}
