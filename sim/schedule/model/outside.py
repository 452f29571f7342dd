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
    embedding_of,
    h,
    head_of,
    ids,
    labels,
    logits,
    loss,
    norm_last,
    scored,
    w_embed,
)
from sim.schedule.model.equations import Equation, back, by_torch
from sim.schedule.model.params import Params, Reduced, Room
from sim.schedule.model.scope import ends_of
from sim.schedule.model.tiling import Tiling, write_all
from sim.schedule.model.write import TokenWriter, Values
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import LossName, ModulesName
from sim.words.workload import Dtype, ModelSpec


class Outside(Protocol):
    """What stands before the first layer of one rank, and behind the last."""

    def enter(self) -> View:
        """Append what gives the first layer its input; return that."""
        ...

    def leave(self, last: View) -> None:
        """Append what becomes of the output of the last layer."""
        ...

    def enter_backward(self) -> View:
        """Append what gives the gradient of the output of the last layer; return that."""
        ...

    def leave_backward(self, first: View) -> None:
        """Append what becomes of the gradient of the first layer's input."""
        ...


class Ports(NamedTuple):
    """Activations and their gradients come from outside, and are left there."""

    b: ProgramBuilder
    tokens: Tokens
    x: Tensor

    def enter(self) -> View:
        """See Outside."""
        return self.b.input_of(self.x, self.tokens)

    def leave(self, last: View) -> None:
        """See Outside."""
        self.b.output_of(self.x.later(self.b.workload.layers), self.tokens, last)

    def enter_backward(self) -> View:
        """See Outside."""
        return self.b.input_of(d(self.x).later(self.b.workload.layers), self.tokens)

    def leave_backward(self, first: View) -> None:
        """See Outside."""
        self.b.output_of(d(self.x), self.tokens, first)


