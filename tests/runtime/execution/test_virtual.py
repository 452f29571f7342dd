"""Exactness on the virtual cluster: every schedule, up to 64 ranks, in random orders, against one process in fp64."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution import inputs, virtual
from runtime.execution.inputs import global_tokens
from runtime.execution.ops import dense
from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from runtime.processes.launch import Session
from runtime.run import ScheduleRun
from sim.base.errors import InputError, ScheduleError
from sim.engine.play.simulate import simulate
from sim.schedule.ir.masks import Span
from sim.schedule.methods.catalog import SCHEDULES
from sim.words.workload import Workload
from tests.helpers import (
    OFFLOADED,
    VARIANTS,
    checked_or_refused,
    make_checked,
    make_cluster_spec,
    make_model,
    slow_but,
)
from topology.cluster import Cluster

CPU = torch.device("cpu")
HEADS = ((8, 8), (8, 4), (8, 2), (8, 1))
SIXTEEN = {"zigzag", "balanced-ring", "double-ring", "ulysses", "usp of 4", "upipe over rings"}
MASKS: tuple[dict[str, Any], ...] = ({"mask": "causal"}, {"mask": "full"}, {"window": 9})


def exact_or_refused(name: str, ranks: int, order_seed: int | None, **fields: Any) -> bool:
    """Execute a cell and hold it against the reference; False if it is refused, as it has to be."""
    workload = Workload(**fields)
    checked = checked_or_refused(name, workload, ranks)
    if checked is None:
        return False
    worst = output_errors(checked, execute_virtual(checked, CPU, order_seed))
    if workload.scope == "layer":
        last = workload.layers
        assert worst.keys() >= {f"x {last}", "dx", "dwq", f"dw_down {last - 1}", "dnorm1"}
    else:
        assert worst.keys() >= ({"dq", "dk", "dv"} if workload.backward else {"out"})
    # Sums in the model's own data type, as some codes keep them, lose a digit where that is narrow.
    variant = (VARIANTS | OFFLOADED)[name]
    narrow = getattr(variant.chosen, "gradients", "fp32") == "model"
    bound = BOUNDS[workload.dtype] * (3 if narrow and workload.dtype in {"bf16", "fp16"} else 1)
    assert all(error <= bound for error in worst.values()), (name, ranks, worst)
    return True


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"single", "ring", "zigzag", "balanced-ring", "ulysses"}, VARIANTS))
def test_small_numbers_of_ranks(name: str) -> None:
    """Heads, masks and numbers of ranks in turns, each in an order of its own that the derived dependencies allow: a
    race detector by execution.
    """
    cells = list(itertools.product((4, 2, 3, 1), HEADS, MASKS))
    for order_seed, (ranks, heads, mask) in enumerate(cells[:: 7 if name in SCHEDULES else 17]):
        model = make_model(*heads)
        exact_or_refused(name, ranks, order_seed, model=model, seq=48, batch=2, dtype="fp64", **mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_up_to_eight_ranks(name: str) -> None:
    """More of the same cells."""
    cells = list(itertools.product((1, 2, 3, 4, 8), HEADS, MASKS))
    for ranks, heads, mask in cells[:: 5 if name in SCHEDULES else 7]:
        model = make_model(*heads)
        exact_or_refused(name, ranks, ranks, model=model, seq=48, batch=2, dtype="fp64", **mask)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [dtype for dtype in BOUNDS if dtype != "fp64"])
@pytest.mark.parametrize("name", slow_but({"zigzag", "allgather", "ulysses"}, VARIANTS))
def test_narrower_data_types(name: str, dtype: str) -> None:
    ranks = 1 if VARIANTS[name].schedule == "single" else 4
    for heads in ((8, 4), (8, 1)):
        assert exact_or_refused(name, ranks, 2, model=make_model(*heads), seq=48, batch=2, dtype=dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_layers(name: str) -> None:
    """Output, input gradient and all weights' gradients equal autograd of the textbook formulas."""
    two_layers_are_exact(name, 1 if name == "single" else 4, "fp64", (8, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("dtype", "ranks"), [("fp64", 8), ("fp64", 4), ("fp64", 2), ("fp64", 1), ("fp32", 4), ("bf16", 4)]
)
def test_two_layers_in_other_data_types_and_on_other_numbers_of_ranks(name: str, dtype: str, ranks: int) -> None:
    for heads in ((8, 8), (8, 2)):
        if name != "single" or ranks == 1:
            two_layers_are_exact(name, ranks, dtype, heads)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["zigzag", "ulysses"])
