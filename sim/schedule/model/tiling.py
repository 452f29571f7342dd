"""How many tokens equations are written for at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.block import Tile, block_of
from sim.schedule.model.equations import Block, Equation
from sim.schedule.model.weights.params import Params
from sim.schedule.model.write import TokenWriter
from sim.words.options import MlpName, ModulesName, ProductsName
from sim.words.workload import Workload

Tiling = Callable[[tuple[Equation, ...], TokenWriter], Iterator[Tensor]]
"""Appends equations for all rows of a writer, some at a time; yields each result once it is complete."""


def whole(equations: tuple[Equation, ...], rows: TokenWriter) -> Iterator[Tensor]:
    """All rows at once."""
    for equation in equations:
        rows.write(equation)
        yield from equation.results


def write_all(equations: tuple[Equation, ...], rows: TokenWriter, params: Params, tiling: Tiling) -> None:
    """Append equations; gradients of weights are summed over the ranks as soon as they are there."""
    for tensor in tiling(equations, rows):
        if tensor.kind == "weight gradient":
            params.reduce(tensor.later(rows.layer), rows.values[tensor])


def block_in_tiles(
    mlp: MlpName, workload: Workload, tokens: int, modules: ModulesName = "fused", products: ProductsName = "apart"
) -> Block:
    """Return the block of a rank that has so many tokens of each sequence, with its MLP whole or in tiles.

    Sizes as published. ALST: so many tiles that one has about as many tokens as x has features, and a function of
    autograd, which saves what it was given once it has run (arXiv:2506.13996 §3.1; DeepSpeed's TiledMLP). MST: 4096
    tokens of all sequences, at least 1024 of each (wdlctc/mini-s, LlamaMLPWarpper).
    """
    batch = workload.batch
    if mlp == "whole":
        return block_of(workload.model, None, modules, products)
    if mlp == "tiled":
        size = -(-batch * tokens // -(-tokens // workload.model.embed_dim))
        return block_of(workload.model, Tile(size, saves=True), modules, products)
    return block_of(workload.model, Tile(batch * max(4096 // batch, 1024), saves=False), modules, products)
