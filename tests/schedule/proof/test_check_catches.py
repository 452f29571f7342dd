"""What ``check`` is for: every way to get distributed attention wrong has to be found before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.fragments import Port
from sim.schedule.ir.masks import CAUSAL, FULL, Band, DocumentBlock, Span
from sim.schedule.ir.ops import (
    COMPUTE,
    FETCH,
    HOST,
    STREAMS,
    Accumulate,
    AllReduce,
    AllToAll,
    Attend,
    AttendBackward,
    Barrier,
    Copy,
    Delta,
    Exchange,
    Fold,
    Gemm,
    Hold,
    HostCopy,
    HostSync,
    Merge,
    Message,
    Op,
    RmsNorm,
    Rope,
    Zero,
)
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.ir.views import Buffer, Split, View
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.hops import Lane, MessageForm, hop, lane, to_send
from sim.words.mesh import Mesh
from sim.words.workload import Dtype, Scope, Workload
from tests.helpers import make_checked, make_model

Change = Callable[[Op], Op | None]


def changed(name: str, ranks: int, kind: type, change: Change, *, rank: int, number: int, **workload: Any) -> Schedule:
    """Return a proved schedule with one op of one rank changed, or (None) left out."""
    options: dict[str, Any] = {"model": make_model(8, 4), "seq": 32, "mask": "causal"} | workload
    schedule = make_checked(name, Workload(**options), ranks).schedule
    programs = schedule.programs
    ops = list(programs[rank].ops)
    index = [i for i, op in enumerate(ops) if isinstance(op, kind)][number]
    new = change(ops[index])
    ops[index : index + 1] = [] if new is None else [new]
    programs[rank] = programs[rank].replace(ops=tuple(ops))
    return Schedule(schedule.header, programs.__getitem__)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_communicator_named_like_a_stream(stream: str) -> None:
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    (first, *rest) = schedule.header.communicators
    named = (msgspec.structs.replace(first, name=stream), *rest)
    refuses(
        Schedule(msgspec.structs.replace(schedule.header, communicators=named), schedule.program),
        f"communicator '{stream}' has the name of a stream",
    )


def test_two_communicators_of_one_name() -> None:
    """What runs over that name would be what each player takes it for."""
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    (ring,) = schedule.header.communicators
    twice = msgspec.structs.replace(schedule.header, communicators=(ring, ring))
    refuses(Schedule(twice, schedule.program), "communicators 'ring' are there twice")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            HostSync,
            {"streams": ("ring", "rnig")},
            "waits for stream 'rnig', on which nothing runs: allowed are compute, ",
        ),
        (HostSync, {"streams": (HOST,)}, "waits for stream 'host'"),
        (Exchange, {"communicator": "rnig"}, "is on communicator 'rnig', which rank 0 has no part in: it has ring, ul"),
        (AllToAll, {"communicator": COMPUTE}, "is on stream 'compute': a communicator's ops take its own"),
    ],
)
def test_an_op_where_it_does_not_belong(kind: type, fields: dict[str, Any], message: str) -> None:
    refuses(changed("usp, queries travel", 4, kind, replace(**fields), rank=0, number=0), message)


def test_a_communicator_that_a_rank_has_no_part_in() -> None:
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    (ring,) = schedule.header.communicators
    alone = msgspec.structs.replace(schedule.header, communicators=(msgspec.structs.replace(ring, groups=((1,),)),))
    refuses(Schedule(alone, schedule.program), "is on communicator 'ring', which rank 0 has no part in: it has none")


def test_a_kernel_with_a_stream_of_its_own() -> None:
    """Kernels have no field for it: a file that gives them one is refused, as with any other field."""
    written = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule.to_json()
    with pytest.raises(InputError, match="unknown field `stream`"):
        Schedule.from_json(written.replace(b'{"type":"Attend",', b'{"type":"Attend","stream":"ring",', 1))


LAYER: dict[str, Any] = {"scope": "layer", "layers": 1}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (RmsNorm, {"epsilon": 1e-6}, "has epsilon 1e-06: norm_epsilon of the model is 1e-05"),
        (Rope, {"theta": 500000.0}, "has theta 500000.0: rope_theta of the model is 10000.0"),
    ],
)
def test_a_number_that_is_not_the_models(kind: type, fields: dict[str, Any], message: str) -> None:
    for number in (0, 1):  # of Rope in forward, of RmsNorm in either place
        refuses(changed("ulysses", 2, kind, replace(**fields), rank=1, number=number, **LAYER), message)


def test_a_matrix_product_by_tokens() -> None:
    def by_tokens(op: Op) -> Op:
        assert isinstance(op, Gemm)
        return msgspec.structs.replace(op, b=op.a)

    refuses(changed("single", 1, Gemm, by_tokens, rank=0, number=0, **LAYER), "takes io for")


def of_dtype(name: str, kind: type, operand: str, dtype: Dtype, number: int = 0, **workload: Any) -> Schedule:
    """Return a proved schedule of bf16 in which the buffer of one op's operand is of another data type."""
    options: dict[str, Any] = {"model": make_model(8, 4), "seq": 32, "dtype": "bf16"} | workload
    schedule = make_checked(name, Workload(**options), 1 if name == "single" else 2).schedule
    programs = schedule.programs
    rank = len(programs) - 1
    op = [op for op in programs[rank].ops if isinstance(op, kind)][number]
    value, buffers = getattr(op, operand), list(programs[rank].buffers)
    at = value.view.buffer if isinstance(value, Split) else value.buffer
    buffers[at] = msgspec.structs.replace(buffers[at], dtype=dtype)
    programs[rank] = programs[rank].replace(buffers=tuple(buffers))
    return Schedule(schedule.header, programs.__getitem__)


