"""Blocks that have more than Llama's: each line is proved, and executed as torch's autograd of the formulas has it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from sim.base.errors import InputError
from sim.schedule.ir.ops import BiasedGemm, HeadNorm, Op, Rope, TokenSum
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.model.block import Tile, block_of
from sim.schedule.model.checkpoint import nameable
from sim.schedule.model.scope import units
from sim.schedule.proof.check import check
from sim.schedule.proof.supersteps import Supersteps
from sim.schedule.write.attention import attention_flops
from sim.words.workload import LayerKind, Workload
from tests.helpers import by_tier, slow_but
from tests.schedule.model.test_step import STACKS, errors_of, make_step, replaced, step
from tests.schedule.proof.test_check_catches import refuses

FEATURES: dict[str, dict[str, Any]] = {
    "biases of q, k, v": {"biases": ("qkv",)},
    "all biases": {"biases": ("qkv", "out", "mlp")},
    "norms of heads": {"qk_norm": "head"},
    "norms of q and k": {"qk_norm": "all"},
    "norms behind attention and MLP": {"norms": "after", "qk_norm": "all"},
    "norms around": {"norms": "around", "mlp": "geglu"},
    "GELU of one product": {"mlp": "gelu", "biases": ("out", "mlp")},
    "half of each head rotated": {"rotary_dims": 8, "biases": ("qkv",), "norms": "around"},
    "parallel residual": {"parallel_residual": True, "biases": ("qkv", "mlp"), "mlp": "gelu"},
    "windows layer by layer": {"kinds": (LayerKind(window=5, rope_theta=5.0), LayerKind())},
    "layers that are not rotated": {"kinds": (LayerKind(), LayerKind(rotary_dims=0)), "qk_norm": "head"},
    "soft-caps": {"attention_softcap": 2.0, "logit_softcap": 1.5, "attention_scale": 0.4},
    "scales": {"embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 0.25, "attention_scale": 0.1},
    "adapters": {"lora_rank": 2, "lora_alpha": 1.0},
    "norms of heads, biases, tied": {"qk_norm": "head", "biases": ("qkv",), "tied_embeddings": True},
}


def changed(**fields: Any) -> Workload:
    model = step().model
    return step(model=type(model)(**{**msgspec.structs.asdict(model), **fields}), dtype="fp64")


def of(feature: str, **fields: Any) -> Workload:
    return msgspec.structs.replace(changed(**FEATURES[feature]), **fields)


def exact(name: str, ranks: int, workload: Workload, dp: int = 1, **options: Any) -> dict[str, float]:
    return errors_of(make_step(name, ranks, workload, dp, **options))


@pytest.mark.parametrize(
    "feature",
    by_tier(
        {"all biases", "norms of heads"},
        {
            "norms around",
            "half of each head rotated",
            "parallel residual",
            "windows layer by layer",
            "soft-caps",
            "adapters",
        },
        FEATURES,
    ),
)
def test_every_feature_is_exact(feature: str) -> None:
    exact("ring", 2, of(feature))


@pytest.mark.sweep
@pytest.mark.parametrize("feature", slow_but({"all biases", "norms of heads"}, FEATURES))
@pytest.mark.parametrize("stack", slow_but({"attention kept"}, ["attention kept", "nothing", "micro-batches"]))
def test_every_feature_with_other_techniques(feature: str, stack: str) -> None:
    """What is kept of a layer, and what runs again, follows from its equations, whichever these are."""
    exact("ulysses", 2, of(feature, batch=2), **STACKS[stack])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "cell",
    slow_but(
        {("upipe", "all biases")},
        [("fpdt", "all biases"), ("upipe", "all biases"), ("fpdt", "norms of heads"), ("fpdt", "norms of q and k"),
         ("fpdt", "windows layer by layer"), ("upipe", "windows layer by layer"), ("fpdt", "parallel residual")],
    ),
)  # fmt: skip
def test_projections_in_parts(cell: tuple[str, str]) -> None:
    name, feature = cell
    for checkpoint in ("none", "full"):
        exact(name, 2, of(feature), checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"residual_scale": 0.5, "norms": "after"}, {}, "residual_scale with norms after: allowed is one of both"),
        (
            {"qk_norm": "head"},
            {"name": "upipe"},
            "'upipe' projects some heads at a time, and test8:4 norms q and k behind that",
        ),
        ({"mlp": "geglu"}, {"mlp": "tiled"}, "`set` schedule.mlp computes MLPs of SwiGLU without biases in tiles"),
        ({"biases": ("mlp",)}, {"mlp": "mini"}, "`set` schedule.mlp computes MLPs of SwiGLU without biases in tiles"),
        ({"rotary_dims": 7}, {}, "rotary_dims 7: expected an even number of at most head_dim 16"),
        ({"rotary_dims": 18}, {}, "rotary_dims 18: expected an even number of at most head_dim 16"),
        ({"parallel_residual": True, "norms": "after"}, {}, "parallel_residual with norms behind"),
        ({"parallel_residual": True, "biases": ("out", "mlp")}, {}, "parallel_residual with biases of out and mlp"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_step(**({"name": "ring", "ranks": 2, "workload": changed(**fields)} | options))


@pytest.mark.parametrize(
    ("feature", "kind", "changes", "message"),
    [
        ("all biases", BiasedGemm, {"form": "nt"}, "adds a bias in form nt|takes"),
        ("all biases", BiasedGemm, {"accumulate": True}, "adds a bias in form nn: allowed is nn, alone"),
        ("norms of heads", HeadNorm, {"epsilon": 1.0}, "epsilon 1.0: norm_epsilon of the model is 1e-05"),
        ("half of each head rotated", Rope, {"rotated": 16}, "rotated 16: rotary_dims of the model is 8"),
        ("half of each head rotated", Rope, {"rotated": msgspec.UNSET}, "rotary_dims of the model is 8"),
    ],
)
def test_other_numbers_are_caught(feature: str, kind: type[Op], changes: dict[str, Any], message: str) -> None:
    refuses(replaced(make_step("ring", 2, of(feature)).schedule, kind, **changes), message)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("feature", "label", "message"),
    [
        ("all biases", "gradient dbq", "reads.*before all of it is written"),
        ("norms of heads", "norm_q", "reads.*before all of it is written"),
        ("norms around", "post_norm2", "reads.*before all of it is written|cannot add"),
        ("parallel residual", "sum of both", "lacks contributions|is not complete"),
    ],
)
def test_an_op_that_is_left_out_is_caught(feature: str, label: str, message: str) -> None:
    schedule = make_step("ring", 2, of(feature), checkpoint="none").schedule

    def program(rank: int) -> Program:
        found = schedule.program(rank)
        return found.replace(ops=tuple([op for op in found.ops if op.label != label or rank]))

    refuses(Schedule(schedule.header, program), message)


def test_gradients_of_biases_are_not_taken_for_each_other() -> None:
    """Those of k and v have one shape."""
    schedule = make_step("ring", 2, of("all biases")).schedule
    sums = {op.label: op for op in schedule.program(0).ops if isinstance(op, TokenSum)}
    swapped = replaced(schedule, TokenSum, total=sums["gradient dbk"].total)
    refuses(swapped, "has total of shape|packs|reads")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LayerKind(window=5), "is not what the mask .* keeps"),
        (LayerKind(rope_theta=5.0), "rotates by theta .*: rope_theta of this layer is"),
        (LayerKind(rotary_dims=0), "Rope .* of q .* is no equation of the layer"),
    ],
    ids=str,
)
def test_layers_of_another_kind_are_caught(kind: LayerKind, message: str) -> None:
    """And of a pattern that is right not every turn is played."""
    workload = changed(kinds=(kind, LayerKind()))
    workload = msgspec.structs.replace(workload, layers=6)
    other = msgspec.structs.replace(workload.model, kinds=(LayerKind(), kind))
    right, wrong = (
        make_step("ring", 2, one).schedule for one in (workload, msgspec.structs.replace(workload, model=other))
    )
    supersteps = Supersteps(right)
    supersteps.play()
    assert supersteps.num_played < len(supersteps.all)
    refuses(Schedule(right.header, wrong.program), message)


def test_a_window_is_the_shorter_one() -> None:
    workload = of("windows layer by layer", layers=5, window=9)
    assert [(one.window, count) for one, count in workload.kinds()] == [(5, 3), (9, 2)]
    assert attention_flops(workload.of_layer(0)) < attention_flops(workload.of_layer(1))
    claims = make_step("ring", 2, workload, checkpoint="none").schedule.header.claims
    assert claims
    assert claims.attention_flops == 3 * attention_flops(workload.of_layer(0)) + 2 * attention_flops(
        workload.of_layer(1)
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    "feature", slow_but({"norms around"}, ["norms of heads", "norms around", "norms behind attention and MLP"])
)
@pytest.mark.parametrize("mlp", slow_but({"whole"}, ["whole", "tiled"]))
def test_every_list_of_what_is_kept(feature: str, mlp: str) -> None:
    """Of each tensor that a layer can keep alone, and of all but each."""
    workload = of(feature, layers=1)
    if mlp == "tiled" and workload.model.mlp:
        pytest.skip("tiles are of SwiGLU")
    tile = Tile(8, saves=True) if mlp == "tiled" else None
    names = [name for name in nameable(block_of(workload.model, tile)) if name != "x"]
    for one in names:
        for kept in ([one], [name for name in names if name != one]):
            make_step("single", 1, workload, checkpoint="+".join(["x", *kept]), mlp=mlp)


def test_units_hold_what_a_layer_has() -> None:
    model = of("norms of heads, biases, tied").model
    plain = step(model=msgspec.structs.replace(step().model, tied_embeddings=True))
    sizes = [sum(math.prod(unit.flat.shape(one.model)) for unit in units(one)) for one in (plain, step(model=model))]
    heads = model.num_heads + 2 * model.num_kv_heads
    assert sizes[1] - sizes[0] == plain.layers * model.head_dim * (heads + 2)


@pytest.mark.parametrize("feature", ["soft-caps", "windows layer by layer"])
def test_attention_alone_is_that_of_the_first_layer(feature: str) -> None:
    workload = msgspec.structs.replace(of(feature), scope="attention", layers=1)
    entry = SCHEDULES["zigzag"]
    errors_of(check(entry.schedule(workload, entry.mesh(2, workload.model), entry.options)))
    backward = msgspec.structs.replace(workload, passes="backward")
    errors_of(check(entry.schedule(backward, entry.mesh(2, workload.model), entry.options)))
