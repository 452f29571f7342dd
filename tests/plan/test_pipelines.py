"""Plans with stages of a pipeline: few layers and micro-batches say what many take, and no bound is above a step."""

from __future__ import annotations

from typing import Any

import pytest

import longstep
from longstep import InputError, Setup
from sim.plan.search.bounds import least_room, room_by_few
from sim.plan.search.branches import Played, least_limits, least_of, played
from sim.plan.search.families import families
from sim.plan.search.few import holds_as_much, of_layers, of_played, of_turns
from sim.plan.search.passes import Work, least_steps, walked
from sim.plan.search.space import Branch, Family
from sim.plan.search.steps import step_of
from sim.schedule.model.pipeline.account import Parts
from sim.schedule.model.pipeline.stages import Stages
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.words.mesh import Mesh
from sim.words.options import LayerOptions
from tests.helpers import by_tier, slow_but
from tests.plan.test_plan import SMALL, by_trying, require_bounds, require_told

F_S, B_S, W_S = 1.0, 1.25, 0.75


def make_step(schedule: str = "ulysses", layers: int = 12, micro_batches: int = 6, **changes: Any) -> Setup:
    """Return a step of two stages of two ranks each; ``changes`` are options of its schedule, but ``pp``."""
    pp = changes.pop("pp", 2)
    given = {f"schedule.{key}": value for key, value in {"micro_batches": micro_batches, **changes}.items()}
    return SMALL.replace(
        schedule=schedule, gpus=2 * pp, pp_degree=pp, layers=layers, batch=micro_batches, jitter=0.0, set=given,
    )  # fmt: skip


def steps_of(pipeline: str, pp: int, micro_batches: int, chunks: int = 1) -> float:
    """Return what passes that take the same in all chunks take, without anything between stages."""
    options = LayerOptions(pipeline_schedule=pipeline, pipeline_chunks=chunks, micro_batches=micro_batches)
    workload = longstep.workload("tiny", 64, batch=micro_batches, scope="step", layers=pp * chunks)
    taken_s = {"F": F_S, "B": B_S, "W": W_S, "BW": B_S + W_S}
    passes = {(kind, at): Parts(0.0, s / chunks, 0.0) for kind, s in taken_s.items() for at in range(pp * chunks)}
    return walked(Stages(Mesh(pp=pp), workload, options), [Work(passes, passes, 0.0, 0.0)] * pp).all_s


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (8, 24)])
def test_passes_through_timetables_take_what_papers_say(pp: int, micro_batches: int) -> None:
    """Bubbles of p - 1 passes (arXiv:1811.06965, arXiv:2104.04473 §2.2), of chunks as much less (§2.2.2), and without
    gradients of weights in them (arXiv:2401.10241 table 2, ZB-H1).
    """
    of_one = F_S + B_S + W_S
    whole_s, bubble_s = micro_batches * of_one, (pp - 1) * of_one
    for pipeline in ("gpipe", "1f1b"):
        assert steps_of(pipeline, pp, micro_batches) == pytest.approx(whole_s + bubble_s, rel=1e-12)
    assert steps_of("interleaved", pp, micro_batches, 2) == pytest.approx(whole_s + bubble_s / 2, rel=1e-12)
    hidden_s = (pp - 1) * W_S
    assert whole_s < steps_of("zb-h1", pp, micro_batches) == pytest.approx(whole_s + bubble_s - 2 * hidden_s, rel=1e-12)


OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "zb-h1": {"pipeline_schedule": "zb-h1", "micro_batches": 7, "layers": 10},
    "four stages": {"pp": 4, "layers": 24, "micro_batches": 9},
    "sharded": {"schedule": "zigzag", "checkpoint": "full", "micro_batches": 5},
    "to the host": {"activations": "host", "optimiser": "host", "mlp": "tiled"},
    "summed at the end": {"zero_stage": 1, "checkpoint": "none"},
    "one micro-batch": {"micro_batches": 1},
    "few": {"micro_batches": 2, "layers": 4},
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"few"}, OPTIONS))
def test_few_layers_and_micro_batches_say_what_many_take(name: str) -> None:
    """Seconds within 1e-4, memory to the byte, and no bound is above either."""
    setup = make_step(**OPTIONS[name])
    predicted, least = require_told(setup)
    assert least.kernels_s + least.states_s > 0.6 * predicted.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_schedule": "interleaved", "pipeline_chunks": 2, "layers": 40, "micro_batches": 12},
        {"pipeline_layers": "11,9", "layers": 20},
        {"pp": 4, "pipeline_layers": "10,13,11,10", "layers": 44, "micro_batches": 10},
    ],
)
def test_unlike_chunks_take_more_layers_to_say_it(options: dict[str, Any]) -> None:
    """Within 0.5 %; memory to the byte."""
    setup = make_step(**options)
    predicted = setup.predicted()
    assert step_of(setup)[0] == pytest.approx(predicted.step_time_s, rel=5e-3)
    assert least_of(setup).step_s <= predicted.step_time_s
    assert predicted.room is not None
    assert [one.held_bytes for one in least_limits(setup)] == [one.held_bytes for one in predicted.room.limits]


ROUNDS: dict[str, dict[str, Any]] = {
    "zb-h2": {},
    "zb-v": {},
    "dualpipe": {},
    "dualpipe-v": {},
    "looped-bfs": {"pipeline_chunks": 2},
    "interleaved-zb": {"pipeline_chunks": 2},
}


@pytest.mark.sweep
@pytest.mark.parametrize("pp", slow_but({2}, [2, 4]))
@pytest.mark.parametrize("name", slow_but({"dualpipe-v", "looped-bfs"}, ROUNDS))
def test_rounds_of_micro_batches_say_what_more_of_them_take(name: str, pp: int) -> None:
    """Within 2e-3, which ZB-V over two stages comes to only by and by; and no bound is above."""
    setup = make_step("zigzag", 2 * pp, 5 * pp + 4, pp=pp, pipeline_schedule=name, **ROUNDS[name])
    predicted = setup.predicted()
    few = of_turns(setup)
    assert len(few.setups) == 2
    told_s = few.told(*(one.predicted().step_time_s for one in few.setups))
    assert told_s == pytest.approx(predicted.step_time_s, rel=2e-3)
    assert least_of(setup).step_s <= predicted.step_time_s
    assert predicted.room is not None
    assert all(
        one.held_bytes <= two.held_bytes for one, two in zip(least_limits(setup), predicted.room.limits, strict=True)
    )


UNLIKE = {"interleaved": "1,1,2,0,0,3,1,1", "interleaved-zb": "3,2,0,2,1,1,0,2"}
"""Layers of the chunks of four stages, which hold less of 8 micro-batches than of more."""


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", by_tier({"1f1b"}, {"zb-v", "looped-bfs", "interleaved-zb"}, PIPELINES))
def test_few_micro_batches_say_what_stages_hold(name: str, pp: int) -> None:
    """To the byte; only orders that go forward with all of them first have to be walked with all."""
    split = UNLIKE[name] if pp == 4 and name in UNLIKE else ""
    layers, chunks = sum(map(int, split.split(","))) if split else 8, 2 if PIPELINES[name].chunks is None else 1
    options = {"pipeline_schedule": name, "pipeline_chunks": chunks, "checkpoint": "none"}
    setup = make_step("ring", layers, 6 * pp, pp=pp, **options, **({"pipeline_layers": split} if split else {}))
    few, whole = of_turns(setup), setup.resolved()
    assert len(few.setups) == 2
    assert holds_as_much(setup, few) is (name not in {"gpipe", "looped-bfs"})
    if holds_as_much(setup, few):
        assert room_by_few(whole, few) == least_room(whole)
        assert least_limits(setup) == [*least_room(whole).limits]


def test_layers_are_left_out_of_each_chunk_alike() -> None:
    """So that stages differ by as many as before; what is small is played as it is."""
    uneven = make_step(layers=23, pipeline_layers="13,10")
    few = of_played(uneven)
    assert [one.resolved().options.pipeline_layers for one in few.setups] == ["9,6", "11,8"]
    assert (few.between, few.further) == (2, 2)
    assert of_layers(make_step(layers=8), (3, 4)).setups == [make_step(layers=8)]
    assert [one.resolved().options.micro_batches for one in of_turns(make_step()).setups] == [3, 4]
    rounds = make_step(pipeline_schedule="interleaved", pipeline_chunks=2, micro_batches=8)
    assert [one.resolved().options.micro_batches for one in of_turns(rounds).setups] == [4, 6]
    both_ways = make_step(pipeline_schedule="dualpipe", micro_batches=24)
    assert [one.resolved().options.micro_batches for one in of_turns(both_ways).setups] == [8, 10]
    assert of_turns(make_step(micro_batches=4)).setups == [make_step(micro_batches=4)]


