"""cuDNN's attention as torch calls it, played by the reference with a cache of graphs: one that was built for shapes
and strides of q, k and v is run on all that have them, with the strides that out, dout and log-sum-exp had at first
(aten/src/ATen/native/cudnn/MHA.cpp, MHAParams). Schedules have to stay exact.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from runtime.execution import virtual
from runtime.execution.ops import cuda_attention
from runtime.execution.ops.cuda_attention import Cudnn
from runtime.execution.reference import attention
from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.schedule.ir.masks import FULL, Band
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import check
from sim.words.workload import Workload
from tests.helpers import checked_or_refused, make_model, slow_but

Tensor = torch.Tensor
pytestmark = pytest.mark.sweep
SHIFTED = ("allgather", "burst", "double-ring", "striped", "zigzag")
"""Schedules in which parts of a rank's queries are attended."""


class Graphs:
    """torch's two ops. ``packs``: the backward one reads a log-sum-exp as packed, whatever its strides are."""

    def __init__(self, *, packs: bool) -> None:
        self._packs = packs
        self._built: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Any, ...]:
        bias, keep_lse, dropout, causal, debug = rest
        assert (bias, keep_lse, dropout, debug) == (None, True, 0.0, False)
        found = attention(*(x.transpose(1, 2) for x in (q, k, v)), None, Band(right=0) if causal else FULL)
        out = torch.empty_like(q).copy_(found.out.transpose(1, 2))
        return out, found.lse.contiguous()[..., None], *[None] * 7

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
        causal = rest[-1]
        key = (causal, *((x.shape, x.stride()) for x in (q, k, v)))
        built = self._built.setdefault(key, [x.stride() for x in (dout, out, lse)])
        dout, out, lse = (self._read(x, strides) for x, strides in zip((dout, out, lse), built, strict=True))
        if self._packs:
            rows = lse.shape[2]
            lse = self._read(lse, (lse.shape[1] * rows, rows, 1, 1))
        scale = q.shape[-1] ** -0.5
        weights = torch.exp(q @ k.mT * scale - lse)
        if causal:
            weights = weights.tril()
        scores = weights * (dout @ v.mT - (dout * out).sum(dim=-1, keepdim=True)) * scale
        return scores @ k, scores.mT @ q, weights.mT @ dout

    @staticmethod
    def _read(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        """Return what a graph reads that was built for some strides: not a number beyond the memory's end."""
        memory = tensor.untyped_storage()
        flat = torch.empty(0, dtype=tensor.dtype).set_(memory)
        last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
        beyond = flat.new_full((max(last + 1 - len(flat), 0),), math.nan)
        return torch.as_strided(torch.cat([flat, beyond]), tensor.shape, strides, tensor.storage_offset())


def worst(name: str, scope: str, monkeypatch: pytest.MonkeyPatch, *, packs: bool = False) -> float:
    """Return the largest error of a schedule of two sequences on four ranks, and on one device."""
    monkeypatch.setattr(virtual, "attention_kernel", lambda *_, **__: Cudnn())
    graphs = Graphs(packs=packs)
    for way in ("forward", "backward"):
        op = "_scaled_dot_product_cudnn_attention" + ("_backward" if way == "backward" else "")
        monkeypatch.setattr(torch.ops.aten, op, getattr(graphs, way))
    workload = Workload(model=make_model(8, 4), seq=64, batch=2, dtype="fp64", scope=scope, layers=1)  # type: ignore[arg-type]
    checked = checked_or_refused(name, workload, 1 if name == "single" else 4)
    assert checked
    found = []
    for played in (checked, check(on_one_device(checked))):
        errors = output_errors(played, execute_virtual(played, torch.device("cpu"), None))
        found += [math.inf if math.isnan(error) else error for error in errors.values()]
    return max(found)


@pytest.mark.parametrize("scope", slow_but({"layer"}, ["layer", "attention"]))
@pytest.mark.parametrize("name", slow_but({"single", "zigzag", "allgather"}, SCHEDULES))
@pytest.mark.parametrize("packs", slow_but({True}, [False, True]))
def test_graphs_that_are_kept_are_run_on_what_they_were_built_for(
    name: str, scope: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst(name, scope, monkeypatch, packs=packs) <= BOUNDS["fp64"]


@pytest.mark.parametrize("name", slow_but({"zigzag", "allgather"}, SHIFTED))
def test_a_log_sum_exp_with_strides_is_read_wrongly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "packed", lambda tensor: tensor)
    assert worst(name, "layer", monkeypatch, packs=True) > 1e-3
