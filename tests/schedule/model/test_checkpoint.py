"""Activation checkpointing: what is kept and what runs again by hand, exact for every list, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from sim.base.errors import InputError
from sim.schedule.ir.ops import Attend, Gemm
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import checkpoint
from sim.words.workload import load_model
from tests.helpers import by_tier, slow_but
from tests.schedule.model.test_step import is_exact, make_step, step
from tests.schedule.proof.test_check_catches import refuses

LLAMA = block_of(load_model("tiny"))

BEFORE = ["norm1", "wq", "wk", "wv", "rope q", "rope k"]
AFTER = ["wo", "residual of attention", "norm2", "w_gate", "w_up", "swiglu"]
"""All that a full checkpoint computes again around attention, as torch's checkpointing stops: not w_down, which that of
Megatron-LM runs (whole)."""
NAMES = ["h1", "q", "k", "v", "out", "middle", "h2", "gate", "up", "act"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("full", BEFORE, AFTER),
        ("whole", BEFORE, [*AFTER, "w_down", "residual of mlp"]),
        ("attention", BEFORE, AFTER),
        ("x+out", BEFORE, AFTER),
        ("x+q+k+v+out", BEFORE[:1], AFTER),
        ("x+h1+q+k+v+out", [], AFTER),
        ("x+out+h2", BEFORE, ["wo", "residual of attention", "w_gate", "w_up", "swiglu"]),
        ("x+out+middle", BEFORE, AFTER[2:]),
        ("x+q+k+v", BEFORE[:1], AFTER),
        ("x+q", ["norm1", "wk", "wv", "rope k"], AFTER),
        ("x+out+gate+up+h2+middle", BEFORE, ["swiglu"]),
        ("x+out+act+h2+middle", BEFORE, ["w_gate", "w_up"]),
        ("none", [], []),
        ("+".join(["x", *NAMES]), [], []),
    ],
)
def test_what_runs_again_by_hand(name: str, before: list[str], after: list[str]) -> None:
    point = checkpoint(LLAMA, name)
    assert [one.label for one in point.again.before] == before
    assert [one.label for one in point.again.after] == after
    assert point.attends == ("out" not in name and name not in {"none", "attention"})
    assert point.lays_out == (not point.attends and "rope q" in before)


def test_only_a_full_list_is_everything() -> None:
    assert checkpoint(LLAMA, "+".join(["x", *NAMES])) == checkpoint(LLAMA, "none")
    for missing in NAMES:
        assert checkpoint(LLAMA, "+".join(["x", *(name for name in NAMES if name != missing)])).is_needed, missing


def test_attention_runs_once_a_layer_where_its_output_is_kept() -> None:
    """So that each rank attends L times forward, not 2L; and its hops are those of two passes."""
    counts = {}
    for name in ("full", "attention", "none"):
        ops = make_step("ring", 2, step(), checkpoint=name).schedule.program(0).ops
        counts[name] = sum(isinstance(op, Attend) for op in ops)
    assert counts["full"] == 2 * counts["attention"] == 2 * counts["none"] > 0


@pytest.mark.sweep
def test_bytes_of_ulysses_that_lays_out_again() -> None:
    """Of 2 layers and 32 tokens in fp64, 8 and 4 heads of 16: with 2 ranks half of q, k and v, and of out."""
    sent = {
        name: make_step("ulysses", 2, step(), checkpoint=name).schedule.header.claims.wire_bytes
        for name in ("none", "x+q+k+v+out", "attention", "full")
    }
    each = 2 * 32 * 16 * 8 // 2
    assert sent["x+q+k+v+out"] == sent["none"]
    assert sent["attention"] == sent["none"] + each * (8 + 4 + 4)
    assert sent["full"] == sent["none"] + each * (8 + 4 + 4 + 8)


def held(schedule: Schedule) -> Counter[str]:
    """Return the bytes per token and layer that the forward pass of rank 0 leaves for the backward pass, by name."""
    program: Program = schedule.program(0)
    parts: dict[str, set[int]] = {
        part: {view.buffer for op in program.ops if op.part == part for view in (*op.reads, *op.writes)}
        for part in ("forward", "backward")
    }
    outside = {port.view.buffer for port in (*program.inputs, *program.outputs)}
    workload = schedule.header.workload
    tokens = workload.seq // schedule.num_ranks
    found: Counter[str] = Counter()
    for number in (parts["forward"] & parts["backward"]) - outside:
        buffer = program.buffers[number]
        if buffer.category in {"saved", "attention"}:
            found[buffer.name] += buffer.nbytes
    return Counter({name: nbytes // tokens for name, nbytes in found.items()})


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["full", "whole", "attention", "x+out+h2", "x+q+k+v+out", "none"])
def test_what_is_kept_by_hand(name: str) -> None:
    """Of one layer more, per token in fp64: E = 128 of x, middle and norms; 8 heads of 16 of q and out, 4 of k and v;
    F = 64 of gate, up and act; beside out a log-sum-exp of each head, beside a norm's result one number.
    """
    few, many = (held(make_step("ring", 2, step(layers=layers), checkpoint=name).schedule) for layers in (3, 4))
    embed = {"x": 128 * 8}
    results = {"out": 128 * 8, "lse": 8 * 8}
    inputs = {"q": 128 * 8, "k": 64 * 8, "v": 64 * 8}
    expected = {
        "full": embed,
        "whole": embed,
        "attention": embed | results,
        "x+out+h2": embed | results | {"h2": 128 * 8, "rstd2": 8},
        "x+q+k+v+out": embed | results | inputs,
        "none": embed | results | inputs | {"h1": 1024, "rstd1": 8, "middle": 1024, "h2": 1024, "rstd2": 8}
        | {"gate": 512, "up": 512, "act": 512},
    }  # fmt: skip
    more = many - few
    assert sum(more.values()) == sum(expected[name].values()), more


@pytest.mark.sweep
def test_what_a_layer_computes_again_counts_among_the_flops() -> None:
    """Of 2 layers, 32 tokens: 2 FLOPs a weight; wq and wo 128 x 128, wk and wv 128 x 64, of MLP's three 128 x 64."""
    claimed = {
        name: make_step("ring", 2, step(), checkpoint=name).schedule.header.claims.gemm_flops
        for name in ("none", "x+q+k+v+out", "x+h1+q+k+v+out+middle+h2", "full", "whole")
    }
    each = 2 * 2 * 32 * 128
    assert claimed["x+q+k+v+out"] - claimed["none"] == each * (128 + 2 * 64)
    assert claimed["x+h1+q+k+v+out+middle+h2"] - claimed["none"] == each * 2 * 64
    assert claimed["full"] - claimed["none"] == each * (128 + 2 * 64 + 128 + 2 * 64)
    assert claimed["whole"] - claimed["full"] == each * 64


