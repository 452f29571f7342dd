"""Tensors of tokens as matrices, a row each."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def matrices(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return tensors (B, S, …) as matrices without a copy: (B * S, …), or (S * B, …) where all have tokens first in
    memory. Where the sequences of one of them do not follow each other in memory, or the orders differ, it is one
    matrix (S, …) for each sequence.
    """
    batch = tensors[0].shape[0]
    if batch == 1 or all(tensor.stride(0) == tensor.shape[1] * tensor.stride(1) for tensor in tensors):
        return [tuple(map(_matrix, tensors))]
    if all(tensor.stride(1) == batch * tensor.stride(0) for tensor in tensors):
        return [tuple(_matrix(tensor.transpose(0, 1)) for tensor in tensors)]
    return [tuple(_matrix(tensor[at : at + 1]) for tensor in tensors) for at in range(batch)]


def _matrix(tokens: Tensor) -> Tensor:
    """Return (B, S, …) as (B * S, …) without a copy."""
    return tokens.view(tokens.shape[0] * tokens.shape[1], -1)
