"""Attention kernels of GPUs, as far as a CPU can test them: what they are called with, and what is made of the answer.

torch's own run on meta tensors, which have shapes and no values; the packages are played by the reference in fp64,
behind their signatures. Where there is a GPU, every kernel that it has is held against the reference.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from experiments.evidence.executed.execution import Execution
from experiments.verbs.calibrate import Calibrate
from experiments.verbs.validate import Validate
from runtime.execution.ops.attention import AttentionKernel
from runtime.execution.ops.attention_choice import NAMES, cuda_kernel, described, needs_windows, runs
from runtime.execution.ops.cuda_attention import (
    AtenFlash,
    Cudnn,
    FlashAttention2,
    FlashAttention3,
    MemoryEfficient,
    Window,
    window_of,
)
from runtime.execution.reference import attention, relative_error
from sim.base.errors import InputError
from sim.schedule.ir.masks import CAUSAL, FULL, Band
from sim.words.workload import Workload
from tests.helpers import make_checked, make_model

Tensor = torch.Tensor
BLOCKS = [(48, 48, FULL), (48, 48, CAUSAL), (24, 48, FULL), (48, 24, FULL), (24, 48, Band(right=24))]
WINDOWS = [
    (48, 24, Band(right=-8)),
    (48, 48, Band(left=7, right=0)),
    (24, 48, Band(left=3, right=30)),
    (48, 48, Band(left=4, right=4)),
]


def draw(queries: int, keys: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = ((2, queries, 8, 64), (2, keys, 2, 64), (2, keys, 2, 64), (2, queries, 8, 64))
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(tensor.to(dtype).to(device) for tensor in (q, k, v, dout))  # type: ignore[return-value]


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [AtenFlash(), MemoryEfficient(), Cudnn()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("queries", "keys", "band"), BLOCKS)
def test_torch_takes_the_calls(kernel: AttentionKernel, queries: int, keys: int, band: Band) -> None:
    """On meta tensors: the schemas take the arguments, and shapes and layouts come back as the interface says."""
    dtype = torch.float32 if isinstance(kernel, MemoryEfficient) else torch.bfloat16
    q, k, v, dout = draw(queries, keys, dtype, "meta")
    out, lse = kernel.forward(q, k, v, band)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == ((2, 8, queries), torch.float32)
    grads = kernel.backward((q, k, v, out, lse), dout, band)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(("queries", "keys", "band"), BLOCKS + WINDOWS)
def test_a_window_keeps_what_the_band_keeps(queries: int, keys: int, band: Band) -> None:
    """By flash-attention's definition, counted from the diagonal of the last query and the last key."""
    window = window_of(band, queries, keys)
    left, right = (math.inf if side < 0 else side for side in (window.left, window.right))
    if window.causal:
        right = 0
    for query in range(queries):
        for key in range(keys):
            kept = (band.left is None or key >= query - band.left) and (band.right is None or key <= query + band.right)
            assert kept == (-left <= key - (query + keys - queries) <= right), (query, key)


def test_what_no_kernel_can_do_is_refused() -> None:
    with pytest.raises(InputError, match="its diagonal lies outside"):
        window_of(Band(right=-5), 48, 48)
    q, k, v, _ = draw(48, 48, torch.float32)
    with pytest.raises(InputError, match="runs full and causal blocks"):
        MemoryEfficient().forward(q, k, v, Band(left=7, right=0))
    with pytest.raises(InputError, match="bf16, fp16 and fp32"):
        cuda_kernel(torch.float64)


def test_kernels_are_chosen_by_name_or_the_fastest_one_is() -> None:
    """Without packages, as here."""
    assert cuda_kernel(torch.bfloat16).name == "aten-flash"
    assert cuda_kernel(torch.float32).name == "aten-efficient"
    assert cuda_kernel(torch.float16, "aten-cudnn").name == "aten-cudnn"
    with pytest.raises(InputError, match=r"'aten-cudnn' does not run float32 here, aten-efficient would: set"):
        cuda_kernel(torch.float32, "aten-cudnn")
    with pytest.raises(InputError, match="'flash-attn-2' does not run bfloat16 here, aten-flash, aten-efficient"):
        cuda_kernel(torch.bfloat16, "flash-attn-2")
    with pytest.raises(InputError, match="unknown attention kernel 'aten-cudn'"):
        cuda_kernel(torch.bfloat16, "aten-cudn")
    for verb in (Calibrate, Execution, Validate):
        assert all(name in inspect.getsource(verb) for name in NAMES)
    assert runs("flash-attn-3", torch.bfloat16)
    assert not runs("flash-attn-3", torch.float32)
    assert not runs("", torch.bfloat16)


