"""Timetables of pipelines: each pass once, none waits in vain, and bubbles and memory as papers state them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest

from sim.base.errors import InputError, ScheduleError
from sim.schedule.model.pipeline.account import Held, Parts, Spent, held, played, played_in_parts
from sim.schedule.model.pipeline.timetables import PIPELINES
from sim.schedule.model.step import Item
from tests.helpers import by_tier


class Size(NamedTuple):
    stages: int
    micros: int
    chunks: int = 1


class Times(NamedTuple):
    """Those of a micro-batch in one chunk: forward, gradients of inputs, gradients of weights."""

    F: float
    B: float
    W: float

    def of(self, item: Item) -> float:
        return self.B + self.W if item.kind == "BW" else self._asdict()[item.kind]


def tables(name: str, size: Size) -> list[list[Item]]:
    return [PIPELINES[name].timetable(stage, *size) for stage in range(size.stages)]


def whole(stages: Iterable[Spent]) -> float:
    """Return the step in which all stages wait for the last one to end, as for the norm of gradients."""
    return max(stage.end for stage in stages)


def longest(stages: Iterable[Spent]) -> float:
    """Return the step in which none waits for others before its update, so that stages begin the next one as they end
    (arXiv:2401.10241 §4, whose bubbles are of this).
    """
    return max(stage.end - stage.begins[0] for stage in stages)


def bubbles(name: str, size: Size, times: Times) -> tuple[float, float]:
    """Return the idle time of each stage in either step."""
    found, work = played(tables(name, size), times.of), size.micros * size.chunks * sum(times)
    assert {sum(map(times.of, items)) for items in tables(name, size)} == {work}
    return whole(found) - work, longest(found) - work


def spelled(items: Iterable[Item]) -> str:
    return " ".join(f"{item.kind}{item.micro}.{item.chunk}" for item in items)


def test_by_hand() -> None:
    assert spelled(tables("zb-h2", Size(2, 3))[0]) == "F0.0 F1.0 F2.0 B0.0 W0.0 B1.0 W1.0 B2.0 W2.0"
    assert spelled(tables("zb-h2", Size(2, 3))[1]) == "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 W0.1 W1.1 W2.1"
    assert spelled(tables("looped-bfs", Size(2, 2, 2))[1]) == "F0.1 F1.1 F0.3 F1.3 BW1.3 BW0.3 BW1.1 BW0.1"
    assert spelled(tables("zb-v", Size(1, 2, 2))[0]) == "F0.0 F0.1 B0.1 W0.1 F1.0 B0.0 W0.0 F1.1 B1.1 W1.1 B1.0 W1.0"
    assert spelled(tables("dualpipe-v", Size(1, 2, 2))[0]) == "F0.0 F0.1 F1.0 BW0.1 F1.1 BW0.0 BW1.1 B1.0 W1.0"
    assert spelled(tables("dualpipe", Size(2, 4))[0]) == "F0.0 F2.1 F1.0 BW2.1 F3.1 BW0.0 BW3.1 B1.0 W1.0"
    assert spelled(tables("dualpipe", Size(2, 4))[1]) == "F2.0 F0.1 F3.0 BW0.1 F1.1 BW2.0 BW1.1 B3.0 W3.0"


STAGES = range(1, 17)
EVERY = [(name, stages) for name, stages in product(PIPELINES, STAGES) if name != "dualpipe" or stages % 2 == 0]
BOTH_WAYS = {"dualpipe", "dualpipe-v"}
TESTED = [(name, stages) for name, stages in EVERY if stages in {1, 2, 3, 4}]


def sizes(name: str, stages: int) -> Iterator[Size]:
    """Those of a pipeline over so many stages: p to 4p micro-batches, and one to four chunks a stage."""
    own = PIPELINES[name].chunks
    for micros, chunks in product(range(stages, 4 * stages + 1), [own] if own else range(1, 5)):
        rounds = micros // stages if name.startswith("interleaved") and chunks > 1 else 1
        takes = micros >= 2 * stages and micros % PIPELINES[name].copies == 0
        if micros % rounds == 0 and (takes or name not in BOTH_WAYS):
            yield Size(stages, micros, chunks)


@pytest.mark.parametrize("cell", by_tier(TESTED, TESTED, EVERY))
def test_each_micro_batch_passes_each_chunk_once_and_none_waits_in_vain(cell: tuple[str, int]) -> None:
    name, stages = cell
    for size in sizes(name, stages):
        found = tables(name, size)
        passes = Counter(item for items in found for item in items)
        assert set(passes.values()) == {1}
        for micro, chunk in product(range(size.micros), range(stages * size.chunks)):
            kinds = {kind for kind in ("F", "BW", "B", "W") if passes.pop(Item(kind, micro, chunk), 0)}  # type: ignore[arg-type]
            assert kinds in ({"F", "BW"}, {"F", "B", "W"})
        assert not passes
        for stage, items in enumerate(found):
            mirrors = {stage, stages - 1 - stage} if name == "dualpipe" else {stage}
            assert {PIPELINES[name].stage_of(item.chunk, stages) for item in items} == mirrors
        assert whole(played(found, lambda _: 1)) >= size.micros * size.chunks * 2


UNEQUAL = [Times(*each) for each in ((2, 2, 2), (3, 2, 2), (2, 5, 1), (5, 3, 2), (1, 2, 3), (4, 1, 2))]
"""In whole units, so that sums are exact."""
SPLIT = [times for times in UNEQUAL if min(times.F, times.B) >= times.W]
"""What the closed forms of zero bubbles hold for."""


@pytest.mark.parametrize("stages", by_tier((2, 3), (2, 3, 4), range(2, 17)))
def test_bubbles_of_closed_forms(stages: int) -> None:
    """Equal stages, no communication. GPipe and 1F1B: arXiv:2104.04473 §2.2.1, with chunks §2.2.2; zero bubbles:
    arXiv:2401.10241 §2 and Table 1, of which ZB-H2 waits for no other stage at the end of a step.
    """
    p = stages
    for m, v in product(range(p, 4 * p + 1), range(1, 5)):
        for F, B, W in UNEQUAL if p < 5 else UNEQUAL[2:4]:
            if v == 1:
                assert bubbles("1f1b", Size(p, m), Times(F, B, W))[0] == (p - 1) * (F + B + W)
                assert bubbles("gpipe", Size(p, m), Times(F, B, W))[0] == (p - 1) * (F + B + W)
            if m % p == 0:
                assert bubbles("looped-bfs", Size(p, m, v), Times(F, B, W))[0] == (p - 1) * (F + B + W)
                assert bubbles("interleaved", Size(p, m, v), Times(F, B, W))[0] == (p - 1) * (F + B + W)
        for F, B, W in SPLIT if p < 5 else SPLIT[2:4]:
            if v == 1:
                assert bubbles("zb-h1", Size(p, m), Times(F, B, W))[0] == (p - 1) * (F + B - W)
            if v == 1 and m >= 2 * p - 1:
                assert bubbles("zb-h2", Size(p, m), Times(F, B, W))[1] == (p - 1) * (F + B - 2 * W)
            if m % p == 0:
                assert bubbles("interleaved-zb", Size(p, m, v), Times(F, B, W))[0] == (p - 1) * (F + B - W)


@pytest.mark.parametrize("stages", by_tier((2, 4), (2, 4), range(2, 17)))
def test_bubbles_of_chunks_as_a_v(stages: int) -> None:
    """ZB-V has none where all passes are as long (arXiv:2401.10241 §6). DualPipeV has those that DeepSeek-V3's Table 2
    prints, (p/2-1)(FB + F + B + W - 3W) for p chunks, at most: FB, a pair of passes, is one after the other here, and
    forward hands on before backward begins.
    """
    for m in range(2 * stages, 4 * stages + 1):
        assert bubbles("zb-v", Size(stages, m, 2), Times(3, 3, 3))[1] == 0
        for F, B, W in SPLIT:
            idle, _ = bubbles("dualpipe-v", Size(stages, m, 2), Times(F, B, W))
            assert idle <= (stages - 1) * ((F + B + W) + (B + W) - 3 * W)
            if F == B:
                assert idle == (stages - 1) * (F + B - W)


@pytest.mark.parametrize("stages", by_tier((2, 4), (2, 4), range(2, 17, 2)))
def test_bubbles_of_two_copies(stages: int) -> None:
    """As those of DualPipeV over half as many stages, which do what one half does, with half of the micro-batches."""
    for m in range(2 * stages, 4 * stages + 1, 2):
        for F, B, W in SPLIT:
            idle = bubbles("dualpipe", Size(stages, m), Times(F, B, W))
            assert idle == bubbles("dualpipe-v", Size(stages // 2, m // 2, 2), Times(F, B, W))


@pytest.mark.parametrize("stages", by_tier((2, 4), (2, 4), range(2, 17, 2)))
def test_bubbles_of_pairs_of_passes_as_printed(stages: int) -> None:
    """DeepSeek-V3's Table 2, where forward and backward passes of a pair begin and end together: the stage that waits
    longest waits (p/2-1)(FB + B + W - 3W) where F = B.
    """
    p = stages
    for m in range(2 * p, 4 * p + 1, 2):
        for (F, B, W), saved in product([times for times in SPLIT if times.F == times.B], (0, 1, 2)):
            pair = F + B + W - saved
            for name, size in (("dualpipe", Size(p, m)), ("dualpipe-v", Size(p // 2, m // 2, 2))):
                rows, middle = tables(name, size), {p // 2 - 1, p // 2}
                took = [in_pairs(items, Times(F, B, W), pair, stage in middle) for stage, items in enumerate(rows)]
                step = whole(
                    played_in_parts(rows, {item: part for one in took for item, part in one.items()}.__getitem__)
                )
                idle = [step - sum(part.whole for part in one.values()) for one in took]
                assert max(idle) == (p // 2 - 1) * (pair + B + W - 3 * W)


def in_pairs(items: list[Item], times: Times, pair: float, first_apart: bool) -> dict[Item, Parts]:
    """Return what passes of a stage take where those in a pair take as long as it. Of stages at the turn of a V the
    first pair is none (deepseek-ai/DualPipe dualpipe.py, step).
    """
    found = {item: Parts(0, times.of(item), 0) for item in items}
    pairs = [(one, other) for one, other in pairwise(items) if one.kind == "F" and other.kind == "BW"]
    for forward, backward in pairs[first_apart:]:
        found |= {forward: Parts(0, pair, 0), backward: Parts(0, 0, 0)}
    return found


@pytest.mark.parametrize("stages", by_tier((2, 4), (2, 4), range(2, 17)))
def test_activations_of_closed_forms(stages: int) -> None:
    """Visits of a micro-batch to a chunk, by stage s. arXiv:2104.04473 §2.2.1, and Megatron-LM's warm-up with chunks;
    arXiv:2401.10241 Table 1 and §6; DeepSeek-V3's Table 2, p + 1 of p chunks.
    """
    p = stages
    for m in range(p, 4 * p + 1):
        for s, items in enumerate(tables("1f1b", Size(p, m))):
            assert held(items) == Held(min(m, p - s), 0, min(m, p - s))
        for v, (s, items) in product(range(1, 5), enumerate(tables("looped-bfs", Size(p, m)))):
            assert held(PIPELINES["looped-bfs"].timetable(s, p, m, v)).visits == held(items).visits * v == m * v
        assert {held(items).visits for items in tables("zb-h1", Size(p, m))} == {p}
        if m >= 2 * p - 1:
            assert {held(items).visits for items in tables("zb-h2", Size(p, m))} == {2 * p - 1}
            assert {held(items).visits for items in tables("zb-v", Size(p, m, 2))} == {2 * p}
        if m >= 2 * p:
            assert {held(items).visits for items in tables("dualpipe-v", Size(p, m, 2))} == {2 * p + 1}
        if m >= 2 * p and m % 2 == p % 2 == 0:
            assert {held(items).visits for items in tables("dualpipe", Size(p, m))} == {p + 1}
    for m, v in product(range(p, 4 * p + 1, p), range(1, 5)):
        for s, items in enumerate(tables("interleaved", Size(p, m, v))):
            assert held(items).visits == min(m * v, 2 * (p - 1 - s) + (v - 1) * p + 1)
        assert {held(items).visits for items in tables("interleaved-zb", Size(p, m, v))} == {p * v}


TABLE_9 = {
    24: (Times(29.718, 29.444, 19.927), 0.527),
    32: (Times(29.802, 29.428, 19.53), 0.577),
    64: (Times(29.935, 29.621, 19.388), 0.535),
}
"""Passes of a micro-batch of 6.2B over 8 stages, and what is handed on, in ms, by micro-batches: arXiv:2401.10241."""
TABLE_5 = {
    "1f1b": (0.2347, 0.1898, 0.1091),
    "zb-h1": (0.1323, 0.1045, 0.0554),
    "zb-h2": (0.0698, 0.0559, 0.0294),
}
"""Its shares of the longest stage that are idle; those of ZB-1p are those of ZB-H1. ZB-2p, whose order is searched for
measured times, is not there."""
INTERLEAVED = (0.0808, 0.0628, 0.032)
"""Those of its 1F1B-I, with one of 32 layers a chunk."""


@pytest.mark.parametrize("name", TABLE_5)
def test_bubble_rates_as_printed(name: str) -> None:
    for (m, (times, hand_over)), printed in zip(TABLE_9.items(), TABLE_5[name], strict=True):
        found = played(tables(name, Size(8, m)), times.of, hand_over)
        assert round(1 - m * sum(times) / longest(found), 4) == printed


def test_bubble_rates_of_interleaved_as_printed_but_for_a_round() -> None:
    """They have p hand-overs less than the order needs. The first micro-batch is handed on pv - 1 times before any
    goes back, and the last one so often after all have gone forward: its round fills each chunk exactly.
    """
    p, v = 8, 4
    for (m, (times, hand_over)), printed in zip(TABLE_9.items(), INTERLEAVED, strict=True):
        of_chunk = Times(*(each / v for each in times))
        found = played(tables("interleaved", Size(p, m, v)), of_chunk.of, hand_over)
        work, fill = m * sum(times), (p - 1) * sum(of_chunk)
        assert longest(found) == pytest.approx(work + fill + 2 * (p * v - 1) * hand_over)
        assert round(1 - work / (longest(found) - p * hand_over), 4) == printed
        assert 0 < 1 - work / longest(found) - printed < 0.002


TORCHS = {
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""The classes of torch."""


