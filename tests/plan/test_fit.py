"""What fits, what techniques save and cost, and what makes a step fit."""

from __future__ import annotations

from typing import Any

import pytest

import longstep
from longstep import InputError, Setup
from sim.plan.fit import rungs, switched_off, using
from sim.plan.search.families import families
from sim.plan.search.room import room
from sim.setup.stacks import STACKS, TECHNIQUES
from tests.helpers import sweep_but

GIB = 2**30
ON_TWO = Setup(model="tiny", dtype="bf16", cluster="hgx-h100", gpus=2, scope="step", seq="32K")


def with_memory(gib: float, **changes: Any) -> Setup:
    """Return a setup whose GPUs have so much memory for buffers, and know that to the byte."""
    figures = {"capacity_bytes": int(gib * GIB), "reserved_bytes": 0, "reserved_within_bytes": 0}
    return ON_TWO.replace(set={f"cluster.hbm.{key}": value for key, value in figures.items()}, **changes)


def test_a_ladder_goes_up_and_takes_out_each() -> None:
    states = dict(rungs(list(TECHNIQUES)))
    everything = states[f"+ {list(TECHNIQUES)[-1]}"]
    assert len(states) == 1 + 2 * len(TECHNIQUES)
    for name, technique in TECHNIQUES.items():
        assert technique.on.items() <= states[f"+ {name}"].items()
        assert states[f"all - {name}"] == {**everything, **technique.off}
    assert states["none"]["schedule"] == "single"


@pytest.mark.slow
def test_a_ladder_of_a_small_model() -> None:
    found = longstep.ladder(with_memory(1), most="2M")
    rows = {row["techniques"]: row for row in found.rows}
    assert rows["+ FSDP"]["optimiser"] * 2 == rows["none"]["optimiser"]
    assert rows["+ checkpointing"]["step_time_s"] > rows["+ FSDP"]["step_time_s"]
    assert rows["+ Ulysses"]["step_time_s"] < rows["+ checkpointing"]["step_time_s"]
    everything = rows[f"+ {list(TECHNIQUES)[-1]}"]
    assert everything["optimiser"] < rows["+ FSDP"]["optimiser"]
    longest = [row["longest"] for row in found.rows[: 1 + len(TECHNIQUES)]]
    assert longest == sorted(longest)
    assert longest[0] < longest[-1]
    for row in found.rows:
        assert row["fits"] is (row["free_bytes"] >= 0)


@pytest.mark.sweep
def test_what_is_named_makes_it_fit() -> None:
    """Of techniques that do alone one, else as many as it takes."""
    (one,) = longstep.fit(with_memory(1.2), ["ulysses"], ["64K"]).rows
    assert one["step_time_s"] is None
    assert one["free_bytes"] < 0
    assert one["helps"] in TECHNIQUES
    helped = using(with_memory(1.2, seq="64K", schedule="ulysses"), TECHNIQUES[one["helps"]].on)
    assert room(helped.resolved()).fits
    (several,) = longstep.fit(with_memory(0.75), ["ulysses"], ["64K"]).rows
    names = several["helps"].split(" + ")
    assert len(names) > 1
    on = {key: value for name in names for key, value in TECHNIQUES[name].on.items()}
    assert room(using(with_memory(0.75, seq="64K"), {"schedule": "ulysses", **on}).resolved()).fits
    (none,) = longstep.fit(with_memory(0.05), ["ulysses"], ["64K"]).rows
    assert none["helps"] == ""


@pytest.mark.sweep
def test_cells_say_seconds_or_why_not() -> None:
    found = longstep.fit(with_memory(4), ["zigzag", "fsdp", "ulysses"], ["32K", "64K"], progress=None)
    assert [(row["row"], row["seq"]) for row in found.rows[:3]] == [
        ("zigzag", 2**15),
        ("zigzag", 2**16),
        ("fsdp", 2**15),
    ]
    fitting = found.rows[0]
    alone = with_memory(4, schedule="zigzag", seeds=1).predicted()
    assert (fitting["fits"], fitting["step_time_s"]) == (True, alone.step_time_s)
    unsure = with_memory(4).replace(set={"cluster.hbm.reserved_within_bytes": 4 * GIB})
    near = longstep.fit(unsure, ["zigzag"], ["32K"]).rows[0]
    assert (near["fits"], near["step_time_s"]) == (None, alone.step_time_s)
    heads = longstep.fit(with_memory(4, gpus=16, cluster="hgx-h100"), ["ulysses"], ["32K"]).rows[0]
    assert "heads" in heads["error"]
    with pytest.raises(InputError, match="unknown value of `schedule or stack` 'rings'"):
        longstep.fit(ON_TWO, ["rings"], ["32K"])