@pytest.mark.sweep
def test_layers_of_several_kinds_are_left_out_by_whole_turns() -> None:
    """A step of 16 layers, of which every other one has a window, takes what few say; that of the last alone is not
    what another adds.
    """
    setup = Setup("zigzag", model="gemma-2-2b", cluster="hgx-h100", gpus=2, seq="64K", layers=15, jitter=0.0)
    few = of_layers(setup, (3, 4))
    assert [one.layers for one in few.setups] == [3, 5]
    assert step_of(setup)[0] == pytest.approx(setup.predicted().step_time_s, rel=1e-4)


@pytest.mark.sweep
def test_a_plan_has_the_stages_that_were_asked_for() -> None:
    """In all of its families, by name; the best are those of trying everything."""
    setup = SMALL.replace(
        schedule="ulysses", pp_degree=2, layers=4, global_batch=4,
        set={"schedule.pipeline_schedule": "1f1b", "schedule.zero_stage": 3},
    )  # fmt: skip
    options = {"checkpoint": ["none", "full"]}
    found = longstep.plan(setup, options=options, most=2, jobs=1)
    assert {family.named for family in families(setup, options)} == {
        "ulysses (U 2, PP 2)",
        "ulysses (PP 2, 2 replicas)",
    }
    assert {row["schedule"] for row in found.best} <= {"ulysses (U 2, PP 2)", "ulysses (PP 2, 2 replicas)"}
    seconds = [row["step_time_s"] / row["sequences"] for row in found.best]
    assert seconds == pytest.approx(by_trying(setup, options)[:2], rel=1e-4)
    assert found.slack == 0


@pytest.mark.slow
def test_no_bound_of_a_pipeline_is_above_a_simulation() -> None:
    """Of branches and leaves, in time and memory."""
    few: dict[str, tuple[str, ...]] = {
        "checkpoint": ("none", "full"),
        "activations": ("hbm", "host"),
        "optimiser": ("gpu", "host"),
    }
    assert require_bounds(SMALL.replace(schedule="zigzag", pp_degree=2, layers=8, global_batch=4), few) >= 12


def test_stages_are_tried_where_micro_batches_fill_them() -> None:
    """And layers divide over them or nearly; of one sequence, or as many as each replica brings, there is one stage,
    as where it is asked for.
    """
    several = SMALL.replace(schedule="ulysses", layers=6, global_batch=4, set={"schedule.zero_stage": 3})
    found = families(several)
    orders = ("1f1b", "interleaved, pipeline_chunks 3", "zb-h1")
    assert {one.named for one in found if one.setup.pp_degree > 1} == {
        f"ulysses ({degrees}, pipeline_schedule {order})"
        for degrees in ("U 2, PP 2", "PP 2, 2 replicas")
        for order in orders
    }
    assert {one.setup.resolved().mesh.size for one in found} == {4}
    chunks = [one for one in families(several.replace(layers=8)) if "pipeline_chunks 2" in one.named]
    assert {one.setup.pp_degree for one in chunks} == {2, 4}
    assert {one.setup.resolved().options.pipeline_schedule for one in chunks} == {"interleaved"}
    ones = [{"global_batch": 1}, {"global_batch": "any"}, {"pp_degree": 1}, {"layers": 5}]
    for changes in ones:
        assert {one.setup.pp_degree for one in families(several.replace(**changes))} == {1}, changes
    refused = families(several.replace(set={"model.num_heads": 9, "model.num_kv_heads": 3}))
    assert "ulysses (U 2, PP 2, pipeline_schedule 1f1b)" in {one.named for one in refused}, "builders say it"
    named = families(several, {"pipeline_schedule": ["gpipe"]})
    assert {one.named for one in named if one.setup.pp_degree > 1} == {
        "ulysses (U 2, PP 2, pipeline_schedule gpipe)",
        "ulysses (PP 2, 2 replicas, pipeline_schedule gpipe)",
    }


