"""What is written again is what would be written anew."""

from __future__ import annotations

from random import Random

import pytest

from sim.schedule.ir.masks import Band, Span, Tokens
from sim.schedule.ir.program import Schedule
from sim.schedule.write.blocks import _of_band, blocks
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
    again = _schedule(name, mask).to_json()
    monkeypatch.setattr(Stretches, "of", lambda _, __: None)
    assert _schedule(name, mask).to_json() == again


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
    assert 4 < len(written) < 16


@pytest.mark.parametrize("seed", range(20))
def test_blocks_depend_on_how_far_tokens_are_apart_no_more_than_the_mask_does(seed: int) -> None:
    draw = Random(seed)
    mask = Band(draw.choice([None, 0, 5, 40]), draw.choice([None, 0, 0, 7]))
    step = draw.choice([1, 1, 3])
    queries, keys = (_tokens(draw, step) for _ in range(2))
    pairs = tuple([tuple([(some, others) for others in keys]) for some in queries])
    assert blocks(mask, queries, keys) == _of_band(mask, pairs)


def _tokens(draw: Random, step: int) -> Tokens:
    starts = [draw.randrange(90) for _ in range(draw.choice([1, 2]))]
    return tuple([Span(start, start + 8 * step, step) for start in starts])
