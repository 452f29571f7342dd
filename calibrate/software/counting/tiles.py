"""The tiles of DeepSpeed 0.19.8, ``runtime/sequence_parallel/ulysses_sp.py``, as Arctic Training 0.8.0 calls them.

A tile has ``chunk`` tokens. It is not the first one: gradients of weights are there, and it adds to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from calibrate.software.counting.count import Ready, Run, received, run
from calibrate.software.counting.layers import weight
from calibrate.software.counting.sizes import Sizes


class _Tile(torch.autograd.Function):
    """A tile of ``TiledMLP``: forward without a graph, and once more in backward."""

    @staticmethod
    def forward(
        ctx: Any, of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, of_x: torch.Tensor
    ) -> torch.Tensor:
        """Return the MLP of x."""
        ctx.of, ctx.of_x = of, of_x
        ctx.save_for_backward(x)
        with torch.no_grad():
            return of(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of x, which is added to zeros; those of weights are added to others."""
        (x,) = ctx.saved_tensors
        tile = x.detach().requires_grad_()
        tile.grad = ctx.of_x
        with torch.enable_grad():
            output = ctx.of(tile)
        torch.autograd.backward(output, gradient)
        return None, tile.grad, None


def mlp(sizes: Sizes) -> Run:
    """Return what a tile of the MLP runs."""

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["chunk"], sizes["hidden"])
        gate, up = (_added(sizes["ffn"], sizes["hidden"]) for _ in range(2))
        down, of_x = _added(sizes["hidden"], sizes["ffn"]), torch.empty_like(x)

        def of(x: torch.Tensor) -> torch.Tensor:
            return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

        return Ready(lambda: (_Tile.apply(of, x, of_x),), (x,))

    return run(build, sizes)


def loss(sizes: Sizes) -> Run:
    """Return what a tile of ``TiledFusedLogitsLoss`` runs with ForCausalLMLoss, both passes of it in forward."""

    def build(sizes: Sizes) -> Ready:
        x = torch.empty(sizes["chunk"], sizes["hidden"], dtype=torch.bfloat16)
        labels = torch.empty(sizes["chunk"], dtype=torch.int64)
        head, of_x = _added(sizes["vocab"], sizes["hidden"]), torch.empty_like(x)
        given = torch.empty((), dtype=torch.bfloat16)

        def forward() -> tuple[()]:
            tile = x.detach().requires_grad_()
            tile.grad = of_x
            logits = functional.linear(tile, head)
            good = (labels != -100).sum()
            each = functional.cross_entropy(logits.float(), labels) * good
            torch.autograd.backward(each, given)
            return ()

        return Ready(forward)

    return run(build, sizes)._replace(kept=[])


def _added(*shape: int) -> torch.nn.Parameter:
    """Return a weight that has a gradient."""
    made = weight(*shape)
    made.grad = torch.empty_like(made)
    return made