def of_torch(kind: Any, size: Size, stage: int) -> str:
    """What torch's schedule does on a rank, of passes alone."""
    own = kind.__new__(kind)  # its constructor wants modules
    own.pp_group_size, own._n_microbatches, own.n_local_stages = size
    own._stages, own.num_stages = [None] * size.chunks, size.stages * size.chunks
    own.microbatches_per_round = size.micros // max(1, size.micros // size.stages)
    actions = [action for action in own._calculate_single_rank_operations(stage) if action]
    letters = {"F": "F", "B": "BW", "I": "B", "W": "W"}
    passes = [one for action in actions for one in action.sub_actions or [action]]
    return spelled(
        Item(letters[one.computation_type.value], one.microbatch_index, one.stage_index)  # type: ignore[arg-type]
        for one in passes
    )


@pytest.mark.sweep  # loads torch's compiler
@pytest.mark.parametrize("name", TORCHS)
def test_the_order_is_that_of_torch(name: str) -> None:
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, TORCHS[name])
    for stages in (1, 2, 3, 5):
        for size in sizes(name, stages):
            for stage, items in enumerate(tables(name, size)):
                assert spelled(items) == of_torch(kind, size, stage)


def test_few_micro_batches() -> None:
    """Fewer than stages."""
    for name, m in product(PIPELINES, (1, 2, 3)):
        chunks = PIPELINES[name].chunks or 2
        if name not in BOTH_WAYS:
            assert whole(played(tables(name, Size(4, m, chunks)), lambda _: 1)) > 0
    with pytest.raises(InputError, match="dualpipe-v over 4 stages takes 8 micro-batches or more, not 7"):
        tables("dualpipe-v", Size(4, 7, 2))
    with pytest.raises(InputError, match="dualpipe over 4 stages takes 8 micro-batches or more, not 6"):
        tables("dualpipe", Size(4, 6))
    for odd in (Size(3, 8), Size(4, 9)):
        with pytest.raises(
            InputError, match=r"dualpipe over . stages with . .*pp_degree` 4 .*micro_batches=(8|10), or"
        ):
            tables("dualpipe", odd)
    for name in ("interleaved", "interleaved-zb"):
        with pytest.raises(
            InputError, match=r"9 micro-batches over 4 stages: .*nearest are 8 or 10; .*micro_batches=10"
        ):
            tables(name, Size(4, 9, 2))


