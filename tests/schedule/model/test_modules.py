"""Eager norms and MLPs: exact, with what they keep and launch as it was counted, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.base.errors import InputError
from sim.schedule.derive.kernels import ELEMENTWISE, kernel_use
from sim.schedule.ir.ops import EagerNorm, EagerNormBackward, EagerSwiGlu, EagerSwiGluBackward, Kernel, RmsNorm
from sim.schedule.model.block import block_of
from sim.schedule.model.checkpoint import checkpoint, nameable
from sim.schedule.proof.check import Checked, check
from sim.setup.setup import Setup
from sim.software.counted import Pass, amount, load_counted
from sim.words.workload import ModelSpec, load_model
from tests.helpers import by_tier, slow_but
from tests.schedule.model.test_blocks import of
from tests.schedule.model.test_step import errors_of, is_exact, make_step, replaced, step
from tests.schedule.proof.test_check_catches import refuses

EAGER = block_of(load_model("tiny"), None, "eager")
COUNTED = load_counted("transformers-llama")
TECHNIQUES: dict[str, dict[str, Any]] = {
    "all kept": {"checkpoint": "none", "loss": "torch"},
    "a list": {"checkpoint": "x+out+h2"},
    "a list without the input": {"checkpoint": "h1+q+k+v+out+h2+gate+up+act"},
    "chunked loss": {"loss": "chunked", "checkpoint": "attention"},
    "tiles": {"mlp": "tiled"},
    "offloaded": {"activations": "host", "checkpoint": "none"},
    "replicated weights": {"zero_stage": 0},
}


@pytest.mark.sweep
@pytest.mark.parametrize("technique", slow_but({"all kept", "tiles"}, TECHNIQUES))
@pytest.mark.parametrize("dtype", slow_but({"bf16"}, ["bf16", "fp64"]))
def test_every_technique_is_exact(technique: str, dtype: str) -> None:
    is_exact("zigzag", 2, step(layers=3, dtype=dtype), modules="eager", **TECHNIQUES[technique])


@pytest.mark.parametrize("kept", ["none", "full"])
def test_an_eager_mlp_alone_is_exact_and_leaves_norms(kept: str) -> None:
    checked = make_step("zigzag", 2, step(layers=2), modules="eager-mlp", checkpoint=kept)
    assert errors_of(checked)
    kinds = {type(op) for op in checked.schedule.programs[0].ops}
    assert {RmsNorm, EagerSwiGlu, EagerSwiGluBackward} <= kinds
    assert not kinds & {EagerNorm, EagerNormBackward}


def of_layers(model: ModelSpec | str, **fields: Any) -> Checked:
    """Layers on one GPU, with eager modules."""
    return Setup("single", model=model, scope="layer", gpus=1, cluster="hgx-h100", set={"schedule.modules": "eager"},
                 **fields).resolved().checked()  # fmt: skip


BLOCKS = {
    ("ulysses", "norms around"),
    ("upipe", "biases of q, k, v"),
    ("usp", "norms behind attention and MLP"),
    ("ring", "parallel residual"),
    ("zigzag", "norms of heads, biases, tied"),
    ("fpdt", "norms of heads"),
}


@pytest.mark.parametrize(
    "cell",
    by_tier(
        {("zigzag", "norms of heads, biases, tied")},
        {("fpdt", "norms of heads"), ("ring", "parallel residual")},
        sorted(BLOCKS),
    ),
    ids=" of ".join,
)
@pytest.mark.parametrize("kept", ["none", "full"])
def test_other_blocks_are_exact(cell: tuple[str, str], kept: str) -> None:
    name, feature = cell
    assert errors_of(make_step(name, 2, of(feature), modules="eager", checkpoint=kept))


def test_what_a_layer_keeps_is_what_was_counted() -> None:
    """Of Llama-3-8B in bf16 196 KiB a token; beside that attention's kernel keeps the state of its random numbers."""
    kept = []
    for layers in (2, 3):
        checked = of_layers("llama3-8b", seq=256, layers=layers)
        program = checked.schedule.program(0)
        parts: dict[str, set[int]] = {
            part: {view.buffer for op in program.ops if op.part == part for view in (*op.reads, *op.writes)}
            for part in ("forward", "backward")
        }
        outside = {port.view.buffer for port in (*program.inputs, *program.outputs)}
        kept.append(sum(program.buffers[one].nbytes for one in (parts["forward"] & parts["backward"]) - outside))
    counted = sum(
        times * amount(COUNTED.parts[part].kept, sizes_of(load_model("llama3-8b"), 256))
        for part, times in {"norm": 2, "attention": 1, "mlp": 1}.items()
    )
    assert kept[1] - kept[0] == counted - COUNTED.parts["attention"].kept["1"]
    assert (kept[1] - kept[0]) / 256 / 1024 == pytest.approx(196, abs=0.2)


