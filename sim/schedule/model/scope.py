"""What there is to compute at each scope: its equations, its weights, what is given and what is asked for."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sim.schedule.ir.masks import Span
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.model.block import LLAMA, lse
from sim.schedule.model.ends import (
    EMBEDDING,
    EMBEDDING_BACKWARD,
    HEAD,
    HEAD_BACKWARD,
    ids,
    labels,
    loss,
    norm_last,
    w_embed,
    w_head,
)  # fmt: skip
from sim.workload import Workload


class Unit(NamedTuple):
    """Weights that are held, gathered and updated together: those of a layer, or of one end."""

    name: str
    weights: tuple[Tensor, ...]
    """As of the first layer."""
    layer: int


def units(workload: Workload) -> list[Unit]:
    """Return the weights of a workload, in the order in which its forward pass needs them."""
    layers = [Unit("weights", LLAMA.weights, layer) for layer in range(workload.layers)]
    if workload.scope != "step":
        return layers if workload.scope == "layer" else []
    return [Unit("embedding", (w_embed,), 0), *layers, Unit("head", (norm_last, w_head), workload.layers)]


_GROUPS = (LLAMA.equations, EMBEDDING, EMBEDDING_BACKWARD, HEAD, HEAD_BACKWARD)
EQUATIONS = tuple(equation for group in _GROUPS for equation in group)
"""All that a step computes of tokens."""
_TENSORS = {
    tensor.name: tensor._replace(layer=0)
    for tensor in (lse, *(tensor for one in EQUATIONS for tensor in (*one.operands, *one.results)))
}
TERMS = Counter(tensor.name for equation in LLAMA.equations for tensor in equation.results)
"""How many equations of a layer add up to a tensor, by name."""


def terms_of(number: int, tensor: Tensor) -> Span:
    """Return which of the terms of a result an equation makes: at an end of the model it makes them all."""
    return Span(number, number + (1 if number < len(LLAMA.equations) else TERMS[tensor.name]))


def tensor_of(name: str) -> Tensor:
    """Return the tensor of a name, as of the first layer; one that no equation speaks of has batch and tokens only."""
    return _TENSORS.get(name) or Tensor(name, "activation")


def ports_of(workload: Workload) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Return the inputs that a workload's scope and passes give, and the outputs that they ask for: (tensor, layer)."""
    weights, last = [weight.later(unit.layer) for unit in units(workload) for weight in unit.weights], workload.layers
    if workload.scope == "attention":
        given, asked, leaving = [LLAMA.q, LLAMA.k, LLAMA.v], [d(LLAMA.q), d(LLAMA.k), d(LLAMA.v)], LLAMA.out
        given += [] if workload.forward else [LLAMA.out, lse]
    elif workload.scope == "layer":
        given, asked, leaving = [LLAMA.x, *weights], [d(LLAMA.x), *map(d, weights)], LLAMA.x.later(last)
    else:
        given, asked, leaving = [ids, labels.later(last), *weights], [*map(d, weights)], loss.later(last)
    given += [d(leaving)] if workload.backward and workload.scope != "step" else []
    asked = (asked if workload.backward else []) + ([leaving] if workload.forward else [])
    names, wanted = ({(tensor.name, tensor.layer) for tensor in tensors} for tensors in (given, asked))
    return names, wanted
