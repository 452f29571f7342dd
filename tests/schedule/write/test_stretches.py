"""What is written again is what would be written anew."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from sim.schedule.ir.layout import LAYOUTS
from sim.schedule.ir.masks import Band, Span, Tokens
from sim.schedule.ir.program import Schedule
from sim.schedule.ir.stretches import Stretched
from sim.schedule.write.blocks import _of_band, blocks, met
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.stretches import Stretches
from sim.words.workload import Workload
from tests.helpers import VARIANTS, by_tier, make_model

NAMES = [name for name, variant in VARIANTS.items() if variant.schedule not in {"single", "balanced-ring"}]


@pytest.mark.parametrize(
    "name",
    by_tier({"ring, queries travel", "zigzag", "usp, sums as published"}, {"striped", "allgather", "fpdt"}, NAMES),
)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_what_is_written_again_is_what_is_written_anew(name: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again = _schedule(name, mask)
    into_json = again.to_json()
    monkeypatch.setattr(ProgramBuilder, "bound", _anew)
    anew = _schedule(name, mask)
    assert anew.to_json() == into_json
    for one, other in zip(again.programs, anew.programs, strict=True):
        assert isinstance(other.ops, tuple)
        assert one == other
    firsts = {group[0] for group in again.header.mesh.groups("ulysses")}  # whose others trade heads, and do as they do
    writes_again = not name.startswith("ulysses")  # which attends once
    assert all(isinstance(again.program(rank).ops, Stretched) is writes_again for rank in firsts)


@pytest.mark.parametrize("name", by_tier({"zigzag", "ring, queries travel"}, {"usp, sums as published"}, NAMES))
def test_what_is_found_by_stretches_is_what_is_found_op_by_op(name: str) -> None:
    for program in _schedule(name, "causal").programs:
        by_stretches, op_by_op = (one.calls[0].fragment for one in (program, program.replace()))
        (forms, which, views), (others, other_which, other_views) = by_stretches.formed, op_by_op.formed
        assert all(one is other for one, other in zip(forms, others, strict=True))
        assert np.array_equal(which, other_which)
        assert np.array_equal(views, other_views)
        assert by_stretches.peers == op_by_op.peers
        assert by_stretches.exchanges.first == op_by_op.exchanges.first
        assert np.array_equal(by_stretches.exchanges.at, op_by_op.exchanges.at)
        assert np.array_equal(by_stretches.exchanges.which, op_by_op.exchanges.which)


def test_ops_of_stretches_are_a_sequence() -> None:
    ops = _schedule("zigzag", "causal").program(1).ops
    some = tuple(ops)
    assert (len(ops), ops[-1], ops[3:7], ops) == (len(some), some[-1], some[3:7], some)
    assert ops != (*some[:-1], some[0])
    assert pickle.loads(pickle.dumps(ops)) == some
    with pytest.raises(IndexError):
        ops[len(ops)]


def _anew(
    _: ProgramBuilder, key: object, views: object, label: str, write: Callable[[], None], *peers: object
) -> tuple[None, bool]:
    write()
    return None, True


def _schedule(name: str, mask: str) -> Schedule:
    workload = Workload(model=make_model(8, 4, head_dim=4), seq=64, dtype="bf16", mask=mask, passes="both", batch=2)  # type: ignore[arg-type]
    return VARIANTS[name].build(workload, VARIANTS[name].mesh(4, workload.model))


def test_ranks_write_most_stretches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zigzag of P ranks attends 2 P^2 times, in few ways."""
    ranks, written, add = 16, [], Stretches.add
    monkeypatch.setattr(Stretches, "add", lambda self, key, one: written.append(key) or add(self, key, one))
    workload = Workload(model=make_model(8, 4, head_dim=4), seq=64, dtype="bf16", mask="causal", passes="both")
    schedule = VARIANTS["zigzag"].build(workload, VARIANTS["zigzag"].mesh(ranks, workload.model))
    assert len(schedule.programs) == ranks
    assert 10 < len(written) < 32


@pytest.mark.parametrize("seed", range(20))
def test_blocks_depend_on_how_far_tokens_are_apart_no_more_than_the_mask_does(seed: int) -> None:
    draw = Random(seed)
    mask = Band(draw.choice([None, 0, 5, 40]), draw.choice([None, 0, 0, 7]))
    step = draw.choice([1, 1, 3])
    queries, keys = (_tokens(draw, step) for _ in range(2))
    pairs = tuple([tuple([(some, others) for others in keys]) for some in queries])
    assert blocks(mask, queries, keys) == _of_band(mask, pairs)


@pytest.mark.parametrize("seed", range(20))
def test_what_members_meet_is_told_by_how_far_they_are_apart(seed: int) -> None:
    draw = Random(seed)
    mask = Band(draw.choice([None, 0, 5, 40]), draw.choice([None, 0, 0, 7]))
    layout = LAYOUTS[draw.choice(["contiguous", "zigzag", "striped"])](96, 8)
    for own in layout:
        of_queries, of_keys = (met(mask, own, layout, "sequence", are_keys=are_keys) for are_keys in (False, True))
        assert [of_queries.found[which] for which in of_queries.which] == [blocks(mask, own, other) for other in layout]
        assert [of_keys.found[which] for which in of_keys.which] == [blocks(mask, other, own) for other in layout]


def _tokens(draw: Random, step: int) -> Tokens:
    starts = [draw.randrange(90) for _ in range(draw.choice([1, 2]))]
    return tuple([Span(start, start + 8 * step, step) for start in starts])