@pytest.mark.parametrize(
    ("name", "kind", "operand", "dtype", "message"),
    [
        ("single", Attend, "lse", "bf16", "takes bf16 for lse: beside bf16 allowed is fp32"),
        ("ring", Attend, "out", "fp32", "takes fp32 for out: beside bf16 allowed is bf16"),
        ("ring", AttendBackward, "dk", "fp32", "takes fp32 for dk: beside bf16 allowed is bf16"),
        ("ring", Merge, "into_out", "bf16", "takes bf16 for into_out: beside bf16 allowed is fp32"),
        ("ring", Copy, "target", "fp16", "takes fp16 for target: beside bf16 allowed is bf16 or fp32 or int64"),
        ("burst", Delta, "delta", "bf16", "takes bf16 for delta: beside bf16 allowed is fp32"),
        ("single", RmsNorm, "rstd", "bf16", "takes bf16 for rstd: beside bf16 allowed is fp32"),
        ("single", Gemm, "out", "fp32", "takes fp32 for out: beside bf16 allowed is bf16"),
        ("single", RmsNorm, "weight", "fp32", "input norm1 is in fp32: it has to be in bf16"),
        ("ring", Attend, "q", "fp16", "input q is in fp16: it has to be in bf16"),
    ],
)
def test_data_types_that_no_kernel_takes(name: str, kind: type, operand: str, dtype: Dtype, message: str) -> None:
    """Of buffers of the last rank: log-sum-exps and accumulators are wide, all else is in the workload's type."""
    scope: dict[str, Any] = LAYER if kind in {RmsNorm, Gemm} else {}
    refuses(of_dtype(name, kind, operand, dtype, **scope), message)


def replace(**fields: Any) -> Change:
    return lambda op: msgspec.structs.replace(op, **fields)


def drop(_: Op) -> None:
    return None


def refuses(schedule: Schedule, message: str) -> ScheduleError:
    with pytest.raises(ScheduleError, match=message) as error:
        check(schedule)
    assert "\n" not in str(error.value)
    return error.value


def test_a_missing_block() -> None:
    refuses(changed("ring", 4, Merge, drop, rank=3, number=1), "not complete")


def test_a_block_attended_twice() -> None:
    def again(op: Op) -> Op:
        assert isinstance(op, Attend)
        return msgspec.structs.replace(op, k=first.k, v=first.v)

    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32, mask="full"), 4).schedule
    first = next(op for op in schedule.program(2).ops if isinstance(op, Attend))
    refuses(changed("ring", 4, Attend, again, rank=2, number=1, mask="full"), "twice")


def test_the_wrong_keys_in_the_right_buffer() -> None:
    """One rank forgets a hop and passes its own keys on: declared coverage would not see it, contents do."""

    def own(op: Op) -> Op:
        assert isinstance(op, Exchange)
        sends = tuple(Message(old.peer, new.view) for old, new in zip(op.sends, first.sends, strict=True))
        return msgspec.structs.replace(op, sends=sends)

    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32, mask="full"), 4).schedule
    first = next(op for op in schedule.program(1).ops if isinstance(op, Exchange))
    refuses(changed("ring", 4, Exchange, own, rank=1, number=1, mask="full"), "twice")


def test_keys_and_values_of_different_tokens() -> None:
    def swap(op: Op) -> Op:
        assert isinstance(op, Exchange)
        k, v = op.sends
        return msgspec.structs.replace(op, sends=(Message(v.peer, v.view), Message(k.peer, k.view)))

    refuses(changed("ring", 2, Exchange, swap, rank=0, number=0), "used as keys and values")


