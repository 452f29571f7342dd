"""Block-sparse masks: what they keep, what every schedule makes of them, and what they cost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.base.errors import InputError, ScheduleError
from sim.schedule.derive.kernels import attention_use, gathered
from sim.schedule.ir.masks import (
    CAUSAL,
    FULL,
    Band,
    BlockSparse,
    RowBlock,
    Run,
    Span,
    count_pairs,
    keeps_parts,
    rectangles,
)
from sim.schedule.ir.ops import Attend
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof.check import check
from sim.schedule.write.blocks import blocks
from sim.setup.block_masks import block_mask_of
from sim.setup.setup import Setup
from sim.words.workload import BlockMask, Workload
from tests.helpers import VARIANTS, by_tier, make_model
from tests.runtime.execution.test_virtual import exact_or_refused

NAMES = [name for name in SCHEDULES if name != "balanced-ring"]


@st.composite
def _masks(draw: st.DrawFn) -> BlockMask:
    count = draw(st.integers(1, 5))
    kept = [sorted({row, *draw(st.sets(st.integers(0, count - 1)))}) for row in range(count)]
    return BlockMask(size=draw(st.integers(1, 5)), kept=tuple(map(tuple, kept)))


@given(_masks(), st.sampled_from([CAUSAL, FULL, Band(left=2, right=0)]), st.integers(1, 3), st.data())
def test_pairs_are_counted_and_attended_one_by_one(mask: BlockMask, band: Band, step: int, data: st.DataObject) -> None:
    seq, whole = len(mask.kept) * mask.size, BlockSparse(band, mask)
    queries, keys = (
        Span(start, start + step * ((seq - 1 - start) // step + 1), step)
        for start in (data.draw(st.integers(0, seq - 1)) for _ in range(2))
    )
    wanted = {
        (i, j)
        for i in range(*queries)
        for j in range(*keys)
        if j // mask.size in mask.kept[i // mask.size] and count_pairs(band, Span(i, i + 1), Span(j, j + 1))
    }
    assert count_pairs(whole, queries, keys) == len(wanted)
    found: list[tuple[int, int]] = []
    for block in blocks(whole, (queries,), (keys,)):
        rows, columns = range(*queries)[block.rows], range(*keys)[block.columns]
        parts = block.sparse or (RowBlock(len(rows), (Run(0, len(columns), block.band),)),)
        row = 0
        for part in parts:
            for run in part.runs:
                found += [
                    (rows[row + i], columns[run.start + j])
                    for i in range(part.rows)
                    for j in range(run.columns)
                    if count_pairs(run.band, Span(i, i + 1), Span(j, j + 1))
                ]
            row += part.rows
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("name", by_tier(["zigzag"], ["striped", "ulysses", "allgather"], NAMES))
def test_executed_block_masks_are_exact(name: str) -> None:
    mask = block_mask_of("topk:8:3", 64, "causal", 1)
    assert exact_or_refused(name, 1 if name == "single" else 4, 3, model=make_model(), seq=64, dtype="fp64",
                            block_mask=mask)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["topk:5:3", "lambda:8:1:2"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_layers_under_block_masks_are_exact(name: str, mask: str, pattern: str) -> None:
    assert exact_or_refused(
        name, 1 if name == "single" else 4, 3, model=make_model(), seq=64, dtype="fp64", scope="layer", layers=2,
        mask=mask, block_mask=block_mask_of(pattern, 64, mask, 1),
    )  # fmt: skip


@pytest.mark.parametrize(
    "part",
    [
        RowBlock(4, (Run(0, 4, FULL),)),  # the block itself is lost
        RowBlock(4, (Run(0, 8, FULL), Run(8, 4, CAUSAL))),  # a block is there that the mask drops
        RowBlock(4, (Run(0, 4, FULL), Run(8, 4, FULL))),  # pairs above the diagonal
        RowBlock(4, (Run(4, 4, FULL), Run(8, 4, CAUSAL))),  # as many pairs, of another block
    ],
)
def test_a_block_of_other_pairs_is_caught(part: RowBlock) -> None:
    mask, whole = BlockSparse(CAUSAL, BlockMask(size=4, kept=((0,), (0, 1), (0, 2)))), Span(0, 12)
    (block,) = blocks(mask, (whole,), (whole,))
    assert keeps_parts(mask, rectangles(block.sparse), whole, whole, 0, 0)
    assert not keeps_parts(mask, rectangles((*block.sparse[:2], part)), whole, whole, 0, 0)


def test_runs_that_overlap_are_refused() -> None:
    schedule = _single(BlockMask(size=16, kept=((0,), (1,), (0, 2), (1, 3))))
    program = schedule.program(0)
    op = next(op for op in program.ops if isinstance(op, Attend))
    assert op.sparse
    first = RowBlock(16, (Run(0, 16, CAUSAL), Run(0, 16, CAUSAL)))
    wrong = msgspec.structs.replace(op, sparse=(first, *op.sparse[1:]))
    changed = Program(
        rank=0, buffers=program.buffers, ops=tuple(wrong if one is op else one for one in program.ops),
        inputs=program.inputs, outputs=program.outputs,
    )  # fmt: skip
    with pytest.raises(ScheduleError, match="expected rising ones"):
        check(Schedule(schedule.header, [changed].__getitem__))


def test_a_schedule_that_forgets_the_blocks_is_refused() -> None:
    mask = BlockMask(size=16, kept=((0,), (1,), (0, 2), (1, 3)))
    other = BlockMask(size=16, kept=((0,), (1,), (1, 2), (1, 3)))  # as many FLOPs
    schedule = _single(mask)
    workload = msgspec.structs.replace(schedule.header.workload, block_mask=other)
    header = msgspec.structs.replace(schedule.header, workload=workload)
    with pytest.raises(ScheduleError, match="not what the mask"):
        check(Schedule(header, schedule.program))
    assert Schedule.from_json(schedule.to_json()).hash == schedule.hash


def _single(mask: BlockMask) -> Schedule:
    workload = Workload(model=make_model(), seq=64, block_mask=mask)
    return VARIANTS["single"].build(workload, VARIANTS["single"].mesh(1, workload.model))


def test_a_block_sparse_kernel_costs_what_it_keeps() -> None:
    """Rows of 128: with keys of one block under the diagonal, of two blocks, and of one block before and their own."""
    mask = BlockSparse(CAUSAL, BlockMask(size=128, kept=((0,), (0, 1), (0, 2))))
    (block,) = blocks(mask, (Span(0, 384),), (Span(0, 384),))
    use = attention_use(False, "bf16", (1, 384, 2, 64), 384, 2, FULL, gathered(block.sparse))
    assert use.flops == 4 * 64 * 2 * (3 * 128 * 129 // 2 + 2 * 128 * 128)
    assert [(one.shape[1:3], one.variant, count) for one, count in use.documents] == [
        ((128, 128), "causal", 1), ((128, 256), "causal", 2),
    ]  # fmt: skip
    assert use.tiles == 3 * 2


def test_patterns() -> None:
    drawn = block_mask_of("topk:1K:3", 16384, "causal", 0)
    assert [len(kept) for kept in drawn.kept] == [1, 2, *[3] * 14]
    assert all(row == kept[-1] for row, kept in enumerate(drawn.kept))
    assert drawn == block_mask_of("topk:1K:3", 16384, "causal", 0) != block_mask_of("topk:1K:3", 16384, "causal", 1)
    assert block_mask_of("lambda:4:1:2", 20, "full", 0).kept[2] == (0, 1, 2, 3)


def test_a_file_says_which_blocks(tmp_path: Path) -> None:
    file = tmp_path / "mask.toml"
    file.write_text("size = 4096\nkept = [[0], [0, 1]]\n")
    found = Setup("zigzag", cluster="hgx-h100", gpus=2, seq="8K", scope="attention", block_mask=str(file)).resolved()
    assert found.workload.block_mask == BlockMask(size=4096, kept=((0,), (0, 1)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("topk:8", "expected topk:SIZE:K"),
        ("dense", "expected topk:SIZE:K"),
        ("topk:8:two", "topk|two"),
        ("topk:1:1", "at most 8192"),
        (BlockMask(size=8192, kept=((0,),)), "has 1 blocks of queries"),
        (3, "expected str or BlockMask"),
    ],
)
def test_bad_masks_are_refused(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Setup("zigzag", cluster="hgx-h100", seq="16K", block_mask=given).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [((1,), (0, 1)), ((0,), (1, 0)), ((0,), (0, 2))])
def test_bad_rows_are_refused(kept: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError, match="block . of queries keeps"):
        BlockMask(size=4, kept=kept)


def test_what_is_not_combined_is_refused() -> None:
    fields = {"model": make_model(), "seq": 64, "block_mask": block_mask_of("topk:8:2", 64, "causal", 0)}
    with pytest.raises(InputError, match="without padding"):
        Workload(**fields, documents=(32, 32))
    with pytest.raises(InputError, match="without padding"):
        Workload(**fields, padding=3)
    with pytest.raises(InputError, match="balanced-ring"):
        VARIANTS["balanced-ring"].build(Workload(**fields), VARIANTS["balanced-ring"].mesh(4, make_model()))
