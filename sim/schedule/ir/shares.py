"""Which share of each weight a rank of a tensor-parallel group has (arXiv:1909.08053 §3).

What a tensor is divided into (``Tensor.divided``), heads, features of an MLP or the vocabulary, falls to the members of
a group in their order. Weights that are not divided, such as those of norms, each member has as a whole.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.schedule.ir.masks import ONE, Span
from sim.schedule.ir.tensors import Tensor
from sim.words.workload import ModelSpec, Workload


class Share(NamedTuple):
    """What one member of a group has of a model's weights."""

    model: ModelSpec
    """The whole one."""
    number: int = 0
    of: int = 1
    """How many members the group has."""

    def divides(self, tensor: Tensor) -> bool:
        """Return whether members have different elements of a weight, or of a flat tensor of weights."""
        return self.of > 1 and any(part.divided(self.model) is not None for part in tensor.parts or (tensor,))

    def rows(self, tensor: Tensor) -> Span:
        """Return which rows of a whole weight this member has; of a flat tensor of its own shares all elements."""
        if tensor.parts:
            return Span(0, self.size(tensor))
        return self._along(0, tensor)

    def columns(self, tensor: Tensor) -> Span | None:
        """Return which columns of a whole weight this member has, None where it has all."""
        divided = tensor.divided(self.model)
        return self._along(1, tensor) if self.of > 1 and divided and divided.axis == 1 else None

    def _along(self, axis: int, tensor: Tensor) -> Span:
        divided, extent = tensor.divided(self.model), tensor.shape(self.model)[axis]
        if self.of == 1 or divided is None or divided.axis != axis:
            return Span(0, extent)
        first, count = self.number * divided.into // self.of, max(1, divided.into // self.of)
        return Span(first * divided.width, (first + count) * divided.width)

    def size(self, tensor: Tensor) -> int:
        """Return how many elements of a weight, or of a flat tensor of weights, this member has."""
        parts = tensor.parts or (tensor,)
        return sum(math.prod(part.shape(self.model)) * self.alike(part) // self.of for part in parts)

    def alike(self, tensor: Tensor) -> int:
        """Return how many members, one behind the other, have the same of a weight: of one that is not divided all, of
        key/value heads fewer than members some.
        """
        divided = tensor.divided(self.model)
        return max(1, self.of // divided.into) if divided else self.of

    def sums(self, weight: Tensor, *, sequence: bool) -> bool:
        """Return whether members that have the same of a weight have terms each of its gradient: of own tokens where
        these are divided (``sequence``), or of own heads.
        """
        of_heads = weight.divided(self.model) is not None or weight.axes == ("head_dim",)
        return self.alike(weight) > 1 and (sequence or of_heads)

    def is_norm(self, weight: Tensor) -> bool:
        """Return whether all of several members have a weight, or its gradient, that meets each token by itself: where
        tokens are divided each has a sum over its own, which may wait for those of other micro-batches.
        """
        return self.of > 1 and weight.axes == ("embed",)

    @property
    def vocabulary(self) -> Span:
        """The ids whose rows of the embedding, and whose logits, this member has."""
        each = self.model.vocab_size // self.of
        return Span(self.number * each, (self.number + 1) * each)

    def place(self, tensor: Tensor) -> Span:
        """Return by which members the elements of a flat tensor of this one's shares are named: by itself, or by the
        first one where all have the same. Of a weight it is ONE.
        """
        return Span(self.number, self.number + 1) if tensor.parts and self.divides(tensor) else ONE

    def elements(self, flat: Tensor, rows: Span) -> list[tuple[Span, Span]]:
        """Return some rows of a flat tensor of this member's shares with the member by which they are named, for
        weights that several members have the first of them: so each element of the whole weights has one name.
        """
        found: list[tuple[Span, Span]] = []
        ends = _ends(self, flat)
        for start, stop, weight in zip((0, *ends), ends, flat.parts, strict=False):
            low, high = max(rows.start, start), min(rows.stop, stop)
            if low < high:
                first = self.number // self.alike(weight) * self.alike(weight)
                whose = Span(first, first + 1)
                if found and found[-1][1] == whose:
                    low = found.pop()[0].start
                found.append((Span(low, high), whose))
        return found

    def counted(self, flat: Tensor, rows: Span) -> list[Span]:
        """Return those of some rows of a flat tensor of this member's shares that are named by it: together members
        have each element of the whole weights once.
        """
        named = [ONE, self.place(flat)] if self.number == 0 else [self.place(flat)] if self.divides(flat) else []
        return [span for span, whose in self.elements(flat, rows) if whose in named]


@lru_cache(maxsize=256)
def _ends(share: Share, flat: Tensor) -> tuple[int, ...]:
    """Return behind how many elements of a flat tensor of a member's shares each weight's end."""
    return tuple(accumulate(map(share.size, flat.parts)))


def num_elements(flat: Tensor, model: ModelSpec) -> int:
    """Return how many elements the whole weights of a flat tensor have."""
    return sum(math.prod(part.shape(model)) for part in flat.parts)


@lru_cache(maxsize=256)
def model_of_share(model: ModelSpec, degree: int) -> ModelSpec:
    """Return what each of so many members has of a model: its share of heads, of features of the MLP and of the
    vocabulary. Raises InputError for a degree that does not divide them, and for what is not computed in parts.
    """
    if degree == 1:
        return model
    counts = {name: getattr(model, name) for name in _SHARED_OUT}
    for name, count in counts.items():
        replicated = name == "num_kv_heads" and degree % count == 0
        if count % degree and not replicated:
            kv_heads = counts.pop("num_kv_heads")
            allowed = [
                n for n in range(1, model.num_heads + 1)
                if not any(one % n for one in counts.values()) and 0 in {kv_heads % n, n % kv_heads}
            ]  # fmt: skip
            padded = f"; or `set` model.{name}={-(-count // degree) * degree}" if name == "vocab_size" else ""
            raise InputError(
                f"`tp_degree` {degree} does not divide {name} {count} of {model.name}: allowed are "
                f"{', '.join(map(str, allowed))}{padded}"
            )
    if refused := _not_in_parts(model, degree):
        raise InputError(f"`tp_degree` {degree}: {refused} of {model.name} are not computed in parts yet; set it to 1")
    return msgspec.structs.replace(model, **{name: max(1, count // degree) for name, count in counts.items()})


def computed_model(model: ModelSpec, degree: int) -> ModelSpec:
    """Return what so many members have together of a model: key/value heads that several have count for each."""
    return msgspec.structs.replace(model, num_kv_heads=max(model.num_kv_heads, degree))


_SHARED_OUT = ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
"""What of a model each member has a share of."""


def _not_in_parts(model: ModelSpec, degree: int) -> str:
    """Return what of a model no tensor-parallel schedule computes; empty if there is nothing."""
    if model.qk_norm == "all":
        return "norms of all heads of q and k as one"
    if model.qk_norm and model.num_kv_heads < degree:
        return f"norms of {model.num_kv_heads} key/value heads that several ranks have"
    if {"out", "mlp"} & {*(model.biases or ())}:
        return "biases behind sums over ranks"
    if model.lora_targets and {*model.lora_targets} <= {"k", "v"} and model.num_kv_heads < degree:
        return f"adapters of {model.num_kv_heads} key/value heads alone that several ranks have"
    return ""


def workload_of_share(workload: Workload, degree: int) -> Workload:
    """Return a workload of what each of so many members has of its model; raises InputError as ``model_of_share``."""
    if degree == 1:
        return workload
    return msgspec.structs.replace(workload, model=model_of_share(workload.model, degree))