@pytest.mark.parametrize("band", [FULL, Band(right=-1), Band(left=2, right=0)])
def test_the_wrong_mask_in_a_diagonal_block(band: Band) -> None:
    refuses(changed("ring", 2, Attend, replace(band=band), rank=1, number=0), "not what the mask")
    refuses(changed("ring", 2, AttendBackward, replace(band=band), rank=1, number=0), "not what the mask")


def test_a_causal_mask_where_the_block_is_full() -> None:
    refuses(changed("ring", 2, Attend, replace(band=CAUSAL), rank=1, number=1), "not what the mask")


def test_a_builder_that_claims_something_else_than_its_ops_do() -> None:
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    assert schedule.header.claims is not None
    for field, message in (("attention_flops", "FLOPs, but arXiv:2310.01889"), ("wire_bytes", "bytes are sent, but")):
        claims = msgspec.structs.replace(schedule.header.claims, **{field: 1})
        header = msgspec.structs.replace(schedule.header, claims=claims)
        refuses(Schedule(header, schedule.program), message)


def test_an_output_merged_with_the_log_sum_exp_of_other_keys() -> None:
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=48, mask="full"), 3).schedule
    merges = [op for op in schedule.program(0).ops if isinstance(op, Merge)]
    stale = merges[0].lse
    refuses(changed("ring", 3, Merge, replace(lse=stale), rank=0, number=1, mask="full", seq=48), "saw other keys")


def test_backward_with_the_partial_log_sum_exp() -> None:
    """The classic: gradients of a block from that block's own log-sum-exp instead of the global one."""
    workload = Workload(model=make_model(8, 4), seq=32, mask="full")
    schedule = make_checked("ring", workload, 2).schedule
    part = [op for op in schedule.program(0).ops if isinstance(op, Attend)][1]
    wrong = changed("ring", 2, AttendBackward, replace(lse=part.lse), rank=0, number=1, mask="full")
    refuses(wrong, "not complete")


def test_a_gradient_that_is_dropped() -> None:
    refuses(changed("ring", 2, Accumulate, drop, rank=1, number=0), "lacks contributions")


def test_a_gradient_added_twice() -> None:
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    programs = schedule.programs
    ops = list(programs[1].ops)
    at = next(i for i, op in enumerate(ops) if isinstance(op, Accumulate))
    ops.insert(at, ops[at])
    programs[1] = programs[1].replace(ops=tuple(ops))
    refuses(Schedule(schedule.header, programs.__getitem__), "twice")


def test_heads_that_do_not_belong_together() -> None:
    """Ulysses whose key/value heads arrive in another order than the query heads."""

    def shifted(op: Op) -> Op:
        assert isinstance(op, Attend)
        every, middle = slice(None), slice(1, 3)
        some = {"q": op.q[every, every, middle], "out": op.out[every, every, middle], "lse": op.lse[every, middle]}
        return msgspec.structs.replace(op, k=op.k[:, :, :1], v=op.v[:, :, :1], **some)

    refuses(changed("ulysses", 2, Attend, shifted, rank=1, number=0, passes="forward"), "wrong key/value heads")


def test_a_missing_hop_is_named_by_its_counterpart() -> None:
    refuses(changed("ring", 2, Exchange, drop, rank=0, number=0), "rank 0 sends 3 times to rank 1, which receives 4")


def test_a_missing_collective() -> None:
    refuses(changed("ulysses", 2, AllToAll, drop, rank=0, number=0), "disagree on the number of collectives")


def test_messages_of_different_size() -> None:
    def shorter(op: Op) -> Op:
        assert isinstance(op, Exchange)
        return msgspec.structs.replace(op, sends=tuple(Message(m.peer, m.view[:, :4]) for m in op.sends))

    refuses(changed("ring", 2, Exchange, shorter, rank=0, number=0), "sends .* but .* receives")


# Small schedules of their own


