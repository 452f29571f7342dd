"""Parts of a block by variable-length kernels: flash-attention behind its signatures, played segment by segment by the
CPU's kernel, gives what the parts give one by one, in as many launches as there are kinds of masks.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.execution.ops.attention import Backward, CpuFlash, Forward, PartsKernel, merge
from runtime.execution.ops.cuda_attention import AtenFlash, FlashAttention2, FlashAttention3, Window
from runtime.execution.ops.packed import packed_backward, packed_forward
from runtime.execution.reference import relative_error
from sim.schedule.ir.masks import CAUSAL, FULL, Band, DocumentBlock, Span
from tests.runtime.execution.test_cuda_attention import banded

Tensor = torch.Tensor
Parts = tuple[DocumentBlock, ...]


def part(rows: tuple[int, int], columns: tuple[int, int], band: Band) -> DocumentBlock:
    return DocumentBlock(Span(*rows), Span(*columns), band)


DOCUMENTS = (part((0, 20), (0, 20), CAUSAL), part((20, 25), (20, 25), CAUSAL), part((25, 48), (25, 48), CAUSAL))
"""All rows and columns, in order: nothing is gathered."""
GAPS = (part((3, 20), (0, 20), Band(right=3)), part((30, 41), (22, 33), CAUSAL))
SHARED = (
    part((0, 16), (0, 16), CAUSAL),
    part((16, 48), (0, 16), FULL),
    part((16, 48), (16, 48), CAUSAL),
)
"""Queries and keys of two parts each."""
WINDOWED = (part((0, 24), (0, 24), Band(5, 0)), part((24, 48), (24, 48), Band(5, 0)))
CASES: dict[str, tuple[Parts, int, int]] = {  # launches forward and backward
    "documents": (DOCUMENTS, 1, 1),
    "gaps": (GAPS, 1, 1),
    "shared": (SHARED, 2, 2),
    "all causal and shared": ((*DOCUMENTS[:2], part((0, 25), (25, 48), FULL), DOCUMENTS[2]), 2, 2),
    "shared keys alone": ((part((0, 8), (0, 48), FULL), part((8, 48), (0, 48), FULL)), 1, 1),
    "shared queries alone": ((part((0, 48), (0, 8), FULL), part((0, 48), (8, 48), FULL)), 2, 1),
    "windows": (WINDOWED, 1, 1),
}


def split(tensor: Tensor, ends: Tensor) -> list[Tensor]:
    assert ends.dtype == torch.int32
    return [tensor[None, start:stop] for start, stop in pairwise(ends.tolist())]


class Played:
    """A variable-length kernel as flash-attention has it: (T, H, D), lse (H, T), +inf of queries that see no key."""

    def __init__(self) -> None:
        self.launches = {"forward": 0, "backward": 0}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, row_ends: Tensor, column_ends: Tensor, most: tuple[int, int], of: Window
    ) -> tuple[Tensor, Tensor]:
        self.launches["forward"] += 1
        self._sizes(row_ends, column_ends, most)
        found = [
            CpuFlash().forward(*some, banded(some[0], some[1], of))
            for some in zip(split(q, row_ends), split(k, column_ends), split(v, column_ends), strict=True)
        ]
        lse = torch.cat([one.lse[0] for one in found], dim=1)
        return torch.cat([one.out[0] for one in found]), lse.float().masked_fill(lse == -math.inf, math.inf)

    def backward(
        self, dout: Tensor, saved: tuple[Tensor, ...], ends: tuple[Tensor, Tensor], most: tuple[int, int], of: Window
    ) -> Backward:
        self.launches["backward"] += 1
        q, k, v, out, lse = saved
        assert all(tensor.is_contiguous() for tensor in (*saved, dout))
        self._sizes(*ends, most)
        starts = ends[0].tolist()
        finite = lse.double().masked_fill(lse == math.inf, 0)
        lses = [finite[None, :, start:stop] for start, stop in pairwise(starts)]
        found = [
            CpuFlash().backward(some[:5], some[5], banded(*some[:2], of))
            for some in zip(
                split(q, ends[0]), split(k, ends[1]), split(v, ends[1]), split(out, ends[0]), lses,
                split(dout, ends[0]), strict=True,
            )
        ]  # fmt: skip
        return Backward(*(torch.cat([grads[side][0] for grads in found]) for side in range(3)))

    @staticmethod
    def _sizes(row_ends: Tensor, column_ends: Tensor, most: tuple[int, int]) -> None:
        assert most == (int(row_ends.diff().max()), int(column_ends.diff().max()))


def aten(played: Played, monkeypatch: pytest.MonkeyPatch) -> PartsKernel:
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, window_size_left: int, window_size_right: int) -> Any:
        rows, columns, most_rows, most_columns, dropout, causal, debug = rest
        assert (dropout, debug) == (0.0, False)
        window = Window(causal, window_size_left, window_size_right)
        return *played.forward(q, k, v, rows, columns, (most_rows, most_columns), window), None, None, None

    def backward(dout: Tensor, *given: Any, window_size_left: int, window_size_right: int) -> Any:
        rows, columns, most_rows, most_columns, dropout, causal = given[5:11]
        assert dropout == 0.0
        window = Window(causal, window_size_left, window_size_right)
        return played.backward(dout, given[:5], (rows, columns), (most_rows, most_columns), window)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return AtenFlash()


def package_2(played: Played, monkeypatch: pytest.MonkeyPatch) -> PartsKernel:
    """By the signatures of 2.8."""

    def forward(*given: Any) -> tuple[Any, ...]:
        q, k, v, rows, columns, most_rows, most_columns, dropout, scale, causal, left, right, *rest = given
        assert (dropout, scale, rest) == (0.0, q.shape[-1] ** -0.5, [0.0, None, False])
        window = Window(causal, left, right)
        return *played.forward(q, k, v, rows, columns, (most_rows, most_columns), window), None, None

    def backward(*given: Any) -> None:
        dout, *saved, dq, dk, dv = given[:9]
        rows, columns, most_rows, most_columns, dropout, scale, causal, left, right, *rest = given[9:]
        assert (dropout, scale, rest) == (0.0, dout.shape[-1] ** -0.5, [0.0, None, False])
        window = Window(causal, left, right)
        grads = played.backward(dout, tuple(saved), (rows, columns), (most_rows, most_columns), window)
        for grad, value in zip((dq, dk, dv), grads, strict=True):
            grad.copy_(value)

    module = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = forward, backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    return FlashAttention2()


def package_3(played: Played, monkeypatch: pytest.MonkeyPatch) -> PartsKernel:
    """As hopper/ of flash-attention builds it."""

    def told(given: dict[str, Any], causal: str) -> tuple[Any, ...]:
        window = Window(given.pop(causal), given.pop("window_size_left"), given.pop("window_size_right"))
        ends, most = (tuple(given.pop(f"{what}_{side}") for side in "qk") for what in ("cu_seqlens", "max_seqlen"))
        assert given.keys() == {"softmax_scale"}
        return ends, most, window

    def forward(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
        ends, most, window = told(given, "causal")
        return *played.forward(q, k, v, *ends, most, window), None, None

    def backward(dout: Tensor, *saved: Tensor, **given: Any) -> None:
        into = tuple(given.pop(name) for name in ("dq", "dk", "dv"))
        for grad, value in zip(into, played.backward(dout, saved, *told(given, "is_causal")), strict=True):
            grad.copy_(value)

    module = ModuleType("flash_attn_interface")
    module._flash_attn_forward, module._flash_attn_backward = forward, backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return FlashAttention3()


KERNELS = {"aten": aten, "package 2": package_2, "package 3": package_3}


def alike(kernel: Any, parts: Parts, seed: int = 0) -> None:
    """Equal to the parts one by one; the backward pass gets an out and a lse to which other keys have added."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 48, 4, 8), (2, 48, 2, 8), (2, 48, 2, 8), (2, 48, 4, 8))
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    wanted, found = (packed_forward(one, (q, k, v), parts) for one in (CpuFlash(), kernel))
    unseen = torch.isneginf(wanted.lse)
    assert torch.equal(torch.isneginf(found.lse), unseen)
    pairs = [(found.out, wanted.out), tuple(lse.double().masked_fill(unseen, 0) for lse in (found.lse, wanted.lse))]
    whole = Forward(torch.randn_like(wanted.out), torch.randn_like(wanted.lse))
    merge(*wanted, *whole)
    saved = (q, k, v, *whole)
    pairs += zip(*(packed_backward(one, saved, dout, parts) for one in (kernel, CpuFlash())), strict=True)
    assert all(relative_error(*pair) <= 1e-6 for pair in pairs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_parts_together_are_the_parts_one_by_one(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, forward, backward = CASES[case]
    played = Played()
    alike(KERNELS[name](played, monkeypatch), parts)
    assert played.launches == {"forward": forward, "backward": backward}


@pytest.mark.sweep
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_parts(data: st.DataObject) -> None:
    """Of a grid, so that no pair is in two of them."""
    rows, columns = (sorted({0, 48, *data.draw(st.lists(st.integers(1, 47), max_size=4))}) for _ in range(2))
    grid = [(row, column) for row in pairwise(rows) for column in pairwise(columns)]
    bands = st.sampled_from([CAUSAL, FULL])
    chosen = data.draw(st.lists(st.sampled_from(grid), min_size=1, unique=True))
    parts = tuple(
        part(row, column, data.draw(bands) if row[1] - row[0] == column[1] - column[0] else FULL)
        for row, column in sorted(chosen)
    )
    with pytest.MonkeyPatch.context() as patch:
        alike(aten(Played(), patch), parts)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_torch_takes_the_calls(case: str) -> None:
    """On meta tensors: the schemas take the arguments."""
    q, k, v = (torch.empty((2, 48, heads, 64), dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    parts, kernel = CASES[case][0], AtenFlash()
    out, lse = packed_forward(kernel, (q, k, v), parts)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 48), torch.float32)
    grads = packed_backward(kernel, (q, k, v, out, lse), q, parts)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
