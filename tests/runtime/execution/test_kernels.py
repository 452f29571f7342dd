"""Attention on the CPU with a log-sum-exp, and the merge: exact, and right where kernels have traps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.execution.inputs import global_state
from runtime.execution.ops import unfused
from runtime.execution.ops.attention import CpuFlash, delta_of, merge, with_delta
from runtime.execution.ops.dense import eager_norm, eager_norm_backward, rms_norm
from runtime.execution.ops.state import square_sum
from runtime.execution.reference import attention, relative_error
from sim.schedule.ir.masks import CAUSAL, FULL, Band
from sim.schedule.model.scope import units
from sim.words.workload import Workload
from tests.helpers import make_model

BANDS = [FULL, CAUSAL, Band(right=-1), Band(right=3), Band(left=2, right=0), Band(left=1, right=1)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def tensors(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)

    def draw(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(batch, tokens, count, 16, generator=generator, dtype=torch.float64)

    return [draw(queries, heads), draw(keys, kv_heads), draw(keys, kv_heads), draw(queries, heads)]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (24, 40), (40, 24), (3, 24)])
def test_every_mask_forward_and_backward(band: Band, dtype: torch.dtype, queries: int, keys: int) -> None:
    """Top-left causal on rectangles, bands with fully masked rows, grouped heads, two sequences."""
    q, k, v, dout = (tensor.to(dtype) for tensor in tensors(queries, keys))
    exact = attention(*(tensor.double() for tensor in (q, k, v, dout)), band)
    kernel = CpuFlash()
    out, lse = kernel.forward(q, k, v, band)
    masked = torch.isneginf(exact.lse)
    assert torch.equal(torch.isneginf(lse), masked)
    assert out.shape == q.shape
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCE[dtype]
    assert relative_error(out, exact.out) <= tolerance
    assert relative_error(lse.masked_fill(masked, 0), exact.lse.masked_fill(masked, 0)) <= tolerance
    grads = kernel.backward((q, k, v, out, lse), dout, band)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert relative_error(grad, getattr(exact, name)) <= tolerance, name


def test_views_of_a_packed_tensor() -> None:
    """Heads sliced out of one buffer, as all-to-alls leave them."""
    q, k, v, _ = tensors(24, 24, kv_heads=4)
    packed = torch.cat([q, k, v], dim=2)
    sliced = [packed[:, :, i * 4 : (i + 1) * 4] for i in range(3)]
    assert torch.equal(CpuFlash().forward(*sliced, CAUSAL).out, CpuFlash().forward(q, k, v, CAUSAL).out)


@given(st.floats(-120, 120), st.booleans())
def test_merging_is_exact_for_any_gap_and_either_order(gap: float, swap: bool) -> None:
    """Also beyond 88, where exp overflows in fp32."""
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(1, 4, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
    lses = [torch.randn(1, 2, 4, generator=generator, dtype=torch.float64) + shift for shift in (0.0, gap)]
    weights = [torch.exp(lse - torch.logaddexp(*lses)).transpose(1, 2).unsqueeze(-1) for lse in lses]
    exact = outs[0] * weights[0] + outs[1] * weights[1]
    first, second = (1, 0) if swap else (0, 1)
    into_out, into_lse = outs[first].float(), lses[first].float()
    merge(outs[second].float(), lses[second].float(), into_out, into_lse)
    assert relative_error(into_out, exact) < 1e-5
    assert (into_lse - torch.logaddexp(*lses)).abs().max() < 1e-4


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm of transformers 4.57.6, which sums in fp32 whatever is wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_eager_norms_have_the_bits_of_autograd(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, dout = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, 16), (16,), (2, 3, 16)))
    out, wide, rstd, normed = eager_norm(x, weight, 1e-5)
    leaves = x.requires_grad_(), weight.requires_grad_()
    expected = llama_norm(*leaves)
    assert torch.equal(out, expected)
    assert wide.data_ptr() != x.data_ptr()
    found = eager_norm_backward(normed.detach(), weight.detach(), wide.detach(), rstd.detach(), dout)
    for mine, other in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_of_gpus_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """torch's fused op falls apart into others on a CPU; its results are what ours are."""
    x, weight = torch.randn(2, 3, 16, dtype=torch.float64).to(dtype), torch.randn(16, dtype=torch.float64).to(dtype)
    out, rstd = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, 1e-5)
    found = rms_norm(x, weight, 1e-5)
    assert (rstd.squeeze(-1).shape, rstd.dtype) == (found.second.shape, found.second.dtype)
    assert relative_error(found.out, out.double()) <= TOLERANCE[dtype]
    assert relative_error(found.second, rstd.squeeze(-1).double()) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True), (True, True)])
def test_merging_with_blocks_that_saw_nothing(mine: bool, theirs: bool) -> None:
    """lse = -inf weighs nothing, on either side or on both; nothing becomes NaN."""
    out, other = torch.full((1, 2, 1, 4), 3.0), torch.full((1, 2, 1, 4), 5.0)
    lse, other_lse = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)
    if mine:
        out.zero_()
        lse.fill_(-math.inf)
    if theirs:
        other.zero_()
        other_lse.fill_(-math.inf)
    merge(other, other_lse, out, lse)
    expected = {(True, False): 5.0, (False, True): 3.0, (True, True): 0.0}[mine, theirs]
    assert torch.equal(out, torch.full_like(out, expected))
    assert torch.equal(lse, torch.full_like(lse, -math.inf if mine and theirs else 0.0))


