"""Where attention that goes part by part has q, k and v of its rank's own tokens from, and where their gradients go.

A part is some tokens or some heads. Alone, attention takes parts of whole tensors; in a layer each part is projected
when its turn comes, so that no more of q, k and v is held than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from sim.schedule.ir.ops import Copy
from sim.schedule.ir.views import HEADS, Split, View
from sim.schedule.write.attention import DistributedAttention, Saved
from sim.schedule.write.builder import ProgramBuilder

Name = Literal["q", "k", "v"]
NAMES: tuple[Name, Name, Name] = ("q", "k", "v")
ALL = slice(None)


class Part(NamedTuple):
    """Some heads of q, k or v: those of a view with these numbers, in this order."""

    view: View
    heads: tuple[int, ...]


class Inputs(Protocol):
    """q, k and v of a rank's own tokens, and their gradients. ``rows`` are some of these tokens; ``heads`` some heads,
    of q in the order in which attention takes them (``PartwiseAttention.q_heads``).
    """

    def part(self, name: Name, rows: slice = ALL, heads: slice = ALL) -> Part:
        """Return a part, having appended what makes it."""
        ...

    def room(self, name: Name, rows: slice = ALL, heads: slice = ALL) -> View:
        """Return where the gradient of a part is to be written."""
        ...

    def take(self, name: Name, gradient: View, rows: slice = ALL, heads: slice = ALL) -> None:
        """Take the gradient of a part, which lies where ``room`` said; append what it goes through."""
        ...


class PartwiseAttention(DistributedAttention, Protocol):
    """Attention that asks for its inputs part by part: each once forward, and maybe once more backward."""

    q_heads: tuple[int, ...]
    """The order in which it takes the heads of q."""

    def forward_from(self, inputs: Inputs) -> tuple[View, Saved]:
        """Append the forward pass, as ``forward``; what is saved has no whole q, k and v."""
        ...

    def backward_into(self, saved: Saved, dout: View, inputs: Inputs) -> None:
        """Append the backward pass, as ``backward``."""
        ...


class HeadsInTurn:
    """A tensor of a rank's own tokens whose heads are written in the order of ``heads``."""

    def __init__(self, b: ProgramBuilder, name: str, tokens: int, heads: Sequence[int]) -> None:
        self._b, self._name, self._heads = b, name, heads
        self.view = b.tensor(name, tokens, len(heads), "attention")

    def in_order(self) -> View:
        """Return all heads in their own order, having copied them where that is another one."""
        _, tokens, total, _ = self.view.shape
        if list(self._heads) == list(range(total)):
            return self.view
        whole = self._b.tensor(self._name, tokens, total, "attention")
        self._b.add(
            Copy(
                label=f"order {self._name}",
                source=Split(self.view, HEADS, total),
                target=Split(whole, HEADS, total),
                order=inverse(self._heads),
            )
        )
        return whole


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return where in an order each number stands."""
    return tuple([place for _, place in sorted((number, place) for place, number in enumerate(order))])


class Whole:
    """Whole q, k and v, of which parts are views; so it is with their gradients, of ``num_gradients`` tokens."""

    def __init__(
        self, b: ProgramBuilder, q_heads: Sequence[int], views: Sequence[View] = (), *, num_gradients: int = 0
    ) -> None:
        kv_heads = range(b.workload.model.num_kv_heads)
        self._heads: dict[Name, Sequence[int]] = {"q": q_heads, "k": kv_heads, "v": kv_heads}
        self._views: dict[Name, View] = dict(zip(NAMES, views, strict=False))
        self._gradients = {
            name: HeadsInTurn(b, f"d{name}", num_gradients, heads)
            for name, heads in self._heads.items()
            if num_gradients
        }

    def part(self, name: Name, rows: slice = ALL, heads: slice = ALL) -> Part:
        """See Inputs."""
        return Part(self._views[name][:, rows], tuple(self._heads[name][heads]))

    def room(self, name: Name, rows: slice = ALL, heads: slice = ALL) -> View:
        """See Inputs."""
        return self._gradients[name].view[:, rows, heads]

    def take(self, name: Name, gradient: View, rows: slice = ALL, heads: slice = ALL) -> None:
        """See Inputs: there it is complete."""

    def gradients(self) -> tuple[View, View, View]:
        """Return those of all parts."""
        dq, dk, dv = (self._gradients[name].in_order() for name in NAMES)
        return dq, dk, dv