@pytest.mark.parametrize(
    ("major", "installed", "half", "single", "windowed"),
    [
        (8, "", "aten-flash", "aten-efficient", "aten-flash"),
        (8, "flash_attn", "flash-attn-2", "aten-efficient", "flash-attn-2"),
        (8, "flash_attn_interface", "aten-flash", "aten-efficient", "aten-flash"),
        (9, "", "aten-cudnn", "aten-efficient", "aten-flash"),
        (9, "flash_attn", "aten-cudnn", "aten-efficient", "flash-attn-2"),
        (9, "flash_attn_interface", "flash-attn-3", "aten-efficient", "flash-attn-3"),
        (10, "flash_attn_interface", "aten-cudnn", "aten-efficient", "aten-flash"),
    ],
)
def test_the_fastest_depends_on_the_gpu_and_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, major: int, installed: str, half: str, single: str, windowed: str
) -> None:
    """Ampere, Hopper, Blackwell: flash-attention 2 has no instructions of the latter, version 3 is Hopper's alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    modules = {
        "flash_attn": {"flash_attn": ModuleType("flash_attn"), "flash_attn.flash_attn_interface": package_2()},
        "flash_attn_interface": {"flash_attn_interface": package_3()},
    }
    for name, module in modules.get(installed, {}).items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    assert cuda_kernel(torch.bfloat16).name == half
    assert cuda_kernel(torch.float32).name == single
    assert cuda_kernel(torch.bfloat16, windows=True).name == windowed
    assert ("copying shared keys" in described(half)) == (half == "aten-cudnn")


def test_windows_take_a_kernel_that_has_them() -> None:
    with pytest.raises(
        InputError, match="'aten-cudnn' does not run sliding windows in bfloat16 here, aten-flash would"
    ):
        cuda_kernel(torch.bfloat16, "aten-cudnn", windows=True)
    with pytest.raises(InputError, match="no attention kernel on CUDA runs sliding windows in float32: set `dtype`"):
        cuda_kernel(torch.float32, windows=True)
    assert runs("aten-flash", torch.bfloat16, windows=True)
    assert not runs("aten-cudnn", torch.bfloat16, windows=True)
    for window, needed in ((None, False), (8, True)):
        workload = Workload(model=make_model(8, 4), seq=64, window=window)
        packed = msgspec.structs.replace(workload, documents=(40, 24))
        assert needs_windows(make_checked("single", packed, 1).schedule.program(0)) == needed
        assert needs_windows(make_checked("single", workload, 1).schedule.program(0)) == needed


def answered(q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return out and lse as flash-attention does: +inf where a query sees no key."""
    exact = attention(*(x.double() for x in (q, k, v)), None, banded(q, k, window))
    return exact.out.to(q.dtype), exact.lse.float().masked_fill(torch.isneginf(exact.lse), math.inf)


def banded(q: Tensor, k: Tensor, window: Window) -> Band:
    last = k.shape[1] - q.shape[1]
    if window.causal:
        return Band(right=last)
    left, right = (None if side < 0 else side for side in (window.left, window.right))
    return Band(None if left is None else left - last, None if right is None else right + last)


def differentiated(saved: tuple[Tensor, ...], dout: Tensor, window: Window, grads: tuple[Tensor, ...]) -> None:
    """Fill the gradients of a block, given its own out and lse."""
    q, k, v, out, lse = saved
    expected = answered(q, k, v, window)
    assert lse.is_contiguous()
    assert torch.allclose(out, expected[0])
    assert torch.allclose(lse, expected[1])
    exact = attention(*(x.double() for x in (q, k, v, dout)), banded(q, k, window))
    for grad, value in zip(grads, exact[2:], strict=True):
        grad.copy_(value)


