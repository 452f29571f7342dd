"""What a transformer layer computes, one line an equation: the tokens' side of what ``check`` proves.

The layer is Llama's (arXiv:2302.13971 §2.2): RMSNorm, projections, rotary embedding, attention, output projection,
residual; RMSNorm, SwiGLU, residual. Tensors carry the number of their layer; ``x`` is what comes into a layer, and a
``+`` marks the next layer, so ``x+`` is what leaves it and ``dx+`` the gradient that comes back.
"""

from __future__ import annotations

from functools import cache

from sim.workload import ModelSpec, Workload


@cache
def weight_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the weights of one layer: (fan in, fan out), of norms (E,)."""
    embed, ffn = model.embed_dim, model.ffn_dim
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "norm1": (embed,),
        "wq": (embed, q),
        "wk": (embed, kv),
        "wv": (embed, kv),
        "wo": (q, embed),
        "norm2": (embed,),
        "w_gate": (embed, ffn),
        "w_up": (embed, ffn),
        "w_down": (ffn, embed),
    }


def heads_of(tensor: str, model: ModelSpec) -> int | None:
    """Return how many heads a tensor of tokens has, None if it has none (or is none)."""
    if tensor in {"q_raw", "q", "out", "lse", "dout", "dq", "dq_raw"}:
        return model.num_heads
    if tensor in {"k_raw", "k", "v", "dk", "dk_raw", "dv"}:
        return model.num_kv_heads
    return None


def width_of(tensor: str, model: ModelSpec) -> int:
    """Return how many features a token of a tensor has that are no heads, 1 if it has none; of a weight (or its
    gradient) how many columns.
    """
    weight = weight_shapes(model).get(tensor) or weight_shapes(model).get(tensor.removeprefix("d"))
    if weight:
        return weight[1] if len(weight) == 2 else 1
    if tensor in {"gate", "up", "act", "dgate", "dup", "dact"}:
        return model.ffn_dim
    return 1 if heads_of(tensor, model) or tensor.startswith("rstd") else model.embed_dim


def ports_of(workload: Workload) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Return the inputs that a workload's scope and passes give, and the outputs that they ask for: (tensor, layer)."""
    given: set[tuple[str, int]] = set()
    asked: set[tuple[str, int]] = set()
    if workload.scope == "layer":
        weights = [(name, layer) for layer in range(workload.layers) for name in weight_shapes(workload.model)]
        given, asked = {("x", 0), *weights}, {("x", workload.layers)}
        if workload.backward:
            given |= {("dx", workload.layers)}
            asked |= {("dx", 0), *((f"d{name}", layer) for name, layer in weights)}
        return given, asked
    given = {(name, 0) for name in ("q", "k", "v")}
    if workload.forward:
        asked = {("out", 0)}
    else:
        given |= {("out", 0), ("lse", 0)}
    if workload.backward:
        given |= {("dout", 0)}
        asked |= {(name, 0) for name in ("dq", "dk", "dv")}
    return given, asked


def is_weight(tensor: str) -> bool:
    """Return whether a tensor is a weight."""
    return tensor.startswith(("w", "norm"))


def is_weight_gradient(tensor: str) -> bool:
    """Return whether a tensor is the gradient of a weight."""
    return tensor.startswith(("dw", "dnorm"))


_FORWARD = {
    ("RmsNorm", "x", "norm1"): ("h1", "rstd1"),
    ("Gemm nn", "h1", "wq"): ("q_raw",),
    ("Gemm nn", "h1", "wk"): ("k_raw",),
    ("Gemm nn", "h1", "wv"): ("v",),
    ("Rope", "q_raw"): ("q",),
    ("Rope", "k_raw"): ("k",),
    # attention: q, k, v -> out, lse (see proof/attention_rules.py)
    ("Gemm nn", "out", "wo"): ("projected",),
    ("Accumulate", "x", "projected"): ("middle",),
    ("RmsNorm", "middle", "norm2"): ("h2", "rstd2"),
    ("Gemm nn", "h2", "w_gate"): ("gate",),
    ("Gemm nn", "h2", "w_up"): ("up",),
    ("SwiGlu", "gate", "up"): ("act",),
    ("Gemm nn", "act", "w_down"): ("down",),
    ("Accumulate", "middle", "down"): ("x+",),
}

_BACKWARD = {
    ("Gemm nt", "dx+", "w_down"): ("dact",),
    ("Gemm tn", "act", "dx+"): ("dw_down",),
    ("SwiGluBackward", "gate", "up", "dact"): ("dgate", "dup"),
    ("Gemm tn", "h2", "dgate"): ("dw_gate",),
    ("Gemm tn", "h2", "dup"): ("dw_up",),
    ("Gemm nt", "dgate", "w_gate"): ("dh2 of gate",),
    ("Gemm nt accumulate", "dup", "w_up", "dh2 of gate"): ("dh2",),
    ("RmsNormBackward", "middle", "norm2", "rstd2", "dh2"): ("dmiddle of norm", "dnorm2"),
    ("Accumulate", "dx+", "dmiddle of norm"): ("dmiddle",),
    ("Gemm nt", "dmiddle", "wo"): ("dout",),
    ("Gemm tn", "out", "dmiddle"): ("dwo",),
    # attention backward: q, k, v, out, lse, dout -> dq, dk, dv
    ("Rope inverse", "dq"): ("dq_raw",),
    ("Rope inverse", "dk"): ("dk_raw",),
    ("Gemm tn", "h1", "dq_raw"): ("dwq",),
    ("Gemm tn", "h1", "dk_raw"): ("dwk",),
    ("Gemm tn", "h1", "dv"): ("dwv",),
    ("Gemm nt", "dq_raw", "wq"): ("dh1 of q",),
    ("Gemm nt accumulate", "dk_raw", "wk", "dh1 of q"): ("dh1 of qk",),
    ("Gemm nt accumulate", "dv", "wv", "dh1 of qk"): ("dh1",),
    ("RmsNormBackward", "x", "norm1", "rstd1", "dh1"): ("dx of norm", "dnorm1"),
    ("Accumulate", "dmiddle", "dx of norm"): ("dx",),
}

EQUATIONS: dict[tuple[str, ...], tuple[str, ...]] = _FORWARD | _BACKWARD
"""(kernel, operands in the order of the op's reads) -> results in the order of its writes."""
