"""What the axes of contents are for: micro-batches, unequal parts, and shards of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from runtime.processes.launch import Session
from runtime.run import ScheduleRun
from sim.base.errors import ScheduleError
from sim.engine.play.simulate import simulate
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.layout import contiguous
from sim.schedule.ir.masks import ONE, Span, mask_of
from sim.schedule.ir.ops import AllGather, Exchange, Message
from sim.schedule.ir.program import Claims, Communicator, Header, Program, Schedule
from sim.schedule.ir.views import TOKENS, Split, View
from sim.schedule.methods.ring import RingAttention, RingOptions, ring_bytes, ring_communicators
from sim.schedule.proof.check import check
from sim.schedule.proof.owners import check_shards
from sim.schedule.write.accumulate import SoftmaxAccumulator
from sim.schedule.write.attention import all_heads, attention_flops
from sim.schedule.write.blocks import blocks
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import DTYPE_BYTES, Workload
from tests.helpers import make_checked, make_cluster_spec, make_model
from topology.cluster import Cluster

MODEL = make_model(4, 2)


def exact(schedule: Schedule) -> None:
    checked = check(schedule)
    for seed in (1, 2):
        outputs = execute_virtual(checked, torch.device("cpu"), seed)
        assert max(output_errors(checked, outputs).values()) <= BOUNDS["fp64"]


def in_two_micro_batches(second: Span) -> Schedule:
    """A ring of two ranks, one sequence after the other; what should be ``Span(1, 2)`` is the second one."""
    workload, mesh, options = Workload(model=MODEL, seq=16, batch=2, dtype="fp64"), Mesh(ring=2), RingOptions()
    rings, layout = ring_communicators(mesh.groups("ring"), options), contiguous(16, 2)

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        own = all_heads(MODEL, layout[rank])
        for b.batch in (Span(0, 1), second):
            b.part = "forward"
            attention = RingAttention(b, rings, layout, own, options)
            q, k, v = (
                b.input(x, own.tokens, heads)
                for x, heads in (("q", own.heads), ("k", own.kv_heads), ("v", own.kv_heads))
            )
            out, saved = attention.forward(q, k, v)
            b.output("out", out, own.tokens, own.heads)
            b.part = "backward"
            grads = attention.backward(saved, b.input("dout", own.tokens, own.heads))
            for tensor, grad, heads in zip(
                ("dq", "dk", "dv"), grads, (own.heads, own.kv_heads, own.kv_heads), strict=True
            ):
                b.output(tensor, grad, own.tokens, heads)
        return b.build()

    claims = Claims(
        attention_flops=attention_flops(workload),
        wire_bytes=ring_bytes(workload, options, 2),
        source="ring",
    )
    header = Header(name="micro", workload=workload, mesh=mesh, communicators=rings.declared, claims=claims)
    return Schedule(header, program)


def test_two_micro_batches_are_one_batch() -> None:
    exact(in_two_micro_batches(Span(1, 2)))


def test_a_micro_batch_that_is_computed_twice() -> None:
    with pytest.raises(ScheduleError, match="would count tokens 0..8 twice"):
        check(in_two_micro_batches(Span(0, 1)))


def of_unequal_shards(
    sizes: Sequence[int], parts: Callable[[int], tuple[int, ...]], *, relayed: bool = False
) -> Schedule:
    """Attention to keys gathered from ranks with as many tokens each; ``parts`` is how a rank cuts what it gathers.

    Keys that are ``relayed`` go to the other rank and come back before.
    """
    workload, mesh = Workload(model=MODEL, seq=sum(sizes), dtype="fp64", passes="forward"), Mesh(ring=len(sizes))
    everyone = Communicator(name="everyone", groups=mesh.groups("ring"))
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def program(rank: int) -> Program:
        b, tokens = ProgramBuilder(rank, workload), (Span(starts[rank], starts[rank] + sizes[rank]),)
        own = all_heads(MODEL, tokens)
        q, k, v = (
            b.input(x, tokens, heads) for x, heads in (("q", own.heads), ("k", own.kv_heads), ("v", own.kv_heads))
        )
        whole = []
        for name, own_view in (("k", k), ("v", v)):
            view = there_and_back(b, everyone, own_view, sizes[1 - rank]) if relayed else own_view
            whole.append(b.tensor(f"all {name}", workload.seq, MODEL.num_kv_heads, "communication"))
            recvs = Split(whole[-1], TOKENS, len(sizes), parts(rank))
            b.add(AllGather(label=f"gather {name}", communicator=everyone.name, send=view, recvs=recvs))
        (block,) = blocks(mask_of(workload), tokens, (Span(0, workload.seq),))
        softmax = SoftmaxAccumulator(b, q, num_parts=1)
        softmax.attend(block, whole[0], whole[1], "all")
        b.output("out", softmax.out, tokens, own.heads)
        return b.build()

    row = MODEL.num_kv_heads * MODEL.head_dim * DTYPE_BYTES["fp64"]
    times = 2 * (len(sizes) - 1) + 4 * relayed
    claims = Claims(attention_flops=attention_flops(workload), wire_bytes=times * sum(sizes) * row, source="gathered")
    header = Header(name="unequal", workload=workload, mesh=mesh, communicators=(everyone,), claims=claims)
    return Schedule(header, program)


def there_and_back(b: ProgramBuilder, over: Communicator, own: View, tokens: int) -> View:
    """Exchange a tensor with the other rank's, which has so many tokens, and back."""
    theirs, back = b.tensor("theirs", tokens, own.shape[2], "communication"), b.like("back", own, "communication")
    peer = 1 - b.rank
    for sent, received in ((own, theirs), (theirs, back)):
        sends, recvs = (Message(peer, sent),), (Message(peer, received),)
        b.add(Exchange(label="relay", communicator=over.name, sends=sends, recvs=recvs))
    return back