def package_2() -> ModuleType:
    """Return flash_attn.flash_attn_interface, by the signatures of 2.8."""
    module = ModuleType("flash_attn.flash_attn_interface")

    def forward(*given: Any) -> tuple[Any, ...]:
        q, k, v, dropout, scale, causal, left, right, softcap, alibi, return_softmax = given
        assert (dropout, scale, softcap, alibi, return_softmax) == (0.0, q.shape[-1] ** -0.5, 0.0, None, False)
        return *answered(q, k, v, Window(causal, left, right)), None, None

    def backward(*given: Any) -> None:
        dout, *saved, dq, dk, dv, dropout, scale, causal, left, right, softcap, alibi, deterministic = given
        assert (dropout, scale, softcap, alibi, deterministic) == (0.0, dout.shape[-1] ** -0.5, 0.0, None, False)
        differentiated(tuple(saved), dout, Window(causal, left, right), (dq, dk, dv))

    module._flash_attn_forward, module._flash_attn_backward = forward, backward  # type: ignore[attr-defined]
    return module


def package_3() -> ModuleType:
    """Return flash_attn_interface, as hopper/ of flash-attention builds it."""
    module = ModuleType("flash_attn_interface")

    def forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
        assert given.pop("softmax_scale") == q.shape[-1] ** -0.5
        window = Window(given.pop("causal"), given.pop("window_size_left"), given.pop("window_size_right"))
        assert not given
        return *answered(q, k, v, window), None, None

    def backward(dout: Tensor, *saved: Tensor, **given: Any) -> None:
        assert given.pop("softmax_scale") == dout.shape[-1] ** -0.5
        window = Window(given.pop("is_causal"), given.pop("window_size_left"), given.pop("window_size_right"))
        grads = tuple(given.pop(name) for name in ("dq", "dk", "dv"))
        assert not given
        differentiated(saved, dout, window, grads)

    module._flash_attn_forward, module._flash_attn_backward = forward, backward  # type: ignore[attr-defined]
    return module


def older_package_3() -> ModuleType:
    """Return flash_attn_interface as hopper/ built it until 2025: a pair for the window, and no defaults."""
    module, today = ModuleType("flash_attn_interface"), package_3()

    def forward(  # noqa: PLR0917 - as it was
        q: Tensor, k: Tensor, v: Tensor, k_new: None, qv: None, cu_seqlens_q: None, cu_seqlens_k: None,
        max_seqlen_q: None, max_seqlen_k: None, softmax_scale: float, causal: bool,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0
    ) -> Any:  # fmt: skip
        assert (k_new, qv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softcap) == (*[None] * 6, 0)
        sides = {"window_size_left": window_size[0], "window_size_right": window_size[1]}
        return today._flash_attn_forward(q, k, v, softmax_scale=softmax_scale, causal=causal, **sides)

    def backward(  # noqa: PLR0917
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: None,
        cu_seqlens_k: None, max_seqlen_q: None, max_seqlen_k: None, dq: Tensor, dk: Tensor, dv: Tensor,
        softmax_scale: float, causal: bool, window_size: tuple[int, int] = (-1, -1), deterministic: bool = False
    ) -> None:  # fmt: skip
        assert (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic) == (*[None] * 4, False)
        sides = {"window_size_left": window_size[0], "window_size_right": window_size[1]}
        today._flash_attn_backward(
            dout, q, k, v, out, softmax_lse, dq=dq, dk=dk, dv=dv, softmax_scale=softmax_scale, is_causal=causal,
            **sides
        )  # fmt: skip

    module._flash_attn_forward, module._flash_attn_backward = forward, backward  # type: ignore[attr-defined]
    return module