def sizes_of(model: ModelSpec, tokens: int) -> dict[str, int]:
    """What amounts of tables are proportional to."""
    return {"tokens": tokens, "sequence": tokens, "hidden": model.embed_dim, "ffn": model.ffn_dim,
            "heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "part", "backward"),
    [
        (EagerNorm, "norm", False),
        (EagerNormBackward, "norm", True),
        (EagerSwiGlu, "mlp", False),
        (EagerSwiGluBackward, "mlp", True),
    ],
)
def test_what_is_launched_is_what_was_counted(kind: type[Kernel], part: str, backward: bool) -> None:
    """Every kernel, with its bytes and launches. A sum of gradients of the MLP's input is not between its products."""
    model = load_model("tiny")
    program = of_layers("tiny", seq=48, layers=1, dtype="bf16").schedule.program(0)
    op = next(op for op in program.ops if isinstance(op, kind))
    use = kernel_use(op, program)
    counted: Pass = COUNTED.parts[part].backward if backward else COUNTED.parts[part].forward
    sizes, expected = sizes_of(model, 48), Counter[tuple[str, str, float]]()
    for one in counted.kernels:
        if part == "norm" or "tokens*ffn" in one.reads:
            moved = amount(one.reads, sizes) + amount(one.writes, sizes)
            expected[one.variant, one.dtype, moved] += one.launches
    assert {one.kernel for one, _ in use.loop} == {ELEMENTWISE}
    found = Counter[tuple[str, str, float]]()
    for one, times in use.loop:
        found[one.variant, one.dtype, one.hbm_bytes] += int(times)
    assert found == expected
    assert use.hbm_bytes == sum(moved * times for (_, _, moved), times in expected.items())


def test_a_layer_keeps_its_input_only_to_compute_again() -> None:
    assert "x" in nameable(EAGER)
    assert "middle" not in nameable(EAGER)
    assert EAGER.x not in checkpoint(EAGER, "none").held
    assert checkpoint(EAGER, "full").held == (EAGER.x,)
    with pytest.raises(InputError, match="lacks x"):
        checkpoint(EAGER, "h1+q+k+v+out")


def test_attention_alone_has_no_modules() -> None:
    with pytest.raises(InputError, match="scope 'attention' has none: leave it out, or set `scope` layer or step"):
        Setup(
            "ring", model="tiny", cp=2, seq=64, scope="attention", set={"schedule.modules": "eager"}
        ).resolved().built()


def test_software_with_eager_modules_goes_with_every_scope() -> None:
    for scope, expected in (("attention", "fused"), ("layer", "eager")):
        found = Setup("ring", model="tiny", cp=2, seq=64, cluster="hgx-h100", scope=scope, software="huggingface")
        assert found.resolved().options.modules == expected


def test_a_copy_of_another_norm_is_caught() -> None:
    schedule = make_step("single", 1, step(layers=1), modules="eager", checkpoint="none").schedule
    norms = [op for op in schedule.program(0).ops if isinstance(op, EagerNorm)]
    refuses(replaced(schedule, EagerNormBackward, wide=norms[0].wide), "no equation of the layer")


@pytest.mark.sweep
def test_fused_schedules_keep_their_hash() -> None:
    plain, named = (make_step("ring", 2, step(), **options).schedule for options in ({}, {"modules": "fused"}))
    assert "modules" not in named.header.options
    assert plain.hash == named.hash
    check(named)
