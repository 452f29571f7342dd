"""Plans of irregular blocks: any plan that covers its mask is exact and moves what it must; any other is refused."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.execution.verify import output_errors
from runtime.execution.virtual import attention_seconds, execute_virtual
from sim.accounts.breakdown import attention_s
from sim.base.errors import InputError
from sim.batches.batch import batch
from sim.engine.play.simulate import simulate
from sim.schedule.derive.matching import wire_bytes
from sim.schedule.ir.masks import Band, Span, count_pairs, mask_of
from sim.schedule.ir.ops import Attend, Exchange, HostSync
from sim.schedule.ir.plan import Plan, Task
from sim.schedule.methods.planned import PlannedOptions, planned
from sim.setup.setup import Setup
from sim.words.mesh import Mesh
from sim.words.patterns import AttentionSink, CausalBlockwise
from sim.words.workload import Workload
from tests.batches.batches import ANY_LENGTH, DIVIDED, OF_BLOCKS, PATTERNS
from tests.helpers import make_cluster_spec, make_model, slow_but
from tests.schedule.methods.plans import HELPED, LAYOUT, SEQ, TASKS, plans, proved, task, written
from topology.cluster import Cluster

CPU = torch.device("cpu")
MASKS: tuple[dict[str, Any], ...] = (
    {"mask": "causal"},
    {"mask": "full"},
    {"window": 7},
    {"pattern": AttentionSink(sink=2, window=5)},
    {"pattern": CausalBlockwise(size=3, local=2)},
)
MODEL = make_model(4, 2, 4)


SMALL = Workload(model=MODEL, seq=16, dtype="fp64")


def exact(plan: Plan, workload: Workload, seed: int = 0, **options: Any) -> None:
    checked = proved(plan, workload, PlannedOptions(**options))
    worst = output_errors(checked, execute_virtual(checked, CPU, seed))
    assert max(worst.values()) <= 1e-12, worst


def test_bytes_by_hand() -> None:
    """Tokens 0..4 go to rank 1 and 4..8 to rank 0 as keys; rank 2 takes keys 8..12 and 12..16, and queries 12..16."""
    keys, queries = 4 + 4 + 8, 4
    kv, q, lse = 2 * keys * 2 * 4 * 8, queries * 4 * 4 * 8, queries * 4 * 8
    for passes, wanted in (("forward", kv + 2 * q + lse), ("backward", 2 * kv + 3 * q + 2 * lse)):
        schedule = proved(HELPED, msgspec.structs.replace(SMALL, passes=passes)).schedule
        assert schedule.header.claims is not None
        assert wire_bytes(schedule, proved(HELPED, schedule.header.workload).matching) == wanted
        assert schedule.header.claims.wire_bytes == wanted


def test_what_lies_between_documents_meets_nothing() -> None:
    """Rank 1 fetches documents 0 and 3, which one kernel attends. Between their queries lie those of document 2, whose
    keys are its own; between their keys those of document 1, which its own queries attend.
    """
    layout = ((Span(0, 4), Span(6, 8), Span(10, 16)), (Span(4, 6), Span(8, 10)))
    at_home = (task((6, 8), (4, 8)), task((8, 12), (10, 12)))
    apart = (task((4, 6), (4, 8)), task((8, 12), (8, 10)))
    whole = (task((0, 4), (0, 4)), task((12, 16), (12, 16)))
    workload = msgspec.structs.replace(SMALL, documents=(4, 4, 4, 4), mask="full")
    plan = Plan(layout, (at_home, (*whole, *apart)))
    between = [
        op
        for op in proved(plan, workload).schedule.program(1).ops
        if isinstance(op, Attend) and op.documents and op.q.shape[1] == 10 and op.k.shape[1] == 10
    ]
    assert [len(op.documents or ()) for op in between] == [2]
    exact(plan, workload)


def test_neighbours_are_one_kernel_and_one_message() -> None:
    """Rank 1 attends to keys 0..4, and to its own 4..12, in a kernel each; cut in five tasks it is no more."""
    cut = tuple(task((at, at + 4), (to, to + 4)) for at in (4, 8) for to in range(0, at + 4, 4))
    whole, fine = (proved(Plan(LAYOUT, (TASKS[0], of, TASKS[2])), SMALL).schedule for of in (TASKS[1], cut))
    for schedule in (whole, fine):
        forward = [op for op in schedule.program(1).ops if op.part == "forward"]
        assert sum(len(op.recvs) for op in forward if isinstance(op, Exchange)) == 2
    assert [sum(isinstance(op, Attend) for op in one.program(1).ops) for one in (whole, fine)] == [2, 2]


@pytest.mark.sweep
@settings(max_examples=25, deadline=None)
@given(
    plans(),
    st.sampled_from(MASKS),
    st.sampled_from(["both", "forward", "backward"]),
    st.sampled_from([1, 2]),
    st.builds(PlannedOptions, overlap=st.booleans(), gradients=st.sampled_from(["fp32", "model"])),
)
def test_any_plan(plan: Plan, mask: dict[str, Any], passes: Any, sequences: int, options: PlannedOptions) -> None:
    properties(plan, Workload(model=MODEL, seq=SEQ, batch=sequences, dtype="fp64", passes=passes, **mask), options)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(plans(), st.sampled_from(MASKS), st.sampled_from([1, 2]))
def test_many_plans(plan: Plan, mask: dict[str, Any], sequences: int) -> None:
    properties(plan, Workload(model=MODEL, seq=SEQ, batch=sequences, dtype="fp64", **mask), PlannedOptions())


def test_parts_of_which_a_window_keeps_nothing_are_no_kernels() -> None:
    """Tasks cut each other's rows, and of some parts a window keeps nothing: that was an error of Python."""
    spans = (((0, 1), (0, 24), 0), ((1, 24), (0, 2), 1), ((1, 24), (2, 7), 0), ((1, 24), (7, 24), 2))
    tasks = tuple(Task(Span(*queries), Span(*keys), division) for queries, keys, division in spans)
    plan = Plan(((), (Span(0, 24),)), (tasks, ()))
    properties(plan, Workload(model=MODEL, seq=24, dtype="fp64", window=7), PlannedOptions())


