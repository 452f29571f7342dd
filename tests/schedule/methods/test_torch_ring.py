"""The ring of torch's context_parallel copies as much as its code, and gives each query head its own keys."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.ops import Copy
from sim.schedule.ir.program import Schedule
from sim.schedule.proof.check import check
from sim.words.workload import Workload
from tests.helpers import Variant, make_checked, make_model

RANKS, ROWS, HEADS, DIM = 8, 16, 4, 8


def test_it_copies_and_adds_what_torch_does() -> None:
    """Bytes for each element of a rank's queries, of 8 ranks on average, as torch 2.13's code had them on the meta
    device. Forward contiguous (8), cat (84), casts of the first part and of the sum (12). Backward contiguous (8), cat
    (268), casts (18), and what is added in place (187.5).
    """
    model = make_model(HEADS, HEADS, head_dim=DIM, dtype="bf16")
    work = Workload(model=model, seq=RANKS * ROWS, dtype="bf16", mask="causal", passes="both")
    checked, found = make_checked("zigzag as torch", work, RANKS), Counter[tuple[str, str]]()
    for program, uses in zip(checked.schedule.programs, checked.kernels, strict=True):
        for op, use in zip(program.ops, uses, strict=True):
            if use and use.kernel in {"copy", "accumulate"}:
                found[op.part, use.kernel] += use.hbm_bytes
    of_all = RANKS * ROWS * HEADS * DIM
    assert {part: moved / of_all for part, moved in found.items()} == {
        ("forward", "copy"): 104.0,
        ("backward", "copy"): 294.0,
        ("backward", "accumulate"): 187.5,
    }


def test_keys_that_are_repeated_for_other_heads_are_refused() -> None:
    schedule = make_checked("zigzag as torch", Workload(model=make_model(8, 4), seq=32), 2).schedule
    program = schedule.program(0)
    number = next(i for i, op in enumerate(program.ops) if isinstance(op, Copy) and op.order)
    repeats = program.ops[number]
    assert isinstance(repeats, Copy)
    other = msgspec.structs.replace(repeats, order=(*repeats.order[1:], repeats.order[0]))
    ops = (*program.ops[:number], other, *program.ops[number + 1 :])
    programs = [program.replace(ops=ops), schedule.program(1)]
    with pytest.raises(ScheduleError, match="used as keys and values of one block|wrong key/value heads"):
        check(Schedule(schedule.header, programs.__getitem__))


@pytest.mark.parametrize(
    "options", [{"ring_backward": "queries"}, {"sums": "published"}, {"messages": "packed"}, {"halves": "host-mask"}]
)
def test_what_torch_does_not_have_is_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    variant = Variant("zigzag", {"rotation": "torch", **options})
    workload = Workload(model=make_model(8, 4), seq=32, passes="both")
    with pytest.raises(InputError, match=f"rotation=torch .* schedule.{name}={value}"):
        variant.build(workload, variant.mesh(2, workload.model))
