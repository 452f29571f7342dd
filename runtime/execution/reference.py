"""Attention on one process in fp64, written out with plain matmuls: the reference of every executed schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from sim.schedule.ir.masks import CAUSAL, Band, BlockSparse, Documents, Mask
from sim.schedule.ir.ops import NO_LABEL
from sim.words.optimiser import ADAM
from sim.words.patterns import AttentionSink, CausalBlockwise, Pattern
from sim.words.workload import ModelSpec

Tensor = torch.Tensor

_QUERIES = 1024
"""Queries whose scores are written out at once."""


_NOTHING = 1e-12
"""What rounding in fp64 leaves of a tensor that is zero."""


Kind = tuple[ModelSpec, Mask]
"""What a layer is: the model's figures and the mask."""


class Reference(NamedTuple):
    """Global tensors in fp64. out, dq: (B, S, H, D); dk, dv: (B, S, H_kv, D); lse: (B, H, S)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    mask: Mask,
    positions: range | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Reference:
    """Return attention of q (B, S_q, H, D) to k, v (B, S_k, H_kv, D) and, if dout is given, its gradients.

    ``positions`` are those of the queries, by default 0, 1, …, as those of the keys. One sequence, one head and some
    queries at a time, so that scores take little memory.
    """
    group = q.shape[2] // k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = scale or q.shape[-1] ** -0.5
    for begin in range(0, q.shape[1], _QUERIES):
        some = slice(begin, begin + _QUERIES)
        keep = _kept(mask, (positions or range(q.shape[1]))[some], k.shape[1])
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
            g = h // group
            bent = _bent(q[b, some, h] @ k[b, :, g].T * scale, cap)
            slope = scale if cap is None else scale * (1 - (bent / cap) ** 2)
            scores = bent.masked_fill(~keep, -torch.inf)
            lse[b, h, some] = torch.logsumexp(scores, dim=-1)
            weights = scores.sub_(lse[b, h, some, None]).exp_().masked_fill_(~keep, 0.0)
            out[b, some, h] = weights @ v[b, :, g]
            if dout is not None:
                do = dout[b, some, h]
                dv[b, :, g] += weights.T @ do
                delta = (do * out[b, some, h]).sum(dim=-1, keepdim=True)
                ds = weights.mul_(do @ v[b, :, g].T - delta).mul_(slope)
                dq[b, some, h] = ds @ k[b, :, g]
                dk[b, :, g] += ds.T @ q[b, some, h]
    return Reference(out, lse, dq, dk, dv)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> dict[str, Tensor]:
    """Return attention without softmax and its gradients, with all scores of the mask written out: no chunks, and no
    states. Gradients are torch's autograd of that.
    """
    for x in (q, k, v):
        x.requires_grad_()
    out = _weighted(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, linear=True).transpose(1, 2)
    out.backward(dout)
    return {"out": out.detach(), "dq": _gradient(q), "dk": _gradient(k), "dv": _gradient(v)}


def _weighted(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, linear: bool, scale: float | None = None, cap: float | None = None
) -> Tensor:
    """Return (B, H, S, D) of q (B, H, S, D) and k, v (B, H_kv, S, D), with softmax or without."""
    group = q.shape[1] // k.shape[1]
    scores = _bent(q @ k.repeat_interleave(group, dim=1).mT * (scale or q.shape[-1] ** -0.5), cap)
    keep = _kept(mask, range(q.shape[2]), q.shape[2])
    weights = scores.masked_fill(~keep, 0.0) if linear else scores.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    return weights @ v.repeat_interleave(group, dim=1)


def layers(
    weights: list[dict[str, Tensor]], x: Tensor, dx: Tensor | None, kinds: list[Kind], *, linear: bool
) -> dict[tuple[str, int], Tensor]:
    """Return what leaves a stack of Llama's layers and, if its gradient dx (B, S, E) is given, all gradients.

    By (tensor, layer): ("x", L) and ("dx", 0) are (B, S, E), ("dwq", l) and so on have the shape of their weight.
    Gradients are torch's autograd of the textbook formulas: nothing in common with the kernels that are tested.
    Weights of a model with adapters have none, and theirs are among those of their layer.
    """
    first = x.requires_grad_()
    _learn(weights, kinds)
    for of_layer, kind in zip(weights, kinds, strict=True):
        x = _layer(of_layer, x, *kind, linear=linear)
    found = {("x", len(weights)): x.detach()}
    if dx is not None:
        x.backward(dx)
        found["dx", 0] = _gradient(first)
        for layer, of_layer in enumerate(weights):
            found |= {(f"d{name}", layer): gradient for name, gradient in _gradients(of_layer).items()}
    return found


class Sequences(NamedTuple):
    """Sequences that are alike."""

    ids: Tensor
    """(B, S)."""
    labels: Tensor
    """(B, S)."""
    kinds: list[Kind]
    """Of each layer."""


def step(
    weights: list[dict[str, Tensor]], batches: Iterable[Sequences], *, linear: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of each token (B, S) of a training step, and for their mean the gradients of each unit's weights,
    flat, one behind the other. The first of ``weights`` are the embedding's, the last ones the head's; of a model whose
    embedding is its head, too, the first are both. Frozen ones are left out. Losses of sequences of unlike lengths
    stand in as many columns as the longest has.
    """
    every = list(batches)
    _learn(weights, every[0].kinds)
    losses = [_losses(weights, one, linear=linear) for one in every]
    labelled = sum([(one.labels != NO_LABEL).sum() for one in every])
    (torch.stack([loss.sum() for loss in losses]).sum() / labelled).backward()
    found = [list(_gradients(unit).values()) for unit in weights]
    longest = max(loss.shape[1] for loss in losses)
    whole = [torch.nn.functional.pad(loss.detach(), (0, longest - loss.shape[1])) for loss in losses]
    return torch.cat(whole), [torch.cat([gradient.flatten() for gradient in unit]) for unit in found if unit]