def test_two_layers_in_a_narrow_data_type(name: str) -> None:
    two_layers_are_exact(name, 4, "bf16", (8, 4))


def two_layers_are_exact(name: str, ranks: int, dtype: str, heads: tuple[int, int]) -> None:
    fields: dict[str, Any] = {"scope": "layer", "layers": 2, "batch": 2, "dtype": dtype}
    assert exact_or_refused(name, ranks, ranks, model=make_model(*heads), seq=32, **fields)


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"single, offloaded", "zigzag, offloaded", "ulysses, offloaded"}, OFFLOADED))
def test_activations_on_the_host(name: str) -> None:
    """In random orders, so that a copy that has not been waited for shows."""
    played = [
        exact_or_refused(
            name, ranks, seed, model=make_model(8, 4), seq=32, scope="layer", layers=3, dtype="fp64", batch=2
        )
        for ranks, seed in ((1, 1), (4, 2))
    ]
    assert any(played)


@pytest.mark.sweep
@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("name", slow_but(SCHEDULES, VARIANTS))
def test_one_pass_alone(name: str, passes: str) -> None:
    variant = VARIANTS[name]
    ranks = 1 if variant.schedule == "single" else 4
    exact_or_refused(name, ranks, 5, model=make_model(8, 4), seq=48, dtype="fp64", passes=passes)


@pytest.mark.sweep
@pytest.mark.parametrize("heads", slow_but({(32, 4)}, [(32, 4), (12, 2), (64, 8)]))
@pytest.mark.parametrize("name", slow_but({"balanced-ring", "ulysses", "usp of 4"}, sorted(SIXTEEN)))
def test_sixteen_ranks(name: str, heads: tuple[int, int]) -> None:
    exact_or_refused(name, 16, 7, model=make_model(*heads, head_dim=8), seq=64, dtype="fp64")


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("ring", (4, 2)), ("zigzag", (2, 1)), ("striped", (2, 1)), ("burst", (2, 1)), ("balanced-ring", (2, 1)),
        ("double-ring", (2, 1)), ("allgather", (2, 1)), ("ulysses", (64, 64)), ("ulysses", (64, 8)),
        ("usp of 4", (8, 4)), ("upipe over rings", (4, 2)),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_sixty_four_ranks(name: str, heads: tuple[int, int]) -> None:
    for dtype in ("fp64", "fp32"):
        assert exact_or_refused(name, 64, 3, model=make_model(*heads, head_dim=8), seq=128, dtype=dtype)


def test_heads_that_do_not_divide_are_refused() -> None:
    assert not exact_or_refused("ulysses", 64, 3, model=make_model(48, 8, head_dim=8), seq=128)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", slow_but({*SCHEDULES} - {"single"}, [name for name in VARIANTS if VARIANTS[name].schedule != "single"])
)
def test_fewest_tokens_per_rank(name: str) -> None:
    """One token a rank; two where each rank has two chunks."""
    seq = 16 if getattr(VARIANTS[name].chosen, "layout", "") == "zigzag" else 8
    assert exact_or_refused(name, 8, 1, model=make_model(8, 8), seq=seq, dtype="fp64", mask="causal")


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but(SCHEDULES, VARIANTS))
def test_padding_changes_nothing(name: str) -> None:
    """What is verified are the real tokens, against the sequence without padding."""
    ranks = 1 if VARIANTS[name].schedule == "single" else 4
    assert exact_or_refused(name, ranks, 1, model=make_model(8, 4), seq=48, padding=5, dtype="fp64")


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"zigzag", "ulysses", "fpdt"}, SCHEDULES))
def test_padding_of_layers_changes_nothing(name: str) -> None:
    ranks = 1 if name == "single" else 4
    fields: dict[str, Any] = {"scope": "layer", "layers": 2}
    assert exact_or_refused(name, ranks, 1, model=make_model(8, 4), seq=48, padding=5, dtype="fp64", **fields)


