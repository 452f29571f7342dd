"""Frozen weights with adapters of low rank: proved, exact, and as many FLOPs, bytes and parameters as by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, get_args

import msgspec
import pytest

from sim.accounts.footprint import footprint
from sim.accounts.memory import terms_in_use
from sim.base.errors import InputError
from sim.engine.play.simulate import STEADY
from sim.schedule.ir.ops import (
    AdamW,
    AllGather,
    EmbedBackward,
    Gemm,
    Op,
    ReduceScatter,
    RmsNormBackward,
    Scale,
    TokenSum,
)
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.block import block_of
from sim.schedule.model.layer import gemm_flops
from sim.schedule.model.scope import trained, units
from sim.schedule.proof.check import Checked
from sim.words.options import ModulesName
from sim.words.workload import LoraTarget, Workload
from tests.engine.play.equality import Cell, require_equal_engines
from tests.engine.play.test_engines import requires_compiler
from tests.helpers import slow_but, sweep_but
from tests.schedule.model.test_blocks import FEATURES, changed
from tests.schedule.model.test_step import STACKS, errors_of, make_step, replaced
from tests.schedule.model.test_tiled_mlp import narrow
from tests.schedule.proof.test_check_catches import refuses
from topology.cluster import Cluster, load_cluster

LORA: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 1.0}
TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)
ATTENTION = TARGETS[:4]


def of(feature: str = "", *, lora: dict[str, Any] = LORA, **fields: Any) -> Workload:
    return msgspec.structs.replace(changed(**{**FEATURES.get(feature, {}), **lora}), **fields)


def exact(name: str, ranks: int, workload: Workload, dp: int = 1, **options: Any) -> Checked:
    checked = make_step(name, ranks, workload, dp, **options)
    assert errors_of(checked).keys() >= {"loss 2", "new adapters parameters", "new second moments of adapters 1"}
    return checked


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"fpdt", "zigzag"}, SCHEDULES))
def test_every_schedule_is_proved_and_exact(name: str) -> None:
    exact(name, 1 if name == "single" else 4, of())


@pytest.mark.parametrize("modules", sweep_but({"fused"}, ["fused", "eager"]))
def test_a_step_is_exact(modules: ModulesName) -> None:
    """Losses, adapters and their moments equal autograd of the textbook formula; nothing else is updated."""
    checked = exact("ring", 2, of(), modules=modules)
    assert all("adapters" in port.tensor or port.tensor == "loss" for port in checked.schedule.program(0).outputs)


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"upipe"}, ["upipe", "fpdt"]))
def test_adapters_of_eager_modules_are_made_part_by_part(name: str) -> None:
    """What is scaled and added is as wide as the heads of a part."""
    for checkpoint in ("none", "full"):
        exact(name, 4, of(lora={**LORA, "lora_targets": ("q", "v")}), modules="eager", checkpoint=checkpoint)


@pytest.mark.sweep
@pytest.mark.parametrize("feature", slow_but({"all biases", "parallel residual"}, FEATURES))
@pytest.mark.parametrize("modules", ["fused", "eager"])
def test_every_feature(feature: str, modules: ModulesName) -> None:
    exact("fpdt" if "soft" not in feature else "ring", 2, of(feature), modules=modules)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "stack",
    slow_but({"nothing", "optimiser on the host", "chunked loss"}, [one for one in STACKS if "mlp" not in STACKS[one]]),
)
def test_every_technique(stack: str) -> None:
    exact("zigzag", 2, of(batch=STACKS[stack].get("micro_batches", 1)), **STACKS[stack])


@pytest.mark.sweep
@pytest.mark.parametrize("mlp", slow_but({"tiled"}, ["tiled", "mini"]))
@pytest.mark.parametrize("modules", ["fused", "eager"])
def test_tiles_of_a_frozen_mlp(mlp: str, modules: ModulesName) -> None:
    """Some larger than a rank's tokens, and some of which a rank has several."""
    attention = {**LORA, "lora_targets": ATTENTION}
    several = narrow(batch=2, model=msgspec.structs.replace(narrow().model, **attention))
    for workload in (of(lora=attention), several):
        exact("zigzag", 2, workload, mlp=mlp, modules=modules)


