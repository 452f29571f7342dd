"""Patterns of documents: what they keep, what every schedule makes of it, and that a wrong one is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.masks import DocumentBlock, Documents, Span, count_pairs, keeps_parts
from sim.schedule.ir.ops import Attend
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import NAMED, SCHEDULES
from sim.schedule.proof.check import check
from sim.schedule.write.blocks import blocks
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.patterns import AttentionSink, CausalBlockwise, Pattern, SharedQuestion
from sim.words.workload import BlockMask, Workload
from tests.batches.batches import in_band, patterns, sees
from tests.helpers import VARIANTS, by_tier, make_model
from tests.runtime.execution.test_virtual import exact_or_refused

NAMES = [name for name in SCHEDULES if name != "balanced-ring"]
LAMBDA = AttentionSink(sink=3, window=7)
PATTERNS = {
    "lambda": LAMBDA,
    "blockwise": CausalBlockwise(size=5, local=2),
    "shared question": SharedQuestion(answers=3, share=0.2),
}
LENGTHS = (5, 20, 1, 3, 11, 24)


@pytest.mark.sweep
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), patterns(), st.integers(1, 3), st.data())
def test_pairs_are_counted_and_attended_one_by_one(
    lengths: list[int], pattern: Pattern, step: int, data: st.DataObject
) -> None:
    edges = tuple(sum(lengths[:at]) for at in range(len(lengths) + 1))
    document = [number for number, size in enumerate(lengths) for _ in range(size)]
    mask, seq = Documents(pattern, edges), edges[-1]
    queries, keys = (
        Span(start, start + step * ((seq - 1 - start) // step + 1), step)
        for start in (data.draw(st.integers(0, seq - 1)) for _ in range(2))
    )
    wanted = [
        (i, j)
        for i in range(*queries)
        for j in range(*keys)
        if document[i] == document[j]
        and sees(pattern, lengths[document[i]], i - edges[document[i]], j - edges[document[i]])
    ]
    assert count_pairs(mask, queries, keys) == len(wanted)
    found: list[tuple[int, int]] = []
    for block in blocks(mask, (queries,), (keys,)):
        rows, columns = range(*queries)[block.rows], range(*keys)[block.columns]
        for part in block.documents or (DocumentBlock(Span(0, len(rows)), Span(0, len(columns)), block.band),):
            found += [
                (rows[part.rows.start + i], columns[part.columns.start + j])
                for i in range(part.rows.size)
                for j in range(part.columns.size)
                if in_band(part.band, i, j)
            ]
    assert sorted(found) == wanted


@pytest.mark.parametrize(
    "cell",
    by_tier(
        [("zigzag", "lambda"), ("ulysses", "blockwise"), ("allgather", "shared question")],
        [("ring", "blockwise"), ("striped", "shared question"), ("single", "lambda")],
        [(name, pattern) for name in NAMES for pattern in PATTERNS],
    ),
)
def test_executed_patterns_are_exact(cell: tuple[str, str]) -> None:
    name, pattern = cell
    ran = exact_or_refused(name, 1 if name == "single" else 4, 3, model=make_model(), seq=64, documents=LENGTHS,
                           dtype="fp64", pattern=PATTERNS[pattern])  # fmt: skip
    assert ran


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NAMES)
def test_layers_under_patterns_are_exact(name: str, pattern: str) -> None:
    """Of one sequence that is one document."""
    exact_or_refused(name, 1 if name == "single" else 4, 3, model=make_model(), seq=64, dtype="fp64", scope="layer",
                     layers=2, pattern=PATTERNS[pattern])  # fmt: skip


def test_one_kernel_attends_to_all_rectangles_of_a_hop() -> None:
    """As many launches as under a causal mask without documents, with fewer FLOPs."""
    variant, model = VARIANTS["zigzag"], make_model()
    of = Workload(model=model, seq=64, pattern=LAMBDA)
    found = check(variant.build(of, variant.mesh(4, model)))
    ops = [op for op in found.schedule.program(0).ops if isinstance(op, Attend)]
    assert len(ops) <= 4
    assert any(len(op.documents or ()) > 1 for op in ops)


def test_a_block_of_other_pairs_is_caught() -> None:
    mask, whole = Documents(LAMBDA, (0, 20)), Span(0, 20)
    (block,) = blocks(mask, (whole,), (whole,))
    assert keeps_parts(mask, block.documents, whole, whole, 0, 0)
    for number, part in enumerate(block.documents):
        others = block.documents[:number] + block.documents[number + 1 :]
        for wrong in ((), (part, part), (part._replace(band=part.band._replace(left=1)),)):
            assert not keeps_parts(mask, (*others, *wrong), whole, whole, 0, 0), "lost, doubled, or of another window"


@pytest.mark.parametrize("other", [None, AttentionSink(sink=4, window=6), AttentionSink(sink=3, window=8)])
def test_a_schedule_of_another_pattern_is_refused(other: Pattern | None) -> None:
    model = make_model()
    of = Workload(model=model, seq=64, pattern=LAMBDA)
    schedule = VARIANTS["single"].build(of, Mesh())
    assert Schedule.from_json(schedule.to_json()).hash == schedule.hash
    assert Schedule.from_json(schedule.to_json()).header.workload == of
    meant = msgspec.structs.replace(of, pattern=other or msgspec.UNSET)
    with pytest.raises(ScheduleError, match="not what the mask"):
        check(Schedule(msgspec.structs.replace(schedule.header, workload=meant), schedule.program))


@pytest.mark.parametrize(
    "beside", [{"window": 8}, {"mask": "full"}, {"padding": 2}, {"block_mask": BlockMask(size=64, kept=((0,),))}]
)
def test_what_patterns_are_not_combined_with(beside: dict[str, object]) -> None:
    with pytest.raises(InputError, match="`mask` lambda:3:7 is of what a causal mask keeps of whole documents"):
        Workload(model=make_model(), seq=64, pattern=LAMBDA, **beside)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["balanced-ring", "linear"])
def test_schedules_of_a_causal_mask_alone_refuse_patterns(name: str) -> None:
    with pytest.raises(InputError, match="leave out|allowed are"):
        NAMED[name].build(Workload(model=make_model(), seq=64, pattern=LAMBDA), Mesh(ring=4))


def test_setups_name_them() -> None:
    setup = Setup("zigzag", model="tiny", cluster="hgx-h100", gpus=2, mask="lambda:64:1K", scope="attention", seeds=1)
    found = setup.resolved()
    assert found.workload.pattern == AttentionSink(sink=64, window=1024)
    assert "lambda:64:1024" in found.title
    assert (
        setup.replace(mask="window:1K").resolved().workload
        == setup.replace(mask="causal", window=1024).resolved().workload
    )
    causal, fewer = setup.replace(mask="causal").predicted(), setup.predicted()
    assert fewer.step_time_s < causal.step_time_s
    with pytest.raises(InputError, match="`window` 64 beside `mask` lambda:64:1K: leave out one"):
        setup.replace(window=64).resolved()