def test_an_all_gather_of_3_and_5_tokens() -> None:
    schedule = of_unequal_shards((3, 5), lambda _: (3, 5))
    exact(schedule)
    exact(Schedule.from_json(schedule.to_json()))


def test_unequal_parts_take_as_long_as_the_largest() -> None:
    """Four and four tokens take 4 / 5 of the time of three and five: the links are all that takes time."""
    times = [
        simulate(check(of_unequal_shards(sizes, lambda _, sizes=sizes: sizes)), Cluster(make_cluster_spec(2)), None)
        .trace.of_rank(0)[0]
        .busy_s
        for sizes in ((4, 4), (3, 5))
    ]
    assert times[0] / times[1] == pytest.approx(4 / 5)


@pytest.mark.gloo
@pytest.mark.parametrize("relayed", [False, True])
def test_unequal_parts_over_gloo(ranks: Callable[[int], Session], relayed: bool) -> None:
    """Also where what a rank gathers has only just come."""
    checked = check(of_unequal_shards((3, 5), lambda _: (3, 5), relayed=relayed))
    run = ScheduleRun(ranks(2), checked)
    run.step()
    assert max(run.errors().values()) <= BOUNDS["fp64"]
    run.close()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda rank: (3, 5) if rank else (5, 3), "disagree on its parts"),
        (lambda _: (5, 3), "disagree on its parts"),
        (lambda _: (3, 4), r"cuts .* into \(3, 4\) parts"),
        (lambda _: (3, 3, 2), r"into \(3, 3, 2\) parts"),
        (lambda _: (-3, 11), r"into \(-3, 11\) parts"),
        (lambda _: (), "disagree on its parts"),
    ],
)
def test_unequal_parts_that_do_not_meet(parts: Callable[[int], tuple[int, ...]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(of_unequal_shards((3, 5), parts))


LAYERS = Workload(model=MODEL, seq=16, scope="layer")


def holding(rows: dict[int, list[Span]], columns: Span | None = None) -> list[Program]:
    """Ranks that hold rows of wq, and leave their gradient."""

    def port(tensor: str, span: Span) -> Port:
        return Port(tensor=tensor, view=None, batch=ONE, tokens=(span,), heads=ONE, features=columns)  # type: ignore[arg-type]

    return [
        Program(
            rank=rank,
            buffers=(),
            ops=(),
            inputs=tuple(port("wq", span) for span in spans),
            outputs=tuple(port("dwq", span) for span in spans),
        )
        for rank, spans in rows.items()
    ]


UPPER, LOWER = Span(0, 32), Span(32, 64)


def test_shards_that_are_held_equally_often() -> None:
    check_shards(holding({0: [Span(0, 64)], 1: [Span(0, 64)]}), LAYERS)
    check_shards(holding({0: [UPPER], 1: [LOWER]}), LAYERS)
    check_shards(holding({0: [UPPER], 1: [LOWER], 2: [UPPER], 3: [LOWER]}), LAYERS)
    check_shards(holding({0: [UPPER, LOWER]}) + holding({1: [Span(0, 64)]}), LAYERS)
    halves = [holding({rank: [Span(0, 64)]}, columns)[0] for rank, columns in enumerate((UPPER, LOWER))]
    check_shards(halves, LAYERS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({0: [UPPER], 1: [UPPER]}, "rows 32..64, columns 0..64 are held 0 times"),
        ({0: [UPPER], 1: [LOWER], 2: [UPPER]}, "rows 0..32, columns 0..64 are held 2 times"),
        ({0: [Span(0, 64)], 1: [Span(0, 48)]}, "rows 48..64, columns 0..64 are held 1 times"),
    ],
)
def test_a_lost_or_doubled_shard(rows: dict[int, list[Span]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_shards(holding(rows), LAYERS)


@pytest.mark.sweep
def test_a_gradient_that_a_rank_does_not_leave() -> None:
    checked = make_checked("ring", msgspec.structs.replace(LAYERS, dtype="fp64"), 2)
    whole = checked.schedule

    def forgetful(rank: int) -> Program:
        program = whole.program(rank)
        kept = tuple(port for port in program.outputs if rank == 0 or port.tensor != "dwq")
        return program.replace(outputs=kept)

    with pytest.raises(ScheduleError, match="rank 1 leaves no gradient of rows 0..64, columns 0..64 of wq of layer 0"):
        check(Schedule(whole.header, forgetful))


def relabelled(whole: Schedule, change: Callable[[Port], Port], first: int = 1) -> Schedule:
    """A schedule of two ranks with other ports on the last one, or (``first`` = 0) on both."""

    def program(rank: int) -> Program:
        program = whole.program(rank)
        ports = {which: tuple(map(change, getattr(program, which))) for which in ("inputs", "outputs")}
        return program.replace(**ports) if rank >= first else program

    return Schedule(whole.header, program)


@pytest.mark.parametrize(
    ("change", "first", "message"),
    [
        ({"tokens": (Span(16, 24),)}, 1, "says that it holds 16..24 of 16"),
        ({"batch": Span(7, 8)}, 0, "says that it holds 7..8 of 1"),
    ],
)
def test_positions_that_do_not_exist(change: dict[str, Any], first: int, message: str) -> None:
    """Under a full mask nothing else tells that a rank's tokens are others than it says."""
    whole = make_checked("ring", Workload(model=MODEL, seq=16, mask="full"), 2).schedule
    with pytest.raises(ScheduleError, match=message):
        check(relabelled(whole, lambda port: msgspec.structs.replace(port, **change), first))


def test_half_of_the_features_of_an_output() -> None:
    def half(port: Port) -> Port:
        if (port.tensor, port.layer) != ("x", 1):
            return port
        return msgspec.structs.replace(port, view=port.view[:, :, :32], features=Span(0, 32))

    whole = make_checked("ring", LAYERS, 2).schedule
    with pytest.raises(ScheduleError, match="x 1 has some of 64 features: whole tokens are needed"):
        check(relabelled(whole, half))


@pytest.mark.parametrize("groups", [((0, 0, 1),), ((0, 1), (1, 0)), ((0, 1, 2),)])
def test_groups_that_are_no_partition(groups: tuple[tuple[int, ...], ...]) -> None:
    whole = make_checked("ring", Workload(model=MODEL, seq=16), 2).schedule
    odd = Communicator(name="odd", groups=groups)
    header = msgspec.structs.replace(whole.header, communicators=(*whole.header.communicators, odd))
    with pytest.raises(ScheduleError, match="give each of ranks 0..1 one place at most"):
        check(Schedule(header, whole.program))


def test_a_group_whose_ranks_do_not_rise() -> None:
    """Process groups of torch have their ranks as they rise: gathered parts would lie in another order."""
    whole = of_unequal_shards((4, 4), lambda _: (4, 4))
    (everyone,) = whole.header.communicators
    turned = msgspec.structs.replace(everyone, groups=((1, 0),))
    with pytest.raises(ScheduleError, match=r"'everyone' has collectives in the group \(1, 0\)"):
        check(Schedule(msgspec.structs.replace(whole.header, communicators=(turned,)), whole.program))


def test_a_message_does_not_turn_dimensions() -> None:
    """As many tokens as heads: the shapes fit, what lies where does not."""
    everyone = Communicator(name="everyone", groups=((0, 1),))
    workload = Workload(model=MODEL, seq=8)

    def program(rank: int) -> Program:
        b, own = ProgramBuilder(rank, workload), all_heads(MODEL, contiguous(8, 2)[rank])
        q = b.input("q", own.tokens, own.heads)
        turned = b.buffer("turned", "bhsd", q.shape, "fp32", "other")
        sends, recvs = (Message(1 - rank, q),), (Message(1 - rank, turned),)
        b.add(Exchange(label="turn", communicator=everyone.name, sends=sends, recvs=recvs))
        return b.build()

    header = Header(name="turned", workload=workload, mesh=Mesh(ring=2), communicators=(everyone,))
    with pytest.raises(ScheduleError, match="sends fp32 bshd .* receives fp32 bhsd"):
        check(Schedule(header, program))