def chunk_of_loss(tokens: int, model: ModelSpec) -> int:
    """Return how many of so many tokens have their logits held at a time, so that these take about as much memory as
    activations (linkedin/Liger-Kernel ops/fused_linear_cross_entropy.py).
    """
    least = -(-tokens // -(-model.vocab_size // model.embed_dim))
    return 1 << (least - 1).bit_length()


class Loss:
    """Token ids are embedded; final norm, LM head and cross-entropy make a loss of each token, left as an output.

    Where the embedding is the head, too, its weights are gathered once, for both, and its gradients of both ends are
    added up, as torch's autograd adds them up, before they are handed on.
    """

    def __init__(
        self,
        b: ProgramBuilder,
        tokens: Tokens,
        params: Params,
        tiling: Tiling,
        form: LossName,
        modules: ModulesName = "fused",
    ) -> None:
        self._b, self._tokens, (self._first, self._last) = b, tokens, ends_of(b.workload)
        self._head, self._layers = head_of(b.workload.model, modules), b.workload.layers
        self._embedding = embedding_of(b.workload.model)
        self._params, self._tiling, self._chunked = params, tiling, form == "chunked"
        self._unfused = form == "unfused" and b.sum_dtype != b.workload.dtype
        self._scored = (by_torch(scored),) if form == "torch" else (scored,)
        self._ids = b.input_of(ids, tokens)
        self._kept: Values = {}
        self._weights: Values = {}
        self._made: Values = {}
        """Gradients of the head where its unit lacks others yet."""

    @property
    def _tied(self) -> bool:
        """Whether gradients of both ends make one."""
        return self._first == self._last and not self._frozen

    @property
    def _frozen(self) -> bool:
        return self._last.frozen

    def enter(self) -> View:
        """See Outside."""
        return self._b.call("embed", 0, self._embed, self._ids, self._params.gather(self._first))

    def _embed(self, given: View, weights: Values) -> View:
        return self._written(self._embedding, 0, {ids: given, **weights})[x]

    def leave(self, last: View) -> None:
        """See Outside."""
        layer = self._layers
        given = self._b.input_of(labels.later(layer), self._tokens)
        self._weights = self._params.gather(self._last)
        self._kept = self._b.call("loss", layer, self._score, last, given, self._weights)
        self._b.output_of(loss.later(layer), self._tokens, self._kept.pop(loss))

    def _score(self, last: View, given: View, weights: Values) -> Values:
        if self._chunked:
            return self._score_in_chunks(last, given, weights)
        norm_and_logits, to_loss = self._head.forward[:-1], self._scored
        made = self._written(norm_and_logits, self._layers, {x: last, labels: given, **weights})
        if self._unfused:
            made[logits] = self._cast(made[logits], "logits", self._b.sum_dtype)
        made = self._written(to_loss, self._layers, made)
        kept = (*self._head.of_norm, *(() if self._frozen else (h,)), d(logits), loss)
        return {tensor: made[tensor] for tensor in kept}

    def _score_in_chunks(self, last: View, given: View, weights: Values) -> Values:
        """Append the loss of some tokens at a time, with the gradients of the head, so that no more of the logits is
        held (arXiv:2410.10989 §3.2).
        """
        b, layer, count = self._b, self._layers, num_tokens(self._tokens)
        w_head, to_logits = self._head.weight, self._head.to_logits
        whole = self._written((self._head.normed,), layer, {x: last, **weights})
        whole |= {labels: given, loss: b.new(loss, count), d(h): b.new(d(h), count)}
        size, stop = chunk_of_loss(count, b.workload.model), 0
        while stop < count:
            start, stop = stop, min(stop + size, count)
            rows = {tensor: whole[tensor][:, start:stop] for tensor in (h, labels, loss, d(h))}
            gradient = {d(w_head): whole[d(w_head)]} if d(w_head) in whole else {}
            chunk = TokenWriter(b, layer, cut(self._tokens, start, stop), {**weights, **rows, **gradient})
            for equation in (to_logits, scored, *back(to_logits)):
                chunk.write(equation, adds=bool(gradient) and d(w_head) in equation.results)
            whole |= {} if self._frozen else {d(w_head): chunk.values[d(w_head)]}
        kept = (*self._head.of_norm, d(h), *(() if self._frozen else (d(w_head),)), loss)
        return {tensor: whole[tensor] for tensor in kept}

    def enter_backward(self) -> View:
        """See Outside."""
        layer, back = self._layers, self._back_from_loss
        if self._tied:
            dx, self._made = self._b.call("back from the loss", layer, self._back_to_last, self._kept, self._weights)
            return dx
        room = self._params.room(self._last)
        dx, reduced = self._b.call("back from the loss", layer, back, self._kept, self._weights, room)
        self._params.keep(self._last, reduced)
        return dx

    def _back_from_loss(self, kept: Values, weights: Values, room: Room) -> tuple[View, Reduced]:
        dx, _ = self._back_to_last(kept, weights)
        return dx, self._params.reduced(self._last, room)

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

    def leave_backward(self, first: View) -> None:
        """See Outside."""
        if self._frozen:
            return
        room = self._params.room(self._first)
        call = partial(self._b.call, "back to the embedding", 0)
        back, tied = self._back_to_embedding, self._back_to_tied_embedding
        given = (self._ids, first, room)
        self._params.keep(self._first, call(tied, *given, self._made) if self._tied else call(back, *given))

    def _back_to_embedding(self, given: View, first: View, room: Room) -> Reduced:
        self._written(back(*reversed(self._embedding)), 0, {ids: given, d(x): first})
        return self._params.reduced(self._first, room)

    def _back_to_tied_embedding(self, given: View, first: View, room: Room, of_head: Values) -> Reduced:
        made = self._written(back(*reversed(self._embedding)), 0, {ids: given, d(x): first})
        table = d(w_embed)
        self._b.add(Accumulate(label=f"add {table.name} of both ends", source=made[table], into=of_head[table]))
        for gradient, view in of_head.items():
            self._params.reduce(gradient, view)
        return self._params.reduced(self._first, room)

    def _cast(self, view: View, name: str, dtype: Dtype) -> View:
        """Append a copy in another data type; return it."""
        copied = self._b.like(name, view, "other", dtype)
        self._b.copy(view, copied, f"cast {name}")
        return copied

    def _written(self, equations: tuple[Equation, ...], layer: int, values: Values) -> Values:
        """Append equations; return all values that are there then."""
        write_all(equations, TokenWriter(self._b, layer, self._tokens, values), self._params, self._tiling)
        return values
