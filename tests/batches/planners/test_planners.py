"""Every planner on random batches: no token and no pair lost or doubled; statistics equal to enumeration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.base.errors import InputError, LengthError, ScheduleError
from sim.batches.batch import MOST_TOKENS, Batch, batch
from sim.batches.lower_bound import lower_bound
from sim.batches.planned import Planned
from sim.batches.planners.dcp import dcp
from sim.batches.planners.fcp import fcp
from sim.batches.planners.static import permuted, ring
from sim.batches.planners.wlb import padded_pairs, predicted_seconds, wlb
from sim.batches.statistics import Statistics, max_over_mean, statistics, token_bytes
from sim.schedule.ir.masks import Span
from sim.schedule.ir.plan import Plan, Task
from tests.batches.batches import (
    ANY_LENGTH,
    ANY_MASK,
    BANDS,
    DIVIDED,
    OF_BLOCKS,
    PARTITIONED,
    PATTERNS,
    PER_TOKEN,
    for_planner,
    kept,
    lengths,
    within,
)
from tests.batches.coverage import require_covered

PLANNERS = {**ANY_LENGTH, **DIVIDED, **OF_BLOCKS, **PARTITIONED}


def cases(name: str) -> st.SearchStrategy[tuple[Batch, int]]:
    patterns = list(PATTERNS) if name in ANY_MASK else list(BANDS)
    return st.builds(
        lambda documents, ranks, pattern: (for_planner(name, documents, ranks, pattern), ranks),
        lengths(),
        st.integers(1, 7),
        st.sampled_from(patterns),
    )


def properties(name: str, found: Batch, ranks: int) -> None:
    if name in PARTITIONED:
        pytest.importorskip("mtkahypar")
    planned = PLANNERS[name](found, ranks)
    require_covered(planned.plan, found)
    attended: list[tuple[int, int]] = []
    pairs = set(kept(found.rectangles))
    for tasks in planned.plan.tasks:
        assert [task.division for task in tasks] == sorted(task.division for task in tasks)
        for task in tasks:
            block = [(q, k) for q in range(*task.queries) for k in range(*task.keys) if (q, k) in pairs]
            assert block, "a task without pairs"
            attended += block
    assert len(attended) == len(set(attended)) == len(pairs)
    counted = statistics(planned, found, PER_TOKEN)
    assert_equal(counted, enumerated(planned, found))
    bound = lower_bound(found, ranks, PER_TOKEN, int(counted.tokens.max()))
    busiest = counted.pairs.sum(axis=1).argmax()
    assert bound.pairs <= counted.pairs.sum(axis=1).max()
    received = counted.kv_bytes[busiest].sum() + counted.query_bytes[busiest].sum()
    assert bound.received_bytes <= received + 1e-9


def enumerated(planned: Planned, found: Batch) -> Statistics:
    """Count token by token what ``statistics`` counts by spans."""
    plan, pairs = planned.plan, set(kept(found.rectangles))
    ranks = len(plan.layout)
    divisions = 1 + max((t.division for tasks in plan.tasks for t in tasks), default=0)
    home = {token: rank for rank, spans in enumerate(plan.layout) for span in spans for token in within(span)}
    counts, kv, query, out = (np.zeros((ranks, divisions), dtype=int) for _ in range(4))
    sent = np.zeros((ranks, ranks), dtype=int)
    for rank, tasks in enumerate(plan.tasks):
        has_kv = {token for token in home if home[token] == rank}
        has_query, last = set(has_kv), {}
        for task in tasks:
            block = [(q, k) for q in range(*task.queries) for k in range(*task.keys) if (q, k) in pairs]
            counts[rank, task.division] += len(block)
            if planned.transport == "blocks":
                for token in within(task.keys) - has_kv:
                    kv[rank, task.division] += PER_TOKEN.kv
                    sent[home[token], rank] += PER_TOKEN.kv
                has_kv |= within(task.keys)
            for token in within(task.queries) - has_query:
                query[rank, task.division] += PER_TOKEN.query
                sent[home[token], rank] += PER_TOKEN.query
            has_query |= within(task.queries)
            last |= dict.fromkeys(within(task.queries), task.division)
        if planned.transport != "blocks":
            for token in set(home) - has_kv:
                step = 0 if planned.transport == "all-gather" else (rank - home[token]) % ranks
                kv[rank, min(step, divisions - 1)] += PER_TOKEN.kv
                sent[home[token], rank] += PER_TOKEN.kv
        for token, division in last.items():
            if home[token] != rank:
                out[home[token], division] += PER_TOKEN.out
                sent[rank, home[token]] += PER_TOKEN.out
    tokens = np.array([sum(span.size for span in spans) for spans in plan.layout])
    return Statistics(tokens, counts, kv, query, out, sent)


def assert_equal(a: Statistics, b: Statistics) -> None:
    for name, one, other in zip(a._fields, a, b, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    np.testing.assert_array_equal(a.sent_bytes.sum(axis=0), a.received_bytes)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=10)
@given(data=st.data())
def test_no_pair_is_lost_or_doubled(name: str, data: st.DataObject) -> None:
    properties(name, *data.draw(cases(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=1000)
@given(data=st.data())
def test_no_pair_is_lost_or_doubled_in_a_thousand_batches(name: str, data: st.DataObject) -> None:
    properties(name, *data.draw(cases(name)))


def two(queries: tuple[int, ...] = (0, 4), keys: tuple[int, ...] = (0, 4)) -> Plan:
    layout = ((Span(0, 4),), (Span(4, 8),))
    return Plan(layout, ((Task(Span(*queries), Span(*keys), 0),), (Task(Span(4, 8), Span(4, 8), 0),)))


def test_a_covered_plan_passes() -> None:
    require_covered(two(), batch([4, 4]))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (two(keys=(0, 3)), "attends 9 of 10 pairs of queries 0 to 3 and keys 0 to 3"),
        (two(queries=(0, 5), keys=(0, 5)), "two tasks attend the same pairs: .*queries 4 to 7 and keys 4 to 7"),
        (two(queries=(0, 9)), "outside of the 8 tokens"),
        (two()._replace(layout=((Span(0, 4),), (Span(5, 8),))), "token 4 lives on no rank"),
        (two()._replace(layout=((Span(0, 5),), (Span(4, 8),))), "token 4 lives on several ranks"),
        (two()._replace(layout=((Span(0, 4),), (Span(4, 9),))), "outside of the 8 tokens"),
    ],
)
def test_plans_with_holes_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        require_covered(plan, batch([4, 4]))


def test_mixed_strides_may_not_meet_either() -> None:
    layout = ((Span(0, 6),),)
    whole, odd = Task(Span(0, 6), Span(0, 6), 0), Task(Span(1, 7, 2), Span(3, 6), 0)
    with pytest.raises(ScheduleError, match=r"two tasks attend the same pairs: .* queries 1 to 5 by 2"):
        require_covered(Plan(layout, ((whole, odd),)), batch([6]))
    even = Task(Span(0, 6, 2), Span(0, 6), 0)
    both = (even, Task(Span(1, 7, 2), Span(0, 3), 0), Task(Span(1, 7, 2), Span(3, 6), 0))
    require_covered(Plan(layout, (both,)), batch([6]))
    require_covered(
        Plan(layout, ((even, Task(Span(1, 7, 6), Span(0, 6), 0), Task(Span(3, 7, 2), Span(0, 6), 0)),)), batch([6])
    )


def test_a_ring_moves_all_keys_whatever_the_mask() -> None:
    # Two documents, a rank each: nothing must move, but the ring passes 4 tokens of keys and values on.
    found = statistics(ring(batch([4, 4]), 2), batch([4, 4]), PER_TOKEN)
    assert found.kv_bytes.sum() == 2 * 4 * PER_TOKEN.kv
    assert found.pairs.sum(axis=1).tolist() == [10, 10]


def test_work_of_a_contiguous_ring_is_the_closed_form() -> None:
    # One causal document on P ranks: the last rank has (2P - 1) / P of the mean, less the diagonal.
    found = statistics(ring(batch([4096]), 8), batch([4096]), PER_TOKEN)
    assert found.skew == pytest.approx(15 / 8, rel=1e-3)
    assert statistics(ring(batch([4096]), 8, "zigzag"), batch([4096]), PER_TOKEN).skew == 1.0


def test_one_long_document_among_short_ones_unbalances_zigzag_but_not_wlb() -> None:
    found = batch([4096, *[64] * 64])
    assert statistics(ring(found, 8, "zigzag"), found, PER_TOKEN).skew > 1.5
    for planned in (wlb(found, 8, "document"), wlb(found, 8)):
        assert statistics(planned, found, PER_TOKEN).skew < 1.02


def test_the_adaptive_choice_is_the_cheaper_one() -> None:
    long, short = batch([8192]), batch([256] * 32)
    for found, better in ((long, "sequence"), (short, "sequence"), (batch([4096, *[64] * 64]), "document")):
        other = "document" if better == "sequence" else "sequence"
        assert predicted_seconds(found, 8, better) <= predicted_seconds(found, 8, other)  # type: ignore[arg-type]
        assert wlb(found, 8).plan == wlb(found, 8, better).plan  # type: ignore[arg-type]


def test_a_cost_model_of_the_caller_decides() -> None:
    seen: list[Any] = []

    def launches(queries: Any, keys: Any, pairs: Any) -> float:
        seen.append((queries, keys, pairs))
        return float(len(queries))  # a launch costs by its blocks: documents should stay whole

    found = batch([64] * 64)
    assert wlb(found, 4, kernel_seconds=launches).plan == wlb(found, 4, "sequence").plan
    assert sum(int(pairs.sum()) for _, _, pairs in seen) == 2 * 64 * 64 * 65 // 2  # both shardings attend everything


def test_few_queries_cost_a_whole_tile() -> None:
    ones = np.array([1])
    assert padded_pairs(16 * ones, 64 * ones, 640 * ones) == padded_pairs(128 * ones, 64 * ones, 5120 * ones)


def test_per_document_shards_leave_every_rank_the_same_tokens() -> None:
    found = batch([33, 70, 5, 129])
    sizes = statistics(wlb(found, 4, "document"), found, PER_TOKEN).tokens
    assert sizes.max() - sizes.min() <= 1


def test_per_document_shards_by_hand() -> None:
    """Chunks of a token each, in pairs, of both documents; the first one's fifth token goes to the first rank."""
    shards = wlb(batch([5, 4]), 2, "document").plan.layout
    assert [[at for span in shard for at in range(span.start, span.stop)] for shard in shards] == [
        [0, 3, 4, 5, 8],
        [1, 2, 6, 7],
    ]