def schedule_of(
    programs: Callable[[ProgramBuilder, Communicator], None],
    ranks: int = 2,
    seq: int = 8,
    more: tuple[Communicator, ...] = (),
) -> Schedule:
    """Return a schedule whose ranks all hold the q of their own tokens in ``given`` and run ``programs``."""
    workload = Workload(model=make_model(4, 4), seq=seq, passes="forward")
    everyone = Communicator(name="all", groups=(tuple(range(ranks)),))

    def build(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        programs(b, everyone)
        return b.build()

    other = Communicator(name="other", groups=everyone.groups)
    header = Header(name="own", workload=workload, mesh=Mesh(ring=ranks), communicators=(everyone, other, *more))
    return Schedule(header, build)


def given(b: ProgramBuilder, tokens: int = 4) -> Any:
    return b.input("q", (Span(b.rank * tokens, (b.rank + 1) * tokens),), Span(0, 4))


def test_a_deadlock_names_who_waits_for_what_and_shows_the_grid() -> None:
    """Separate sends and receives: each rank waits for the other's send, which comes behind its own receive."""

    def program(b: ProgramBuilder, over: Communicator) -> None:
        view, peer = given(b), 1 - b.rank
        taken = b.like("taken", view, "communication")
        b.add(Exchange(label="receive", communicator=over.name, sends=(), recvs=(Message(peer, taken),)))
        b.add(Exchange(label="send", communicator=over.name, sends=(Message(peer, view),), recvs=()))

    error = refuses(schedule_of(program), "deadlock: rank 0 op 1 .* waits for op 0 .*'receive'")
    assert ">>> send <<<" in error.grid
    assert error.grid.count("rank") == 2


def test_grouped_they_do_not_deadlock() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view, peer = given(b), 1 - b.rank
        b.add(
            Exchange(
                label="swap",
                communicator=over.name,
                sends=(Message(peer, view),),
                recvs=(Message(peer, b.like("taken", view, "communication")),),
            )
        )

    check(schedule_of(program))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("form", ["separate", "packed-separate"])
def test_messages_apart_take_more_than_one_communicator(size: int, form: MessageForm) -> None:
    """Every rank of a ring sends first: on one communicator none ever receives, on those of its pairs all do."""
    ring = Communicator(name="ring", groups=(tuple(range(size)),))
    apart = lane(ring, form)
    assert len(apart.declared) == 2 + size % 2

    def hops(over: Lane) -> Schedule:
        def program(b: ProgramBuilder, _: Communicator) -> None:
            view = given(b)
            sent = to_send(b, over, (view, view), "pair")
            hop(b, over, sent, b.like_all(["a", "b"], sent, "other", packed=over.packed), 1, "send", overlap=True)

        return schedule_of(program, size, 4 * size, tuple(dict.fromkeys((ring, *over.declared))))

    check(hops(apart))
    refuses(hops(dataclasses.replace(apart, edges=(ring, ring, ring))), "deadlock")


def test_collectives_on_two_communicators_in_opposite_order() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        other = Communicator(name="other", groups=over.groups)
        for name in (over, other) if b.rank == 0 else (other, over):
            total = b.like("total", view, "other")
            b.copy(view, total, "copy")
            b.add(Barrier(label="barrier", communicator=name.name))
            b.add(HostSync(streams=(name.name,)))

    refuses(schedule_of(program), "deadlock")


def test_reading_what_was_never_written() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        b.add(Accumulate(label="add", source=view, into=b.like("empty", view, "other")))

    refuses(schedule_of(program), "buffer 'empty' before all of it is written")


def test_writing_to_an_input() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        b.add(Accumulate(label="double", source=view, into=view))

    refuses(schedule_of(program), "writes to the input 'q'")


def test_sending_a_view_with_gaps() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view, peer = given(b), 1 - b.rank
        part = view[:, :, :2]
        b.add(
            Exchange(
                label="send",
                communicator=over.name,
                sends=(Message(peer, part),),
                recvs=(Message(peer, b.like("taken", part, "communication")),),
            )
        )

    refuses(schedule_of(program), "with gaps")


def test_splitting_along_an_inner_dimension() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        taken = b.like("taken", view, "communication")
        b.add(AllToAll(label="all-to-all", communicator=over.name, sends=Split(view, 2, 2), recvs=Split(taken, 2, 2)))

    refuses(schedule_of(program), "along dimension 2, which leaves gaps")


def test_exchanging_with_oneself() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        b.add(
            Exchange(
                label="self",
                communicator=over.name,
                sends=(Message(b.rank, view),),
                recvs=(Message(b.rank, b.like("taken", view, "other")),),
            )
        )

    refuses(schedule_of(program), "its own rank")


def test_a_copy_to_the_host_on_the_stream_back() -> None:
    layers: dict[str, Any] = {"scope": "layer", "layers": 2}
    wrong = changed("zigzag, offloaded", 2, HostCopy, replace(stream=FETCH), rank=1, number=0, **layers)
    refuses(wrong, "is on stream 'from host': copies to host take 'to host'")


@pytest.mark.parametrize(
    "slices", [((0, 1), (0, 17), (0, 8), (0, 16)), ((0, 1), (4, 4), (0, 8), (0, 16)), ((0, 1), (0, 16))]
)
def test_a_view_that_is_not_inside_its_buffer(slices: tuple[tuple[int, int], ...]) -> None:
    def outside(op: Op) -> Op:
        assert isinstance(op, Attend)
        return msgspec.structs.replace(op, out=View(op.out.buffer, slices))

    refuses(changed("ring", 2, Attend, outside, rank=0, number=0), "which has dims 'bshd' and shape")
    refuses(changed("ring", 2, Attend, replace(q=View(1000, slices)), rank=0, number=0), "uses buffer 1000 of")


def test_operands_of_other_dimensions() -> None:
    """Once a traceback: a weight that is a token tensor, an output that is a log-sum-exp."""

    def activations(op: Op) -> Op:
        assert isinstance(op, Gemm)
        return msgspec.structs.replace(op, b=op.a)

    refuses(changed("single", 1, Gemm, activations, rank=0, number=0, scope="layer"), "takes .* for .* of buffer")

    def merged(op: Op) -> Op:
        assert isinstance(op, Merge)
        return msgspec.structs.replace(op, out=op.lse)

    refuses(changed("ring", 2, Merge, merged, rank=1, number=0), "takes bqhd for bhs")


def test_a_split_that_does_not_fit_the_group() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        taken = b.like("taken", view, "communication")
        b.add(AllToAll(label="all-to-all", communicator=over.name, sends=Split(view, 1, 4), recvs=Split(taken, 1, 4)))

    refuses(schedule_of(program), "4 parts, but its group has 2 members")


def test_outputs_that_two_ranks_own() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = b.input("q", (Span(0, 4),), Span(0, 4))
        held = b.like("held", view, "other")
        b.copy(view, held, "copy")
        b.output("q", held, (Span(0, 4),), Span(0, 4))

    refuses(schedule_of(program), "twice")


def test_outputs_that_nobody_owns() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b, tokens=2)
        held = b.like("held", view, "other")
        b.copy(view, held, "copy")
        b.output("q", held, (Span(b.rank * 2, b.rank * 2 + 2),), Span(0, 4))

    refuses(schedule_of(program), "have an owner")


