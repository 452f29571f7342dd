"""Ring attention: queries stay, keys and values travel around the ring (arXiv:2310.01889 §3).

Step t of rank r attends to the keys of rank (r - t) mod P while it sends the keys at hand to r + 1 and receives the
next ones from r - 1. Backward the keys travel again, and dK, dV one hop behind them: each rank adds its part and passes
the sum on, so the last of P hops brings it home. Under a causal mask a rank skips the blocks that the mask empties,
but takes every hop, and the last rank sets the time.
"""

from __future__ import annotations

from sim.schedule.accumulate import GradientSum, SoftmaxAccumulator
from sim.schedule.attention import Saved, all_heads
from sim.schedule.builder import ProgramBuilder
from sim.schedule.ir import Communicator, Schedule
from sim.schedule.layer import AttentionPlan, build_around
from sim.schedule.layout import contiguous
from sim.schedule.masks import MASKS, Band, Tokens, block_band
from sim.schedule.ops import Message
from sim.schedule.views import View
from sim.workload import DTYPE_BYTES, Dtype, Parallel, Workload, accumulation_dtype


def build(workload: Workload, parallel: Parallel) -> Schedule:
    """Return ring attention over all ranks, each owning a contiguous slice of the sequence."""
    ranks = tuple(range(parallel.num_ranks))
    layout = contiguous(workload.seq, len(ranks))
    # KV and dKV hop at the same time: on one communicator they would queue behind each other.
    kv, dkv = (Communicator(name=name, groups=(ranks,)) for name in ("ring kv", "ring dkv"))
    plan = AttentionPlan(
        name="ring",
        communicators=(kv, dkv),
        shard=lambda rank: all_heads(workload.model, layout[rank]),
        attention=lambda b: RingAttention(b, kv, dkv, layout),
        wire_bytes=_wire_bytes(workload, len(ranks)),
        source="arXiv:2310.01889 §3; dKV in fp32 with P hops as in ring-flash-attention",
    )
    return build_around(plan, workload, parallel)


class RingAttention:
    """Ring attention of one rank; ``layout[i]`` are the tokens of the i-th member of its ring."""

    def __init__(
        self, builder: ProgramBuilder, kv: Communicator, dkv: Communicator, layout: tuple[Tokens, ...]
    ) -> None:
        self._b = builder
        self._kv = kv
        self._dkv = dkv
        ring = kv.group_of(builder.rank)
        self._size = len(ring)
        self._position = ring.index(builder.rank)
        self._next = ring[(self._position + 1) % self._size]
        self._previous = ring[self._position - 1]
        self._layout = layout
        self.saved_shard = all_heads(builder.workload.model, layout[self._position])

    def forward(self, q: View, k: View, v: View) -> tuple[View, Saved]:
        """P - 1 hops of KV; every block is attended while the next KV is on its way."""
        bands = [self._band(step) for step in range(self._size)]
        softmax = SoftmaxAccumulator(self._b, q, num_blocks=sum(band is not None for band in bands))
        slots = self._kv_slots(k, v)
        for step, band in enumerate(bands):
            self._pass_on_kv(step, slots)
            if band is not None:
                softmax.attend(*slots[step], band, f"kv{self._source(step)}")
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse)

    def backward(self, saved: Saved, dout: View) -> tuple[View, View, View]:
        """P - 1 hops of KV and P hops of dKV, summed and sent in promote(model dtype, fp32)."""
        b, size = self._b, self._size
        sum_dtype = accumulation_dtype(b.workload.dtype)
        slots = self._kv_slots(saved.k, saved.v)
        dkv_slots = [self._slot("d", i, saved.k, saved.v, sum_dtype) for i in range(min(size, 2))]
        dq = GradientSum(b, "dq", b.like("dq sum", saved.q, "attention", sum_dtype))
        for step in range(size):
            self._pass_on_kv(step, slots)
            k, v = slots[step]
            band, source = self._band(step), f"kv{self._source(step)}"
            here = dkv_slots[step % 2]
            if band is not None:
                dk = GradientSum(b, "dk", here[0], empty=step == 0)
                dv = GradientSum(b, "dv", here[1], empty=step == 0)
                grads = (dq.target(saved.q), dk.target(k), dv.target(v))
                b.attend_backward((saved.q, k, v, saved.out, saved.lse), dout, grads, band, f"backward {source}")
                for total, part in zip((dq, dk, dv), grads, strict=True):
                    total.add(part, source)
            if size > 1:
                self._hop(self._dkv, here, dkv_slots[(step + 1) % 2], f"send d{source}")
        dk_home, dv_home = dkv_slots[size % 2 if size > 1 else 0]
        return self._cast("dq", dq.total), self._cast("dk", dk_home), self._cast("dv", dv_home)

    def _source(self, step: int) -> int:
        """Return whose keys are at hand in this step."""
        return (self._position - step) % self._size

    def _band(self, step: int) -> Band | None:
        """Return the mask between this rank's queries and the keys at hand, None if it keeps nothing."""
        (queries,), (keys,) = self._layout[self._position], self._layout[self._source(step)]
        return block_band(MASKS[self._b.workload.mask], queries, keys)

    def _kv_slots(self, k: View, v: View) -> list[tuple[View, View]]:
        """Return which buffers hold the keys of every step: the own ones, then two in turns."""
        pool = [self._slot("", i, k, v) for i in range(min(self._size - 1, 2))]
        return [(k, v), *(pool[i % 2] for i in range(self._size - 1))]

    def _slot(self, prefix: str, number: int, k: View, v: View, dtype: Dtype | None = None) -> tuple[View, View]:
        """Return buffers that keys and values, or their gradients, are received into."""
        return (
            self._b.like(f"{prefix}k slot {number}", k, "communication", dtype),
            self._b.like(f"{prefix}v slot {number}", v, "communication", dtype),
        )

    def _pass_on_kv(self, step: int, slots: list[tuple[View, View]]) -> None:
        """Send the keys at hand on and receive those of the next step, if there is one."""
        if step < self._size - 1:
            self._hop(self._kv, slots[step], slots[step + 1], f"send kv{self._source(step)}")

    def _hop(self, over: Communicator, here: tuple[View, View], there: tuple[View, View], label: str) -> None:
        self._b.exchange(
            over,
            [Message(self._next, view) for view in here],
            [Message(self._previous, view) for view in there],
            label,
        )

    def _cast(self, name: str, total: View) -> View:
        """Return the gradient in the model's data type."""
        b = self._b
        if b.dtype(total) == b.workload.dtype:
            return total
        grad = b.like(name, total, "attention", b.workload.dtype)
        b.copy(total, grad, f"cast {name}")
        return grad


def _wire_bytes(workload: Workload, size: int) -> int:
    """Over all ranks: forward P(P-1) hops of KV; backward as many again, and P*P hops of dKV in fp32 or wider."""
    model = workload.model
    elements = 2 * workload.batch * (workload.seq // size) * model.num_kv_heads * model.head_dim
    kv = elements * DTYPE_BYTES[workload.dtype]
    dkv = elements * DTYPE_BYTES[accumulation_dtype(workload.dtype)]
    forward = (size - 1) * kv if workload.forward else 0
    backward = (size - 1) * kv + (size * dkv if size > 1 else 0) if workload.backward else 0
    return size * (forward + backward)