def test_a_rank_without_room_gets_no_block_though_it_has_the_fewest_pairs() -> None:
    """Of six blocks, of which the last one of the long document has as many pairs as five short ones."""
    found = batch([1536, 512, 512, 512])
    assert statistics(fcp(found, 2), found, PER_TOKEN).tokens.tolist() == [1536, 1536]


def test_bytes_of_a_token() -> None:
    # DCP's microbenchmark: 8 query heads, 2 kv heads of 128 in bf16; a partial output carries its log-sum-exp in fp32.
    assert token_bytes(8, 2, 128, 2) == (2 * 2 * 128 * 2, 8 * 128 * 2, 8 * 128 * 2 + 8 * 4)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*ANY_LENGTH, *DIVIDED, "fcp", "groups", "dcp"])
def test_two_billion_tokens_take_no_longer_than_few(name: str) -> None:
    """As many as are allowed, one document among short ones: no pair is lost, nothing is counted token by token."""
    if name == "dcp":
        pytest.importorskip("mtkahypar")
    planners = {**PLANNERS, "fcp": fcp, "dcp": lambda found, ranks: dcp(found, ranks, PER_TOKEN)}
    found = batch([MOST_TOKENS - 128, 100, 28])
    planned = planners[name](found, 8)
    counted = statistics(planned, found, PER_TOKEN)
    assert counted.pairs.sum() == sum(size * (size + 1) // 2 for size in found.documents)
    assert counted.tokens.sum() == MOST_TOKENS
    np.testing.assert_array_equal(counted.sent_bytes.sum(axis=0), counted.received_bytes)


def test_more_ranks_than_tokens() -> None:
    found = batch([2, 1])
    planned = wlb(found, 8)
    require_covered(planned.plan, found)
    assert statistics(planned, found, PER_TOKEN).tokens.sum() == 3
    with pytest.raises(LengthError, match="no multiple of 8"):
        ring(found, 8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: wlb(batch([4]), 0), "`num_ranks` 0"),
        (lambda: batch([]), "has no document"),
        (lambda: batch([4, 0]), "document 1 has 0 tokens"),
        (lambda: batch([4, -1]), "document 1 has -1 tokens"),
        (lambda: batch([4.5]), "document 0 has 4.5 tokens: expected whole numbers"),  # type: ignore[list-item]
        (lambda: batch(["4"]), "document 0 has '4' tokens: expected whole numbers"),  # type: ignore[list-item]
        (lambda: batch([float("nan")]), "document 0 has nan tokens"),  # type: ignore[list-item]
        (lambda: batch([True]), "document 0 has True tokens"),
        (lambda: batch([2**30, 2**30, 1]), "more tokens in all than the 2147483648"),
        (lambda: ring(batch([4]), -1), "`num_ranks` -1"),
        (lambda: wlb(batch([9], PATTERNS["lambda"]), 2), "one band each"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_positions_of_a_framework_are_its_layout(layout: Any) -> None:
    found = batch([9, 5, 10])
    ours = ring(found, 3, layout)
    order = [token for spans in ours.plan.layout for span in spans for token in range(*span)]
    theirs = permuted(found, order, 3, "ring")
    require_covered(theirs.plan, found)
    assert_equal(statistics(theirs, found, PER_TOKEN), statistics(ours, found, PER_TOKEN))
    assert theirs.plan.layout[0] == ours.plan.layout[0]


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 12]), st.sampled_from(["all-gather", "ring"]))
def test_any_permutation_is_covered(order: list[int], ranks: int, transport: Any) -> None:
    found = batch([5, 7])
    planned = permuted(found, order, ranks, transport)
    require_covered(planned.plan, found)
    assert_equal(statistics(planned, found, PER_TOKEN), enumerated(planned, found))


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([0, 1, 1, 3], "token 1 2 times, token 2 not at all"),
        ([0, 1, 2], "`order` has 3 positions, the batch 4 tokens"),
        ([0, 1, 2, 4], "`order` has position 4: expected 0 to 3"),
        ([0, 1, 2, -1], "`order` has position -1"),
        ([0, 1, 2.5, 3], "`order` has what is no position"),
        ([0, 1, float("nan"), 3], "`order` has what is no position"),
        ([0, 1, 2, 2**64], "`order` has what is no position"),
        ([0, 1, 2, 2**63 - 1], "`order` has position 9223372036854775807"),
        ([], "`order` has 0 positions"),
    ],
)
def test_what_is_no_permutation_is_refused(order: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        permuted(batch([4]), order, 2)


def test_max_over_mean_of_nothing_is_one() -> None:
    assert max_over_mean([0.0, 0.0]) == 1.0
    assert max_over_mean([3.0, 1.0]) == 1.5