def test_outputs_that_hold_something_else() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        held = b.like("held", view, "other")
        b.copy(view, held, "copy")
        b.output("q", held, (Span(4 - b.rank * 4, 8 - b.rank * 4),), Span(0, 4))

    refuses(schedule_of(program), r"holds q\[tokens 0..4")


def test_sums_of_anything_but_gradients() -> None:
    def reduced(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        twice = b.like("twice", view, "other")
        b.copy(view, twice, "copy")
        b.add(AllReduce(label="reduce", communicator=over.name, view=twice))
        b.output("q", twice, (Span(b.rank * 4, b.rank * 4 + 4),), Span(0, 4))

    refuses(schedule_of(reduced), "adds up q")

    def unmerged(op: Op) -> Op:
        assert isinstance(op, Merge)
        return Accumulate(part=op.part, label="add", source=op.out, into=op.into_out)

    refuses(changed("ring", 2, Merge, unmerged, rank=1, number=0, passes="forward"), "adds up out")


def test_a_missing_output_and_an_invented_input() -> None:
    workload = Workload(model=make_model(4, 2), seq=16)
    whole = make_checked("allgather", workload, 2).schedule

    def forgetful(rank: int) -> Program:
        program = whole.program(rank)
        return program.replace(outputs=program.outputs[:-1])

    refuses(Schedule(whole.header, forgetful), r"\d+ of \d+ .* of dv have an owner|no rank has the output dv")

    def generous(rank: int) -> Program:
        program = whole.program(rank)
        view = View(len(program.buffers), ((0, 1), (0, 16), (0, 2), (0, 16)))
        buffer = Buffer(name="free k", dims="bshd", shape=(1, 16, 2, 16), dtype="fp32", category="other")
        port = Port(tensor="k", view=view, batch=Span(0, 1), tokens=(Span(0, 16),), heads=Span(0, 2))
        return program.replace(buffers=(*program.buffers, buffer), inputs=(*program.inputs, port))

    refuses(Schedule(whole.header, generous), "twice")


def test_shapes_that_do_not_fit() -> None:
    def short(op: Op) -> Op:
        assert isinstance(op, Merge)
        return msgspec.structs.replace(op, out=op.out[:, :2], lse=op.lse[:, :, :2])

    refuses(changed("ring", 2, Merge, short, rank=1, number=0, passes="forward"), "where .* is needed")
    schedule = make_checked("allgather", Workload(model=make_model(4, 2), seq=16), 2).schedule

    def clipped(rank: int) -> Program:
        program = schedule.program(rank)
        ports = [msgspec.structs.replace(port, view=port.view[:, :1]) for port in program.outputs]
        return program.replace(outputs=tuple(ports))

    refuses(Schedule(schedule.header, clipped), "holds 1 along 's' where 8 is needed")


def test_an_op_that_writes_what_it_sends() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = b.like("view", given(b), "other")
        b.copy(given(b), view, "copy")
        b.add(AllToAll(label="in place", communicator=over.name, sends=Split(view, 1, 2), recvs=Split(view, 1, 2)))

    refuses(schedule_of(program), "overlapping parts of buffer 'view'")


def test_an_exchange_with_a_rank_outside_its_group() -> None:
    """Ring traffic on the communicator of another degree."""

    def moved(op: Op) -> Op:
        assert isinstance(op, Exchange)
        return msgspec.structs.replace(op, sends=tuple(Message(3, view) for _, view in op.sends))

    schedule = changed("ring", 4, Exchange, moved, rank=0, number=0, passes="forward")
    groups = tuple(msgspec.structs.replace(c, groups=((0, 1), (2, 3))) for c in schedule.header.communicators)
    header = msgspec.structs.replace(schedule.header, communicators=groups)
    refuses(Schedule(header, schedule.program), "not in its group")


def test_delta_of_something_else() -> None:
    def of_queries(op: Op) -> Op:
        assert isinstance(op, Delta)
        return msgspec.structs.replace(op, dout=op.out)

    refuses(changed("burst", 2, Delta, of_queries, rank=0, number=0), "where dout of")


def test_a_sum_that_begins_with_nothing() -> None:
    """The rank that has nothing to add has to send zeros on."""
    refuses(changed("ring from the KV at hand", 2, Zero, drop, rank=0, number=0), "before all of it is written")


def test_zeros_in_the_place_of_gradients() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        zeros = b.like("zeros", given(b), "attention")
        b.add(Zero(label="zero", into=zeros))
        b.output("dq", zeros, (Span(4 * b.rank, 4 * b.rank + 4),), Span(0, 4))

    refuses(schedule_of(program), "holds zero")


def test_heads_that_go_to_the_wrong_ranks() -> None:
    """Two key/value heads over four ranks: 0, 0, 1, 1."""

    def turned(op: Op) -> Op:
        assert isinstance(op, Copy)
        assert op.order == (0, 0, 1, 1)
        return msgspec.structs.replace(op, order=(1, 1, 0, 0))

    options: dict[str, Any] = {"model": make_model(8, 2)}
    refuses(
        changed("ulysses", 4, Copy, turned, rank=1, number=1, **options), "cannot|wrong key/value heads|values of one"
    )


def test_replicas_whose_gradients_are_not_summed() -> None:
    def half(op: Op) -> Op:
        assert isinstance(op, Fold)
        source, target = op.source, op.target
        first = Split(source.view[:2], 0, 2)
        return Copy(part=op.part, label=op.label, source=first, target=target)

    options: dict[str, Any] = {"model": make_model(8, 2)}
    refuses(changed("ulysses", 4, Fold, half, rank=1, number=0, **options), "lacks contributions|expected")


def test_probabilities_of_keys_in_another_order() -> None:
    """What a standard kernel keeps is of no use with keys that lie elsewhere."""

    def half(op: Op) -> Op:
        assert isinstance(op, AttendBackward)
        return msgspec.structs.replace(op, kernel="flash")

    refuses(
        changed("standard attention", 1, AttendBackward, half, rank=0, number=0), "those of a standard one are kept"
    )
    workload = Workload(model=make_model(4, 4), seq=8, mask="full")
    header = Header(name="turned", workload=workload, mesh=Mesh())

    def build(rank: int) -> Program:
        b, tokens, heads = ProgramBuilder(rank, workload), (Span(0, 8),), Span(0, 4)
        q, k, v, dout = (b.input(name, tokens, heads) for name in ("q", "k", "v", "dout"))
        turned = [b.like(f"turned {name}", view, "other") for name, view in (("k", k), ("v", v))]
        for view, source in zip(turned, (k, v), strict=True):
            b.add(Copy(label="turn", source=Split(source, 1, 2), target=Split(view, 1, 2), order=(1, 0)))
        out, lse = b.like("out", q, "saved"), b.lse("lse", 8, 4, "saved")
        probs = b.buffer("probs", "bhst", (1, 4, 8, 8), "fp32", "saved")
        b.add(
            Attend(
                label="attend",
                q=q,
                k=turned[0],
                v=turned[1],
                out=out,
                lse=lse,
                band=FULL,
                kernel="standard",
                probs=probs,
            )
        )
        dq, dk, dv = (b.like(f"d{name}", view, "other") for name, view in zip("qkv", (q, k, v), strict=True))
        b.add(
            AttendBackward(
                label="back",
                q=q,
                k=k,
                v=v,
                out=out,
                lse=lse,
                dout=dout,
                dq=dq,
                dk=dk,
                dv=dv,
                band=FULL,
                kernel="standard",
                probs=probs,
            )
        )
        return b.build()

    refuses(Schedule(header, build), "of other keys, or in another order")


def test_splits_that_do_not_divide() -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = b.like("view", given(b), "other")
        b.add(Copy(label="copy", source=Split(given(b), 1, 3), target=Split(view, 1, 3)))

    refuses(schedule_of(program), "into 3 parts")


def test_all_keys_given_to_every_rank() -> None:
    """Replicas are what a forward pass leaves, not what it begins with."""
    workload = Workload(model=make_model(4, 4), seq=8, passes="forward", mask="full")
    single = make_checked("single", workload, 1).schedule
    claims = msgspec.structs.replace(single.header.claims, attention_flops=single.header.claims.attention_flops)
    header = msgspec.structs.replace(single.header, mesh=Mesh(ring=2), claims=claims)

    def halves(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        tokens, whole, heads = (Span(4 * rank, 4 * rank + 4),), (Span(0, 8),), Span(0, 4)
        q, k, v = b.input("q", tokens, heads), b.input("k", whole, heads), b.input("v", whole, heads)
        out, lse = b.like("out", q, "saved"), b.lse("lse", 4, 4, "saved")
        b.add(Attend(label="attend", q=q, k=k, v=v, out=out, lse=lse, band=FULL))
        b.output("out", out, tokens, heads)
        return b.build()

    refuses(Schedule(header, halves), "twice")


def test_dims_that_only_look_alike() -> None:
    """As many tokens as heads: a copy must not turn one into the other."""

    def program(b: ProgramBuilder, over: Communicator) -> None:
        view = given(b)
        b.copy(view, b.buffer("turned", "bhsd", view.shape, "fp32", "other"), "turn")

    refuses(schedule_of(program), "takes bshd for bhsd")


def test_pairs_attended_twice_that_make_up_for_others() -> None:
    """The second document has 36 pairs: 15 of its first two columns, and 21 that begin one column too early."""
    second = Span(8, 16)

    def overlapping(op: Op) -> Op:
        assert isinstance(op, Attend | AttendBackward)
        assert op.documents
        rest = (DocumentBlock(second, Span(8, 10), CAUSAL), DocumentBlock(second, Span(9, 15), Band(right=-2)))
        return msgspec.structs.replace(op, documents=(op.documents[0], *rest))

    for kind in (Attend, AttendBackward):
        schedule = changed("single", 1, kind, overlapping, rank=0, number=0, seq=16, documents=(8, 8))
        refuses(
            schedule,
            "columns 8..10 and rows 8..16 x columns 9..15, which have a pair in common",
        )


@pytest.mark.parametrize("sizes", [((1, 1), ()), ((), (1, 1)), ((1, 1), (1, 1))])
def test_parts_of_sizes_along_another_dimension(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def program(b: ProgramBuilder, over: Communicator) -> None:
        source = given(b)[:, :, :2]
        target = b.buffer("turned", "bshd", (2, 4, 1, source.shape[3]), "fp32", "other")
        b.add(Copy(label="turn", source=Split(source, 2, 2, sizes[0]), target=Split(target, 0, 2, sizes[1])))

    refuses(schedule_of(program), "along dimension 2 for parts along dimension 0")


def test_a_split_along_no_dimension_of_its_view() -> None:
    def outside(op: Op) -> Op:
        assert isinstance(op, AllToAll)
        return msgspec.structs.replace(op, sends=Split(op.sends.view, -1, op.sends.parts))

    refuses(changed("ulysses", 4, AllToAll, outside, rank=1, number=0), "along dimension -1")


@pytest.mark.parametrize("mesh", [Mesh(ring=8), Mesh(dp=2, ring=4), Mesh(ring=4, ulysses=2), Mesh(ring=2)])
def test_a_mesh_that_the_programs_are_not_of(mesh: Mesh) -> None:
    """Builders look ranks up in groups, which have no others."""
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 4).schedule
    header = msgspec.structs.replace(schedule.header, mesh=mesh)
    refuses(Schedule(header, schedule.program), "has no rank 4: its mesh has 4|give each of ranks 0..1 one place")
    written = schedule.to_json().replace(msgspec.json.encode(schedule.header), msgspec.json.encode(header))
    with pytest.raises(InputError):
        check(Schedule.from_json(written))


@pytest.mark.parametrize("scope", ["attention", "layer"])
@pytest.mark.parametrize(("field", "by"), [("head_dim", 2), ("num_heads", 2), ("ffn_dim", 2), ("embed_dim", 2)])
def test_a_model_that_the_programs_are_not_of(scope: Scope, field: str, by: int) -> None:
    """Inputs and outputs have the sizes that the model of the header gives them, along every dimension."""
    workload = Workload(model=make_model(8, 4), seq=32, scope=scope, layers=1)
    schedule = make_checked("zigzag", workload, 2).schedule
    model = msgspec.structs.replace(workload.model, **{field: by * getattr(workload.model, field)})
    header = msgspec.structs.replace(schedule.header, workload=msgspec.structs.replace(workload, model=model))
    asked = Schedule(header, schedule.program)
    if scope == "attention" and field in {"ffn_dim", "embed_dim"}:
        check(asked)  # which attention alone has not
    else:
        refuses(asked, "is needed|cells of .* have an owner|wrong key/value heads")


@pytest.mark.parametrize("shape", [(1, 16), (1, 16, 2, 16, 1), (1, -16, 2, 16)])
def test_a_buffer_whose_shape_is_none_of_its_dimensions(shape: tuple[int, ...]) -> None:
    """Though nothing uses it."""
    whole = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    unused = Buffer(name="unused", dims="bshd", shape=shape, dtype="fp32", category="other")

    def with_it(rank: int) -> Program:
        program = whole.program(rank)
        return program.replace(buffers=(*program.buffers, unused))

    refuses(Schedule(whole.header, with_it), r"buffer 'unused' has dims 'bshd' and shape")


def test_an_input_whose_dimensions_are_in_another_order() -> None:
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    programs = schedule.programs
    at = programs[1].inputs[0].view.buffer
    buffers = list(programs[1].buffers)
    buffers[at] = msgspec.structs.replace(buffers[at], dims="bsdh")
    programs[1] = programs[1].replace(buffers=tuple(buffers))
    refuses(Schedule(schedule.header, programs.__getitem__), "has dims 'bsdh': those of q are 'bshd'")


@pytest.mark.parametrize(
    ("options", "buffer", "message"),
    [
        ({"zero_stage": 3}, "wq", "takes for weights a view of buffer 'wq' with gaps"),
        ({"zero_stage": 3}, "dw_head 1", "takes for gradients a view of buffer 'dw_head 1' with gaps"),
        ({}, "ids", "takes for ids a view of buffer 'ids' with gaps"),
        ({"mlp": "tiled"}, "h2", "takes for x a view of buffer 'h2' with gaps"),
    ],
)
def test_a_view_with_gaps_for_a_kernel_that_sees_one_row(options: dict[str, Any], buffer: str, message: str) -> None:
    workload = Workload(model=make_model(8, 4), seq=16, batch=2, scope="step", layers=1)
    method = SCHEDULES["ring"]
    chosen = dataclasses.replace(method.options, **options)
    schedule = method.schedule(workload, method.mesh(2, workload.model), chosen)
    programs = schedule.programs
    buffers = tuple(
        msgspec.structs.replace(one, shape=(*one.shape[:-1], one.shape[-1] + 1)) if one.name == buffer else one
        for one in programs[0].buffers
    )
    programs[0] = programs[0].replace(buffers=buffers)
    refuses(Schedule(schedule.header, programs.__getitem__), message)


def test_a_hold_of_nothing() -> None:
    schedule = changed("ulysses", 2, Hold, lambda op: msgspec.structs.replace(op, held=()), rank=0, number=0)
    refuses(schedule, "holds nothing: expected one view or more")


@pytest.mark.parametrize("heads", [Span(-8, 0), Span(2**64, 2**64 + 8), Span(0, 8, 0)])
def test_an_input_of_positions_that_there_are_not(heads: Span) -> None:
    """A proof of classes of ranks writes far positions for what differs among them: none may come from outside."""
    schedule = make_checked("ring", Workload(model=make_model(8, 4), seq=32), 2).schedule
    programs = schedule.programs
    first, *rest = programs[1].inputs
    programs[1] = programs[1].replace(inputs=(msgspec.structs.replace(first, heads=heads), *rest))
    refuses(Schedule(schedule.header, programs.__getitem__), "positions begin at 0 and rise")