@pytest.mark.sweep
def test_what_is_set_comes_before_a_stack() -> None:
    """Whose other options stay."""
    setup = with_memory(4, gpus=None).replace(set={"schedule.mlp": "mini", "cluster.gpus_per_node": 2})
    (row,) = longstep.fit(setup, ["alst"], ["32K"]).rows
    meant = setup.replace(stack="alst", gpus=2, schedule="ulysses", seeds=1).predicted()
    assert (meant.checked.schedule.header.options["mlp"], row["step_time_s"]) == ("mini", meant.step_time_s)
    assert meant.checked.schedule.header.options["optimiser"] == "host"


@pytest.mark.sweep
def test_techniques_that_a_model_does_not_take_are_left_out() -> None:
    """No MLP with adapters is tiled, so none is tried where something does not fit."""
    frozen = ON_TWO.replace(set={"model.lora_rank": 8})
    found = longstep.ladder(frozen, most="8K", techniques=["FSDP", "tiled MLP"])
    assert found.to_dict()["techniques"] == ["none", "+ FSDP"]
    assert "tiled MLP" in switched_off(ON_TWO)
    assert "tiled MLP" not in switched_off(frozen)
    assert {family.grid["mlp"] for family in families(frozen)} == {("whole",)}
    assert "tiled MLP" in switched_off(frozen.replace(set={"model.lora_targets": "q+v"}))


@pytest.mark.sweep
def test_a_single_layer_is_not_asked_to_leave_the_gpu() -> None:
    """Nor that of a stage: the last one of each chunk stays there."""
    stages = ON_TWO.replace(schedule="single", pp_degree=2, batch=2)
    for one, more in ((ON_TWO.replace(layers=1), ON_TWO), (split(stages, 3, 1), split(stages, 2, 2))):
        assert switched_off(more).keys() - switched_off(one).keys() == {"offload"}
        longstep.what_helps(one.replace(seq="4M"))


def split(setup: Setup, *layers: int) -> Setup:
    options = {"schedule.micro_batches": 2, "schedule.pipeline_layers": ",".join(map(str, layers))}
    return setup.replace(layers=sum(layers), set=options)


@pytest.mark.parametrize("stack", sweep_but({"fsdp"}, list(STACKS)))
def test_a_stack_is_its_options_and_its_schedule(stack: str) -> None:
    """What is set comes first."""
    named = ON_TWO.replace(stack=stack, dp_degree=2 if STACKS[stack].schedule == "single" else 1)
    found = named.resolved()
    assert found.schedule == STACKS[stack].schedule
    assert {key: str(getattr(found.options, key)) for key in STACKS[stack].options} == dict(STACKS[stack].options)
    assert named.replace(set={"schedule.prefetch": 2, "schedule.loss": "whole"}).resolved().options.loss == "whole"
    assert named.replace(schedule="zigzag", dp_degree=1).resolved().schedule == "zigzag"


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["fpdt", "upipe"])
def test_a_schedule_is_played_where_it_is_named(schedule: str) -> None:
    """Not a stack that its authors published with it, which has another name."""
    (row,) = longstep.fit(with_memory(4), [schedule], ["32K"]).rows
    assert row["step_time_s"] == with_memory(4, schedule=schedule, seeds=1).predicted().step_time_s


def test_no_stack_is_named_as_a_schedule_is() -> None:
    assert not {*STACKS} & {*longstep.names("schedules")}
    with pytest.raises(InputError, match="unknown stack 'upipe'.*`schedule` upipe .*untied-ulysses and 5m"):
        ON_TWO.replace(stack="upipe").resolved()


def test_stacks_are_of_steps() -> None:
    with pytest.raises(InputError, match="`stack` fsdp is of training steps: set `scope` step"):
        Setup(stack="fsdp", gpus=1, scope="layer").resolved()
    with pytest.raises(InputError, match="unknown stack 'fdsp'.*fsdp"):
        Setup(stack="fdsp", gpus=1, scope="step").resolved()
