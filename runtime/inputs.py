"""Inputs of a run, made from global positions.

They depend on the seed, the tensor's name and the global position of each token only, so that every number of ranks and
every layout sees the same global tensors.
"""

from __future__ import annotations

import zlib

import torch

from runtime.reference import Reference, attention
from runtime.tensors import TORCH_DTYPE, Storage
from sim.schedule.ir import Program
from sim.schedule.masks import MASKS, Span, block_band
from sim.workload import Workload

_BLOCK = 64
"""Tokens that are drawn from one seed."""


def global_tokens(name: str, span: Span, heads: int, workload: Workload) -> torch.Tensor:
    """Return some tokens, with all ``heads``, of a global input: (B, tokens, heads, D) in fp64, standard normal.

    Values are rounded to the workload's data type, so that runs in fp64 on the same numbers can check it.
    """
    blocks = []
    for block in range(span.start // _BLOCK, (span.stop - 1) // _BLOCK + 1):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{workload.seed} {name} {block}".encode()))
        shape = (workload.batch, _BLOCK, heads, workload.model.head_dim)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        low, high = block * _BLOCK, (block + 1) * _BLOCK
        begin = max(span.start, low + (span.start - low) % span.step)
        blocks.append(drawn[:, begin - low : min(span.stop, high) - low : span.step])
    return torch.cat(blocks, dim=1).to(TORCH_DTYPE[workload.dtype]).double()


def fill_inputs(program: Program, workload: Workload, storage: Storage) -> None:
    """Put into a rank's input ports what they hold of the global tensors; out and lse are computed in fp64."""
    model, whole = workload.model, Span(0, workload.seq)
    for port in program.inputs:
        if port.tensor not in {"out", "lse"}:
            total = model.num_kv_heads if port.tensor in {"k", "v"} else model.num_heads
            value = torch.cat([global_tokens(port.tensor, span, total, workload) for span in port.tokens], dim=1)
            storage.write(port.view).copy_(value[:, :, port.heads.start : port.heads.stop])
            continue
        heads = range(model.num_heads)[port.heads.start : port.heads.stop : port.heads.step]
        group = model.num_heads // model.num_kv_heads
        k, v = (
            global_tokens(name, whole, model.num_kv_heads, workload)[:, :, [head // group for head in heads]]
            for name in ("k", "v")
        )
        parts = []
        for span in port.tokens:
            q = global_tokens("q", span, model.num_heads, workload)[:, :, list(heads)]
            band = block_band(MASKS[workload.mask], span, whole)
            assert band is not None
            part = attention(q, k, v, None, band)
            parts.append(part.out if port.tensor == "out" else part.lse)
        storage.write(port.view).copy_(torch.cat(parts, dim=1 if port.tensor == "out" else 2))


def reference(workload: Workload) -> Reference:
    """Return output and gradients of a workload's inputs, whole and in fp64, computed on one process."""
    whole, model = Span(0, workload.seq), workload.model
    q, dout = (global_tokens(name, whole, model.num_heads, workload) for name in ("q", "dout"))
    k, v = (global_tokens(name, whole, model.num_kv_heads, workload) for name in ("k", "v"))
    return attention(q, k, v, dout, MASKS[workload.mask])
