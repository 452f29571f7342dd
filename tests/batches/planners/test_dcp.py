"""DCP: limits of balance, what moves, two levels, divisions, repeatability; and the moves that restore balance."""

from __future__ import annotations

import builtins
import math

import numpy as np
import pytest

from sim.balance.planners import PLANNERS, asked_of
from sim.base.errors import InputError
from sim.batches.batch import Batch, batch
from sim.batches.blocks import cut, fitting_size
from sim.batches.counting import Ints
from sim.batches.planned import Planned
from sim.batches.planners import hypergraph
from sim.batches.planners.dcp import DcpOptions, _plan, dcp
from sim.batches.planners.hypergraph import Limits, Vertices, partitioned
from sim.batches.planners.static import ring
from sim.batches.seconds import PlanCosts, plan_seconds
from sim.batches.statistics import Statistics, TokenBytes, statistics, token_bytes
from sim.schedule.ir.masks import Span
from sim.schedule.ir.plan import Plan, Task
from sim.setup.setup import Setup
from sim.words.patterns import AttentionSink
from tests.batches.coverage import require_covered

HEADS = token_bytes(8, 2, 128, 2)


@pytest.fixture(autouse=True)
def library() -> None:
    pytest.importorskip("mtkahypar")


def counted(planned: Planned, found: Batch) -> Statistics:
    require_covered(planned.plan, found)
    return statistics(planned, found, HEADS)


def test_balance_is_within_the_limits() -> None:
    found = batch([900, 3000, 292, 2000, 2000])
    one = counted(dcp(found, 8, HEADS, DcpOptions(block_size=64)), found)
    assert one.skew <= 1.1
    assert one.token_skew <= 1.2


def test_documents_that_fit_a_rank_move_nothing() -> None:
    found = batch([512] * 8)
    one = counted(dcp(found, 8, HEADS), found)
    assert one.received_bytes.sum() == 0
    assert one.skew == 1.0


def test_fewer_bytes_than_a_ring_and_fewer_still_under_a_sparse_mask() -> None:
    documents = [6000, 1200, 800, 192]
    dense, sparse = batch(documents), batch(documents, AttentionSink(sink=64, window=512))
    options = DcpOptions(block_size=128)
    static = counted(ring(dense, 4, "zigzag"), dense).received_bytes.sum()
    some = counted(dcp(dense, 4, HEADS, options), dense).received_bytes.sum()
    few = counted(dcp(sparse, 4, HEADS, options), sparse).received_bytes.sum()
    assert few < some / 2
    assert some < static


def test_documents_stay_within_nodes() -> None:
    # Two documents of equal work, two nodes of two: each node has one, and only its own ranks talk.
    found = batch([1024, 1024])
    one = counted(dcp(found, 4, HEADS, DcpOptions(block_size=64, gpus_per_node=2)), found)
    assert one.sent_bytes[:2, 2:].sum() == one.sent_bytes[2:, :2].sum() == 0
    assert one.sent_bytes.sum() > 0


def test_the_first_division_needs_nothing_from_others() -> None:
    found = batch([3000, 1096])
    one = counted(dcp(found, 4, HEADS, DcpOptions(block_size=64)), found)
    assert one.kv_bytes.shape == (4, 4)
    assert one.kv_bytes[:, 0].sum() == one.query_bytes[:, 0].sum() == 0
    assert (one.pairs[:, 1:].max(axis=1) < 0.4 * one.pairs.sum(axis=1)).all()  # about a quarter each


def test_one_division_fetches_all_at_once() -> None:
    found = batch([3000, 1096])
    one = counted(dcp(found, 4, HEADS, DcpOptions(block_size=64, divisions=1)), found)
    assert one.kv_bytes.shape == (4, 1)
    assert one.kv_bytes.sum() > 0