def test_chunks_are_tried_while_stages_wait_long() -> None:
    """Twice as many and more, up to a layer each, where the first and the last one may have none; also where the order
    is said. With many micro-batches two are enough.
    """
    several = SMALL.replace(schedule="ulysses", layers=30, pp_degree=4, ulysses_degree=1, global_batch=4)

    def tried(**changes: Any) -> dict[int, list[int]]:
        found = [one.setup.resolved().options for one in families(several.replace(**changes))]
        chunked = {one.pipeline_chunks: one.pipeline_layers for one in found if one.pipeline_schedule == "interleaved"}
        return {chunks: [int(layers) for layers in cut.split(",")] for chunks, cut in chunked.items()}

    all_of_them = {2: [3, *[4] * 6, 3], 4: [1, *[2] * 14, 1], 8: [0, *[1] * 30, 0]}
    assert tried() == all_of_them
    assert tried(set={"schedule.pipeline_schedule": "interleaved"}) == all_of_them
    assert tried(set={"schedule.pipeline_schedule": "interleaved", "schedule.pipeline_chunks": 4}).keys() == {4}
    assert tried(global_batch=40).keys() == {2, 4}
    assert tried(global_batch=80).keys() == {2}
    assert tried(global_batch=6) == {}, "micro-batches go in rounds of as many as there are stages"
    assert tried(global_batch=6, set={"schedule.pipeline_schedule": "interleaved"}).keys() == {2}, "unless it is said"


def test_stages_of_unequal_layers_are_tried_where_these_do_not_divide() -> None:
    """One cut for each number of chunks, in the setup of its family; one fewer at both ends. A cut that makes most
    stages wait is tried only where it is asked for, and what is fixed is kept.
    """
    several = SMALL.replace(schedule="ulysses", layers=30, global_batch=4)
    cuts = {one.named: one.setup.resolved().options for one in families(several) if one.setup.pp_degree == 4}
    assert {name: one.pipeline_layers for name, one in cuts.items() if one.pipeline_chunks <= 2} == {
        "ulysses (PP 4, pipeline_schedule 1f1b, pipeline_layers 7,8,8,7)": "7,8,8,7",
        "ulysses (PP 4, pipeline_schedule interleaved, pipeline_chunks 2, pipeline_layers 3,4*6,3)": "3,4,4,4,4,4,4,3",
        "ulysses (PP 4, pipeline_schedule zb-h1, pipeline_layers 7,8,8,7)": "7,8,8,7",
    }
    halves = [one.setup.resolved().options for one in families(several) if one.setup.pp_degree == 2]
    assert {one.pipeline_layers for one in halves if one.pipeline_chunks == 1} == {""}
    for text, layers in (("schedule", "7,8,8,7"), ("layers", "6,8,8,8")):
        fixed = several.replace(set={f"schedule.pipeline_{text}": "gpipe" if text == "schedule" else layers})
        (one,) = [one for one in families(fixed) if one.setup.pp_degree == 4]
        assert one.setup.resolved().options.pipeline_layers == layers
    asked = families(several.replace(layers=5, pp_degree=2))
    assert {one.setup.resolved().options.pipeline_layers for one in asked} == {"3,2", "1,2,1,1"}


