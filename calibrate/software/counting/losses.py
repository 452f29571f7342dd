"""Losses of torch, with the head whose logits they take."""

from __future__ import annotations

import functools
import operator

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from calibrate.software.counting.count import Ready, Run, received, run
from calibrate.software.counting.sizes import Sizes


def torchtitan(sizes: Sizes) -> Run:
    """Return what torchtitan's loss runs: cross_entropy_loss of torchtitan/components/loss.py, logits deleted after."""

    def build(sizes: Sizes) -> Ready:
        head, x, labels = _given(sizes, sizes["batch"], sizes["sequence"])

        def loss() -> tuple[torch.Tensor]:
            return (functional.cross_entropy(head(x).flatten(0, 1).float(), labels.flatten(0, 1)),)

        return Ready(loss, (x,))

    return run(build, sizes)


def chunk(sizes: Sizes) -> Run:
    """Return what one more chunk runs, of a loss that recomputes the logits of each chunk; the peak is that of all."""
    three, two = (run(functools.partial(_in_chunks, chunks), sizes) for chunks in (3, 2))
    return three.without(two)


def _in_chunks(chunks: int, sizes: Sizes) -> Ready:
    """Return a loss of so many chunks of tokens, split before: each under a checkpoint, and added to their sum."""
    head, x, labels = _given(sizes, sizes["chunk"])
    given = [(x, labels), *(_given(sizes, sizes["chunk"])[1:] for _ in range(chunks - 1))]

    def part(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(x).float(), labels, reduction="sum")

    def loss() -> tuple[torch.Tensor]:
        parts = (checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in given)
        return (functools.reduce(operator.add, parts),)

    return Ready(loss, tuple(x for x, _ in given))


def _given(sizes: Sizes, *tokens: int) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Return the head, hidden states and labels."""
    head = torch.nn.Linear(sizes["hidden"], sizes["vocab"], bias=False, dtype=torch.bfloat16)
    return head, received(torch.bfloat16, *tokens, sizes["hidden"]), torch.empty(tokens, dtype=torch.int64)
