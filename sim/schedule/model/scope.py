"""What there is to compute at each scope: its equations, its weights, what is given and what is asked for."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import Gemm
from sim.schedule.ir.tensors import Kind, Tensor, d
from sim.schedule.model import adapters, ends
from sim.schedule.model import block as block_
from sim.schedule.model.block import block_of, k, lse, out, q, v, x
from sim.schedule.model.ends import (
    FROZEN_HEAD,
    FROZEN_TIED_HEAD,
    HEAD,
    SCORED_BY_SHARES,
    TIED_HEAD,
    Head,
    embedding_of,
    h,
    head_of,
    ids,
    labels,
    loss,
    norm_last,
    w_embed,
    w_head,
)
from sim.schedule.model.equations import Equation, back, beside, eagerly
from sim.words.workload import ModelSpec, Workload


class Unit(NamedTuple):
    """Weights that are held, gathered and updated together: those of a layer, or of one end."""

    name: str
    weights: tuple[Tensor, ...]
    """As of the first layer."""
    layer: int = 0
    frozen: bool = False
    """Whether nothing trains them: then they have no gradients and no moments, and are in the model's data type."""

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


LAYER, ADAPTERS, EMBEDDED, HEADED, ROOT = (
    "weights",
    "adapters",
    Unit("embedding", (w_embed,)),
    Unit("head", (norm_last, w_head)),
    Unit("root", (w_embed, norm_last)),
)
"""The names of the units of a layer and of its adapters, and the units of ends. The last one has both ends of a model
whose embedding is its head, too: a weight is in one unit only, so that FSDP shards and gathers them as one
(pytorch/torchtitan models/llama3/infra/parallelize.py, enable_weight_tying). It counts as of layer 0.
"""


@lru_cache(maxsize=256)
def unit_kinds(model: ModelSpec) -> tuple[Unit, ...]:
    """Return all units that a model may have, as of the first layer."""
    weights, frozen = block_of(model).weights, model.is_frozen
    own, added = ([one for one in weights if (one in adapters.WEIGHTS) == added] for added in (False, True))
    of_layer = (Unit(LAYER, tuple(own), frozen=frozen), *([Unit(ADAPTERS, tuple(added))] if frozen else []))
    return *of_layer, *(unit._replace(frozen=frozen) for unit in (EMBEDDED, HEADED, ROOT))


@lru_cache(maxsize=64)
def units(workload: Workload) -> tuple[Unit, ...]:
    """Return the weights of a workload, in the order in which its forward pass needs them: those of adapters behind
    those of their layer.
    """
    *of_layer, embedded, headed, root = unit_kinds(workload.model)
    layers = tuple([unit._replace(layer=layer) for layer in range(workload.layers) for unit in of_layer])
    if workload.scope != "step":
        return layers if workload.scope == "layer" else ()
    if workload.model.tied_embeddings:
        return root, *layers
    return embedded, *layers, headed._replace(layer=workload.layers)


@lru_cache(maxsize=64)
def trained(workload: Workload) -> tuple[Unit, ...]:
    """Return those that are trained."""
    return tuple([unit for unit in units(workload) if not unit.frozen])


@lru_cache(maxsize=4096)
def together(unit: Unit, model: ModelSpec) -> tuple[Unit, ...]:
    """Return what is used where a unit is: with a layer its adapters."""
    _, *added = [one._replace(layer=unit.layer) for one in unit_kinds(model) if one.name in {LAYER, ADAPTERS}]
    return (unit, *added) if unit.name == LAYER else (unit,)


@lru_cache(maxsize=4096)
def trained_of(unit: Unit, model: ModelSpec) -> Unit | None:
    """Return the one of these that is trained, None where there is none."""
    return next((one for one in together(unit, model) if not one.frozen), None)


@lru_cache(maxsize=256)
def num_merged(unit: Unit, model: ModelSpec) -> int:
    """Return how many tensors hold a unit's weights where products of one input have theirs in one, as in Megatron-LM
    and nanotron: of q, k and v one, and of an MLP's gate and up.
    """
    forward = block_of(model).forward
    products = [one for part in forward for one in part if one.kind is Gemm]
    inputs = {weight: given for given, weight, *_ in (one.operands for one in products)}
    return len({inputs.get(weight, weight) for weight in unit.weights})


def layers_of(workload: Workload) -> tuple[Unit, ...]:
    """Return the weights of layers alone, without adapters."""
    return tuple([unit for unit in units(workload) if unit.name == LAYER])


def ends_of(workload: Workload) -> tuple[Unit, Unit]:
    """Return the units of the embedding and of the head of a training step, which may be one."""
    found = units(workload)
    return found[0], found[0] if workload.model.tied_embeddings else found[-1]


def _of_heads(*heads: Head) -> tuple[Equation, ...]:
    """Return all that heads compute, at the end what eager modules have in place of others."""
    normed = eagerly(heads[0].normed)
    return (*(one for head in heads for one in (*head.forward, *head.backward)), normed, *back(normed))


_HEADS, _FROZEN_HEADS = _of_heads(HEAD, TIED_HEAD), _of_heads(FROZEN_HEAD, FROZEN_TIED_HEAD)
_NAMED = {
    one.name: one._replace(layer=0)
    for tensor in (*vars(block_).values(), *vars(ends).values(), *adapters.TENSORS)
    if isinstance(tensor, Tensor)
    for one in (tensor, d(tensor), *((updated(tensor),) if tensor.of_weight else beside(tensor)))
}
"""All tensors but those of units, of whichever model they are."""


