"""Every schedule x every invariant: a new builder is tested by being listed in the catalog."""

from __future__ import annotations

import itertools

import pytest

from sim.errors import InputError
from sim.memory import lifetimes, walk
from sim.schedule.catalog import SCHEDULES
from sim.schedule.check import Checked, check
from sim.schedule.ir import Schedule
from sim.schedule.ops import Attend, AttendBackward
from sim.schedule.show import grid, logical_times
from sim.workload import Workload
from tests.helpers import make_checked, make_model, make_parallel

RANKS = (1, 2, 3, 4, 8)
HEADS = ((8, 8), (8, 4), (8, 2), (8, 1))
CELLS = list(itertools.product(SCHEDULES, RANKS, HEADS, ("causal", "full"), ("forward", "backward", "both"), (1, 2)))


def build(name: str, ranks: int, heads: tuple[int, int], mask: str, passes: str, batch: int) -> Checked | None:
    """Return the schedule, or None where it is refused with the values that are allowed."""
    workload = Workload(model=make_model(*heads), seq=48, batch=batch, mask=mask, passes=passes, dtype="bf16")  # type: ignore[arg-type]
    try:
        return make_checked(name, workload, ranks)
    except InputError as error:
        assert any(word in str(error) for word in ("allowed are", "the nearest are", "set --gpus 1")), error
        return None


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_cell_is_proved_or_refused(name: str) -> None:
    proved = [cell for cell in CELLS if cell[0] == name and build(*cell) is not None]
    refused = [cell for cell in CELLS if cell[0] == name and cell not in proved]
    assert len(proved) >= 24
    for _, ranks, (heads, kv_heads), *_ in refused:
        assert (name == "single" and ranks > 1) or (name == "ulysses" and (heads % ranks or kv_heads % ranks))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_deterministic_and_survive_json(name: str) -> None:
    for cell in CELLS:
        if cell[0] != name or (checked := build(*cell)) is None:
            continue
        again = build(*cell)
        assert again is not None
        assert again.schedule.hash == checked.schedule.hash
        data = checked.schedule.to_json()
        read = Schedule.from_json(data)
        assert read.to_json() == data
        assert read.hash == checked.schedule.hash
        check(read)


@pytest.mark.parametrize("name", SCHEDULES)
def test_buffers_are_freed_and_the_walk_returns_to_what_the_caller_holds(name: str) -> None:
    for cell in CELLS:
        if cell[0] != name or (checked := build(*cell)) is None:
            continue
        for program, dependencies in zip(checked.schedule.programs, checked.dependencies, strict=True):
            spans = lifetimes(program, dependencies)
            outside = {port.view.buffer for port in (*program.inputs, *program.outputs)}
            for number, span in enumerate(spans):
                assert span.first < span.end, f"{program.buffers[number].name} is never used"
                assert (span.end == len(program.ops)) >= (number in outside)
            found = walk(program, dependencies)
            assert found.peak_bytes == max(found.in_use)
            assert sum(found.by_category.values()) == found.peak_bytes


@pytest.mark.parametrize("name", SCHEDULES)
def test_claims_follow_the_papers(name: str) -> None:
    """FLOPs 2*S*(S+1)*H*D forward under a causal mask and 2.5 times that backward; bytes as each paper has them."""
    batch, seq, heads, kv_heads, dim, element = 2, 48, 8, 4, 16, 2
    for ranks in (1, 2, 4):
        checked = build(name, ranks, (heads, kv_heads), "causal", "both", batch)
        if checked is None:
            continue
        claims = checked.schedule.header.claims
        assert claims is not None
        assert claims.attention_flops == batch * 2 * seq * (seq + 1) * heads * dim * 7 // 2
        kv = 2 * batch * seq // ranks * kv_heads * dim * element
        expected = {
            "single": 0,
            "ring": ranks * (2 * (ranks - 1) * kv + (ranks * 2 * kv if ranks > 1 else 0)),  # dKV in fp32, P hops
            "ulysses": 2 * (2 * heads + 2 * kv_heads) * dim * batch * seq * element * (ranks - 1) // ranks,
        }
        assert claims.wire_bytes == expected[name]


def test_the_ring_attends_only_to_what_the_mask_keeps() -> None:
    checked = build("ring", 4, (8, 4), "causal", "both", 1)
    assert checked is not None
    for program in checked.schedule.programs:
        assert sum(isinstance(op, Attend) for op in program.ops) == program.rank + 1
        assert sum(isinstance(op, AttendBackward) for op in program.ops) == program.rank + 1


def test_the_ring_hops_as_often_as_published_code() -> None:
    for ranks in (2, 3, 8):
        checked = build("ring", ranks, (8, 4), "full", "both", 1)
        assert checked is not None
        labels = [op.label for op in checked.schedule.program(0).ops if op.stream.startswith("ring")]
        forward_and_backward_kv = sum(label.startswith("send kv") for label in labels)
        assert forward_and_backward_kv == 2 * (ranks - 1)
        assert sum(label.startswith("send dkv") for label in labels) == ranks


@pytest.mark.parametrize("name", SCHEDULES)
def test_programs_are_built_lazily(name: str) -> None:
    ranks = 1 if name == "single" else 4
    workload = Workload(model=make_model(8, 8), seq=48)
    schedule = SCHEDULES[name].build(workload, make_parallel(name, ranks))
    assert not schedule._programs
    schedule.program(ranks - 1)
    assert list(schedule._programs) == [ranks - 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_shows_every_op_once(name: str) -> None:
    checked = build(name, 1 if name == "single" else 4, (8, 4), "causal", "both", 1)
    assert checked is not None
    waits = [found.waits for found in checked.dependencies]
    times = logical_times(checked.schedule, checked.matching, waits)
    for program, found in zip(checked.schedule.programs, waits, strict=True):
        for index, needed in enumerate(found):
            assert all(times[program.rank, other] < times[program.rank, index] for other in needed)
    ranks = list(range(checked.schedule.num_ranks))
    cells = grid(checked.schedule, times, ranks)
    words = [word for row in cells for cell in row for word in cell.split(" ") if word]
    assert len(words) == sum(len(program.ops) for program in checked.schedule.programs)