@pytest.mark.parametrize("name", ["ring", "zigzag", "striped", "balanced-ring"])
def test_log_sum_exps_far_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results whose log-sum-exps differ by more than 88, where exp overflows in fp32, merge exactly."""
    real = inputs.global_tokens

    def steep(tensor: str, span: Span, heads: int, workload: Workload) -> torch.Tensor:
        value = real(tensor, span, heads, workload)
        if tensor == "q":
            return value.abs()
        positions = torch.arange(*span, dtype=torch.float64)[None, :, None, None]
        return value.abs() * torch.where(positions < 24, 40.0, 0.5) if tensor == "k" else value

    monkeypatch.setattr(inputs, "global_tokens", steep)
    workload = Workload(model=make_model(4, 4), seq=48, dtype="fp64", mask="causal")
    checked = make_checked(name, workload, 4)
    lse = inputs.reference(workload)["lse", 0]
    scores = steep("q", Span(40, 41), 4, workload)[0, 0] * steep("k", Span(40, 41), 4, workload)[0, 0]
    assert float(lse[0, :, 40].max() - scores.sum(dim=-1).max()) > 88
    assert max(output_errors(checked, execute_virtual(checked, CPU, 2)).values()) <= 1e-12


def test_inputs_depend_on_positions_only() -> None:
    workload = Workload(model=make_model(4, 4), seq=512, batch=2, dtype="fp64", seed=3)
    whole = global_tokens("q", Span(0, 512), 4, workload)
    assert torch.equal(global_tokens("q", Span(100, 300), 4, workload), whole[:, 100:300])
    assert torch.equal(global_tokens("q", Span(5, 509, 7), 4, workload), whole[:, 5:509:7])
    assert not torch.equal(global_tokens("k", Span(0, 512), 4, workload), whole)
    other = msgspec.structs.replace(workload, seed=4)
    assert not torch.equal(global_tokens("q", Span(0, 512), 4, other), whole)


def test_what_is_not_a_number_is_no_match() -> None:
    checked = make_checked("single", Workload(model=make_model(8, 4), seq=16), 1)
    outputs = execute_virtual(checked, CPU)
    names = [port.name for port in checked.schedule.program(0).outputs]
    outputs[0][names.index("dq")][0, 3] = float("nan")
    assert output_errors(checked, outputs)["dq"] == float("inf")


def test_a_kernel_that_changes_what_it_reads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = virtual.run_kernel

    def careless(op: Any, storage: Any, attention: Any) -> str:
        ran = real(op, storage, attention)
        storage.read(op.reads[0]).add_(1)
        return ran

    monkeypatch.setattr(virtual, "run_kernel", careless)
    checked = make_checked("single", Workload(model=make_model(8, 4), seq=16), 1)
    with pytest.raises(ScheduleError, match="changed 'q', which it only reads"):
        execute_virtual(checked, CPU)


def test_a_schedule_that_was_not_checked_is_refused() -> None:
    schedule: Any = make_checked("ring", Workload(model=make_model(), seq=16), 2).schedule
    players: tuple[Callable[[], object], ...] = (
        lambda: execute_virtual(schedule, CPU),
        lambda: simulate(schedule, Cluster(make_cluster_spec(2)), None),
        lambda: ScheduleRun(Session.__new__(Session), schedule),
    )
    for play in players:
        with pytest.raises(InputError, match=r"schedule 'ring' is not proved: give check\(schedule\)"):
            play()


@pytest.mark.sweep
def test_tables_of_rotations_end_with_what_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, make = [], dense._tables

    def watched(*rotation: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = make(*rotation)
        tables.append(weakref.ref(cos))
        return cos, sin

    monkeypatch.setattr(dense, "_tables", watched)
    execute_virtual(make_checked("zigzag", Workload(model=make_model(), seq=32, scope="layer", layers=2), 2), CPU)
    gc.collect()
    assert [table() for table in tables] == [None, None]  # of two ranks one each, for queries and keys, in all layers