@pytest.mark.parametrize("name", by_tier({"ulysses"}, {"fpdt"}, SCHEDULES))
@pytest.mark.parametrize("kept", slow_but({"attention", "whole"}, ["attention", "whole", "x+out+k", "x+q+k+v+h2"]))
def test_every_schedule_is_exact(name: str, kept: str) -> None:
    if name in {"fpdt", "upipe"} and not {"q", "k", "v"}.isdisjoint(kept.split("+")):
        with pytest.raises(InputError, match="is none of the tensors that a layer can keep for its backward pass"):
            make_step(name, 4, step(), checkpoint=kept)
        return
    is_exact(name, 1 if name == "single" else 4, step(), checkpoint=kept)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_list_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    for name in ("zigzag", "ulysses"):
        kept = [one for one in NAMES if draw.random() < 0.4]
        options = {"activations": draw.choice(["hbm", "host", "save-on-cpu"])}
        is_exact(name, 2, step(), checkpoint="+".join(["x", *kept]), **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out+h2", "lacks x: backward needs a layer's input, and no equation of the layer makes it"),
        ("x+q_raw", "'q_raw' is none of the tensors .* a list such as x.out of x, h1, q, k, v, out, middle, h2"),
        ("x+lse", "'lse' is none of the tensors"),
        ("x+", "'' is none of the tensors"),
        ("selective", "allowed are none, full, whole, attention, or a list"),
    ],
)
def test_what_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=f"schedule.checkpoint=.*{message}"):
        make_step("ring", 2, step(), checkpoint=name)


def test_inputs_that_attention_keeps_in_a_form_of_its_own() -> None:
    options = {"ring_backward": "kv-at-hand"}
    with pytest.raises(InputError, match="computes q, k and v again, but .* keeps them in a form of its own"):
        make_step("ring", 2, step(), checkpoint="attention", **options)
    is_exact("ring", 2, step(), checkpoint="x+q+k+v+out", **options)


@pytest.mark.sweep
@pytest.mark.parametrize("kept", slow_but({"attention"}, ["none", "full", "attention"]))
@pytest.mark.parametrize("options", [{}, {"recompute": False}, {"activations": "host"}], ids=str)
def test_heads_that_are_projected_stage_by_stage(kept: str, options: dict[str, Any]) -> None:
    """Two stages share keys; heads of q are taken in another order than theirs."""
    is_exact("upipe", 2, step(), checkpoint=kept, **options)


def changed(schedule: Schedule, change: Any) -> Schedule:
    """Return a schedule whose programs' ops are changed."""
    return Schedule(
        schedule.header, lambda rank: schedule.program(rank).replace(ops=change(schedule.program(rank).ops))
    )


@pytest.mark.sweep
def test_a_layer_of_which_something_is_not_computed_again() -> None:
    schedule = make_step("ulysses", 2, workload := step(), checkpoint="attention").schedule
    assert workload.layers == 2
    for lost in ("rope k", "all-to-all k", "w_up", "swiglu", "residual of attention"):

        def without_last(ops: Any, lost: str = lost) -> Any:
            at = [number for number, op in enumerate(ops) if op.label == lost][-1]
            return (*ops[:at], *ops[at + 1 :])

        refuses(
            changed(schedule, without_last), "before all of it is written|not complete yet|no equation|tokens|lacks"
        )


def test_a_layer_computed_again_with_the_weights_of_another() -> None:
    schedule = make_step("ring", 2, step(layers=3), checkpoint="x+h1+q+k+v+out+middle+h2", zero_stage=0).schedule

    def of_other_layer(ops: Any) -> Any:
        again = [number for number, op in enumerate(ops) if isinstance(op, Gemm) and op.label == "w_up"][3:]
        swapped = dict(zip(again, reversed(again), strict=True))
        return tuple(
            type(op)(**{name: getattr(op, name) for name in op.__struct_fields__} | {"b": ops[swapped[at]].b})
            if at in swapped
            else op
            for at, op in enumerate(ops)
        )

    refuses(changed(schedule, of_other_layer), "no equation of the layer")


def test_checkpoints_are_of_steps() -> None:
    with pytest.raises(InputError, match="schedule.checkpoint=attention is of training steps"):
        make_step("ring", 2, step(scope="layer"), checkpoint="attention")
