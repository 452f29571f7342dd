"""Ranks that do the same are written once: their programs are those that each of them writes by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from sim.engine.play.lowered import Lowered
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Exchange, Message, Rope
from sim.schedule.ir.program import Later, Schedule
from sim.schedule.ir.renaming import Renaming, tokens_later
from sim.schedule.model import layer
from sim.schedule.proof.check import Checked
from sim.schedule.write.builder import ProgramBuilder
from sim.words.workload import Workload
from tests.helpers import VARIANTS, by_tier, make_model

TRADING = [name for name, variant in VARIANTS.items() if variant.schedule in {"ulysses", "usp", "upipe", "fpdt"}]
WORKLOADS: dict[str, dict[str, Any]] = {
    "attention": {},
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
@pytest.mark.parametrize("name", by_tier({"ulysses"}, {"usp, rings inside"}, TRADING))
def test_a_rank_is_written_as_it_writes_itself(name: str, what: str, dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[int] = []

    def noted(rank: int, *given: Any, **named: Any) -> ProgramBuilder:
        writers.append(rank)
        return ProgramBuilder(rank, *given, **named)

    monkeypatch.setattr(layer, "ProgramBuilder", noted)
    once = schedule_of(name, what, dp).to_json()
    few = len(writers)
    monkeypatch.setattr(layer, "tokens_later", lambda *_: None)
    monkeypatch.setattr(layer._Ranks, "later", lambda _: Later())
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


def test_ranks_whose_peers_are_as_much_later_share_all_but_these() -> None:
    """Of USP's ring of two in two groups that trade heads: ranks 0 and 1 meet 2 and 3."""
    schedule = schedule_of("usp of 2", "layer", 1)
    first, other = (schedule.program(rank).calls for rank in (0, 1))
    assert any(one.fragment.peers for one in first)
    for one, same in zip(first, other, strict=True):
        assert same.fragment.shared is one.fragment.shared
        assert [peer + 1 for peer in one.fragment.peers] == list(same.fragment.peers)
        assert same.fragment.peers_later == (1 if one.fragment.peers else 0)
    matching, lowered = Checked(schedule).matching, Lowered(Checked(schedule))
    pairs = sorted((one.source[0], one.target[0]) for one in matching.transfers)
    ranks = lowered.op_rank
    assert sorted(zip(ranks[lowered.transfers["source"]], ranks[lowered.transfers["target"]], strict=True)) == pairs


def test_a_rank_one_of_whose_peers_is_another_shares_nothing_of_what_names_it() -> None:
    schedule = schedule_of("usp of 2", "layer", 1)
    call = next(one for one in schedule.program(1).calls if len(one.fragment.peers) > 1)
    named = [at for at, op in enumerate(call.fragment.ops) if isinstance(op, Exchange)]
    op = call.fragment.ops[named[-1]]
    assert isinstance(op, Exchange)
    moved = msgspec.structs.replace(op, recvs=tuple(Message(peer + 1, view) for peer, view in op.recvs))
    changed = dataclasses.replace(
        call.fragment, ops=(*call.fragment.ops[: named[-1]], moved, *call.fragment.ops[named[-1] + 1 :])
    )
    assert call.fragment.like(call.fragment)
    assert not call.fragment.like(changed)
