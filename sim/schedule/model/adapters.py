"""Adapters of low rank beside linear layers (LoRA, arXiv:2106.09685 §4.1): y = W x + (alpha / rank) B (A x), W frozen.

Eager modules make B (A x) apart, scale it and add it to W x, as peft's Linear does it (peft 0.17 tuners/lora/layer.py,
forward). Fused, B's product is added to W x by its own kernel, with the factor as BLAS's alpha, as unsloth does it
(unslothai/unsloth kernels/utils.py, matmul_lora).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, get_args

from sim.schedule.ir.ops import Scale
from sim.schedule.ir.tensors import Axis, Tensor, d
from sim.schedule.model.equations import Equation, add, linear, scaled
from sim.words.options import ModulesName
from sim.words.workload import LoraTarget, ModelSpec


class Adapter(NamedTuple):
    """The tensors of one adapter."""

    a: Tensor
    """(fan in, rank)."""
    b: Tensor
    """(rank, fan out)."""
    inner: Tensor
    """A x."""
    outer: Tensor
    """B (A x) where that is apart."""
    weighed: Tensor
    """The same with its factor."""


_FANS: dict[LoraTarget, tuple[Axis, Axis]] = {
    "q": ("embed", "heads"),
    "k": ("embed", "kv_heads"),
    "v": ("embed", "kv_heads"),
    "o": ("heads", "embed"),
    "gate": ("embed", "ffn"),
    "up": ("embed", "ffn"),
    "down": ("ffn", "embed"),
}


def _adapter(target: LoraTarget) -> Adapter:
    fan_in, fan_out = _FANS[target]
    a, b = (
        Tensor(f"lora_a_{target}", "weight", (fan_in, "rank")),
        Tensor(f"lora_b_{target}", "weight", ("rank", fan_out)),
    )
    inner = Tensor(f"lora_inner_{target}", "activation", ("rank",))
    of_out = (Tensor(f"lora_{which}_{target}", "activation", (fan_out,)) for which in ("outer", "weighed"))
    return Adapter(a, b, inner, *of_out)


ADAPTERS = {target: _adapter(target) for target in _FANS}
TENSORS = tuple([tensor for adapter in ADAPTERS.values() for tensor in adapter])
"""All that there may be."""
WEIGHTS = frozenset([tensor for tensor in TENSORS if tensor.of_weight])


def targets(model: ModelSpec) -> tuple[LoraTarget, ...]:
    """Return which linear layers of a model have an adapter."""
    if not model.lora_rank:
        return ()
    return model.lora_targets or tuple([one for one in get_args(LoraTarget) if one != "gate" or model.mlp != "gelu"])


def adapts_mlp(model: ModelSpec) -> bool:
    """Return whether a linear layer of a model's MLP has an adapter."""
    return not {"gate", "up", "down"}.isdisjoint(targets(model))


class Linear(NamedTuple):
    """The equations of a linear layer, and the same in the order in which gradients are led through: through its own
    weight first.
    """

    forward: tuple[Equation, ...]
    back: tuple[Equation, ...]


@lru_cache(maxsize=4096)
def adapted(
    model: ModelSpec, target: LoraTarget, own: Equation, led: Tensor | None = None, modules: ModulesName = "fused"
) -> Linear:
    """Return a linear layer of a model with its adapter, where it has one; ``own`` is what it computes by itself, and
    ``led`` as of ``linear``.
    """
    if target not in targets(model):
        return Linear((own,), (own,))
    (x, *_), (out,) = own.operands, own.results
    adapter, factor = ADAPTERS[target], (model.lora_alpha or model.lora_rank or 1) / (model.lora_rank or 1)
    down = linear(x, adapter.a, adapter.inner)
    if modules == "eager" and led is None:  # else two would be made of one gradient
        up = linear(adapter.inner, adapter.b, adapter.outer)
        back = Equation(Scale, f"scale d{out.name}", (d(led or out),), (d(adapter.outer),), (("factor", factor),))
        weigh = scaled(adapter.outer, adapter.weighed, factor, f"scale {adapter.outer.name}")._replace(backward=(back,))
        join = add(adapter.weighed, out, f"add {adapter.weighed.name}")._replace(backward=())
        return Linear((own, down, up, weigh, join), (own, weigh, up, down))
    up = linear(adapter.inner, adapter.b, out, led=led)
    by = ("factor", factor)
    backward = tuple([one._replace(variant=(*one.variant, by)) for one in up.backward])
    up = up._replace(adds=True, variant=(*up.variant, by), backward=backward)
    return Linear((own, down, up), (own, up, down))