def test_ranks_of_a_stage_share_out_weights_or_the_optimiser_alone() -> None:
    """Unless there is one stage, or nobody to share with, or somebody says it."""
    several = SMALL.replace(schedule="ulysses", layers=4, global_batch=4, set={"schedule.pipeline_schedule": "1f1b"})
    tried = {(one.setup.pp_degree, one.setup.resolved().options.zero_stage) for one in families(several)}
    assert tried == {(1, 3), (2, 3), (2, 1), (4, 3)}
    for said in ({"set": {"schedule.zero_stage": 2}}, {"software": "megatron"}):
        found = families(several.replace(pp_degree=2, **said))
        assert len({one.setup.resolved().options.zero_stage for one in found}) == 1, said
    asked = families(several.replace(pp_degree=2), {"zero_stage": ["2", "3"]})
    assert {one.setup.resolved().options.zero_stage for one in asked} == {2, 3}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("gib", "stage"), [(23, "zero_stage 1"), pytest.param(20.5, "2 replicas)", marks=pytest.mark.slow)]
)
def test_a_distributed_optimiser_is_found_where_it_just_fits(gib: float, stage: str) -> None:
    """It takes 0.9 of FSDP's time, and 3 GiB more; whole states on all ranks would take 8 GiB more than it does."""
    setup = Setup(
        "ulysses", model="llama3-8b", cluster="hgx-h100", gpus=4, layers=8, seq="2K", pp_degree=2, tp_degree=1,
        ulysses_degree=1, global_batch=16,
        set={"schedule.pipeline_schedule": "1f1b", "cluster.hbm.capacity_bytes": int(gib * 2**30)},
    )  # fmt: skip
    options = {"checkpoint": ["full"], "loss": ["chunked"]}
    found = longstep.plan(setup, options=options, most=1, jobs=1)
    assert stage in found.best[0]["schedule"]
    assert found.best[0]["free_bytes"] >= 0
    assert found.slack == 0
    whole = setup.replace(dp_degree=2, set={"schedule.zero_stage": 0, "schedule.checkpoint": "full"})
    assert least_limits(whole)[0].free_bytes < 0


@pytest.mark.sweep
@pytest.mark.parametrize("layers", [8, *(pytest.param(layers, marks=pytest.mark.slow) for layers in (15, 24))])
def test_ranks_of_one_stage_say_what_those_of_several_are_not_below(layers: int) -> None:
    """Their kernels, and of those of layers what bubbles add at least; of unequal stages nobody knows of any."""
    found = families(SMALL.replace(schedule="zigzag", layers=layers, global_batch=8), {"checkpoint": ["none"]})
    known = {one.named: least_of(one.setup) for one in found if one.setup.pp_degree == 1}
    told = [one for one in found if one.like in known]
    assert len(told) >= 4
    for one in told:
        alike = known[one.like]
        assert (one.bubbles > 0) == (not one.setup.resolved().options.pipeline_layers)
        assert 0 < alike.layers_s < alike.kernels_s
        assert alike.kernels_s + one.bubbles * alike.layers_s <= least_of(one.setup).kernels_s, one.named


@pytest.mark.slow
def test_a_pipeline_is_found_where_links_are_slow() -> None:
    """Over PCIe gathers of weights and hops take longer than bubbles; the best are those of trying everything."""
    setup = SMALL.replace(
        schedule="ulysses", model="llama3-8b", cluster="l20-pcie", layers=8, seq="1K", global_batch=32,
        set={"schedule.pipeline_schedule": "1f1b"},
    )  # fmt: skip
    options = {"checkpoint": ["none"], "loss": ["chunked"]}
    found = longstep.plan(setup, options=options, most=2, jobs=1)
    assert "PP" in found.best[0]["schedule"]
    assert [row["step_time_s"] / 32 for row in found.best] == pytest.approx(by_trying(setup, options)[:2], rel=1e-4)


@pytest.mark.parametrize("pipeline", by_tier({"zb-v"}, {"looped-bfs", "dualpipe-v"}, PIPELINES))
def test_no_order_of_passes_is_below_its_bound(pipeline: str) -> None:
    """Also where a chunk takes what the one before it, of the same stage, has left."""
    setup = make_step(pipeline_schedule=pipeline, layers=8)
    least, step_s = least_steps(setup), setup.predicted().step_time_s
    assert 0.6 * step_s < least.passes_s <= least.all_s <= step_s


def test_bounds_of_stages_that_cannot_be_are_refused() -> None:
    """As their builder does."""
    with pytest.raises(InputError, match="do not divide over 2 chunks"):
        least_steps(make_step(layers=3))


@pytest.mark.sweep
def test_savings_are_those_of_all_micro_batches() -> None:
    """By those of few, in which bubbles are more of the step; what even stages would save is not told by few layers."""
    setup = make_step(micro_batches=10)
    found = played(Branch(Family(setup, "", {})), float("inf"))
    assert isinstance(found, Played)
    whole = setup.predicted().figures
    assert found.bound_by == whole.bound_by
    assert set(found.saves) == set(whole.saves) - {"imbalance"}
    assert dict(found.saves) == pytest.approx({name: whole.saves[name] for name in found.saves}, abs=0.01)