def _losses(weights: list[dict[str, Tensor]], sequences: Sequences, *, linear: bool) -> Tensor:
    """Return the loss of each token of sequences that are alike."""
    ids, labels, kinds = sequences
    first, *inner = weights
    model, _ = kinds[0]
    last = {**first, "w_head": first["w_embed"].T} if model.tied_embeddings else inner.pop()
    x = torch.nn.functional.embedding(ids, first["w_embed"]) * (model.embedding_scale or 1)
    for of_layer, kind in zip(inner, kinds, strict=True):
        x = _layer(of_layer, x, *kind, linear=linear)
    logits = torch.nn.functional.rms_norm(x, (model.embed_dim,), last["norm"], model.norm_epsilon) @ last["w_head"]
    logits = _bent(logits * (model.logit_scale or 1), model.logit_softcap or None)
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=NO_LABEL)


def _bent(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def adamw(states: list[list[Tensor]], gradients: list[Tensor]) -> list[list[Tensor]]:
    """Return weights and both moments of each unit after a step of torch's AdamW, behind its clipping by norm."""
    parameters = [torch.nn.Parameter(weights.clone()) for weights, _, _ in states]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, ADAM.max_norm)
    optimiser = torch.optim.AdamW(
        parameters, ADAM.learning_rate, (ADAM.beta1, ADAM.beta2), ADAM.epsilon, ADAM.weight_decay, fused=False
    )
    kept = optimiser.state
    for parameter, (_, first, second) in zip(parameters, states, strict=True):
        before = torch.tensor(float(ADAM.step - 1))
        kept[parameter] = {"step": before, "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    optimiser.step()
    return [[one.detach(), kept[one]["exp_avg"], kept[one]["exp_avg_sq"]] for one in parameters]


def _learn(weights: list[dict[str, Tensor]], kinds: list[Kind]) -> None:
    """Ask for the gradients of all weights, of a model with adapters of those."""
    model, _ = kinds[0]
    for name, weight in (weight for unit in weights for weight in unit.items()):
        weight.requires_grad_(not model.lora_rank or name.startswith("lora"))


def _gradients(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the weights that have some."""
    return {name: _gradient(weight) for name, weight in weights.items() if weight.requires_grad}


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _layer(w: dict[str, Tensor], x: Tensor, model: ModelSpec, mask: Mask, *, linear: bool) -> Tensor:
    """Return what leaves one layer (arXiv:2302.13971 §2.2)."""
    heads, kv_heads = model.num_heads, model.num_kv_heads

    def norm(tokens: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(tokens, weight.shape, weight, model.norm_epsilon)

    def linear_of(tokens: Tensor, name: str) -> Tensor:
        made = torch.nn.functional.linear(tokens, w[name].T, w.get(f"b{name.removeprefix('w')}"))
        target = name.removeprefix("w").removeprefix("_")
        if f"lora_a_{target}" in w:
            factor = (model.lora_alpha or model.lora_rank or 1) / (model.lora_rank or 1)
            made = made + factor * (tokens @ w[f"lora_a_{target}"] @ w[f"lora_b_{target}"])
        return made

    def split(tokens: Tensor, count: int) -> Tensor:
        return tokens.unflatten(-1, (count, model.head_dim)).transpose(1, 2)

    def query_or_key(tokens: Tensor, which: str, count: int) -> Tensor:
        made = linear_of(tokens, f"w{which}")
        if model.qk_norm == "all":
            made = norm(made, w[f"norm_all_{which}"])
        by_head = split(made, count)
        if model.qk_norm == "head":
            by_head = norm(by_head, w[f"norm_{which}"])
        return _turned(by_head, model, mask)

    def activated(tokens: Tensor) -> Tensor:
        if model.mlp == "gelu":
            return torch.nn.functional.gelu(linear_of(tokens, "w_up"), approximate="tanh")
        gate, up = linear_of(tokens, "w_gate"), linear_of(tokens, "w_up")
        return up * (
            torch.nn.functional.gelu(gate, approximate="tanh") if model.mlp else torch.nn.functional.silu(gate)
        )

    def normed(tokens: Tensor, name: str) -> Tensor:
        return norm(tokens, w[name]) if name in w else tokens

    h = normed(x, "norm1")
    q, k = query_or_key(h, "q", heads), query_or_key(h, "k", kv_heads)
    v = split(linear_of(h, "wv"), kv_heads)
    scale, cap = model.attention_scale or None, model.attention_softcap or None
    out = _weighted(q, k, v, mask, linear=linear, scale=scale, cap=cap)
    attended = linear_of(out.transpose(1, 2).flatten(2), "wo")
    if model.parallel_residual:
        return x + attended + linear_of(activated(h), "w_down")
    factor = model.residual_scale or 1
    x = x + factor * normed(attended, "post_norm1")
    return x + factor * normed(linear_of(activated(normed(x, "norm2")), "w_down"), "post_norm2")


def _turned(x: Tensor, model: ModelSpec, mask: Mask) -> Tensor:
    """Return (B, H, S, D) with rotary embedding, as complex numbers (arXiv:2104.09864 §3.2.2), halves paired."""
    if model.rotary_dims == 0:
        return x
    rotated = model.rotary_dims or model.head_dim
    low, high = x[..., :rotated].chunk(2, dim=-1)
    frequencies = model.rope_theta ** (-torch.arange(0, rotated, 2, dtype=x.dtype) / rotated)
    positions = torch.arange(x.shape[2])
    if isinstance(mask, Documents):
        positions -= torch.tensor(mask.edges)[_document(positions, mask)]
    angles = torch.outer(positions.to(x.dtype), frequencies)
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag, x[..., rotated:]], dim=-1)


def _kept(mask: Mask, queries: range, num_keys: int) -> Tensor:
    """Return which pairs of some queries and all keys a mask keeps."""
    rows, columns = torch.tensor(queries)[:, None], torch.arange(num_keys)[None, :]
    keep = torch.ones(len(queries), num_keys, dtype=torch.bool)
    band = mask if isinstance(mask, Band) else CAUSAL
    if isinstance(mask, Documents):
        keep &= _document(rows, mask) == _document(columns, mask)
        if isinstance(mask.keeps, Band):
            band = mask.keeps
        else:
            keep &= _seen(mask.keeps, mask, rows, columns)
    if isinstance(mask, BlockSparse):
        band, size, kept = mask.band, mask.blocks.size, mask.blocks.kept
        table = torch.zeros(len(kept), len(kept), dtype=torch.bool)
        for row, blocks in enumerate(kept):
            table[row, list(blocks)] = True
        keep &= table[rows // size, columns // size]
    if band.right is not None:
        keep &= columns <= rows + band.right
    if band.left is not None:
        keep &= columns >= rows - band.left
    return keep


def _seen(pattern: Pattern, mask: Documents, rows: Tensor, columns: Tensor) -> Tensor:
    """Return which keys queries see of their own document, among those that are not later, by the definition."""
    edges, document = torch.tensor(mask.edges), _document(rows, mask)
    query, key, size = rows - edges[document], columns - edges[document], (edges[1:] - edges[:-1])[document]
    if isinstance(pattern, AttentionSink):
        return (key < pattern.sink) | (query - key < pattern.window)
    if isinstance(pattern, CausalBlockwise):
        row, column, last = query // pattern.size, key // pattern.size, (size - 1) // pattern.size
        return (row == last) | (column < pattern.sink) | (row - column < pattern.local)
    answer = (size.double() * pattern.share).long()
    edge, each = size - pattern.answers * answer, answer.clamp(min=1)
    return (key < edge) | ((query - edge) // each == (key - edge) // each)


def _document(positions: Tensor, mask: Documents) -> Tensor:
    """Return the number of the document of each position."""
    return torch.bucketize(positions, torch.tensor(mask.edges), right=True) - 1


def relative_error(value: Tensor, exact: Tensor, whole: Tensor | None = None) -> float:
    """Return the largest deviation from ``exact``, relative to the largest magnitude of the tensor it is a part of (or
    absolute, if that tensor is zero: softmax over a single key has no gradient).
    """
    scale = float((exact if whole is None else whole).abs().max())
    if scale < _NOTHING:
        scale = 0.0
    error = float((value.double() - exact).abs().max()) / (scale or 1.0)
    return float("inf") if math.isnan(error) else error  # not a number is as wrong as can be
