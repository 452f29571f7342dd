"""Calls of stages that meet: in an order in which all can be played, or left to the flat proof."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest

from sim.schedule.ir.fragments import Call
from sim.schedule.ir.ops import Exchange, HostSync, Zero
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.tensors import Tensor
from sim.schedule.ir.views import View
from sim.schedule.model.pipeline.stages import Border
from sim.schedule.proof.meetings import Meeting, meetings
from sim.schedule.proof.supersteps import Supersteps
from sim.words.mesh import Mesh
from tests.helpers import by_tier
from tests.schedule.model.test_pipelines import CASES, RINGS, TWO, Case
from tests.schedule.proof.test_supersteps import by_all_ops, by_calls, ends_as_the_flat_proof_does, flattened, rebinding

TENSOR = Case("zb-h1", "2,1", Mesh(pp=2, ring=2, tp=2), {"zero_stage": 2})
HERE = CASES | {"rings and shares of weights": TENSOR}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    by_tier({"1F1B of three stages"}, {"interleaved"}, HERE),
)
def test_pipelines_are_proved_by_their_calls(name: str) -> None:
    schedule = HERE[name].build()
    assert by_calls(schedule)
    ends_as_the_flat_proof_does(schedule)


@pytest.mark.sweep
def test_more_micro_batches_and_stages_that_are_alike_are_remembered() -> None:
    played = []
    for micros in (8, 16):
        supersteps = Supersteps(Case("1f1b", "2,2,2,2", Mesh(pp=4)).build(micros))
        supersteps.play()
        assert len(supersteps.kinds) < len(supersteps.all) / 4
        played.append(supersteps.num_played)
    few, many = played
    assert many - few <= 8 * 8  # sums of gradients alone, over more micro-batches each time


def test_calls_go_on_while_what_is_sent_is_not_received() -> None:
    """1F1B of two stages: in the steady state each sends before it receives, and no order of pairs would do."""
    schedule = Case("1f1b", "1,1", TWO).build()
    found = meetings(schedule)
    assert found is not None
    numbers = {id(call): number for program in schedule.programs for number, call in enumerate(program.calls)}
    late = Counter[int]()
    for rank in range(2):
        order = [numbers[id(call)] for meeting in found for call in _of(meeting, rank)]
        assert sorted(order) == list(range(len(schedule.program(rank).calls)))
        behind = [number for at, number in enumerate(order) if number < max(order[:at], default=-1)]
        for number in behind:
            (op,) = schedule.program(rank).calls[number].fragment.ops
            assert isinstance(op, Exchange)
            assert not op.recvs
        late[rank] += len(behind)
    assert sum(late.values()) > 0


def _of(meeting: Meeting, rank: int) -> list[Call]:
    return [call for one, call in zip(meeting.ranks, meeting.calls, strict=True) if one == rank]


def moved_call(draw: Random, schedule: Schedule) -> Schedule:
    """Return a schedule with a call of a rank at another place, if no buffer is made or used in between."""
    programs = schedule.programs
    rank = draw.randrange(len(programs))
    calls = list(programs[rank].calls)
    at = draw.choice([at for at, call in enumerate(calls) if call.fragment.peers and not call.fragment.own])
    by = draw.choice([-3, -2, -1, 1, 2, 3])
    calls.insert(max(0, at + by), calls.pop(at))
    programs[rank] = Program.of_calls(rank, calls)
    return Schedule(schedule.header, programs.__getitem__)


def another_channel(draw: Random, schedule: Schedule) -> Schedule:
    """Return a schedule in which a rank sends over another communicator, from some call on or in one."""
    programs = schedule.programs
    rank = draw.randrange(len(programs))
    calls = list(programs[rank].calls)
    sending = [at for at, call in enumerate(calls) if call.fragment.peers and len(call.fragment.ops) == 1]
    at = draw.choice(sending)
    name = draw.choice([one.name for one in schedule.header.communicators if len(one.groups[0]) == schedule.num_ranks])
    fragment = calls[at].fragment
    ops = tuple([msgspec.structs.replace(op, communicator=name) for op in fragment.ops if isinstance(op, Exchange)])
    changed = type(fragment)(
        fragment.given, fragment.own, ops, fragment.inputs, fragment.outputs, fragment.buffer_layers, fragment.op_layers
    )
    calls[at] = calls[at]._replace(fragment=changed)
    programs[rank] = Program.of_calls(rank, calls)
    return Schedule(schedule.header, programs.__getitem__)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_what_is_moved_or_bound_otherwise_is_judged_as_the_flat_proof_does(seed: int) -> None:
    """What is accepted by calls is accepted by all ops: that ranks stand still, or hold what is another micro-batch's,
    is not lost where sends end later than they begin.
    """
    draw, verdicts = Random(seed), Counter[tuple[bool, bool]]()
    three = Mesh(pp=3)
    originals = [
        Case("1f1b", "1,1,1", three).build(3),
        Case("zb-h1", "1,1", TWO).build(3),
        Case("interleaved", "1,1,1,1", TWO).build(2),
        Case("1f1b", "1,1", RINGS, {"zero_stage": 3}).build(2),
    ]
    for change in (moved_call, another_channel, rebinding):
        for original in originals:
            for _ in range(3):
                changed = change(draw, original)
                if changed.programs != original.programs:
                    verdicts[by_calls(changed), by_all_ops(flattened(changed))] += 1
    assert not verdicts[True, False]
    assert verdicts[False, False] > 8
    assert all(map(by_calls, originals))


@pytest.mark.parametrize("wait", ["host", "kernel"])
def test_stages_that_wait_for_what_they_send_are_refused(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the steady state of 1F1B each sends before the other one receives: where its host waits until that has ended,
    or where a kernel writes what is sent, no order of calls lets both go on.
    """
    send = Border.sent

    def waits(border: Border, by: str, tensor: Tensor, view: View) -> None:
        send(border, by, tensor, view)

        def waited(view: View) -> None:
            op = HostSync(streams=(by,)) if wait == "host" else Zero(label="write again", into=view)
            border.b.add(op)

        border.b.call(f"wait for {tensor.name} by {by}", tensor.layer, waited, view)

    monkeypatch.setattr(Border, "sent", waits)
    schedule = Case("1f1b", "1,1", TWO).build()
    assert meetings(schedule) is None
    assert not by_all_ops(flattened(schedule))


def test_stages_that_wait_for_each_other_are_refused() -> None:
    """Both receive before they send."""
    schedule = Case("1f1b", "1,1", TWO).build(2)
    programs = schedule.programs
    calls = list(programs[0].calls)
    sends = [at for at, call in enumerate(calls) if call.fragment.peers and not call.fragment.own]
    receives = [at for at, call in enumerate(calls) if call.fragment.peers and call.fragment.own]
    at, behind = sends[0], receives[-1]
    calls.insert(behind, calls.pop(at))
    programs[0] = Program.of_calls(0, calls)
    changed = Schedule(schedule.header, programs.__getitem__)
    assert meetings(changed) is None
    assert not by_all_ops(flattened(changed))
