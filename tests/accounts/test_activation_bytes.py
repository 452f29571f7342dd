"""Activation bytes that were published per layer: Ring Attention (arXiv:2310.01889v4), table 1, in bf16.

There b is the batch, n heads, s tokens of a sequence, c those of a block, h the model's width; an MLP is 4h wide.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sim.accounts.memory import lifetimes
from sim.schedule.derive.workspace import workspace_bytes
from sim.schedule.ir.ops import Attend, SwiGlu, TiledMlp
from sim.schedule.ir.program import Program
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked, check
from sim.words.workload import ModelSpec, Workload

b, n, h, s, ranks = 2, 4, 64, 256, 4
c = s // ranks
MODEL = ModelSpec(
    name="table 1",
    embed_dim=h,
    num_layers=1,
    num_heads=n,
    num_kv_heads=n,
    head_dim=h // n,
    ffn_dim=4 * h,
    vocab_size=512,
)


def built(name: str, ranks: int, scope: Any, **options: Any) -> Checked:
    entry = SCHEDULES[name]
    passes: Any = "both" if scope == "step" else "forward"
    workload = Workload(model=MODEL, batch=b, seq=s, dtype="bf16", scope=scope, passes=passes, mask="full")
    return check(entry.schedule(workload, entry.mesh(ranks, MODEL), dataclasses.replace(entry.options, **options)))


def written(op: Any, program: Program) -> list[int]:
    return [program.nbytes(view) for view in op.writes]


def first(kind: type, program: Program) -> Any:
    return next(op for op in program.ops if isinstance(op, kind))


@pytest.mark.parametrize("kernel", ["standard", "memory-efficient", "flash"])
def test_attention_of_all_tokens(kernel: str) -> None:
    """Vanilla: 2bns². Memory-efficient: 2bsh, the output, and 4bch, a chunk of keys and values. Blockwise: 2bsh.

    Ours saves log-sum-exps, too, of which the table says nothing. Chunks of keys and values are parts of those that
    there are, and take none. What a chunk needs beside them the table leaves out: scores, made in fp32, in bf16 and
    as they were cast, and an output that is not yet where it belongs.
    """
    program = built("single", 1, "step", kernel=kernel).schedule.program(0)
    attend = first(Attend, program)
    out, lse, *probs = written(attend, program)
    assert out == 2 * b * s * h
    assert lse == 4 * b * s * n
    assert probs == ([2 * b * n * s**2] if kernel == "standard" else [])
    if kernel == "memory-efficient":
        assert workspace_bytes(attend, program) == (4 + 2 + 2) * b * n * s**2 + 2 * b * s * h  # one chunk has all


@pytest.mark.parametrize("mlp", ["whole", "mini"])
def test_feed_forward(mlp: str) -> None:
    """Vanilla and memory-efficient: 8bsh, what is 4h wide. Ours is SwiGLU: gate, up and their product are so wide.
    Blockwise: 2bsh, the output.
    """
    program = built("single", 1, "step", mlp=mlp).schedule.program(0)
    if mlp == "mini":
        assert written(first(TiledMlp, program), program) == [2 * b * s * h]
        return
    swiglu = first(SwiGlu, program)
    assert [program.nbytes(view) for view in (swiglu.gate, swiglu.up, swiglu.out)] == [8 * b * s * h] * 3


def test_ring_attention() -> None:
    """6bch: the queries, keys and values that are there and those that arrive, and the output: six blocks, of which the
    table counts elements; in bf16 they are 12bch bytes. Between the first hop and the last ours has more: its own keys
    and values stay for the backward pass, and the output is summed in fp32 from parts in bf16.
    """
    found = built("ring", ranks, "attention")
    program, block, lse = found.schedule.program(2), 2 * b * c * h, 4 * b * c * n
    spans = lifetimes(program, found.dependencies[2])
    held = [
        sum(buffer.nbytes for buffer, span in zip(program.buffers, spans, strict=True) if span.first <= op < span.end)
        for op, what in enumerate(program.ops)
        if isinstance(what, Attend)
    ]
    assert len(held) == ranks
    kept, summed = 2 * block, 4 * b * c * h
    assert held[0] == 6 * block + lse
    assert held[1:3] == [6 * block + lse + kept + summed + lse] * 2
    assert held[3] == 6 * block + lse + summed + lse  # nothing arrives any more: its own are the two blocks
