from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.masks import Span, mask_of
from sim.schedule.ir.ops import AllGather, AttendBackward, ReduceScatter, Zero
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.views import Split
from sim.schedule.model.layer import AttentionPlan, build_around
from sim.schedule.write.accumulate import SoftmaxAccumulator
from sim.schedule.write.attention import Saved, all_heads
from sim.schedule.write.blocks import blocks
from sim.words.workload import DTYPE_BYTES

TOKENS = 1  # dimension of (B, S, H, D)


class Gathered:
    """Gather the keys of all ranks, attend, and scatter the sums of their gradients."""

    def __init__(self, b, everyone, layout):
        self.b, self.everyone, self.parts = b, everyone, len(layout)
        own, everything = layout[everyone.position(b.rank)], (Span(0, b.workload.seq),)
        self.saved_shard = all_heads(b.workload.model, own)
        (self.block,) = blocks(mask_of(b.workload), own, everything)

    def gather(self, name, local):
        whole = self.b.tensor(f"all {name}", self.b.workload.seq, local.shape[2], "communication")
        self.b.add(
            AllGather(
                label=f"gather {name}",
                communicator=self.everyone.name,
                send=local,
                recvs=Split(whole, TOKENS, self.parts),
            )
        )
        return whole

    def forward(self, q, k, v):
        softmax = SoftmaxAccumulator(self.b, q, num_parts=1)
        softmax.attend(self.block, self.gather("k", k), self.gather("v", v), "all")
        return softmax.out, Saved(q, k, v, softmax.out, softmax.lse)

    def backward(self, saved, dout):
        b, keys = self.b, self.block.columns
        k, v = self.gather("k", saved.k), self.gather("v", saved.v)
        dq, dk, dv = (b.like(name, view, "attention") for name, view in (("dq", saved.q), ("dk", k), ("dv", v)))
        for whole in (dk, dv):
            b.add(Zero(label="zero", into=whole[:, keys.stop :])) if keys.stop < whole.shape[TOKENS] else None
        b.add(
            AttendBackward(
                label="backward",
                q=saved.q,
                k=k[:, keys],
                v=v[:, keys],
                out=saved.out,
                lse=saved.lse,
                dout=dout,
                dq=dq,
                dk=dk[:, keys],
                dv=dv[:, keys],
                band=self.block.band,
            )
        )
        return dq, self.scatter("dk", dk), self.scatter("dv", dv)

    def scatter(self, name, whole):
        own = self.b.tensor(f"own {name}", whole.shape[TOKENS] // self.parts, whole.shape[2], "attention")
        self.b.add(
            ReduceScatter(
                label=f"scatter {name}",
                communicator=self.everyone.name,
                sends=Split(whole, TOKENS, self.parts),
                recv=own,
            )
        )
        return own


def build(workload, mesh):
    mesh.only("gathered", "ring")
    model, size = workload.model, mesh.ring
    layout = contiguous(workload.seq, size)
    everyone = Communicator(name="everyone", groups=mesh.groups("ring"))
    shards = 2 * workload.batch * workload.seq * model.num_kv_heads * model.head_dim * DTYPE_BYTES[workload.dtype]
    plan = AttentionPlan(
        name="gathered",
        communicators=(everyone,),
        shard=lambda rank: all_heads(model, layout[everyone.position(rank)]),
        attention=lambda b: Gathered(b, everyone, layout),
        wire_bytes=lambda work: (size - 1) * shards * (work.forward + 2 * work.backward),
        source="this file: (P-1) shards of K and V are gathered in each pass, and of dK and dV scattered",
    )
    return build_around(plan, workload, mesh)
