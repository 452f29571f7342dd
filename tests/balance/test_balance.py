"""How evenly a batch is attended: predicted seconds of launches on several blocks, and planners side by side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import longstep
from sim.balance.balance import LOWER_BOUND, OWN
from sim.balance.planners import PLANNERS, Attention
from sim.base.errors import InputError
from sim.setup.setup import Setup

ON_H100 = Setup(model="llama3-8b", cluster="hgx-h100", gpus=4, scope="attention")
STATIC = ("ring", "zigzag", "all-gather", "fcp-style", "groups")


def of_planner(found: Any, name: str) -> dict[str, Any]:
    (row,) = [row for row in found.rows if row["planner"] == name]
    return dict(row)


def seconds(attention: Attention, *blocks: tuple[int, int, int], backward: bool) -> float:
    columns = np.array(blocks, dtype=np.int64).T
    return attention.seconds(*columns, passes=(backward,))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tokens", [8192, 65536])
def test_a_launch_on_one_block_takes_what_the_schedule_has(tokens: int, backward: bool) -> None:
    """A causal document of one GPU: within what the tile model cannot tell of a mask."""
    setup = ON_H100.replace(
        gpus=1, seq=tokens, schedule="single", passes="backward" if backward else "forward", jitter=0
    )
    step_s = setup.predicted().trace.rows
    kind = "AttendBackward" if backward else "Attend"
    meant = sum(row.busy_s for row in step_s if row.kind == kind)
    pairs = tokens * (tokens + 1) // 2
    attention = Attention(setup.resolved())
    assert seconds(attention, (tokens, tokens, pairs), backward=backward) == pytest.approx(meant, rel=0.06)


def test_a_launch_on_many_blocks_is_as_long_as_all_their_tiles() -> None:
    """Sixteen documents take little more than one whose work is theirs; short ones waste their tiles."""
    attention = Attention(ON_H100.resolved())
    one = (4096, 4096, 4096 * 4097 // 2)
    together = seconds(attention, *[one] * 16, backward=False)
    alone = seconds(attention, one, backward=False)
    assert 8 * alone < together < 16 * alone, "one launch fills the SMs that a document alone leaves"
    short = seconds(attention, *[(32, 4096, 32 * 4096)] * 128, backward=False)
    filled = seconds(attention, (4096, 4096, 4096 * 4096), backward=False)
    assert short > 2 * filled, "queries of less than a tile take as long as a whole one"
    assert seconds(attention, (64, 64, 0), backward=False) == 0


@pytest.mark.sweep
def test_one_long_document_and_the_rank_that_has_its_end() -> None:
    """Of 4 ranks with a quarter each of one document the last attends 7 of 16 parts of the pairs, 1.75 times the mean.
    Zigzag levels it; of two documents of half the length a zigzag of the whole is as good.
    """
    found = longstep.balance(ON_H100, [65536], STATIC, play=False)
    ring, zigzag = of_planner(found, "ring"), of_planner(found, "zigzag")
    assert ring["pairs_skew"] == pytest.approx(1.75, abs=1e-3)
    assert ring["skew"] == pytest.approx(1.75, rel=0.05)
    assert zigzag["pairs_skew"] == pytest.approx(1.0, abs=1e-4)
    assert ring["slowest_s"] > 1.6 * zigzag["slowest_s"]
    least = of_planner(found, LOWER_BOUND)
    assert all(least["slowest_s"] <= row["slowest_s"] for row in found.rows)
    assert ring["received_bytes"] == 3 * 16384 * 2 * 8 * 128 * 2, "three quarters of keys and values"
    (first, *_) = found.found
    assert sum(row["pairs"] for row in first.by_hop) == sum(row["pairs"] for row in first.by_rank) == 65536 * 65537 // 2
    assert sum(row["seconds"] for row in first.by_rank) == pytest.approx(4 * ring["mean_s"])


@pytest.mark.sweep
def test_what_is_simulated_has_kernels_and_transfers() -> None:
    """By the schedule of that name, or by messages; merges and launches come on top where a plan sends nothing."""
    found = longstep.balance(ON_H100, [65536], ["zigzag", "fcp-style"])
    for name in ("zigzag", "fcp-style"):
        row = of_planner(found, name)
        assert 0.9 * row["mean_s"] < row["attention_s"] < 1.6 * row["slowest_s"]
    zigzag = ON_H100.replace(schedule="zigzag", seq=65536, seeds=1).predicted().step_time_s
    assert of_planner(found, "zigzag")["attention_s"] == zigzag
    local = of_planner(longstep.balance(ON_H100, [8192] * 4, ["fcp-style"]), "fcp-style")
    assert local["slowest_s"] < local["attention_s"] < 1.4 * local["slowest_s"]
    kernels = longstep.balance(ON_H100, [65536], ["zigzag"], play=False)
    assert of_planner(kernels, "zigzag")["attention_s"] is None


def test_short_documents_make_all_that_travels_needless() -> None:
    """A document for each rank: static rings still send every key; what planners send is nothing."""
    found = longstep.balance(ON_H100, [8192] * 4, STATIC)
    assert of_planner(found, "ring")["received_bytes"] > 0
    for name in ("fcp-style", "groups"):
        assert of_planner(found, name)["received_bytes"] == 0
        assert of_planner(found, name)["skew"] == pytest.approx(1.0)


def test_a_layout_of_ones_own_is_the_first() -> None:
    order = [*range(0, 2048, 2), *range(1, 2048, 2)]
    found = longstep.balance(ON_H100.replace(gpus=2), [1024, 1024], ["zigzag"], order=order)
    assert [row["planner"] for row in found.rows] == [OWN, "zigzag", LOWER_BOUND]
    assert found.rows[0]["pairs_skew"] == pytest.approx(1.0, abs=1e-2)


def test_what_is_wrong_in_a_batch() -> None:
    with pytest.raises(InputError, match="document 1 has 0 tokens"):
        longstep.balance(ON_H100, [8, 0])
    with pytest.raises(InputError, match="has no document"):
        longstep.balance(ON_H100, [])
    with pytest.raises(InputError, match="document 0 has -8 tokens"):
        longstep.balance(ON_H100, [-8])
    with pytest.raises(InputError, match="document 1 has 0.5 tokens"):
        longstep.balance(ON_H100, [8, 0.5])  # type: ignore[list-item]
    with pytest.raises(InputError, match="token 3 2 times"):
        longstep.balance(ON_H100, [8], order=[0, 1, 2, 3, 3, 5, 6, 7])
    with pytest.raises(InputError, match="'zigzg' .did you mean 'zigzag'"):
        longstep.balance(ON_H100, [8], ["zigzg"])


def test_a_planner_that_refuses_a_batch_leaves_the_others() -> None:
    """Beside a layout of one's own nothing is padded: static layouts do not divide it."""
    others = ["zigzag", "groups"]
    found = longstep.balance(ON_H100.replace(gpus=4), [12], others, order=[*range(12)], play=False)
    assert "set `seq`" in of_planner(found, "zigzag")["error"]
    assert of_planner(found, "zigzag")["slowest_s"] is None
    assert not of_planner(found, "groups")["error"]


