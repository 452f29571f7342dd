"""Integers, as token ids: they are cut, sent and gathered, and nothing computes with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sim.base.errors import InputError
from sim.schedule.ir.masks import Span, mask_of
from sim.schedule.ir.ops import Accumulate, AllGather, AllReduce, Attend, Copy, Gemm, Op
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import Split, View
from sim.schedule.proof.check import check
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_model
from tests.schedule.proof.test_check_catches import refuses

IDS = Tensor("ids", "activation", numbers="int64")


def gathered(more: Callable[[ProgramBuilder, View], Op] | None = None, *, shift: int = 0) -> Schedule:
    """Two ranks gather the ids of all eight tokens, and do one op more with them."""
    workload = Workload(model=make_model(4, 4), seq=8, passes="forward")
    everyone = Communicator(name="everyone", groups=((0, 1),))

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        ids = b.input_of(IDS, (Span(rank * 4, rank * 4 + 4),))
        whole = b.new(IDS, 8)
        recvs = Split(whole, 1, 2)
        b.add(AllGather(label="gather", communicator=everyone.name, send=ids, recvs=recvs))
        if more:
            b.add(more(b, whole))
        start = (rank * 4 + shift) % 8
        b.output_of(IDS, (Span(start, start + 4),), recvs.part(rank))
        return b.build()

    header = Header(name="ids", workload=workload, mesh=Mesh(ring=2), communicators=(everyone,))
    return Schedule(header, program)


def test_they_are_gathered_and_their_tokens_followed() -> None:
    checked = check(gathered())
    program = checked.schedule.program(0)
    assert [buffer.nbytes for buffer in program.buffers] == [4 * 8, 8 * 8]
    assert Schedule.from_json(checked.schedule.to_json()).hash == checked.schedule.hash
    refuses(gathered(shift=4), r"holds ids\[tokens 0..4")


def added(b: ProgramBuilder, ids: View) -> Op:
    return Accumulate(label="add", source=ids, into=b.like("sum", ids, "other"))


def multiplied(b: ProgramBuilder, ids: View) -> Op:
    return Gemm(label="multiply", form="nn", a=ids, b=b.like("w", ids, "other"), out=b.like("out", ids, "other"))


def reduced(b: ProgramBuilder, ids: View) -> Op:
    return AllReduce(label="reduce", communicator="everyone", view=ids)


def attended(b: ProgramBuilder, ids: View) -> Op:
    out, lse = b.like("out", ids, "other"), b.like("lse", ids, "other")
    return Attend(label="attend", q=ids, k=ids, v=ids, out=out, lse=lse, band=mask_of(b.workload))


def cast(b: ProgramBuilder, ids: View) -> Op:
    copy = b.buffer("copy", "bs", ids.shape, "fp32", "other")
    return Copy(label="cast", source=Split(ids, 0, 1), target=Split(copy, 0, 1))


def test_nothing_casts_to_or_from_them() -> None:
    """What passed through them would be rounded to whole numbers."""
    refuses(gathered(cast), "casts int64 to fp32, of buffer 'copy'")


@pytest.mark.parametrize("op", [added, multiplied, reduced, attended])
def test_nothing_computes_with_them(op: Callable[[ProgramBuilder, View], Op]) -> None:
    refuses(gathered(op), "computes with integers, of buffer 'ids'")


def test_no_model_is_made_of_them() -> None:
    with pytest.raises(InputError, match="fp64, fp32, bf16, fp16"):
        Workload(model=make_model(4, 4), seq=8, dtype="int64")
