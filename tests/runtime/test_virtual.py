"""Exactness on the virtual cluster: every schedule, up to 64 ranks, in random orders, against one process in fp64."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from runtime import virtual
from runtime.inputs import global_tokens
from runtime.verify import BOUNDS, output_errors
from runtime.virtual import execute_virtual
from sim.errors import InputError, ScheduleError
from sim.schedule.catalog import SCHEDULES
from sim.schedule.check import check
from sim.schedule.masks import Span
from sim.workload import Workload
from tests.helpers import make_checked, make_gathered, make_model

CPU = torch.device("cpu")


def exact_or_refused(name: str, ranks: int, order_seed: int | None, **fields: Any) -> bool:
    """Execute a cell and hold it against the reference; False if it is refused with the values allowed."""
    workload = Workload(**fields)
    try:
        checked = make_checked(name, workload, ranks)
    except InputError as error:
        assert "allowed are" in str(error) or "set --gpus 1" in str(error)
        return False
    worst = output_errors(checked, execute_virtual(checked, CPU, order_seed))
    if workload.scope == "layer":
        assert worst.keys() >= {"x 2", "dx", "dwq", "dw_down 1", "dnorm1"}
    else:
        assert worst.keys() >= ({"dq", "dk", "dv"} if workload.backward else {"out", "lse"})
    assert all(error <= BOUNDS[workload.dtype] for error in worst.values()), (name, ranks, worst)
    return True


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_small_numbers_of_ranks(name: str, heads: tuple[int, int], dtype: str) -> None:
    played = 0
    for ranks in (1, 2, 3, 4, 8):
        for mask in ("causal", "full"):
            played += exact_or_refused(
                name, ranks, ranks, model=make_model(*heads), seq=48, batch=2, mask=mask, dtype=dtype
            )
    assert played >= {"single": 2, "ring": 10, "ulysses": 2}[name]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 1)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_layers(name: str, heads: tuple[int, int], dtype: str) -> None:
    """Output, input gradient and all weights' gradients equal autograd of the textbook formulas."""
    played = 0
    for ranks in (1, 2, 4, 8):
        fields: dict[str, Any] = {"scope": "layer", "layers": 2, "batch": 2, "dtype": dtype}
        played += exact_or_refused(name, ranks, ranks, model=make_model(*heads), seq=32, **fields)
    assert played >= {"single": 1, "ring": 4, "ulysses": 1}[name]


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_one_pass_alone(name: str, passes: str) -> None:
    ranks = 1 if name == "single" else 4
    assert exact_or_refused(name, ranks, 5, model=make_model(8, 4), seq=48, dtype="fp64", passes=passes)


@pytest.mark.parametrize("order_seed", range(6))
@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_random_orders(name: str, order_seed: int) -> None:
    """Any order that the derived dependencies allow gives the same result: a race detector by execution."""
    assert exact_or_refused(name, 4, order_seed, model=make_model(8, 4), seq=32, dtype="fp64")


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize(("name", "heads"), [("ring", (4, 2)), ("ulysses", (64, 64))])
def test_sixty_four_ranks(name: str, heads: tuple[int, int], dtype: str) -> None:
    assert exact_or_refused(name, 64, 3, model=make_model(*heads, head_dim=8), seq=128, dtype=dtype)
    assert not exact_or_refused("ulysses", 64, 3, model=make_model(64, 8, head_dim=8), seq=128, dtype=dtype)


@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_one_token_per_rank(name: str) -> None:
    assert exact_or_refused(name, 8, 1, model=make_model(8, 8), seq=8, dtype="fp64", mask="causal")


def test_inputs_depend_on_positions_only() -> None:
    workload = Workload(model=make_model(4, 4), seq=512, batch=2, dtype="fp64", seed=3)
    whole = global_tokens("q", Span(0, 512), 4, workload)
    assert torch.equal(global_tokens("q", Span(100, 300), 4, workload), whole[:, 100:300])
    assert torch.equal(global_tokens("q", Span(5, 509, 7), 4, workload), whole[:, 5:509:7])
    assert not torch.equal(global_tokens("k", Span(0, 512), 4, workload), whole)
    other = msgspec.structs.replace(workload, seed=4)
    assert not torch.equal(global_tokens("q", Span(0, 512), 4, other), whole)


@pytest.mark.parametrize("order_seed", range(3))
def test_gathered_keys_and_scattered_gradients(order_seed: int) -> None:
    workload = Workload(model=make_model(8, 4), seq=32, dtype="fp64")
    checked = check(make_gathered(workload, 4))
    worst = output_errors(checked, execute_virtual(checked, CPU, order_seed))
    assert max(worst.values()) <= 1e-12


def test_what_is_not_a_number_is_no_match() -> None:
    checked = make_checked("single", Workload(model=make_model(8, 4), seq=16), 1)
    outputs = execute_virtual(checked, CPU)
    outputs[0]["dq"][0, 3] = float("nan")
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