@pytest.mark.sweep
def test_a_document_longer_than_all_memory() -> None:
    """A billion tokens are balanced as few are; nobody has to hold them."""
    others = [name for name in PLANNERS if name != "dcp"]
    found = longstep.balance(ON_H100.replace(gpus=8), [10**9], others, play=False)
    assert not any(row["error"] for row in found.rows)
    skews = {row["planner"]: row["pairs_skew"] for row in found.rows}
    assert skews["ring"] == pytest.approx(1.875)
    assert [skews[name] for name in ("zigzag", "striped", "wlb-llm", "groups")] == pytest.approx([1.0] * 4, abs=1e-6)
    assert skews["fcp-style"] < 1.2
    (played, _) = longstep.balance(ON_H100.replace(gpus=8), [10**9], ["groups"]).rows
    assert played["attention_s"] > 0.9 * played["slowest_s"] > 1e5


def test_other_masks_are_counted_by_every_planner_that_takes_them() -> None:
    """Of a document of 16K tokens: those of a full mask, of a sink and a window, and of a question with two answers."""
    names, size = [name for name in PLANNERS if name != "dcp"], 16384
    pairs = {
        "full": size * size,
        "window:1K": 1024 * size - 1024 * 1023 // 2,
        "lambda:64:1K": 64 * size - 64 * 63 // 2 + 1024 * (size - 64) - 1024 * 1023 // 2,
        "shared-question:2:0.25": size * (size + 1) // 2 - 4096**2,
    }
    for mask, count in pairs.items():
        found = longstep.balance(ON_H100, [size], names, mask=mask, play=False)
        assert all(int(one.statistics.pairs.sum()) == count for one in found.found)
        refusing = [row["planner"] for row in found.rows if row["error"]]
        assert refusing == ([] if mask in {"full", "window:1K"} else ["wlb-llm"]), mask
        assert not refusing or "one band each" in of_planner(found, "wlb-llm")["error"]


