"""What there is to compute at each scope: its equations, its weights, what is given and what is asked for."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Gemm
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.model.block import LLAMA, lse
from sim.schedule.model.ends import (
    EMBEDDING,
    EMBEDDING_BACKWARD,
    HEAD,
    TIED_HEAD,
    ids,
    labels,
    loss,
    norm_last,
    w_embed,
    w_head,
)  # fmt: skip
from sim.schedule.model.equations import Equation
from sim.workload import ModelSpec, Workload


class Unit(NamedTuple):
    """Weights that are held, gathered and updated together: those of a layer, or of one end."""

    name: str
    weights: tuple[Tensor, ...]
    """As of the first layer."""
    layer: int = 0

    @property
    def flat(self) -> Tensor:
        """All of them as one tensor of elements, in the data type of sums (arXiv:2304.11277 §3.2.1)."""
        return Tensor(f"{self.name} parameters", "weight", numbers="accumulation", layer=self.layer, parts=self.weights)

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """What Adam keeps of their gradients and of their squares."""
        first, second = (f"{which} moments of {self.name}" for which in ("first", "second"))
        return self.flat._replace(name=first, kind="moment"), self.flat._replace(name=second, kind="moment")

    @property
    def states(self) -> tuple[Tensor, ...]:
        """What a step changes."""
        return self.flat, *self.moments

    @property
    def working(self) -> Tensor:
        """The weights in the model's data type, as passes use them, where the optimiser's own are on the host."""
        return self.flat._replace(name=f"working {self.name} parameters", numbers="model")

    @property
    def square(self) -> Tensor:
        """The sum of the squares of their gradient's elements."""
        return Tensor(f"square of {d(self.flat).name}", "square", numbers="accumulation", layer=self.layer)


@lru_cache(maxsize=4096)
def updated(tensor: Tensor) -> Tensor:
    """Return what the optimiser makes of a weight or a moment."""
    return tensor._replace(name=f"new {tensor.name}", kind="updated", parts=tuple(map(updated, tensor.parts)))


LAYER, EMBEDDED, HEADED, ROOT = (
    Unit("weights", LLAMA.weights),
    Unit("embedding", (w_embed,)),
    Unit("head", (norm_last, w_head)),
    Unit("root", (w_embed, norm_last)),
)
"""The last one has both ends of a model whose embedding is its head, too: a weight is in one unit only, so that FSDP
shards and gathers them as one (pytorch/torchtitan models/llama3/infra/parallelize.py, enable_weight_tying). It counts
as of layer 0.
"""


UNIT_KINDS = (LAYER, EMBEDDED, HEADED, ROOT)
"""All that there are, as of the first layer."""


@lru_cache(maxsize=64)
def units(workload: Workload) -> tuple[Unit, ...]:
    """Return the weights of a workload, in the order in which its forward pass needs them."""
    layers = tuple([LAYER._replace(layer=layer) for layer in range(workload.layers)])
    if workload.scope != "step":
        return layers if workload.scope == "layer" else ()
    return (
        (ROOT, *layers)
        if workload.model.tied_embeddings
        else (EMBEDDED, *layers, HEADED._replace(layer=workload.layers))
    )


def layers_of(workload: Workload) -> tuple[Unit, ...]:
    """Return the weights of layers alone."""
    return tuple([unit for unit in units(workload) if unit.name == LAYER.name])


def ends_of(workload: Workload) -> tuple[Unit, Unit]:
    """Return the units of the embedding and of the head of a training step, which may be one."""
    found = units(workload)
    return found[0], found[0] if workload.model.tied_embeddings else found[-1]