def properties(plan: Plan, workload: Workload, options: PlannedOptions) -> None:
    """It is proved, exact, equal in both engines, and moves what some pair needs, each row once, and no more."""
    checked = proved(plan, workload, options)
    assert max(output_errors(checked, execute_virtual(checked, CPU, 1)).values()) <= 1e-12
    cluster = Cluster(make_cluster_spec(len(plan.layout)))
    native, reference = (simulate(checked, cluster, None, engine=one).trace.rows for one in ("auto", "simpy"))
    assert native == reference
    claims = checked.schedule.header.claims
    assert claims is not None
    assert claims.wire_bytes == workload.batch * enumerated_bytes(plan, workload)
    host_waits = sum(isinstance(op, HostSync) for program in checked.schedule.programs for op in program.ops)
    exchanges = sum(isinstance(op, Exchange) for program in checked.schedule.programs for op in program.ops)
    assert host_waits == (0 if options.overlap else exchanges)


def enumerated_bytes(plan: Plan, workload: Workload) -> int:
    """Count pair by pair which tokens each rank has to be sent, in fp64 of 2 key/value heads of 4."""
    mask = mask_of(workload)
    home = {token: rank for rank, spans in enumerate(plan.layout) for span in spans for token in range(*span)}
    keys, queries = set(), set()
    for rank, tasks in enumerate(plan.tasks):
        for one in tasks:
            for q in range(*one.queries):
                for k in range(*one.keys):
                    if count_pairs(mask, Span(q, q + 1), Span(k, k + 1)):
                        keys |= {(rank, k)} if home[k] != rank else set()
                        queries |= {(rank, q)} if home[q] != rank else set()
    kv, q, lse = len(keys) * 2 * 2 * 4 * 8, len(queries) * 4 * 4 * 8, len(queries) * 4 * 8
    return (kv + 2 * q + lse) * workload.forward + (2 * kv + 3 * q + 2 * lse) * workload.backward


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", slow_but({3}, [2, 3, 4]))
@pytest.mark.parametrize("name", [*ANY_LENGTH, *DIVIDED, *OF_BLOCKS])
def test_every_planner_s_plan_of_one_document(name: str, ranks: int) -> None:
    plan = ({**ANY_LENGTH, **DIVIDED, **OF_BLOCKS}[name])(batch([SEQ]), ranks).plan
    exact(plan, Workload(model=MODEL, seq=SEQ, dtype="fp64"), seed=ranks)


def test_a_rank_without_tokens_and_more_ranks_than_tokens() -> None:
    exact(HELPED, SMALL)
    everything = task((0, 2), (0, 2))
    exact(written([[], [Span(0, 2)], [], []], [[everything], [], [], []]), msgspec.structs.replace(SMALL, seq=2))


def test_documents() -> None:
    """Blocks across the borders of documents are cut, and those between documents are skipped."""
    workload = msgspec.structs.replace(SMALL, documents=(6, 1, 9))
    exact(HELPED, workload)
    sent, alone = (proved(HELPED, one).schedule.header.claims for one in (workload, SMALL))
    assert sent is not None
    assert alone is not None
    assert sent.wire_bytes < alone.wire_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", slow_but({"fcp", "groups"}, OF_BLOCKS))
