"""How zigzag code takes halves of what lies document by document.

A rank has two chunks of each document, and a step of the ring takes one of each: the first half of the keys, or the
second half of the queries. That is a slice of one document. Of several it is none, and ring-flash-attention 0.1.8
(zigzag_ring_flash_attn_varlen.py) takes it by a mask of booleans that lies in host memory. PyTorch then finds the
indices on the CPU, copies them to the GPU, and the host waits for that copy, which is behind all kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from sim.schedule.ir.ops import COMPUTE, HostSync
from sim.schedule.write.blocks import Block
from sim.schedule.write.builder import ProgramBuilder

Halves = Literal["slices", "host-mask"]

_INDEX = 3
"""Eager calls of ``x[mask]`` and of ``x[mask] = y``: nonzero, a copy to the GPU, and a kernel that gathers or scatters;
its bytes are counted with the kernels beside it, which take the rows between the halves, too.
"""
_OF_DOCUMENT = 10
"""Of get_half_index, a loop over documents, both times: a sum and a quotient of two edges, which lie on the GPU; both
ends copied to the host (``index[start:end]``); and what fills that slice.
"""
_LSE_OF_DOCUMENT = 3
"""Of get_half_lse, another one: both edges copied to the host, and what copies a slice."""


class HostMasks:
    """Appends what a rank's host does for halves: nothing with slices, nor of one document."""

    def __init__(self, builder: ProgramBuilder, halves: Halves) -> None:
        self._b = builder
        documents = len(builder.workload.document_lengths)
        self._documents = documents if halves == "host-mask" and documents > 1 else 0

    def begin(self, *, backward: bool) -> None:
        """Before a pass: masks of both halves and q's second one; backward that of q, dout, out and lse."""
        self._wait("masks", 1, self._documents * (_LSE_OF_DOCUMENT if backward else _OF_DOCUMENT))
        self._wait("take halves", 3 if backward else 1)

    def around(self, block: Block, rows: int, *, backward: bool) -> AbstractContextManager[None]:
        """Around the kernel of a block of a shard of so many tokens, and what adds its results. Halves of k and v are
        taken before it. Behind it out and lse, or dq, or dk and dv are taken and put back.
        """
        return self._around(block, rows, backward=backward) if self._documents else nullcontext()

    @contextmanager
    def _around(self, block: Block, rows: int, *, backward: bool) -> Iterator[None]:
        of_queries, of_keys = (side.stop - side.start < rows for side in (block.rows, block.columns))
        if of_keys:
            self._wait("take halves of k and v", 2)
        yield
        if of_keys and backward:
            self._wait("add to halves of dk and dv", 4)
        elif of_queries:
            self._wait("add to halves of dq" if backward else "merge halves of out and lse", 2 if backward else 4)

    def _wait(self, label: str, times: int, calls: int = _INDEX) -> None:
        for _ in range(times if self._documents else 0):
            self._b.add(HostSync(label=label, streams=(COMPUTE,), calls=calls))
