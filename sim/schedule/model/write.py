"""Writes equations of a block into a program, for some tokens of one layer."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import UNSET

from sim.schedule.ir.declare import operands
from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens, mask_of, restarted
from sim.schedule.ir.ops import Accumulate, JoinedGemm
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.equations import Equation
from sim.schedule.write.attention import Saved
from sim.schedule.write.builder import ProgramBuilder

Values = dict[Tensor, View]
"""Where the tensors of a layer lie."""


class Kept(NamedTuple):
    """What the backward pass of a layer needs of its forward pass: what was there before attention, and after it."""

    before: Values
    attention: Saved | None
    """None where attention runs again."""
    after: Values


class TokenWriter(NamedTuple):
    """Writes equations for some tokens of one layer; their operands are in ``values``, and so are their results."""

    b: ProgramBuilder
    layer: int
    tokens: Tokens
    values: Values

    def write(self, equation: Equation, *, adds: bool = False) -> None:
        """Append the op of an equation. A result that has no place yet gets a new buffer; one that has may be added to
        what lies there, by the kernel itself or by one behind it.
        """
        if equation.joins:
            self._write_joined(equation, adds=equation.adds or adds)
            return
        kind, model, values = equation.kind, self.b.workload.model, self.values
        adds = equation.adds or adds
        apart = adds and "accumulate" not in kind.__struct_fields__ and kind is not Accumulate
        before = {tensor: values.pop(tensor) for tensor in equation.results if apart and tensor in values}
        fields = {name: mark for name, mark in operands(kind).items() if name not in equation.lacks}
        read = [name for name, mark in fields.items() if mark.is_read]
        views: dict[str, Any] = {name: values[tensor] for name, tensor in zip(read, equation.operands, strict=False)}
        written = [name for name, mark in fields.items() if mark.is_written]
        for name, tensor in zip(written, equation.results, strict=True):
            values[tensor] = views[name] = views.get(name) or values.get(tensor) or self.new(tensor)
        settings: dict[str, Any] = {
            "epsilon": model.norm_epsilon,
            "theta": model.rope_theta,
            "rotated": model.rotary_dims,
            "scale": model.logit_scale,
            "softcap": model.logit_softcap,
            "tokens": restarted(self.tokens, mask_of(self.b.workload)),
            "accumulate": adds,
            "count": self.b.labels,
            "first": self.b.share.vocabulary.start if self.b.share.of > 1 else UNSET,
        }
        known = {name: value for name, value in settings.items() if name in kind.__struct_fields__}
        self.b.add(kind(label=equation.label, **views, **known, **dict(equation.variant)))
        for tensor, into in before.items():
            self.b.add(Accumulate(label=f"add {tensor.name}", source=values[tensor], into=into))
            values[tensor] = into

    def _write_joined(self, equation: Equation, *, adds: bool) -> None:
        """Append a product of several layers; it may be added to what lies there."""
        values = self.values
        for tensor in equation.results:
            values[tensor] = values.get(tensor) or self.new(tensor)
        products = [[values[tensor] for tensor in (*one.operands[:2], *one.results)] for one in equation.joins]
        a, b, out = (tuple(dict.fromkeys(views)) for views in zip(*products, strict=True))
        bias = tuple([values[tensor] for one in equation.joins for tensor in one.operands[2:]])
        form = dict(equation.variant)["form"]
        self.b.add(JoinedGemm(label=equation.label, form=form, a=a, b=b, out=out, bias=bias, accumulate=adds))

    def new(self, tensor: Tensor) -> View:
        """Return a new buffer for a tensor: of its tokens, or all rows of a weight."""
        rows = tensor.rows(self.b.workload.model) if tensor.of_weight else self.tokens
        return self.b.new(tensor.later(self.layer), num_tokens(rows))