def test_planners_of_blocks_take_every_mask(name: str, pattern: str) -> None:
    lengths = (17, 5, 26)
    plan = OF_BLOCKS[name](batch(lengths, PATTERNS[pattern]), 3).plan
    keeps = PATTERNS[pattern]
    fields = (
        {"window": 4} if pattern == "window" else {"mask": pattern} if isinstance(keeps, Band) else {"pattern": keeps}
    )
    exact(plan, Workload(model=MODEL, seq=48, documents=lengths, dtype="fp64", **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_narrow_data_types(dtype: Any) -> None:
    checked = proved(HELPED, msgspec.structs.replace(SMALL, dtype=dtype, batch=2))
    worst = output_errors(checked, execute_virtual(checked, CPU, 3))
    assert max(worst.values()) <= {"bf16": 3e-2, "fp32": 2e-5}[dtype]


UNEVEN = Plan(
    ((Span(20, 32), Span(0, 2)), (Span(2, 20),)),
    ((task((20, 32), (0, 20)), task((0, 2), (0, 2), 1)), (task((20, 32), (20, 32)), task((2, 20), (0, 20), 1))),
)


@pytest.mark.sweep
@pytest.mark.parametrize("scope", ["layer", "step"])
def test_layers_and_steps_of_unequal_shards(scope: Any) -> None:
    workload = Workload(model=make_model(8, 4), seq=32, scope=scope, layers=2, dtype="fp64")
    exact(UNEVEN, workload)


def test_it_overlaps_what_the_next_division_needs() -> None:
    """On the toy cluster a message of 4 keys takes longer than nothing, and hides behind a kernel if it may."""
    cluster = Cluster(make_cluster_spec(2))
    waits, overlaps = (
        simulate(proved(UNEVEN, Workload(model=MODEL, seq=32), PlannedOptions(overlap=overlap)), cluster, None).trace
        for overlap in (False, True)
    )
    assert overlaps.step_time_s < waits.step_time_s


def test_a_setup_plays_a_plan() -> None:
    found = Setup(schedule=planned(HELPED, "helped"), gpus=3, seq=16, scope="attention", cluster="host").predicted()
    assert found.checked.schedule.header.name == "helped"


def test_attention_seconds_of_ranks_played_one_at_a_time() -> None:
    """A rank without tasks takes none, executed and simulated; the toy GPU takes as long as FLOPs say."""
    idle = Plan(LAYOUT, (TASKS[0], (*TASKS[1], *TASKS[2]), ()))
    checked = proved(idle, SMALL)
    executed = attention_seconds(checked, CPU, repeats=1)
    simulated = attention_s(simulate(checked, Cluster(make_cluster_spec(3)), None).trace)
    assert executed[2] == simulated[2] == 0
    assert min(executed[:2]) > 0
    pairs = [10 + 32, 36 + 32 + 26]  # of ranks 0 and 1, by counting the causal mask
    assert list(simulated[:2]) == pytest.approx([14 * 4 * 4 * some / 1e12 for some in pairs])
    with pytest.raises(InputError, match="repeats"):
        attention_seconds(checked, CPU, repeats=0)


DOUBLED = "count tokens 2..3 twice|columns 2..3 .*have a pair in common"
REFUSED: dict[str, tuple[Plan, str]] = {
    "a lost pair": (HELPED._replace(tasks=(TASKS[0], TASKS[1], ())), "tokens 12..16.*not complete"),
    "lost queries": (HELPED._replace(tasks=(TASKS[0][1:], *TASKS[1:])), "token 0, of rank 0"),
    "a doubled pair": (HELPED._replace(tasks=((*TASKS[0], task((12, 14), (2, 3), 1)), *TASKS[1:])), DOUBLED),
    "a doubled pair elsewhere": (HELPED._replace(tasks=(*TASKS[:2], (*TASKS[2], task((12, 14), (2, 3))))), DOUBLED),
    "a task twice": (
        HELPED._replace(tasks=(TASKS[0] * 2, *TASKS[1:])),
        "tokens 0..4 twice|columns 0..4 .*have a pair in common",
    ),
    "a token of two ranks": (HELPED._replace(layout=(*LAYOUT[:2], (Span(3, 4),))), "token 3 of 16 lives 2 times"),
    "a token of none": (HELPED._replace(layout=(LAYOUT[0], (Span(4, 11),), ())), "token 11 of 16 lives on no rank"),
    "tokens that are not there": (HELPED._replace(tasks=(*TASKS[:2], (task((12, 17), (8, 16)),))), "12 to 17 by 1"),
    "an empty task": (HELPED._replace(tasks=(*TASKS[:2], (task((12, 12), (8, 16)),))), "12 to 12 by 1"),
    "tasks of other ranks": (HELPED._replace(tasks=TASKS[:2]), "3 ranks and the tasks of 2"),
    "every other row": (
        Plan(((Span(0, 16, 2),), (Span(1, 17, 2),)), ((Task(Span(0, 16, 4), Span(0, 16), 0),), ())),
        "a step that divides 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plan_is_refused(name: str) -> None:
    plan, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        proved(plan, SMALL)


def test_another_mesh_and_layers_without_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=re.escape("the plan is for 3 ranks, and the ring has 4")):
        planned(HELPED)(SMALL, Mesh(ring=4))
    layers = msgspec.structs.replace(SMALL, scope="layer", layers=1, model=make_model())
    with pytest.raises(InputError, match="rank 2 of the plan has no tokens"):
        planned(HELPED)(layers, Mesh(ring=3))