@pytest.mark.sweep
@pytest.mark.parametrize("shards", ["replica", "all"])
def test_replicas(shards: str) -> None:
    exact("ulysses", 4, of(), dp=2, shards=shards)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_narrower_types(dtype: str) -> None:
    exact("zigzag", 2, of(dtype=dtype, lora={**LORA, "lora_alpha": 0.5}))


@pytest.mark.parametrize("name", sweep_but({"ulysses"}, ["ulysses", "fpdt", "single"]))
def test_layers_alone_leave_gradients_of_adapters(name: str) -> None:
    checked = make_step(name, 1 if name == "single" else 2, of(scope="layer"))
    gradients = {f"dlora_{side}_{target}{layer}" for side in "ab" for target in TARGETS for layer in ("", " 1")}
    assert errors_of(checked).keys() == {"x 2", "dx", *gradients}
    errors_of(make_step(name, 1 if name == "single" else 2, of(scope="layer", passes="forward")))


@requires_compiler
@pytest.mark.parametrize("modules", sweep_but({"eager"}, ["fused", "eager"]))
def test_both_engines_play_alike(modules: ModulesName) -> None:
    checked = make_step("ulysses", 4, of(dtype="bf16"), modules=modules)
    require_equal_engines(Cell(checked, Cluster(load_cluster("hgx-h100")), None, STEADY))


def test_adapters_have_rank_times_both_widths() -> None:
    """E 128, H 8 x 16, H_kv 4 x 16, F as the model has it: 2 (in + out) of each of seven layers."""
    workload = of()
    model = workload.model
    embed, heads, kv_heads, ffn = model.embed_dim, 128, 64, model.ffn_dim
    widths = [(embed, heads), *[(embed, kv_heads)] * 2, (heads, embed), *[(embed, ffn)] * 2, (ffn, embed)]
    counted = [math.prod(unit.flat.shape(model)) for unit in trained(workload)]
    assert counted == [sum(2 * (fan_in + fan_out) for fan_in, fan_out in widths)] * 2
    some = of(lora={**LORA, "lora_targets": ("q", "down")})
    (own, _) = [math.prod(unit.flat.shape(some.model)) for unit in trained(some)]
    assert own == 2 * (embed + heads) + 2 * (ffn + embed)


