"""The ring of torch's context_parallel: keys and values are gathered once, and copied as if they hopped.

What its code copies beside attention (torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py,
_templated_ring_attention and its backward, with the rotation that it has by default, _AllGatherRotater):

    repeat_kv        of the models that call it: each query head gets keys and values of its own, which travel
    contiguous       of both, once a pass
    cat              of both before each hop, though the first alone is gathered; of dK and dV before each of P hops
    zeros_like       sums of gradients begin as zeros, so that all parts are added
    _SDPAMerger      sums in fp32 from the first part on
    _partial_update  a part of half of the tokens is added by a copy of the whole sum
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from sim.schedule.ir.masks import Tokens, mask_of
from sim.schedule.ir.ops import AllGather, Copy, Fold, HostSync
from sim.schedule.ir.views import HEADS, Split, View
from sim.schedule.write.accumulate import Gradients, GradientSum, SoftmaxAccumulator, attend_backward
from sim.schedule.write.attention import Saved, Shard
from sim.schedule.write.blocks import Block, kept_blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.hops import Lane, hop
from sim.words.options import Sharding, SumOptions

_Kv = tuple[View, View]


class TorchRing:
    """Ring attention of one rank as torch's context_parallel has it; ``layout[i]`` are the tokens of the i-th member of
    its ring, ``lanes`` what gathers keys and what gradients hop along.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        lanes: tuple[Lane, Lane],
        layout: Sequence[Tokens],
        shard: Shard,
        options: SumOptions,
        *,
        sharding: Sharding,
        overlap: bool,
    ) -> None:
        self._b = builder
        self._gathers, self._behind = lanes
        self._size = len(layout)
        self._position = self._gathers.position(builder.rank)
        self._layout = layout
        self._options = options
        self._sharding = sharding
        self._overlap = overlap
        self.saved_shard = shard

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """One all-gather of KV, beside which the rank's own are attended."""
        parts = sum(len(self._blocks(source)) for source in range(self._size))
        softmax = SoftmaxAccumulator(self._b, q, num_parts=parts, always=True)
        repeated = self._repeated(q, k, "k"), self._repeated(q, v, "v")
        for source, (keys, values) in self._gathered(repeated):
            if self._adds_to_part(source, q, side="rows"):
                softmax.copy_sum(f"kv{source}")
            for block in self._blocks(source):
                softmax.attend(block, keys, values, f"kv{source}")
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse, repeated)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """One all-gather of KV, and P hops of dKV."""
        repeated = saved.more[0], saved.more[1]
        dq, dk, dv = self._zeros("dq", saved.q), self._zeros("dk", repeated[0]), self._zeros("dv", repeated[1])
        for source, (keys, values) in self._gathered(repeated):
            operands = saved._replace(k=keys, v=values)
            for block in self._blocks(source):
                attend_backward(self._b, block, operands, dout, Gradients(dq, dk, dv), f"kv{source}")
            if self._adds_to_part(source, keys, side="columns"):
                dk, dv = self._copied(dk, "dk"), self._copied(dv, "dv")
            if self._size > 1:
                dk, dv = self._handed_on(dk, dv, source)
            if self._adds_to_part(source, saved.q, side="rows"):
                dq = self._copied(dq, "dq")
        grads = [(name, total.finished(f"{name} of query heads")) for name, total in (("dk", dk), ("dv", dv))]
        shared = [self._of_shared(*grad, like) for grad, like in zip(grads, (saved.k, saved.v), strict=True)]
        return dq.finished("dq"), shared[0], shared[1]

    def _blocks(self, source: int) -> tuple[Block, ...]:
        """Return what the rank attends of the keys of a member."""
        mask, layout = mask_of(self._b.workload), self._layout
        return kept_blocks(mask, layout[self._position], layout[source], self._sharding)

    def _repeated(self, q: View, shared: View, name: str) -> View:
        """Return keys or values of each query head."""
        heads, groups = q.shape[HEADS], shared.shape[HEADS]
        if heads == groups:
            return shared
        whole = self._b.tensor(f"{name} of query heads", shared.shape[1], heads, "attention")
        source, target = Split(shared, HEADS, groups), Split(whole, HEADS, heads)
        order = tuple(head * groups // heads for head in range(heads))
        self._b.add(Copy(label=f"repeat {name}", source=source, target=target, order=order))
        return whole

    def _of_shared(self, name: str, whole: View, shared: View) -> View:
        """Return the gradient of keys or values that query heads share, of those of each."""
        heads, groups = whole.shape[HEADS], shared.shape[HEADS]
        if heads == groups:
            return whole
        total = self._b.like(name, shared, "attention")
        source, target = Split(whole, HEADS, heads), Split(total, HEADS, groups)
        self._b.add(Fold(label=f"sum {name}", source=source, target=target))
        return total

    def _gathered(self, own: _Kv) -> Iterator[tuple[int, _Kv]]:
        """Yield each member with its keys and values; before all but the last step these are put together, and the
        first time gathered.
        """
        b, over, batch = self._b, self._gathers.ring, own[0].shape[0]
        kv = self._laid_out(own, "kv", packed=False)
        whole = None
        for step in range(self._size):
            source = (self._position - step) % self._size
            if whole is not None:
                first = 2 * batch * source
                kv = whole[first : first + batch], whole[first + batch : first + 2 * batch]
            if step < self._size - 1:
                packed = b.whole(self._laid_out(kv, f"kv{source}", packed=True)[0])
                if whole is None:
                    shape = (self._size * packed.shape[0], *packed.shape[1:])
                    whole = b.buffer("kv of all", "bshd", shape, b.dtype(packed), "communication")
                    recvs = Split(whole, 0, self._size)
                    b.add(AllGather(label="gather kv", communicator=over.name, send=packed, recvs=recvs))
                    if not self._overlap:
                        b.add(HostSync(label="wait for kv", streams=(over.name,)))
            yield source, kv

    def _laid_out(self, pair: _Kv, what: str, *, packed: bool) -> _Kv:
        """Return copies of two tensors that are alike, where they are packed one behind the other in one buffer."""
        k, v = self._b.like_all([what] * 2, pair, "communication", packed=packed)
        for view, into in zip(pair, (k, v), strict=True):
            self._b.copy(view, into, f"lay out {what}")
        return k, v

    def _handed_on(self, dk: GradientSum, dv: GradientSum, source: int) -> tuple[GradientSum, GradientSum]:
        """Send both sums to the next member, put together; return those that come from the one before."""
        b, what = self._b, f"dkv{source}"
        sent = b.whole(self._laid_out((dk.total, dv.total), what, packed=True)[0])
        taken = b.like("dkv that arrives", sent, "communication")
        hop(b, self._behind, (sent,), (taken,), 1, f"send {what}", overlap=self._overlap)
        batch = dk.total.shape[0]
        return (
            GradientSum(b, "dk", taken[:batch], empty=False),
            GradientSum(b, "dv", taken[batch:], empty=False),
        )

    def _zeros(self, name: str, like: View) -> GradientSum:
        """Return a sum of gradients that begins as zeros."""
        total = GradientSum(self._b, name, self._b.gradient(f"{name} sum", like, self._options))
        total.fill()
        return total

    def _copied(self, total: GradientSum, name: str) -> GradientSum:
        """Return a copy of a sum."""
        into = self._b.like(f"{name} sum", total.total, "attention")
        self._b.copy(total.total, into, f"copy {name}")
        return GradientSum(self._b, name, into, empty=False)

    def _adds_to_part(self, source: int, whole: View, *, side: Literal["rows", "columns"]) -> bool:
        """Return whether keys of another member add to some of a tensor's tokens alone, which are a side of blocks."""
        parts = [getattr(block, side) for block in self._blocks(source) if source != self._position]
        return any((part.start, part.stop) != (0, whole.shape[1]) for part in parts)