@pytest.mark.sweep
def test_kernels_of_other_masks_take_as_long_as_those_of_the_schedule() -> None:
    """Forward and backward, within what the tile model cannot tell of a mask."""
    for gpus, mask, documents in ((1, "full", [16384]), (8, "window:1K", [65536]), (8, "window:512", [49152, 16384])):
        found = longstep.balance(ON_H100.replace(gpus=gpus, jitter=0), documents, ["all-gather"], mask=mask)
        played = found.found[0].played
        assert played is not None
        busy = [
            math.fsum(row.busy_s for row in played.trace.rows if row.rank == rank and "Attend" in row.kind)
            for rank in range(gpus)
        ]
        assert of_planner(found, "all-gather")["slowest_s"] == pytest.approx(max(busy), rel=0.06), mask


@pytest.mark.sweep
def test_patterns_are_simulated_by_static_schedules_and_by_messages() -> None:
    """Of two documents; the mask may be the setup's, and fewer pairs take less time than all of a causal mask."""
    names = ["ring", "zigzag", "striped", "all-gather", "fcp-style", "groups"]
    found, causal = (longstep.balance(ON_H100, [24576, 8192], names, mask=mask) for mask in ("lambda:64:1K", "causal"))
    assert found.mask == "lambda:64:1024"
    for row, whole in zip(found.rows[:-1], causal.rows, strict=False):
        assert row["slowest_s"] < row["attention_s"] < whole["attention_s"]
    for one in found.found:
        assert one.played is not None
        busy = [row.busy_s for row in one.played.trace.rows if "Attend" in row.kind]
        assert math.fsum(busy) / 4 == pytest.approx(one.row["mean_s"], rel=0.3)
    again = longstep.balance(ON_H100.replace(mask="lambda:64:1K"), [24576, 8192], names[:1])
    assert again.rows[0] == found.rows[0] | {"planning_s": again.rows[0]["planning_s"]}
    with pytest.raises(InputError, match="unknown mask 'lamda'"):
        longstep.balance(ON_H100, [8192], ["zigzag"], mask="lamda")


@pytest.mark.sweep
def test_lengths_need_be_multiples_of_nothing() -> None:
    """All planners take them, with few tokens of padding, which is said."""
    setup = Setup(model="llama3-8b", cluster="hgx-h100", gpus=4)
    found = longstep.balance(setup, [1000, 777, 1112], play=False)
    assert [row["error"] for row in found.rows] == [""] * len(found.rows)
    assert found.batch.documents == (1000, 777, 1112, 7)
    assert "7 tokens of padding, a document by themselves, make 2896: a multiple of two" in found.notes[0]
    even = longstep.balance(setup, [1000, 776, 1112], ["ring"], play=False)
    assert even.batch.documents == (1000, 776, 1112)
    assert not [note for note in even.notes if "padding" in note]
