"""Blocks that have more than Llama's: each line is proved, and executed as torch's autograd of the formulas has it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from sim.errors import InputError
from sim.schedule.ir.ops import BiasedGemm, HeadNorm, TokenSum
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.model.scope import units
from sim.workload import Workload
from tests.helpers import sweep_but
from tests.schedule.test_check_catches import refuses
from tests.schedule.test_step import STACKS, errors_of, make_step, step

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
    "norms of heads, biases, tied": {"qk_norm": "head", "biases": ("qkv",), "tied_embeddings": True},
}


def of(feature: str, **fields: Any) -> Workload:
    model = msgspec.structs.replace(step().model, **FEATURES[feature])
    return step(**({"model": model, "dtype": "fp64"} | fields))


def exact(name: str, ranks: int, workload: Workload, dp: int = 1, **options: Any) -> dict[str, float]:
    return errors_of(make_step(name, ranks, workload, dp, **options))


@pytest.mark.parametrize("feature", sweep_but({"all biases", "norms of heads"}, FEATURES))
def test_every_feature_is_exact(feature: str) -> None:
    exact("ring", 2, of(feature))


@pytest.mark.sweep
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("stack", ["full", "attention", "mst", "alst"])
def test_every_feature_computed_again(feature: str, stack: str) -> None:
    """What is kept of a layer follows from its equations, whichever these are."""
    options: dict[str, Any] = {"checkpoint": "attention"} if stack == "attention" else STACKS.get(stack, {})
    exact("ulysses", 2, of(feature, dtype="fp32", batch=2), **({"checkpoint": stack} if not options else options))


def test_units_hold_what_a_layer_has() -> None:
    model = of("norms of heads, biases, tied").model
    plain = step(model=msgspec.structs.replace(step().model, tied_embeddings=True))
    sizes = [sum(math.prod(unit.flat.shape(one.model)) for unit in units(one)) for one in (plain, step(model=model))]
    heads = model.num_heads + 2 * model.num_kv_heads
    assert sizes[1] - sizes[0] == plain.layers * model.head_dim * (heads + 2)