def test_a_plan_is_repeated_and_cached() -> None:
    found, options = batch([3000, 1096]), DcpOptions(block_size=128)
    first = dcp(found, 4, HEADS, options)
    assert dcp(found, 4, HEADS, options).plan is first.plan
    _plan.cache_clear()
    again = dcp(found, 4, HEADS, options)
    assert again.plan is not first.plan
    assert again.plan == first.plan


def test_nodes_of_different_sizes() -> None:
    found = batch([700, 900, 2496])
    one = counted(dcp(found, 5, HEADS, DcpOptions(block_size=64, gpus_per_node=3, node_imbalance=0.05)), found)
    assert one.skew < 1.1 * 1.1
    assert one.token_skew <= 1.2


def test_blocks_grow_with_the_batch() -> None:
    assert fitting_size(batch([65536]), 1 << 14) == 512
    assert fitting_size(batch([65537]), 1 << 14) == 1024
    assert fitting_size(batch([1 << 20]), 1 << 14) == 8192
    assert fitting_size(batch([1] * 50), 10) == 512
    assert cut(batch([5, 2]), 2).tokens.tolist() == [2, 2, 1, 2]


def test_moves_restore_both_balances_at_the_least_cost() -> None:
    # All on part 0: a limit of 6 tokens a part takes blocks away, computation follows where it adds fewest bytes.
    blocks = cut(batch([2] * 4), 2)
    vertices = hypergraph.vertices_of(blocks)
    part = np.zeros(8, dtype=np.int64)
    size = np.full(4, 10)
    hypergraph._balance(part, vertices, (size, size), vertices.tokens, np.array([4.0, 4.0]))
    assert np.bincount(part[:4]).tolist() == [2, 2]
    assert (part[4:] == 0).all()
    hypergraph._balance(part, vertices, (size, size), vertices.pairs, np.array([6.0, 6.0]))
    assert part[4:].tolist() == part[:4].tolist()  # each document's pairs went where its tokens are: nothing moves


def test_what_cannot_be_balanced_stays() -> None:
    vertices = Vertices(*(np.array([value]) for value in (0, 0, 5, 0)))
    part = np.zeros(1, dtype=np.int64)
    hypergraph._balance(part, vertices, (np.ones(1), np.ones(1)), vertices.tokens, np.array([2.0, 2.0]))  # type: ignore[arg-type]
    assert part.tolist() == [0]


def test_one_part_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypergraph, "_started", None)
    vertices = hypergraph.vertices_of(cut(batch([8]), 2))
    size = np.ones(4, dtype=np.int64)
    assert partitioned(vertices, (size, size), np.ones(1), Limits(0.1, 0.2), np.array([9]), 0).tolist() == [0] * 14  # type: ignore[arg-type]


def test_without_the_library_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *rest: object, **options: object) -> object:
        if name == "mtkahypar":
            raise ImportError(name)
        return found(name, *rest, **options)  # type: ignore[arg-type]

    hypergraph._started.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'longstep\[planners\]'"):
        dcp(batch([64]), 2, HEADS, DcpOptions(block_size=7))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DcpOptions(block_size=-1), "`block_size` -1"),
        (DcpOptions(divisions=0), "`divisions` 0"),
        (DcpOptions(gpus_per_node=0), "`gpus_per_node` 0"),
        (DcpOptions(node_imbalance=-0.1), "`node_imbalance` -0.1"),
    ],
)
def test_options_out_of_range_are_refused(options: DcpOptions, said: str) -> None:
    with pytest.raises(InputError, match=said):
        dcp(batch([64]), 2, HEADS, options)


def per_pair(queries: Ints, keys: Ints, pairs: Ints) -> float:
    """Return the seconds of a launch that takes a nanosecond a pair."""
    del queries, keys
    return 1e-9 * float(pairs.sum())