def test_backward_has_one_product_for_each_frozen_weight() -> None:
    """Where all is trained a step has three products for each weight: forward, of inputs, of weights. Frozen ones have
    two, and adapters three.
    """
    plain, frozen = changed(), of()
    tokens = plain.batch * plain.seq
    weights = (gemm_flops(plain) // tokens) // 6
    adapters = sum(math.prod(unit.flat.shape(frozen.model)) for unit in trained(frozen))
    assert gemm_flops(frozen) == tokens * (4 * weights + 6 * adapters)
    ops = make_step("ring", 2, frozen, checkpoint="none").schedule.program(0).ops
    kinds = Counter(type(op) for op in ops)
    assert kinds[EmbedBackward] == kinds[TokenSum] == kinds[Scale] == 0
    assert all(op.dweight is None for op in ops if isinstance(op, RmsNormBackward))
    of_weights = [op.label for op in ops if isinstance(op, Gemm) and op.form == "tn"]
    assert len(of_weights) == 2 * 2 * 7
    assert all("dlora" in label for label in of_weights)


def test_frozen_weights_are_gathered_and_never_scattered() -> None:
    """At stage 3 for both passes, as units of their own before those of adapters; below it they stay."""
    program = make_step("ring", 2, of()).schedule.program(0)
    gathered = Counter(op.label for op in program.ops if isinstance(op, AllGather))
    assert gathered == {"gather embedding": 1, "gather weights": 4, "gather adapters": 4, "gather head": 1}
    assert {op.label for op in program.ops if isinstance(op, ReduceScatter)} == {"reduce adapters"}
    below = make_step("ring", 2, of(), zero_stage=2).schedule.program(0)
    assert Counter(op.label for op in below.ops if isinstance(op, AllGather)) == {"gather adapters": 2}


@pytest.mark.parametrize("stage", sweep_but({3}, [0, 2, 3]))
def test_memory_by_formula_and_by_the_walk(stage: int) -> None:
    """2 bytes for each frozen weight, sharded at stage 3 alone, and of adapters 16, with 2 of whole ones below."""
    workload = of(dtype="bf16")
    checked = make_step("zigzag", 4, workload, zero_stage=stage)
    frozen, own = (
        sum(math.prod(unit.flat.shape(workload.model)) for unit in units(workload) if unit.frozen == kept)
        for kept in (True, False)
    )
    parts = 1 if stage == 0 else 4
    said = footprint(checked.schedule.header).states_bytes
    assert said == 2 * frozen // (4 if stage == 3 else 1) + (0 if stage == 3 else 2 * own) + 16 * own // parts
    program = checked.schedule.program(0)
    number = next(number for number, op in enumerate(program.ops) if isinstance(op, AdamW))
    held = {term: of_op[number] for term, of_op in terms_in_use(program, checked.dependencies[0]).items()}
    assert held["parameters"] + held["gradients"] + held["optimiser"] == said + 4 * len(trained(workload))


def test_what_backward_keeps() -> None:
    """Of adapters at attention no input of the MLP's products, and of eager norms nothing that their weight multiplies;
    of each adapter A x.
    """
    whole, some = (of(lora={**LORA, "lora_targets": targets}).model for targets in (("gate", "down"), ATTENTION))
    kept = {tensor.name for tensor in block_of(some).saved}
    assert {"h2", "act"} & kept == set()
    assert kept >= {"h1", "out", "gate", "up", *(f"lora_inner_{target}" for target in ATTENTION)}
    assert {"h2", "act", "lora_inner_down"} <= {tensor.name for tensor in block_of(whole).saved}
    eager = {tensor.name for tensor in block_of(some, None, "eager").saved}
    assert {"x_normed", "middle_normed"} & eager == set()
    assert {"x_wide", "middle_wide"} <= eager


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("lora_b_v", "v.*is not complete yet"),
        ("lora_b_q", "is not complete yet"),
        ("lora_a_down", "reads.*before all of it is written"),
        ("back through lora_a_v", "is not complete|lacks contributions|packs"),
        ("gradient dlora_a_q", "reads.*before all of it is written"),
    ],
)
def test_an_op_that_is_left_out_is_caught(label: str, message: str) -> None:
    schedule = make_step("ring", 2, of(), checkpoint="none").schedule

    def program(rank: int) -> Program:
        found = schedule.program(rank)
        return found.replace(ops=tuple([op for op in found.ops if op.label != label or rank]))

    refuses(Schedule(schedule.header, program), message)


@pytest.mark.parametrize(
    ("kind", "label", "changes", "message"),
    [
        (Gemm, "lora_b_v", {"factor": 2.0}, "is no equation of the layer"),
        (Gemm, "lora_b_v", {"factor": msgspec.UNSET}, "is no equation of the layer|only gradients add up"),
        (Gemm, "lora_b_v", {"accumulate": False}, "is not complete yet"),
    ],
)
def test_other_factors_and_sums_are_caught(kind: type[Op], label: str, changes: dict[str, Any], message: str) -> None:
    schedule = make_step("ring", 2, of(), checkpoint="none").schedule

    def program(rank: int) -> Program:
        found = schedule.program(rank)
        ops = [
            msgspec.structs.replace(op, **changes) if isinstance(op, kind) and op.label == label else op
            for op in found.ops
        ]
        return found.replace(ops=tuple(ops))

    refuses(Schedule(schedule.header, program), message)


def test_only_a_frozen_weight_leaves_no_gradient() -> None:
    frozen, plain = (make_step("ring", 2, one, checkpoint="none").schedule for one in (of(), changed()))
    (norm, *_) = [op for op in frozen.program(0).ops if isinstance(op, RmsNormBackward)]
    refuses(replaced(frozen, RmsNormBackward, dweight=norm.weight), "leaves 2 results of 1|buffer")
    refuses(replaced(plain, RmsNormBackward, dweight=None), "leaves 1 results of 2|reads")


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"lora_alpha": 2.0}, {}, "there are none: leave them out, or set a rank with `set` model.lora_rank=N"),
        ({"lora_targets": ("q",)}, {}, "there are none"),
        ({**LORA, "lora_targets": ("gate",), "mlp": "gelu"}, {}, "allowed are q, k, v, o, up and down"),
        (LORA, {"mlp": "tiled"}, "have adapters: leave it out, or set model.lora_targets=q.k.v.o"),
        ({**LORA, "lora_targets": ("q", "up")}, {"mlp": "mini"}, "have adapters"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_step("ring", 2, changed(**fields), **options)
