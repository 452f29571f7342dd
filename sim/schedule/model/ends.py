"""What a training step computes at both ends of its layers: embedding; final norm, LM head and loss."""

from __future__ import annotations

from sim.schedule.ir.tensors import Tensor
from sim.schedule.model.block import x
from sim.schedule.model.equations import back, cross_entropy, embed, linear, norm

ids, labels = (Tensor(name, "activation", numbers="int64") for name in ("ids", "labels"))
h, logits = Tensor("h", "activation", ("embed",)), Tensor("logits", "activation", ("vocab",))
rstd, loss = (Tensor(name, "activation", numbers="accumulation") for name in ("rstd", "loss"))

w_embed = Tensor("w_embed", "weight", ("vocab", "embed"))
norm_last, w_head = Tensor("norm", "weight", ("embed",)), Tensor("w_head", "weight", ("embed", "vocab"))

embedded = embed(ids, w_embed, x)
normed = norm(x, norm_last, h, rstd)
to_logits = linear(h, w_head, logits)
scored = cross_entropy(logits, labels, loss)

EMBEDDING, EMBEDDING_BACKWARD = (embedded,), back(embedded)
HEAD, HEAD_BACKWARD = (normed, to_logits, scored), back(to_logits, normed)
"""Of the x that leaves the last layer. All tensors are numbered as of the layer that would follow."""
