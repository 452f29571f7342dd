"""What a tensor is: a struct that says its kind, its name and its layer, and what extents it takes from the model."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from sim.schedule.ir.masks import Span
from sim.words.workload import Dtype, ModelSpec, accumulation_dtype

Kind = Literal["weight", "weight gradient", "moment", "updated", "square", "activation", "gradient"]
"""moment: what an optimiser keeps of a weight; updated: what it makes of that and of the weight; square: the sum of the
squares of a gradient."""
OF_TOKENS: tuple[Kind, ...] = ("activation", "gradient")
"""Kinds that are of tokens, and of no weight."""
Axis = Literal["embed", "ffn", "heads", "kv_heads", "head_dim", "num_heads", "num_kv_heads", "vocab", "rank"]
"""What an extent is called; each head counts head dim features, but in a number of heads."""


class Divided(NamedTuple):
    """What a tensor falls into along one of its axes, where kernels or ranks may have some of it: heads, features
    between the products of an MLP, or the vocabulary.
    """

    axis: int
    """Its number among the tensor's axes."""
    into: int
    width: int
    """How many places each takes."""


class Tensor(NamedTuple):
    """A tensor of a model. Of an activation or its gradient axes follow batch and tokens; of all others they are rows
    and columns.
    """

    name: str
    kind: Kind
    axes: tuple[Axis, ...] = ()
    numbers: Literal["model", "accumulation", "wide", "int64"] = "model"
    """Its data type: the model's, that of sums (a statistic of a token or head, or a copy as wide), or integers."""
    layer: int = 0
    parts: tuple[Tensor, ...] = ()
    """Of a flat one: the tensors whose elements it consists of, one behind the other."""
    beside: int = 0
    """Of heads: how many times its size lies behind it in the same buffer, of what nobody uses from there."""

    @property
    def of_weight(self) -> bool:
        """Whether it is a weight, its gradient, or what an optimiser has of them."""
        return self.kind not in OF_TOKENS

    @property
    def dims(self) -> str:
        """The letters of its dimensions in a buffer, see ``Buffer``; statistics of heads have no head dim."""
        if self.of_weight:
            return "io"[: len(self.axes) or 1]
        if self.axes in {("heads",), ("kv_heads",)}:
            return "bhs" if self.numbers == "accumulation" else "bshd"
        return "bse"[: 2 + len(self.axes)]

    def later(self, layers: int) -> Tensor:
        """Return the same tensor so many layers later."""
        return self._replace(layer=self.layer + layers)

    def rows(self, model: ModelSpec) -> tuple[Span]:
        """Return all rows of a weight."""
        return (Span(0, self.shape(model)[0]),)

    def shape(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the number of features along each axis; of a flat tensor how many elements it has."""
        return _shape(self, model)

    def heads(self, model: ModelSpec) -> int | None:
        """Return how many heads a tensor of tokens has, None if it has none or is none."""
        counts = {"heads": model.num_heads, "kv_heads": model.num_kv_heads}
        return counts.get(self.axes[0]) if self.axes and not self.of_weight else None

    def divided(self, model: ModelSpec) -> Divided | None:
        """Return what a tensor falls into, None where it is whole."""
        return _divided(self, model)

    def features(self, model: ModelSpec) -> int:
        """Return how many features a token has that are no heads, 1 if it has none; of a weight how many columns."""
        inner = self.shape(model)[1 if self.of_weight else 0 :]
        return 1 if self.heads(model) or not inner else inner[0]


@lru_cache(maxsize=4096)
def _shape(tensor: Tensor, model: ModelSpec) -> tuple[int, ...]:
    if tensor.parts:
        return (sum(math.prod(part.shape(model)) for part in tensor.parts),)
    features = {
        "embed": model.embed_dim,
        "ffn": model.ffn_dim,
        "heads": model.num_heads * model.head_dim,
        "kv_heads": model.num_kv_heads * model.head_dim,
        "head_dim": model.head_dim,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "vocab": model.vocab_size,
        "rank": model.lora_rank or 0,
    }
    return tuple(features[axis] for axis in tensor.axes)


@lru_cache(maxsize=4096)
def _divided(tensor: Tensor, model: ModelSpec) -> Divided | None:
    if heads := tensor.heads(model):
        return Divided(0, heads, 1)
    widths = {"heads": model.head_dim, "kv_heads": model.head_dim}
    widths |= dict.fromkeys(("num_heads", "num_kv_heads", "ffn", "vocab"), 1)
    for number, axis in enumerate(tensor.axes):
        if axis in widths:
            return Divided(number, tensor.shape(model)[number] // widths[axis], widths[axis])
    return None


@lru_cache(maxsize=4096)
def d(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor."""
    kind: Kind = "weight gradient" if tensor.kind == "weight" else "gradient"
    return tensor._replace(name=f"d{tensor.name}", kind=kind, parts=tuple(map(d, tensor.parts)), beside=0)


def dtype_of(tensor: Tensor, own: Dtype) -> Dtype:
    """Return the data type of a tensor where that of the workload is ``own``."""
    wide = accumulation_dtype(own)
    dtypes: dict[str, Dtype] = {"model": own, "accumulation": wide, "wide": wide, "int64": "int64"}
    return dtypes[tensor.numbers]