COSTS = PlanCosts(per_pair, within_bytes_per_s=400e9, between_bytes_per_s=50e9)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "documents", [[9000, 700, 300, 6384], [512] * 8, pytest.param([100, 60000, 2000, 30], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("gpus_per_node", [4, 2])
def test_the_best_block_size_is_no_slower_than_any(documents: list[int], gpus_per_node: int) -> None:
    found = batch(documents)
    options = DcpOptions(gpus_per_node=gpus_per_node)

    def seconds(planned: Planned) -> float:
        require_covered(planned.plan, found)
        return plan_seconds(planned, found, HEADS, COSTS, gpus_per_node)

    best = seconds(dcp(found, 4, HEADS, options, COSTS))
    each = [seconds(dcp(found, 4, HEADS, options._replace(block_size=size))) for size in (512, 1024, 2048, 4096)]
    assert best == min(each)


def test_slow_links_and_slow_kernels_want_other_blocks() -> None:
    """Where pairs cost all, blocks that level them best; where bytes do, those that move fewest."""
    found = batch([9000, 700, 300, 6384])
    each = [counted(dcp(found, 4, HEADS, DcpOptions(block_size=size)), found) for size in (512, 1024, 2048, 4096)]
    slow_kernels = COSTS._replace(within_bytes_per_s=math.inf)
    levelled = counted(dcp(found, 4, HEADS, costs=slow_kernels), found)
    assert levelled.skew == pytest.approx(min(one.skew for one in each), rel=1e-9)
    slow_links = COSTS._replace(within_bytes_per_s=1e3)
    near = counted(dcp(found, 4, HEADS, costs=slow_links), found)
    assert most_moved(near) == min(map(most_moved, each)) < most_moved(each[0])


def most_moved(found: Statistics) -> int:
    """Return the most bytes that a rank sends or receives."""
    return int(max(found.sent_bytes.sum(axis=0).max(), found.sent_bytes.sum(axis=1).max()))


def test_seconds_of_a_plan_by_hand() -> None:
    """Two ranks: the first attends 10 pairs, then 16 of tokens that arrive meanwhile; the second attends its 10."""
    found = batch([8])
    low, high = Span(0, 4), Span(4, 8)
    tasks = ((Task(low, low, 0), Task(high, low, 1)), (Task(high, high, 0),))
    planned = Planned("by hand", Plan(((low,), (high,)), tasks), "blocks", 0.0)
    per_token = TokenBytes(kv=3, query=5, out=7)
    costs = PlanCosts(lambda _, __, pairs: float(pairs.sum()), within_bytes_per_s=2.0, between_bytes_per_s=1.0)
    # 20 bytes of queries arrive, 28 of outputs go home to rank 1: at 2 B/s 10 s and 14 s, sending more than receiving.
    # Rank 0: moves 14 s, all of it queries, behind its first 10 s; then 16 s. Rank 1 waits 14 s behind its last kernel.
    assert plan_seconds(planned, found, per_token, costs, gpus_per_node=2) == 14 + 16
    assert plan_seconds(planned, found, per_token, costs, gpus_per_node=1) == 28 + 16


def test_a_batch_met_again_is_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By costs that rest on the same machine, whoever asks."""
    found = batch([6000, 2192])
    asked = [asked_of(Setup(model="llama3-8b", cluster="hgx-h100", gpus=4), found) for _ in range(2)]
    first = PLANNERS["dcp"](found, asked[0])
    monkeypatch.setattr(hypergraph, "_started", None)
    assert PLANNERS["dcp"](found, asked[1]).plan is first.plan
    slower = asked_of(
        Setup(model="llama3-8b", cluster="hgx-h100", gpus=4, set={"cluster.nvlink.bytes_per_s": "/2"}), found
    )
    assert slower.costs != asked[0].costs


def test_weights_of_edges_stay_within_what_the_library_counts() -> None:
    assert hypergraph._in_proportion([6 * 2**40, 9 * 2**40, 3 * 2**40]) == [2, 3, 1]
    large = hypergraph._in_proportion([2**40 + 1, 3 * 2**40])
    assert sum(large) <= 2**30
    assert large[1] / large[0] == pytest.approx(3, rel=1e-6)
    assert hypergraph._in_proportion([]) == []