def aten_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    """Return a kernel of torch's whose ops are played by the reference, by their schemas of torch 2.13."""

    def turned(*tensors: Tensor) -> list[Tensor]:
        return [tensor.transpose(1, 2) for tensor in tensors]

    def flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, window_size_left: int, window_size_right: int) -> Any:
        assert rest[:5] == (None, None, q.shape[1], k.shape[1], 0.0)
        return *answered(q, k, v, Window(rest[5], window_size_left, window_size_right)), None, None, None

    def flash_backward(dout: Tensor, *given: Any, window_size_left: int, window_size_right: int) -> Any:
        saved, rest = given[:5], given[5:]
        grads = tuple(map(torch.empty_like, saved[:3]))
        differentiated(saved, dout, Window(rest[5], window_size_left, window_size_right), grads)
        return grads

    def heads_first(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, keep_lse: bool, dropout: float, causal: bool, *_: Any
    ) -> Any:
        assert (bias, keep_lse, dropout) == (None, True, 0.0)
        assert not causal or q.shape[2] == k.shape[2]
        out, lse = answered(*turned(q, k, v), Window(causal, -1, -1))
        return out.transpose(1, 2), torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32)) if efficient else lse[
            ..., None
        ]

    def gradients(given: Tensor, saved: list[Tensor], lse: Tensor, causal: bool) -> tuple[Tensor, ...]:
        q, k, v, out = turned(*saved)
        exact = attention(q, k, v, given.transpose(1, 2), Band(right=k.shape[1] - q.shape[1]) if causal else FULL)
        assert torch.allclose(out, exact.out)
        assert torch.allclose(lse, exact.lse.float())
        return tuple(turned(*exact[2:]))

    def efficient_backward(given: Tensor, *saved: Any) -> Any:
        q, k, v, bias, out, lse, _, _, dropout, mask, causal = saved
        assert (bias, dropout, mask, lse.shape[2] % 32) == (None, 0.0, [True, True, True, False], 0)
        return *gradients(given, [q, k, v, out], lse[:, :, : q.shape[2]], causal), None

    def cudnn_backward(given: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
        assert rest[2:] == (None, None, None, q.shape[2], k.shape[2], 0.0, rest[-1])
        return gradients(given, [q, k, v, out], lse.squeeze(-1), rest[-1])

    efficient, aten = kind == "efficient", torch.ops.aten
    if kind == "flash":
        monkeypatch.setattr(aten, "_flash_attention_forward", flash)
        monkeypatch.setattr(aten, "_flash_attention_backward", flash_backward)
        return AtenFlash()
    backward = efficient_backward if efficient else cudnn_backward
    monkeypatch.setattr(aten, f"_scaled_dot_product_{kind}_attention", heads_first)
    monkeypatch.setattr(aten, f"_scaled_dot_product_{kind}_attention_backward", backward)
    return MemoryEfficient() if efficient else Cudnn()


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize(("queries", "keys", "band"), BLOCKS + WINDOWS)
def test_torch_gets_what_it_asks_for(
    kind: str, queries: int, keys: int, band: Band, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "flash" and ((queries, keys, band) in WINDOWS or band == Band(right=24)):
        pytest.skip("no windows; a prefix and a square have the lse of both")
    held_against_the_reference(aten_of(kind, monkeypatch), draw(queries, keys, torch.float64), band, 1e-6)


@pytest.fixture(params=["flash_attn", "flash_attn_interface", "flash_attn_interface of 2025"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    if request.param == "flash_attn":
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package_2())
        return FlashAttention2()
    module = package_3() if request.param == "flash_attn_interface" else older_package_3()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return FlashAttention3()


@pytest.mark.sweep
@pytest.mark.parametrize(("queries", "keys", "band"), BLOCKS + WINDOWS)
def test_packages_get_what_they_ask_for(package: AttentionKernel, queries: int, keys: int, band: Band) -> None:
    held_against_the_reference(package, draw(queries, keys, torch.float64), band, 1e-6)


def held_against_the_reference(kernel: AttentionKernel, tensors: tuple[Tensor, ...], band: Band, bound: float) -> None:
    q, k, v, dout = tensors
    exact = attention(*(tensor.cpu().double() for tensor in (q, k, v, dout)), band)
    out, lse = kernel.forward(q, k, v, band)
    unseen = torch.isneginf(exact.lse)
    assert torch.equal(torch.isneginf(lse).cpu(), unseen)
    found = {"out": out, "lse": lse, **kernel.backward((q, k, v, out, lse), dout, band)._asdict()}
    for name, value in found.items():
        pair = value.cpu(), getattr(exact, name)
        seen = [side.masked_fill(unseen, 0) for side in pair] if name == "lse" else pair
        assert relative_error(*seen) <= bound, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", ["AtenFlash", "MemoryEfficient", "Cudnn", "FlashAttention2", "FlashAttention3"])
@pytest.mark.parametrize(("queries", "keys", "band"), BLOCKS + WINDOWS)
def test_every_kernel_of_this_gpu(kind: str, queries: int, keys: int, band: Band) -> None:
    """bf16 to a few units in the last place of the largest element, fp32 to rounding (TF32 is off)."""
    module = importlib.import_module("runtime.execution.ops.cuda_attention")
    try:
        kernel: AttentionKernel = getattr(module, kind)()
    except ModuleNotFoundError:
        pytest.skip("not installed")
    dtype = torch.float32 if kind == "MemoryEfficient" else torch.bfloat16
    try:
        held_against_the_reference(
            kernel, draw(queries, keys, dtype, "cuda"), band, 2e-5 if kind == "MemoryEfficient" else 3e-2
        )
    except InputError:
        assert (queries, keys, band) in WINDOWS
