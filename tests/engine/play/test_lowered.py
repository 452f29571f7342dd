"""Lowered schedules: arrays of fragments, equal to those of all ops, and to what their matching says."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from sim.engine.costs.cost import CostModel
from sim.engine.play.lowered import Lowered
from sim.schedule.derive.replicas import among
from sim.schedule.ir import ops
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import Checked
from sim.setup.setup import Setup
from sim.words.workload import Workload
from tests.helpers import OFFLOADED, VARIANTS, by_tier, checked_or_refused, make_model

ARRAYS = (
    "ops", "streams", "programs", "transfers", "groups", "stream_ops", "waits", "transfers_of", "members", "op_rank",
    "op_use", "op_copy", "transfer_message", "group_call",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", by_tier({"zigzag", "ulysses", "zigzag, offloaded"}, SCHEDULES, [*VARIANTS, *OFFLOADED])
)
def test_arrays_of_calls_are_those_of_all_ops(name: str) -> None:
    workload = Workload(model=make_model(8, 4), seq=64, scope="layer", layers=3)
    checked = checked_or_refused(name, workload, 1 if VARIANTS.get(name, VARIANTS["ring"]).schedule == "single" else 4)
    if checked is None:
        return
    schedule = checked.schedule
    flat = Checked(Schedule(schedule.header, [program.replace() for program in schedule.programs].__getitem__))
    found, written = Lowered(checked), Lowered(flat)
    for array in ARRAYS:
        np.testing.assert_array_equal(getattr(found, array), getattr(written, array), array)
    assert found.uses.found == written.uses.found
    assert found.messages == written.messages
    assert [call for call, _ in found.calls] == [call for call, _ in written.calls]
    matching, first = checked.matching, found.first

    def numbers(keys: list[tuple[int, int]]) -> list[int]:
        return [first[rank] + index for rank, index in keys]

    assert found.transfers["source"].tolist() == numbers([transfer.source for transfer in matching.transfers])
    assert found.transfers["target"].tolist() == numbers([transfer.target for transfer in matching.transfers])
    sizes = [found.messages[number].nbytes for number in found.transfer_message]
    assert sizes == [transfer.nbytes for transfer in matching.transfers]
    for (rank, index), transfers in matching.transfers_of.items():
        op = found.ops[first[rank] + index]
        assert found.transfers_of[op["transfers"] : op["transfers_end"]].tolist() == transfers
    groups = [found.members[begin:end].tolist() for begin, end in found.groups.tolist()]
    assert groups == [numbers([*group.members]) for group in matching.groups]
    for program, uses, waits in zip(schedule.programs, checked.kernels, checked.dependencies, strict=True):
        last = -1
        for number, (op, use) in enumerate(zip(program.ops, uses, strict=True), first[program.rank]):
            row = found.ops[number]
            assert (found.uses.found[found.op_use[number]] if found.op_use[number] >= 0 else None) == use
            index = number - first[program.rank]
            assert found.waits[row["waits"] : row["waits_end"]].tolist() == [
                first[program.rank] + other for other in waits.waits[index]
            ]
            behind = isinstance(op, ops.Exchange | ops.Collective | ops.HostCopy)
            assert row["behind"] == (last if behind else -1)
            if op.stream == ops.COMPUTE:
                last = number


@pytest.mark.parametrize("software", ["alst", "deepspeed"])
def test_issue_has_the_price_of_its_own_op(software: str) -> None:
    """Also where software packs gradients by several kernels, and copies weights behind them by one."""
    model = make_model(8, 4, dtype="bf16")
    setup = Setup("single", model=model, cluster="hgx-h100", gpus=2, dp_degree=2, seq=512, layers=1, software=software)
    found = setup.resolved()
    checked, cost = found.checked(), CostModel(found.cluster, found.profile)
    arrays, meets = Lowered(checked), partial(among, checked.schedule)
    for number, (op, use) in enumerate(zip(checked.schedule.programs[0].ops, checked.kernels[0], strict=True)):
        assert cost.issue_s(*arrays.issues.found[arrays.ops["issue"][number]]) == cost.issue_s(op, use, meets(op))
