"""What the layers of a model stand between: what comes from outside and is left there, or embedding and loss."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

from sim.schedule.ir.layout import cut, num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import Accumulate
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.ir.views import View
from sim.schedule.model.block import x
from sim.schedule.model.ends import (
    SCORED_BY_SHARES,
    embedding_of,
    h,
    head_of,
    ids,
    labels,
    logits,
    loss,
    norm_last,
    scored,
    top,
    w_embed,
)
from sim.schedule.model.equations import Equation, back, by_torch, subtracting
from sim.schedule.model.scope import ends_of
from sim.schedule.model.tensor.group import Group
from sim.schedule.model.tiling import Tiling, write_all
from sim.schedule.model.weights.params import Params, Reduced, Room
from sim.schedule.model.write import TokenWriter, Values
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import IN_FP32, LossName, ModulesName
from sim.words.workload import Dtype, ModelSpec


class Entry(Protocol):
    """What stands before the first of some layers, for one micro-batch."""

    def forward(self) -> View:
        """Append what gives the first layer its input; return that."""
        ...

    def backward(self, first: View, /) -> None:
        """Append what becomes of the gradient of the first layer's input."""
        ...


class Exit(Protocol):
    """What stands behind the last of some layers, for one micro-batch."""

    def forward(self, last: View, /) -> None:
        """Append what becomes of the output of the last layer."""
        ...

    def backward(self) -> View:
        """Append what gives the gradient of the output of the last layer; return that."""
        ...


def _leave(b: ProgramBuilder, tensor: Tensor, tokens: Tokens, view: View, group: Group | None) -> None:
    """Declare what a rank leaves of a tensor: its tokens, or of those that ranks of a group have alike its own."""
    if group:
        group.leave(b, tensor, view)
    else:
        b.output_of(tensor, tokens, view)


class FromOutside(NamedTuple):
    """Activations come from outside, and their gradients are left there."""

    b: ProgramBuilder
    tokens: Tokens
    x: Tensor
    group: Group | None = None
    """The ranks that have shares of weights."""

    def forward(self) -> View:
        """See Entry."""
        return self.b.input_of(self.x, self.tokens)

    def backward(self, first: View, /) -> None:
        """See Entry."""
        _leave(self.b, d(self.x), self.tokens, first, self.group)


class ToOutside(NamedTuple):
    """Activations are left outside, and their gradients come from there."""

    b: ProgramBuilder
    tokens: Tokens
    x: Tensor
    group: Group | None = None
    """As in FromOutside."""

    def forward(self, last: View, /) -> None:
        """See Exit."""
        _leave(self.b, self.x.later(self.b.workload.layers), self.tokens, last, self.group)

    def backward(self) -> View:
        """See Exit."""
        return self.b.input_of(d(self.x).later(self.b.workload.layers), self.tokens)


