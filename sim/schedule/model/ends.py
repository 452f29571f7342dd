"""What a training step computes at both ends of its layers: embedding; final norm, LM head and loss."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.block import x
from sim.schedule.model.equations import (
    Equation,
    back,
    cross_entropy,
    cross_entropy_by_shares,
    eagerly,
    embed,
    linear,
    norm,
    scaled,
)
from sim.words.options import ModulesName
from sim.words.workload import ModelSpec

ids, labels = (Tensor(name, "activation", numbers="int64") for name in ("ids", "labels"))
h, logits = Tensor("h", "activation", ("embed",)), Tensor("logits", "activation", ("vocab",))
rstd, loss = (Tensor(name, "activation", numbers="accumulation") for name in ("rstd", "loss"))

w_embed = Tensor("w_embed", "weight", ("vocab", "embed"))
norm_last, w_head = Tensor("norm", "weight", ("embed",)), Tensor("w_head", "weight", ("embed", "vocab"))

embedded = embed(ids, w_embed, x)
normed = norm(x, norm_last, h, rstd)
to_logits, to_tied_logits = linear(h, w_head, logits), linear(h, w_embed, logits, transposed=True)
scored = cross_entropy(logits, labels, loss)

top, sums, target = (Tensor(name, "activation", numbers="accumulation") for name in ("top", "sums", "target"))
SCORED_BY_SHARES = cross_entropy_by_shares(logits, (top, sums, target), labels, loss)
"""What is scored of a share of the vocabulary; between them all shares' are summed up, of ``top`` the largest taken."""

embedding_raw = Tensor("embedding_raw", "activation", ("embed",))


@lru_cache(maxsize=256)
def embedding_of(model: ModelSpec) -> tuple[Equation, ...]:
    """Return what makes the input of the first layer. Nothing leads back through a frozen one."""
    if not model.embedding_scale:
        return (embed(ids, w_embed, x, frozen=True),) if model.is_frozen else (embedded,)
    weighed = scaled(embedding_raw, x, model.embedding_scale, "scale embedding")
    weighed = weighed._replace(backward=()) if model.is_frozen else weighed
    return embed(ids, w_embed, embedding_raw, frozen=model.is_frozen), weighed


class Head(NamedTuple):
    """What is computed of the x that leaves the last layer. All tensors are numbered as of the layer that would follow,
    the weight of an embedding that is the head, too, as all others.
    """

    weight: Tensor
    to_logits: Equation
    normed: Equation = normed

    @property
    def forward(self) -> tuple[Equation, ...]:
        """Norm, logits, loss."""
        return self.normed, self.to_logits, scored

    @property
    def backward(self) -> tuple[Equation, ...]:
        """What follows on the gradient of the logits."""
        return back(self.to_logits, self.normed)

    @property
    def of_norm(self) -> tuple[Tensor, ...]:
        """What the norm's way back needs of its way there."""
        (led,) = self.normed.backward
        return tuple([tensor for tensor in led.operands if tensor.kind == "activation"])


HEAD, TIED_HEAD = Head(w_head, to_logits), Head(w_embed, to_tied_logits)
FROZEN_HEAD, FROZEN_TIED_HEAD = (
    Head(weight, linear(h, weight, logits, transposed=tied, frozen=True), norm(x, norm_last, h, rstd, frozen=True))
    for weight, tied in ((w_head, False), (w_embed, True))
)


def head_of(model: ModelSpec, modules: ModulesName = "fused") -> Head:
    """Return the head of a model."""
    heads = (FROZEN_HEAD, FROZEN_TIED_HEAD) if model.is_frozen else (HEAD, TIED_HEAD)
    found = heads[bool(model.tied_embeddings)]
    return found._replace(normed=eagerly(found.normed)) if modules == "eager" else found
