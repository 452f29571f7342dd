"""Buffers that stay for what products of tensor-parallel ranks take: see ``LayerOptions.tp_buffers``.

Frameworks get them by a name, when they are first needed, as large as the largest that was asked for. Here they are
there from the first op to the last, as they are from the second step on.
"""

from __future__ import annotations

from sim.schedule.ir.layout import num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.tensors import Kind, Tensor
from sim.schedule.ir.views import TOKENS, View
from sim.schedule.model.equations import Equation, is_product
from sim.schedule.model.write import TokenWriter
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import LayerOptions, TensorBuffers

KINDS: dict[TensorBuffers, tuple[Kind, ...]] = {"new": (), "inputs": ("activation",), "all": ("activation", "gradient")}
"""Of what tensors there is a buffer."""


def stand(b: ProgramBuilder, every: Tokens, options: LayerOptions) -> None:
    """Declare the buffers for the sequences at hand, each of all tokens of a group."""
    for kind in KINDS[options.tp_buffers] if options.tp_sequence else ():
        tensor = Tensor(f"gathered {kind}s", kind, ("embed",))
        b.standing[kind] = b.activation(tensor, num_tokens(every), b.workload.dtype, "communication")


def room_for(some: tuple[Equation, ...], every: TokenWriter, tensor: Tensor, own: View) -> View | None:
    """Return the buffer from which equations take all tokens of a tensor, of which a rank has its own, and forget what
    lay there; None where none stays for it, or another tensor lies there that they take, too.
    """
    room, used = every.b.standing.get(tensor.kind), {operand for one in some for operand in one.operands}
    if room is None or not is_product(some[0]) or _beside_tokens(own) != _beside_tokens(room):
        return None
    there = [one for one, view in every.values.items() if view.buffer == room.buffer]
    if not used.isdisjoint(there):
        return None
    for one in there:
        del every.values[one]
    return room[:, : num_tokens(every.tokens)]


def _beside_tokens(view: View) -> tuple[int, ...]:
    """Return the extents of all dimensions but that of tokens."""
    return tuple([extent for dim, extent in enumerate(view.shape) if dim != TOKENS])