def chunk_of_loss(tokens: int, model: ModelSpec) -> int:
    """Return how many of so many tokens have their logits held at a time, so that these take about as much memory as
    activations (linkedin/Liger-Kernel ops/fused_linear_cross_entropy.py).
    """
    least = -(-tokens // -(-model.vocab_size // model.embed_dim))
    return 1 << (least - 1).bit_length()


class _End:
    """What both ends of a training step have."""

    def __init__(
        self, b: ProgramBuilder, tokens: Tokens, params: Params, tiling: Tiling, group: Group | None = None
    ) -> None:
        """``group`` are the ranks that have shares of the vocabulary, where ranks do not have all of it."""
        self._b, self._tokens, self._params, self._tiling, self._group = b, tokens, params, tiling, group
        self._every = group.every if group else tokens
        """The tokens whose ids and labels a rank has."""

    def _written(self, equations: tuple[Equation, ...], layer: int, values: Values) -> Values:
        """Append equations; return all values that are there then."""
        write_all(equations, TokenWriter(self._b, layer, self._tokens, values), self._params, self._tiling)
        return values


class Loss(_End):
    """Final norm, LM head and cross-entropy make a loss of each token, left as an output."""

    def __init__(
        self,
        b: ProgramBuilder,
        tokens: Tokens,
        params: Params,
        tiling: Tiling,
        form: LossName,
        modules: ModulesName = "fused",
        group: Group | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """``alone`` says that the embedding is on another stage."""
        super().__init__(b, tokens, params, tiling, group)
        first, self._unit = ends_of(b.workload)
        self._hands_over = first == self._unit and not (self._unit.frozen or alone)
        self._head, self._layers = head_of(b.workload.model, modules), b.workload.layers
        self._chunked = form == "chunked"
        self._unfused = form in IN_FP32 and b.sum_dtype != b.workload.dtype
        scoring = SCORED_BY_SHARES if group else (scored,)
        self._scored = tuple(map(by_torch, scoring)) if form == "torch" else scoring
        if form == "subtracted":
            self._scored = (*scoring[:-1], subtracting(scoring[-1]))
        self._kept: Values = {}
        self._weights: Values = {}
        self.handed_over: Values = {}
        """Gradients of the head where the embedding's are to be added to them."""

    @property
    def _frozen(self) -> bool:
        return self._unit.frozen

    def forward(self, last: View, /) -> None:
        """See Exit."""
        layer = self._layers
        given = self._b.input_of(labels.later(layer), self._every)
        self._weights = self._params.gather(self._unit)
        self._kept = self._b.call("loss", layer, self._score, last, given, self._weights)
        _leave(self._b, loss.later(layer), self._tokens, self._kept.pop(loss), self._group)

    def _score(self, last: View, given: View, weights: Values) -> Values:
        if self._chunked:
            return self._score_in_chunks(last, given, weights)
        norm_and_logits = self._head.forward[:-1]
        made = self._written(norm_and_logits, self._layers, {x: last, labels: given, **weights})
        if self._unfused:
            made[logits] = self._cast(made[logits], "logits", self._b.sum_dtype)
        self._to_loss(TokenWriter(self._b, self._layers, self._every, made))
        kept = (*self._head.of_norm, *(() if self._frozen else (h,)), d(logits), loss)
        return {tensor: made[tensor] for tensor in kept}

    def _to_loss(self, rows: TokenWriter) -> None:
        """Append what makes loss and gradient of logits."""
        if not self._group:
            for equation in self._scored:
                rows.write(equation)
            return
        largest, exponentials, scored_by_shares = self._scored
        rows.write(largest)
        self._group.reduced(rows.b, top, rows.values[top], largest=True)
        rows.write(exponentials)
        for tensor in exponentials.results[::-1]:
            self._group.reduced(rows.b, tensor, rows.values[tensor])
        rows.write(scored_by_shares)
        for tensor in (top, *exponentials.results):
            del rows.values[tensor]

    def _score_in_chunks(self, last: View, given: View, weights: Values) -> Values:
        """Append the loss of some tokens at a time, with the gradients of the head, so that no more of the logits is
        held (arXiv:2410.10989 §3.2).
        """
        b, layer, count = self._b, self._layers, num_tokens(self._every)
        w_head, to_logits = self._head.weight, self._head.to_logits
        whole = self._written((self._head.normed,), layer, {x: last, **weights})
        if self._group:
            whole[h] = self._group.gathered(b, h.later(layer), whole[h])
        whole |= {labels: given, loss: b.new(loss, count), d(h): b.new(d(h), count)}
        size, stop = chunk_of_loss(count, b.workload.model), 0
        while stop < count:
            start, stop = stop, min(stop + size, count)
            rows = {tensor: whole[tensor][:, start:stop] for tensor in (h, labels, loss, d(h))}
            gradient = {d(w_head): whole[d(w_head)]} if d(w_head) in whole else {}
            chunk = TokenWriter(b, layer, cut(self._every, start, stop), {**weights, **rows, **gradient})
            chunk.write(to_logits)
            self._to_loss(chunk)
            for equation in back(to_logits):
                chunk.write(equation, adds=bool(gradient) and d(w_head) in equation.results)
            whole |= {} if self._frozen else {d(w_head): chunk.values[d(w_head)]}
        if self._group:
            whole[d(h)] = self._group.scattered(b, d(h).later(layer), whole[d(h)])
        kept = (*self._head.of_norm, d(h), *(() if self._frozen else (d(w_head),)), loss)
        return {tensor: whole[tensor] for tensor in kept}

    def backward(self) -> View:
        """See Exit."""
        call = partial(self._b.call, "back from the loss", self._layers)
        if self._hands_over:
            dx, self.handed_over = call(self._back_to_last, self._kept, self._weights)
            return dx
        dx, reduced = call(self._back_from_loss, self._kept, self._weights, self._params.room(self._unit))
        self._params.keep(self._unit, reduced)
        return dx

    def _back_from_loss(self, kept: Values, weights: Values, room: Room) -> tuple[View, Reduced]:
        dx, _ = self._back_to_last(kept, weights)
        return dx, self._params.reduced(self._unit, room)

    def _back_to_last(self, kept: Values, weights: Values) -> tuple[View, Values]:
        """Append what gives the gradients of the last layer's output and of the head; return them."""
        layer, gradients = self._layers, [d(weight) for weight in (norm_last, self._head.weight) if not self._frozen]
        if self._chunked and not self._frozen:
            self._params.reduce(gradients[1].later(layer), kept[gradients[1]])
        if self._unfused:
            kept = {**kept, d(logits): self._cast(kept[d(logits)], "dlogits", self._b.workload.dtype)}
        made = self._written(
            back(self._head.normed) if self._chunked else self._head.backward, layer, {**kept, **weights}
        )
        return made[d(x)], {gradient: made[gradient] for gradient in gradients}

    def _cast(self, view: View, name: str, dtype: Dtype) -> View:
        """Append a copy in another data type; return it."""
        copied = self._b.like(name, view, "other", dtype)
        self._b.copy(view, copied, f"cast {name}")
        return copied


class Embedding(_End):
    """Token ids are embedded.

    Where the embedding is the head, too, its weights are gathered once, for both, and its gradients of both ends are
    added up, as torch's autograd adds them up, before they are handed on.
    """

    def __init__(
        self,
        b: ProgramBuilder,
        tokens: Tokens,
        params: Params,
        tiling: Tiling,
        head: Loss | None,
        group: Group | None = None,
    ) -> None:
        """``head`` is the one of the same rank, None where that is on another stage."""
        super().__init__(b, tokens, params, tiling, group)
        self._unit, _ = ends_of(b.workload)
        self._embedding, self._head = embedding_of(b.workload.model), head
        self._ids = b.input_of(ids, self._every)

    def forward(self) -> View:
        """See Entry."""
        return self._b.call("embed", 0, self._embed, self._ids, self._params.gather(self._unit))

    def _embed(self, given: View, weights: Values) -> View:
        return self._written(self._embedding, 0, {ids: given, **weights})[x]

    def backward(self, first: View, /) -> None:
        """See Entry."""
        if self._unit.frozen:
            return
        of_head = self._head.handed_over if self._head else {}
        given = (self._ids, first, self._params.room(self._unit), of_head)
        self._params.keep(self._unit, self._b.call("back to the embedding", 0, self._back, *given))

    def _back(self, given: View, first: View, room: Room, of_head: Values) -> Reduced:
        made = self._written(back(*reversed(self._embedding)), 0, {ids: given, d(x): first})
        if of_head:
            table = d(w_embed)
            self._b.add(Accumulate(label=f"add {table.name} of both ends", source=made[table], into=of_head[table]))
        for gradient, view in of_head.items():
            self._params.reduce(gradient, view)
        return self._params.reduced(self._unit, room)
