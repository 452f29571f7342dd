"""Groups of several sizes and bins of blocks: who gets how many ranks, and what moves."""

from __future__ import annotations

import numpy as np
import pytest

from sim.base.errors import InputError
from sim.batches.batch import Batch, batch
from sim.batches.planned import Planned
from sim.batches.planners.fcp import FcpOptions, fcp
from sim.batches.planners.groups import GroupOptions, groups
from sim.batches.statistics import Statistics, statistics, token_bytes
from sim.schedule.ir.masks import Band
from tests.batches.coverage import require_covered

HEADS = token_bytes(8, 2, 128, 2)


def group_sizes(planned: Planned, found: Batch) -> list[int]:
    """Return on how many ranks the tokens of each document live."""
    starts = np.cumsum(found.documents) - np.array(found.documents)
    ranks: list[set[int]] = [set() for _ in found.documents]
    for rank, tokens in enumerate(planned.plan.layout):
        for span in tokens:
            first = int(np.searchsorted(starts, span.start, side="right")) - 1
            for document in range(first, int(np.searchsorted(starts, span.stop, side="left"))):
                ranks[document].add(rank)
    return [len(some) for some in ranks]


def counted(planned: Planned, found: Batch) -> Statistics:
    require_covered(planned.plan, found)
    return statistics(planned, found, HEADS)


def test_a_long_document_gets_the_ranks_that_its_work_needs() -> None:
    # Squares: 36 + 8 * 1 of 44 on 4 ranks: the long one needs 36 / 11 of them, so 4; the others stay whole.
    found = batch([6000, *[1000] * 8])
    planned = groups(found, 4)
    assert group_sizes(planned, found) == [4, *[1] * 8]
    assert counted(planned, found).skew < 1.01


def test_groups_need_be_no_power_of_two() -> None:
    # Work 9 : 1 : 1 : 1 on 4 ranks: three ranks for the long one.
    found = batch([3000, 1000, 1000, 1000])
    options = GroupOptions(memory_imbalance=1.0)
    planned = groups(found, 4, options)
    assert group_sizes(planned, found) == [3, 1, 1, 1]
    assert counted(planned, found).skew < 1.01
    assert group_sizes(groups(found, 4, options._replace(powers_of_two=True)), found) == [4, 1, 1, 1]


def test_tokens_ask_for_ranks_too() -> None:
    # Under a window every token has the same work, and 4096 of 8192 tokens fill two ranks of four.
    found = batch([4096, *[64] * 64], Band(left=15, right=0))
    assert group_sizes(groups(found, 4, GroupOptions(memory_imbalance=0.0)), found)[0] >= 2
    # A document that attends little, beside one that attends much: tokens alone ask for its ranks.
    found = batch([4000, 1000, 1000, 1000, 1000])
    long, *short = found.rectangles
    found = found._replace(rectangles=(long._replace(band=Band(0, 0)), *short))
    assert group_sizes(groups(found, 4, GroupOptions(memory_imbalance=0.0)), found) == [4, 1, 1, 1, 1]
    assert group_sizes(groups(found, 4, GroupOptions(memory_imbalance=0.5)), found) == [2, 1, 1, 1, 1]


def test_short_documents_move_nothing() -> None:
    found = batch([100, 120, 80, 90, 110, 100, 95, 105])
    assert counted(groups(found, 4), found).received_bytes.sum() == 0


def test_bins_are_level_and_move_only_keys_that_are_attended() -> None:
    found = batch([4096, 2048, *[128] * 16])
    one = counted(fcp(found, 8, FcpOptions(block_size=128)), found)
    assert one.skew < 1.01
    assert one.token_skew <= 1.2
    assert one.query_bytes.sum() == one.out_bytes.sum() == 0
    assert one.kv_bytes.sum() < 0.6 * 8 * found.num_tokens * 7 / 8 * HEADS.kv  # of what all-gather moves


def test_blocks_without_room_go_where_most_is_left() -> None:
    found = batch([7, 5])
    one = counted(fcp(found, 2, FcpOptions(block_size=8, memory_imbalance=0.0)), found)
    assert sorted(one.tokens.tolist()) == [5, 7]


def test_more_ranks_than_tokens() -> None:
    found = batch([2, 1])
    for planned in (groups(found, 9), fcp(found, 9)):
        assert counted(planned, found).tokens.sum() == 3


def test_options_out_of_range_are_refused() -> None:
    found = batch([64])
    for call in (
        lambda: groups(found, 2, GroupOptions(memory_imbalance=-1)),
        lambda: fcp(found, 2, FcpOptions(memory_imbalance=-1)),
    ):
        with pytest.raises(InputError, match="`memory_imbalance` -1: expected 0 or more"):
            call()
    with pytest.raises(InputError, match="`divisions` 0"):
        groups(found, 2, GroupOptions(divisions=0))
    with pytest.raises(InputError, match="`block_size` -2"):
        fcp(found, 2, FcpOptions(block_size=-2))
