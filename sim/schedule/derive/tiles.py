"""What an op that loops over tiles of tokens runs: the kernels of each tile, as a program on buffers of a tile.

Costs, workspace, what is run and what is proved of such an op follow from this program. A tile of the backward pass is
one of the forward pass and its backward equations, as autograd runs them; from the second one on a gradient of a weight
is made apart and added (deepspeed/runtime/sequence_parallel/ulysses_sp.py, TiledMLP: each tile calls backward, and
autograd adds to ``.grad`` in the data type of the weight).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from sim.schedule.ir.ops import (
    Accumulate,
    EagerSwiGlu,
    EagerSwiGluBackward,
    Gemm,
    GemmForm,
    Op,
    SwiGlu,
    SwiGluBackward,
    TiledKernel,
    TiledMlpBackward,
)
from sim.schedule.ir.program import Program
from sim.schedule.ir.views import Buffer, View
from sim.words.workload import Dtype


class Tile(NamedTuple):
    """So many tokens of an op, one tile after the other."""

    program: Program
    """Its first buffers are those that the op reads, then those that it writes, cut to the tokens of one tile."""
    tokens: int
    """Of each tile."""
    times: int
    """How many there are."""


def tiles(op: TiledKernel, program: Program) -> list[Tile]:
    """Return the tiles of an op in their order: the first, those like it, and a smaller one at the end."""
    tokens = math.prod(op.x.shape[:2])
    size = min(op.tile, tokens)
    counts = {(size, True): 1, (size, False): tokens // size - 1, (tokens % size, False): 1 if tokens % size else 0}
    return [
        Tile(tile_of(op, program, (1, rows), first=first), rows, count)
        for (rows, first), count in counts.items()
        if count
    ]


def tile_of(op: TiledKernel, program: Program, tokens: tuple[int, int], *, first: bool) -> Program:
    """Return what an op does for a tile of tokens (B, S)."""
    backward, eager = isinstance(op, TiledMlpBackward), op.eager is True
    frozen = isinstance(op, TiledMlpBackward) and op.dw_gate is None
    return _tile(backward, tokens, op.w_gate.shape, program.dtype(op.x), first, eager, frozen)


def held_bytes(program: Program, given: int) -> int:
    """Return the most that the buffers of a tile hold at a time, but for the first ``given``, which are there."""
    held, most = 0, 0
    for index, ended in enumerate(ends(program, given)):
        held += sum(program.buffers[view.buffer].nbytes for view in _new(program, given, index))
        most = max(most, held)
        held -= sum(program.buffers[number].nbytes for number in ended)
    return most


def ends(program: Program, given: int) -> list[list[int]]:
    """Return per op of a tile the buffers that nothing needs after it, but for the first ``given``."""
    last = {view.buffer: index for index, op in enumerate(program.ops) for view in (*op.reads, *op.writes)}
    found: list[list[int]] = [[] for _ in program.ops]
    for number, index in last.items():
        if number >= given:
            found[index].append(number)
    return found


def _new(program: Program, given: int, index: int) -> list[View]:
    """Return what an op of a tile is the first to write."""
    before = {view.buffer for op in program.ops[:index] for view in op.writes}
    return [view for view in program.ops[index].writes if view.buffer >= given and view.buffer not in before]


@lru_cache(maxsize=1024)
def _tile(backward: bool, tokens: tuple[int, int], weight: tuple[int, ...], dtype: Dtype, first: bool,
          eager: bool, frozen: bool) -> Program:  # fmt: skip
    """Return the program of a tile of tokens (B, S), with weights (E, F), of which frozen ones have no gradients."""
    embed, ffn = weight
    w = _Writer(tokens, dtype)
    x = w.rows("x", embed)
    w_gate, w_up, w_down = w.weight("w_gate", embed, ffn), w.weight("w_up", embed, ffn), w.weight("w_down", ffn, embed)
    if backward:
        dout, dx = w.rows("dout", embed), w.rows("dx", embed)
    if backward and not frozen:
        dw_gate, dw_up = w.weight("dw_gate", embed, ffn), w.weight("dw_up", embed, ffn)
        dw_down = w.weight("dw_down", ffn, embed)
    out = w.rows("out", embed)
    gate = w.gemm("nn", x, w_gate, w.rows("gate", ffn))
    up = w.gemm("nn", x, w_up, w.rows("up", ffn))
    act = w.rows("act", ffn)
    active = w.rows("active", ffn) if eager else None
    if active:
        w.ops.append(EagerSwiGlu(label="swiglu", gate=gate, up=up, out=act, active=active))
    else:
        w.ops.append(SwiGlu(label="swiglu", gate=gate, up=up, out=act))
    w.gemm("nn", act, w_down, out)
    if backward:
        dact = w.gemm("nt", dout, w_down, w.rows("dact", ffn))
        if not frozen:
            w.gradient(act, dout, dw_down, first=first)
        dgate, dup = w.rows("dgate", ffn), w.rows("dup", ffn)
        label = "back through swiglu"
        if active:
            led = EagerSwiGluBackward(label=label, gate=gate, up=up, active=active, dout=dact, dgate=dgate, dup=dup)
            w.ops.append(led)
        else:
            w.ops.append(SwiGluBackward(label=label, gate=gate, up=up, dout=dact, dgate=dgate, dup=dup))
        w.gemm("nt", dgate, w_gate, dx)
        if not frozen:
            w.gradient(x, dgate, dw_gate, first=first)
        w.gemm("nt", dup, w_up, dx, accumulate=True)
        if not frozen:
            w.gradient(x, dup, dw_up, first=first)
    return Program(rank=0, buffers=w.buffers, ops=w.ops)


class _Writer:
    """Collects the buffers and ops of a tile."""

    def __init__(self, tokens: tuple[int, int], dtype: Dtype) -> None:
        self._tokens, self._dtype = tokens, dtype
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []

    def rows(self, name: str, width: int) -> View:
        """Return a new buffer of so many features of the tile's tokens."""
        return self._buffer(name, "bse", (*self._tokens, width))

    def weight(self, name: str, *shape: int) -> View:
        """Return a new buffer of a weight, or of its gradient."""
        return self._buffer(name, "io", shape)

    def _buffer(self, name: str, dims: str, shape: tuple[int, ...]) -> View:
        self.buffers.append(Buffer(name=name, dims=dims, shape=shape, dtype=self._dtype, category="other"))
        return View(len(self.buffers) - 1, tuple([(0, extent) for extent in shape]))

    def gemm(self, form: GemmForm, a: View, b: View, out: View, *, accumulate: bool = False) -> View:
        """Append a matrix product; return its result."""
        label = f"make {self.buffers[out.buffer].name}"
        self.ops.append(Gemm(label=label, form=form, a=a, b=b, out=out, accumulate=accumulate))
        return out

    def gradient(self, x: View, dout: View, into: View, *, first: bool) -> None:
        """Append the gradient of a weight; of a tile that is not the first one it is added to that of those before."""
        if first:
            self.gemm("tn", x, dout, into)
            return
        own = self.gemm("tn", x, dout, self.weight(f"{self.buffers[into.buffer].name} of a tile", *into.shape))
        self.ops.append(Accumulate(label="add", source=own, into=into))