def test_an_account_by_hand() -> None:
    """Of 1F1B, forward 1, backward 2. Stage 0: F0 to 1, F1 to 2. Stage 1: F0 from 1.5 to 2.5, B0 to 4.5, F1 to 5.5,
    B1 to 7.5. Stage 0: B0, which arrives at 5, to 7; B1, which arrives at 8, to 10.
    """
    tables_ = [[Item("F", 0, 0), Item("F", 1, 0), Item("BW", 0, 0), Item("BW", 1, 0)]]
    tables_ += [[Item("F", 0, 1), Item("BW", 0, 1), Item("F", 1, 1), Item("BW", 1, 1)]]
    found = played(tables_, Times(1, 1, 1).of, 0.5)
    assert found == [Spent((0, 1, 5, 8), 10), Spent((1.5, 2.5, 4.5, 5.5), 7.5)]
    assert whole(found) == longest(found) == 10


def test_stages_that_wait_for_each_other_are_named() -> None:
    first = [Item("F", 0, 0), Item("BW", 0, 0), Item("F", 1, 0), Item("BW", 1, 0)]
    second = [Item("F", 0, 1), Item("F", 1, 1), Item("BW", 1, 1), Item("BW", 0, 1)]
    with pytest.raises(
        ScheduleError, match=r"stage 0 before backward of micro-batch 0 in chunk 0; stage 1 before forward"
    ):
        played([first, second], lambda _: 1)
    with pytest.raises(ScheduleError, match="stage 0 before gradients of weights of micro-batch 0 in chunk 0"):
        played([[Item("F", 0, 0), Item("W", 0, 0), Item("B", 0, 0)]], lambda _: 1)


IN_ROUNDS = {name for name in PIPELINES if name not in {"gpipe", "looped-bfs"}}
"""Those that begin to go back before all micro-batches have gone forward."""


@pytest.mark.parametrize("name", sorted(IN_ROUNDS))
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_passes_of_further_rounds_stand_where_those_of_the_last_round_do(name: str, stages: int) -> None:
    """A step of more rounds is one of fewer with the same passes again for each, in one place of each stage."""
    rounds = PIPELINES[name].rounds
    assert rounds is not None
    before, each = rounds.of(stages)

    def order(stage: int, further: int) -> list[tuple[str, int]]:
        micros, chunks = before + further * each, PIPELINES[name].chunks or 2
        return [(item.kind, item.chunk) for item in PIPELINES[name].timetable(stage, stages, micros, chunks)]

    for stage in range(stages):
        few, more, most = (order(stage, further) for further in (1, 2, 3))
        added = len(more) - len(few)
        cuts = [at for at in range(len(few) + 1) if more == few[:at] + more[at : at + added] + few[at:]]
        assert any(most == few[:at] + more[at : at + added] * 2 + few[at:] for at in cuts)