@given(st.permutations(range(4)))
def test_blocks_merged_in_any_order_give_attention_to_all(order: list[int]) -> None:
    q, k, v, _ = tensors(8, 32)
    whole = attention(q, k, v, None, FULL)
    parts = [attention(q, k[:, i * 8 : i * 8 + 8], v[:, i * 8 : i * 8 + 8], None, FULL) for i in order]
    out, lse = parts[0].out, parts[0].lse
    for part in parts[1:]:
        merge(part.out, part.lse, out, lse)
    assert relative_error(out, whole.out) < 1e-13
    assert relative_error(lse, whole.lse) < 1e-13


def test_gradients_of_a_ring_of_blocks_add_up_with_the_global_log_sum_exp() -> None:
    """And with each block's own they do not: this is the mistake that check refuses."""
    q, k, v, dout = tensors(8, 32)
    exact = attention(q, k, v, dout, FULL)
    kernel = CpuFlash()
    right, wrong = torch.zeros_like(q), torch.zeros_like(q)
    for i in range(4):
        keys, values = k[:, i * 8 : i * 8 + 8], v[:, i * 8 : i * 8 + 8]
        right += kernel.backward((q, keys, values, exact.out, exact.lse), dout, FULL).dq
        own = kernel.forward(q, keys, values, FULL)
        wrong += kernel.backward((q, keys, values, own.out, own.lse), dout, FULL).dq
    assert relative_error(right, exact.dq) < 1e-12
    assert relative_error(wrong, exact.dq) > 0.1


@pytest.mark.parametrize("band", [CAUSAL, FULL, Band(left=5, right=0), Band(left=3, right=40)])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_unfused_attention_is_exact(band: Band, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that end in the middle of the block, and with all probabilities written out."""
    monkeypatch.setattr(unfused, "QUERY_CHUNK", 10)
    monkeypatch.setattr(unfused, "KEY_CHUNK", 7)
    q, k, v, dout = tensors(24, 24, kv_heads=kv_heads)
    exact = attention(q, k, v, dout, band)
    delta = exact.lse.new_empty(exact.lse.shape)
    delta_of(exact.out, dout, delta)
    whole = unfused.standard_forward(q, k, v, band)
    found = {
        "standard": (whole, unfused.standard_backward(q, k, v, delta, dout, whole.probs)),
        "chunks": (
            unfused.chunked_forward(q, k, v, band),
            unfused.chunked_backward((q, k, v, delta, exact.lse), dout, band),
        ),
    }
    for name, (forward, backward) in found.items():
        assert relative_error(forward.out, exact.out) < 1e-12, name
        assert relative_error(forward.lse, exact.lse) < 1e-12, name
        for grad in ("dq", "dk", "dv"):
            assert relative_error(getattr(backward, grad), getattr(exact, grad)) < 1e-12, (name, grad)


def test_gradients_from_delta_alone() -> None:
    """Backward kernels take out only for delta; where dout is zero, so is delta."""
    q, k, v, dout = tensors(24, 24)
    dout[:, 3] = 0.0
    exact = attention(q, k, v, dout, CAUSAL)
    delta = exact.lse.new_empty(exact.lse.shape)
    delta_of(exact.out, dout, delta)
    out = with_delta(delta, dout)
    grads = CpuFlash().backward((q, k, v, out, exact.lse), dout, CAUSAL)
    assert all(relative_error(grad, getattr(exact, f"d{x}")) < 1e-12 for x, grad in zip("qkv", grads, strict=True))


@pytest.mark.parametrize("count", [3, 1024, 3_000_001])
def test_a_norm_of_millions_keeps_its_digits(count: int) -> None:
    """torch's own norm of as many in fp32 was off by 1e-4 on a CPU, and with it all clipped gradients."""
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(0))
    exact = gradient.double().square().sum()
    assert abs(square_sum(gradient, torch.float32).double() - exact) <= 1e-6 * exact


class DividingAsCuda(TorchDispatchMode):
    """Divides by a number as torch's kernels for CUDA do: it multiplies by the reciprocal in fp32."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        divides = function in {torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor}
        if divides and not isinstance(args[1], torch.Tensor):
            multiply = torch.mul if function is torch.ops.aten.div.Tensor else torch.Tensor.mul_
            return multiply(args[0], torch.tensor(float(args[1])).reciprocal().item())
        return function(*args, **(kwargs or {}))


@pytest.mark.sweep
def test_weights_have_the_bits_that_a_gpu_makes() -> None:
    workload = Workload(model=make_model(6, 2), seq=64, scope="step", layers=1)
    states = [state.name for unit in units(workload) for state in (*unit.states, unit.working, *unit.weights)]
    here = [global_state(name, 0, workload) for name in states]
    with DividingAsCuda():
        assert not torch.equal(torch.arange(100.0).div_(49), torch.tensor([n / 49 for n in range(100)]))
        there = [global_state(name, 0, workload) for name in states]
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