_HEADS = tuple(equation for head in (HEAD, TIED_HEAD) for equation in (*head.forward, *head.backward))
_GROUPS = (LLAMA.equations, EMBEDDING, EMBEDDING_BACKWARD, _HEADS)
EQUATIONS = tuple(equation for group in _GROUPS for equation in group)
"""All that a step computes of tokens."""
_OF_TOKENS = (lse, *(tensor for one in EQUATIONS for tensor in (*one.operands, *one.results)))
_OF_UNITS = tuple(
    tensor
    for unit in UNIT_KINDS
    for kept in [(*unit.states, unit.working, *unit.weights)]
    for tensor in (*kept, *map(updated, kept), d(unit.flat), unit.square)
)
_TENSORS = {tensor.name: tensor._replace(layer=0) for tensor in (*_OF_TOKENS, *_OF_UNITS)}
_MAKERS = Counter(tensor.name for equation in LLAMA.equations for tensor in equation.results)
"""How many equations of a layer make a tensor, by name."""


_STATES = frozenset(one.name for unit in UNIT_KINDS for state in unit.states for one in (state, updated(state)))


def with_options(tensor: Tensor, optimiser_states: str) -> Tensor:
    """Return a tensor in the data type that options give it: those of an optimiser may be in the model's."""
    return tensor._replace(numbers="model") if optimiser_states == "model" and tensor.name in _STATES else tensor


def is_sum(name: str) -> bool:
    """Return whether several equations of a layer add up to a tensor."""
    return _MAKERS[name] > 1


@lru_cache(maxsize=4096)
def num_terms(name: str, model: ModelSpec) -> int:
    """Return how many terms add up to a tensor: of a matrix product over heads one for each of them."""
    return sum(_num_heads(one, model) for one in LLAMA.equations for tensor in one.results if tensor.name == name)


@lru_cache(maxsize=4096)
def terms_of(number: int, name: str, model: ModelSpec) -> Span:
    """Return which of the terms of a result an equation makes, in the order of a layer's equations: at an end of the
    model it makes them all.
    """
    if number >= len(LLAMA.equations):
        return Span(0, num_terms(name, model))
    earlier = [one for one in LLAMA.equations[:number] for tensor in one.results if tensor.name == name]
    before = sum(_num_heads(one, model) for one in earlier)
    return Span(before, before + _num_heads(LLAMA.equations[number], model))


def _num_heads(equation: Equation, model: ModelSpec) -> int:
    """Return over how many heads a product of tokens and weights sums, 1 where over none."""
    first, *_ = equation.operands
    over_heads = equation.kind is Gemm and not equation.results[0].of_weight
    return (first.heads(model) or 1) if over_heads else 1


def tensor_of(name: str) -> Tensor:
    """Return the tensor of a name, as of the first layer; one that no equation speaks of has batch and tokens only."""
    return _TENSORS.get(name) or Tensor(name, "activation")


class ScopePorts(NamedTuple):
    """Inputs and outputs of a scope, by tensor and layer."""

    given: set[tuple[str, int]]
    asked: set[tuple[str, int]]
    """Outputs that some rank has to leave."""
    allowed: set[tuple[str, int]]
    """Outputs that ranks may leave beside them."""


def ports_of(workload: Workload) -> ScopePorts:
    """Return the inputs that a workload's scope and passes give, and the outputs that they ask for."""
    weights, last = [weight.later(unit.layer) for unit in units(workload) for weight in unit.weights], workload.layers
    allowed: list[Tensor] = []
    if workload.scope == "attention":
        given, asked, leaving = [LLAMA.q, LLAMA.k, LLAMA.v], [d(LLAMA.q), d(LLAMA.k), d(LLAMA.v)], LLAMA.out
        given += [] if workload.forward else [LLAMA.out, lse]
        allowed = [lse]
    elif workload.scope == "layer":
        given, asked, leaving = [LLAMA.x, *weights], [d(LLAMA.x), *map(d, weights)], LLAMA.x.later(last)
    else:
        states = [state for unit in units(workload) for state in unit.states]
        used = [*weights, *(unit.working for unit in units(workload))]
        given, leaving = [ids, labels.later(last), *states, *used], loss.later(last)
        asked, allowed = [*map(updated, states)], [*map(updated, used)]
    given += [d(leaving)] if workload.backward and workload.scope != "step" else []
    asked = (asked if workload.backward else []) + ([leaving] if workload.forward else [])
    return ScopePorts(*({(tensor.name, tensor.layer) for tensor in tensors} for tensors in (given, asked, allowed)))
