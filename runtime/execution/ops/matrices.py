"""Tensors of tokens as matrices, a row each."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def matrix(tokens: Tensor) -> Tensor:
    """Return (B, S, …) as (B * S, …) without a copy."""
    return tokens.view(tokens.shape[0] * tokens.shape[1], -1)


def matrices(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return tensors (B, S, …) as matrices (B * S, …) without a copy, or of each sequence (S, …), where those of one of
    them do not follow each other in memory: where it is a chunk of the tokens of several.
    """
    batch = tensors[0].shape[0]
    if batch == 1 or all(tensor.stride(0) == tensor.shape[1] * tensor.stride(1) for tensor in tensors):
        return [tuple(map(matrix, tensors))]
    return [tuple(matrix(tensor[at : at + 1]) for tensor in tensors) for at in range(batch)]