@lru_cache(maxsize=256)
def equations(model: ModelSpec) -> tuple[Equation, ...]:
    """Return all that a step of a model computes of tokens, at the end what eager modules have in place of others."""
    embedding, of_layer = embedding_of(model), block_of(model).equations
    instead = tuple([one for one in block_of(model, None, "eager").equations if one not in of_layer])
    heads = _FROZEN_HEADS if model.is_frozen else _HEADS
    return (*of_layer, *embedding, *back(*reversed(embedding)), *heads, *SCORED_BY_SHARES, *instead)


def _of_units(kinds: tuple[Unit, ...]) -> dict[str, Tensor]:
    """Return the tensors of units by name."""
    found = []
    for unit in kinds:
        kept = (*unit.states, unit.working)
        found += [*kept, *map(updated, kept), d(unit.flat), unit.square]
    return {tensor.name: tensor for tensor in found}


BY_NAME = (Unit(LAYER, ()), Unit(ADAPTERS, ()), EMBEDDED, HEADED, ROOT)
"""All units of any model, for what their names alone say."""
_KINDS: dict[str, Kind] = {name: tensor.kind for name, tensor in (_NAMED | _of_units(BY_NAME)).items()}


@lru_cache(maxsize=256)
def _units_of(model: ModelSpec) -> dict[str, Tensor]:
    return _of_units(unit_kinds(model))


def tensor_of(name: str, model: ModelSpec) -> Tensor:
    """Return the tensor of a name, as of the first layer; one that no equation speaks of has batch and tokens only."""
    return _NAMED.get(name) or _units_of(model).get(name) or Tensor(name, "activation")


def kind_of(name: str) -> Kind:
    """Return the kind of the tensor of a name, which is that of all models."""
    return _KINDS.get(name, "activation")


_STATES = frozenset(one.name for unit in BY_NAME for state in unit.states for one in (state, updated(state)))


def with_options(tensor: Tensor, optimiser_states: str) -> Tensor:
    """Return a tensor in the data type that options give it: those of an optimiser may be in the model's."""
    return tensor._replace(numbers="model") if optimiser_states == "model" and tensor.name in _STATES else tensor


def is_sum(name: str, model: ModelSpec) -> bool:
    """Return whether several terms of a layer add up to a tensor: several equations, or a product over heads."""
    return num_terms(name, model) > 1


@lru_cache(maxsize=4096)
def num_terms(name: str, model: ModelSpec) -> int:
    """Return how many terms add up to a tensor: of a matrix product over heads, over features of an MLP or over the
    vocabulary, one for each of them.
    """
    made = [one for one in block_of(model).equations for tensor in one.results if tensor.name == name]
    if name == d(h).name:
        made = [one for one in head_of(model).backward if one.results[0].name == name]
    return sum(_num_summed(one, model) for one in made)


@lru_cache(maxsize=4096)
def terms_of(number: int, name: str, model: ModelSpec) -> Span:
    """Return which of the terms of a result an equation makes, in the order of a layer's equations: at an end of the
    model it makes them all.
    """
    of_layer = block_of(model).equations
    if number >= len(of_layer):
        one, of_layer = equations(model)[number], block_of(model, None, "eager").equations
        if one not in of_layer:
            return Span(0, num_terms(name, model))
        number = of_layer.index(one)  # eager modules make as many terms, in the same order
    earlier = [one for one in of_layer[:number] for tensor in one.results if tensor.name == name]
    before = sum(_num_summed(one, model) for one in earlier)
    return Span(before, before + _num_summed(of_layer[number], model))


def _num_summed(equation: Equation, model: ModelSpec) -> int:
    """Return over how many heads, features of an MLP or logits a product of tokens sums, else 1."""
    if equation.kind is not Gemm or equation.results[0].of_weight:
        return 1
    first = equation.operands[0]
    divided = first.divided(model)
    return divided.into * terms_of_each(first, model) if divided else 1


def terms_of_each(tensor: Tensor, model: ModelSpec) -> int:
    """Return how many terms a sum over what a tensor is divided into has for each: of key/value heads as many as query
    heads share one, whose gradients add up to that of the head.
    """
    return model.num_heads // model.num_kv_heads if "kv_heads" in tensor.axes else 1


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
        given, asked, leaving = [q, k, v], [d(q), d(k), d(v)], out
        given += [] if workload.forward else [out, lse]
        allowed = [lse]
    elif workload.scope == "layer":
        learned = [weight.later(unit.layer) for unit in trained(workload) for weight in unit.weights]
        given, asked, leaving = [x, *weights], [d(x), *map(d, learned)], x.later(last)
    else:
        states = [state for unit in trained(workload) for state in unit.states]
        used, learned = (
            [one for unit in some for one in (*(weight.later(unit.layer) for weight in unit.weights), unit.working)]
            for some in (units(workload), trained(workload))
        )
        given, leaving = [ids, labels.later(last), *states, *used], loss.later(last)
        asked, allowed = [*map(updated, states)], [*map(updated, learned)]
    given += [d(leaving)] if workload.backward and workload.scope != "step" else []
    asked = (asked if workload.backward else []) + ([leaving] if workload.forward else [])
    return ScopePorts(*({(tensor.name, tensor.layer) for tensor in tensors} for tensors in (given, asked, allowed)))
