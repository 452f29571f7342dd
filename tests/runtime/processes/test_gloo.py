"""Real processes: the same schedules over gloo, exact, in the order that they say, with nobody left behind."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

from runtime.deaf import deaf
from runtime.execution.tensors import reserve
from runtime.execution.verify import BOUNDS
from runtime.processes.fork_server import ForkedProcess
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext
from runtime.run import ScheduleRun
from sim.accounts.breakdown import breakdown
from sim.accounts.memory import walk
from sim.base.errors import RankError
from sim.batches.batch import batch
from sim.batches.planners.wlb import wlb
from sim.engine.play.simulate import simulate
from sim.schedule.ir.ops import COMPUTE, Barrier, HostSync
from sim.schedule.ir.plan import Plan
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.gathered import gathered
from sim.schedule.proof.check import Checked, check
from sim.words.mesh import Mesh
from sim.words.workload import Dtype, Workload
from tests.helpers import VARIANTS, checked_or_refused, make_checked, make_cluster_spec, make_model, slow_but
from tests.schedule.methods.plans import HELPED, proved
from tests.schedule.model.test_pipelines import CASES as PIPELINES
from tests.schedule.model.test_step import STACKS, enough, make_step, odd, step
from tests.schedule.model.test_tiled_mlp import narrow
from tests.schedule.model.test_unlike_micro_batches import built, unlike
from topology.cluster import Cluster
from topology.specs import DramSpec, PcieSpec, SocketSpec

pytestmark = pytest.mark.gloo


@pytest.fixture(params=[1, 2, 4])
def session(request: pytest.FixtureRequest, ranks: Callable[[int], Session]) -> Session:
    return ranks(request.param)


def run_or_refused(session: Session, name: str, workload: Workload) -> dict[str, float]:
    """Execute a cell; return the errors of what it leaves, none if it is refused."""
    checked = checked_or_refused(name, workload, session.ranks)
    if checked is None:
        return {}
    run = ScheduleRun(session, checked)
    step = run.step()
    errors = run.errors()
    run.close()
    for program, dependencies, peak in zip(
        checked.schedule.programs, checked.dependencies, step.peak_bytes, strict=True
    ):
        assert peak == walk(program, dependencies).buffer_peak_bytes
    return errors


def most_ranks(name: str) -> int:
    return 1 if VARIANTS[name].schedule == "single" else 4


def attention_equals_the_reference(session: Session, name: str, dtype: Dtype, heads: tuple[int, int]) -> None:
    workload = Workload(model=make_model(*heads), seq=48, batch=2, dtype=dtype)
    errors = run_or_refused(session, name, workload)
    assert errors.keys() == ({"out", "dq", "dk", "dv"} if session.ranks <= most_ranks(name) else set())
    assert all(error <= BOUNDS[dtype] for error in errors.values()), errors


def layers_equal_the_reference(session: Session, name: str, dtype: Dtype) -> None:
    workload = Workload(model=make_model(8, 4), seq=32, dtype=dtype, scope="layer", layers=2)
    errors = run_or_refused(session, name, workload)
    assert len(errors) == (2 + 2 * 9 if session.ranks <= most_ranks(name) else 0)
    assert all(error <= BOUNDS[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("name", slow_but(SCHEDULES, VARIANTS))
def test_outputs_and_gradients_equal_the_reference(ranks: Callable[[int], Session], name: str) -> None:
    attention_equals_the_reference(ranks(most_ranks(name)), name, "fp64", (8, 4))


@pytest.mark.parametrize(("dtype", "heads"), [("fp32", (8, 1)), ("bf16", (8, 8))])
@pytest.mark.parametrize("name", ["zigzag", "ulysses"])
def test_narrower_data_types(session: Session, name: str, dtype: Dtype, heads: tuple[int, int]) -> None:
    attention_equals_the_reference(session, name, dtype, heads)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_all_data_types_and_numbers_of_ranks(session: Session, name: str) -> None:
    cells: list[tuple[Dtype, tuple[int, int]]] = [("fp64", (8, 4)), ("fp32", (8, 1))]
    for dtype, heads in cells + [("bf16", (8, 8)), ("fp64", (8, 2))] * (name in SCHEDULES):
        attention_equals_the_reference(session, name, dtype, heads)


@pytest.mark.parametrize("name", slow_but({"usp", "fpdt"}, SCHEDULES))
def test_two_layers_equal_the_reference(ranks: Callable[[int], Session], name: str) -> None:
    layers_equal_the_reference(ranks(most_ranks(name)), name, "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_layers_in_all_data_types_and_numbers_of_ranks(session: Session, name: str) -> None:
    for dtype in ("fp64", "fp32"):
        layers_equal_the_reference(session, name, dtype)


@pytest.mark.parametrize(
    "name", slow_but({"zigzag, offloaded"}, [f"{one}, offloaded" for one in ("single", "zigzag", "ulysses")])
)
def test_activations_on_the_host(session: Session, name: str) -> None:
    """Copied by threads of their own; the GPU's share of the memory is as the walk says."""
    workload = Workload(model=make_model(8, 4), dtype="fp64", seq=32, scope="layer", layers=3)
    assert all(error <= BOUNDS["fp64"] for error in run_or_refused(session, name, workload).values())


EXECUTED = {
    "two gathered ahead", "chunked loss", "a list kept, on the host and back in the way",
    "micro-batches, one sum to the host",
}  # fmt: skip
"""Stacks that cover each kind of op that processes do otherwise once: what is gathered, copied, and on the host."""


@pytest.mark.parametrize("stack", slow_but(EXECUTED, STACKS))
def test_steps_equal_the_reference_again_and_again(ranks: Callable[[int], Session], stack: str) -> None:
    """Also the second one, which begins from the same weights; memory is as the walk says."""
    step_equals_the_reference(ranks(2), make_step("zigzag", 2, enough(stack), **STACKS[stack]))


@pytest.mark.parametrize("checkpoint", slow_but({"full"}, ["full", "none"]))
def test_steps_whose_mlp_has_several_tiles(ranks: Callable[[int], Session], checkpoint: str) -> None:
    step_equals_the_reference(ranks(2), make_step("ulysses", 2, narrow(batch=2), mlp="tiled", checkpoint=checkpoint))


@pytest.mark.parametrize("checkpoint", slow_but({"none"}, ["full", "none"]))
def test_steps_of_eager_modules(ranks: Callable[[int], Session], checkpoint: str) -> None:
    options = {"modules": "eager", "loss": "torch", "checkpoint": checkpoint}
    step_equals_the_reference(ranks(2), make_step("zigzag", 2, step(), **options))


@pytest.mark.parametrize("modules", slow_but({"fused"}, ["fused", "eager"]))
def test_steps_with_adapters(ranks: Callable[[int], Session], modules: str) -> None:
    model = msgspec.structs.replace(step().model, lora_rank=2, lora_alpha=1.0)
    step_equals_the_reference(ranks(2), make_step("ulysses", 2, step(model=model), modules=modules))


@pytest.mark.parametrize("place", slow_but({"host"}, ["host", "host-states"]))
def test_steps_with_weights_on_the_host(ranks: Callable[[int], Session], place: str) -> None:
    options = {"optimiser": "host", "weights": place, "micro_batches": 2}
    step_equals_the_reference(ranks(2), make_step("ulysses", 2, step(batch=2), **options))


@pytest.mark.parametrize("pipeline", slow_but({"published"}, ["ideal", "published"]))
def test_steps_in_chunks(ranks: Callable[[int], Session], pipeline: str) -> None:
    """Four chunks that wait on the host, as do inputs of layers, copied by threads of their own."""
    options = {"pipeline": pipeline, "activations": "host", "loss": "chunked"}
    step_equals_the_reference(ranks(2), make_step("fpdt", 2, step(), chunk=8, **options))


SHARED_OUT: dict[str, dict[str, Any]] = {
    "whole": {}, "chunked": {"loss": "chunked"}, "unfused": {"loss": "unfused"},
    "own shards first": {"loss": "torch", "tp_overlap": "shards"},
    "all tokens on all": {"tp_sequence": False, "tp_overlap": "gradients"},
    "tokens first in memory": {"memory_order": "sbh", "tp_overlap": "shards", "tp_buffers": "all"},
    "chunks beside hops": {"tp_overlap": "chunks", "products": "joined"},
}  # fmt: skip


@pytest.mark.parametrize("chosen", slow_but({"tokens first in memory"}, SHARED_OUT))
def test_steps_whose_weights_are_shared_out(ranks: Callable[[int], Session], chosen: str) -> None:
    """Two sequences at a time, of which what is gathered is copied but where tokens are first in memory; the largest
    logits are all-reduced.
    """
    options = dataclasses.replace(SCHEDULES["single"].options, **SHARED_OUT[chosen])
    schedule = SCHEDULES["single"].schedule(step(batch=2), Mesh(tp=2), options)
    step_equals_the_reference(ranks(2), check(schedule))


def step_equals_the_reference(session: Session, checked: Checked) -> None:
    run = ScheduleRun(session, checked)
    for _ in range(2):
        played = run.step()
        assert max(run.errors().values()) <= BOUNDS["fp64"]
        walks = map(walk, checked.schedule.programs, checked.dependencies)
        assert list(played.peak_bytes) == [found.buffer_peak_bytes for found in walks]
    run.close()


@pytest.mark.sweep
def test_a_step_whose_ranks_do_not_divide_its_weights(ranks: Callable[[int], Session]) -> None:
    checked = make_step("ring", 4, odd(seq=32), optimiser="host")
    run = ScheduleRun(ranks(4), checked)
    played = run.step()
    assert max(run.errors().values()) <= BOUNDS["fp64"]
    walks = map(walk, checked.schedule.programs, checked.dependencies)
    assert list(played.peak_bytes) == [found.buffer_peak_bytes for found in walks]
    run.close()


def test_a_plan_with_ranks_that_have_no_tokens_or_nothing_to_do(ranks: Callable[[int], Session]) -> None:
    plan = Plan((*HELPED.layout, ()), (*HELPED.tasks, ()))
    step_equals_the_reference(ranks(4), proved(plan, Workload(model=make_model(4, 2), seq=16, dtype="fp64", batch=2)))


def test_a_plan_over_gathered_keys_of_shards_of_several_sizes(ranks: Callable[[int], Session]) -> None:
    documents = (17, 3, 14)
    workload = Workload(model=make_model(4, 2), seq=34, dtype="fp64", batch=2, documents=documents)
    plan = wlb(batch(documents), 4, "document").plan
    assert len({sum(span.size for span in tokens) for tokens in plan.layout}) > 1
    step_equals_the_reference(ranks(4), check(gathered(plan)(workload, Mesh(ring=4))))


def test_a_pipeline_whose_micro_batches_have_documents_of_their_own(ranks: Callable[[int], Session]) -> None:
    """Of three lengths, on rings in two stages."""
    step_equals_the_reference(ranks(4), check(built("zigzag", Mesh(ring=2, pp=2), unlike())))


@pytest.mark.parametrize(
    "pipeline", slow_but({"parts handed on"}, ["dual pipe of rings, weights sharded", "parts handed on"])
)
def test_pipelines_with_copies_and_with_parts_that_are_handed_on(
    ranks: Callable[[int], Session], pipeline: str
) -> None:
    """Micro-batches go both ways, and what gathers weights and sums gradients is of stages that mirror each other; or
    what one stage hands on is gathered by the next.
    """
    step_equals_the_reference(ranks(4), check(PIPELINES[pipeline].build()))


@pytest.mark.parametrize("fields", [{"passes": "forward", "mask": "full"}, {"passes": "backward"}, {"window": 5}])
def test_one_pass_alone_and_other_masks(session: Session, fields: dict[str, Any]) -> None:
    for name in ("ring", "zigzag", "ulysses"):
        workload = Workload(model=make_model(8, 4), dtype="fp64", seq=32, **fields)
        assert all(error <= 1e-12 for error in run_or_refused(session, name, workload).values())


@pytest.mark.parametrize(
    "name", slow_but({"balanced-ring", "allgather", "usp", "upipe"}, [name for name in SCHEDULES if name != "single"])
)
def test_both_players_play_the_same_score(session: Session, name: str) -> None:
    """Same hash, streams in the order of the schedule, dependencies kept, memory as the walk says."""
    checked = make_checked(name, Workload(model=make_model(8, 4), seq=64), session.ranks)
    run = ScheduleRun(session, checked)
    run.step()
    step = run.step()
    run.close()
    executed = step.trace
    pcie, socket = (
        PcieSpec(bytes_per_s=1e9, latency_s=0.0),
        SocketSpec(dram=DramSpec(capacity_bytes=2**40, bytes_per_s=1e9)),
    )
    cluster = Cluster(make_cluster_spec(session.ranks, pcie=pcie, socket=socket))
    simulated = simulate(checked, cluster, None).trace
    assert executed.schedule_hash == simulated.schedule_hash == checked.schedule.hash
    assert sum(breakdown(executed, 0).values()) == pytest.approx(executed.step_time_s)
    for program, dependencies, peak in zip(
        checked.schedule.programs, checked.dependencies, step.peak_bytes, strict=True
    ):
        rows = {row.op: row for row in executed.of_rank(program.rank)}
        last: dict[str, float] = {}
        for index, op in enumerate(program.ops):
            row = rows[index]
            assert row.posted_s <= row.begin_s <= row.end_s
            assert row.posted_s >= last.get(op.stream, 0.0)
            last[op.stream] = row.end_s
            assert all(row.posted_s >= rows[other].end_s for other in dependencies.data[index])
            assert (row.ran != "") == (op.stream == "compute")
        assert peak == walk(program, dependencies).buffer_peak_bytes


def test_a_step_can_be_repeated_and_gives_the_same_bits(session: Session) -> None:
    run = ScheduleRun(session, make_checked("ring", Workload(model=make_model(8, 4), seq=32), session.ranks))
    run.step()
    first = run.errors()
    run.step()
    assert run.errors() == first
    run.close()


def test_all_collectives_over_gloo(session: Session) -> None:
    workload = Workload(model=make_model(8, 4), seq=8 * session.ranks, dtype="fp64")
    schedule = make_checked("allgather", workload, session.ranks).schedule

    def synchronised(rank: int) -> Program:
        program, links = schedule.program(rank), [link.name for link in schedule.header.communicators]
        barriers = [Barrier(part="backward", label="all", communicator=link) for link in links]
        wait = HostSync(part="backward", label="wait", streams=(COMPUTE, *links))
        return program.replace(ops=(*program.ops, *barriers, wait))

    run = ScheduleRun(session, check(Schedule(schedule.header, synchronised)))
    kinds = {row.kind for row in run.step().trace.rows if row.rank == 0}
    assert {"Attend", "HostSync"} <= kinds
    assert kinds >= {"AllGather", "ReduceScatter", "Barrier"} or session.ranks == 1
    assert all(error <= 1e-12 for error in run.errors().values())
    run.close()


# Runs that go wrong


def stop_in_the_middle(session: Session, sign: int) -> str:
    """Signal rank 1 while a long run is under way; return what the run says."""
    workload = Workload(model=make_model(8, 4, head_dim=64), seq=4096)
    run = ScheduleRun(session, make_checked("ring", workload, 2))
    run.step()
    pid = session.processes[1].pid
    timer = threading.Timer(0.15, os.kill, (pid, sign))
    timer.start()
    with pytest.raises(RankError) as error:
        while True:
            run.step()
    timer.join()
    assert not any(process.is_alive() for process in session.processes)
    return str(error.value)


def test_a_rank_that_dies_is_named_with_its_op() -> None:
    with Session(2, timeout_s=30) as session:
        message = stop_in_the_middle(session, signal.SIGKILL)
    assert "rank 1 op" in message
    assert "killed by signal SIGKILL" in message
    assert "\n" not in message


def test_a_rank_that_hangs_is_named_with_its_op_within_the_limit() -> None:
    begin = time.monotonic()
    with Session(2, timeout_s=2) as session:
        message = stop_in_the_middle(session, signal.SIGSTOP)
    assert "no progress for 2 s: rank 1 op" in message
    assert time.monotonic() - begin < 40


def fail(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        context.progress(3, False)
        raise ValueError("something is wrong\nwith a second line")
    torch.distributed.barrier()


def test_a_rank_that_raises_is_named() -> None:
    with Session(2, timeout_s=30) as session:
        session.name_ops(lambda rank, op: f"rank {rank} op {op} (a test)")
        with pytest.raises(RankError, match=r"^rank 1 op 3 \(a test\) failed: ValueError: something is wrong$"):
            session.call(fail, 1)
        assert not any(process.is_alive() for process in session.processes)


def their_rank(context: RankContext) -> int:
    return context.rank


@pytest.mark.usefixtures("hearing")
def test_ctrl_c_is_the_parents_alone_and_none_is_lost_while_ranks_start() -> None:
    with Session(2, timeout_s=30) as session:
        for process in session.processes:
            os.kill(process.pid, signal.SIGINT)
        assert session.call(their_rank) == [0, 1]
    with pytest.raises(KeyboardInterrupt), deaf():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("hearing")
def test_ctrl_c_that_reaches_another_thread_waits_too() -> None:
    """As in a notebook: the system gives a signal of the process to any thread that has not blocked it."""
    done, ended = threading.Event(), []
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            with deaf():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
                ended.append(True)
            time.sleep(60)  # on a loaded machine the other thread takes the signal later
    finally:
        done.set()
        other.join()
    assert ended


@pytest.mark.usefixtures("hearing")
def test_a_rank_that_starts_as_ctrl_c_comes_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ForkedProcess] = []

    def interrupted(process: ForkedProcess, *ends: Connection) -> None:
        start(process, *ends)
        started.append(process)
        if len(started) == 2:
            signal.raise_signal(signal.SIGINT)

    start = ForkedProcess.__init__
    monkeypatch.setattr(ForkedProcess, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Session(3, timeout_s=30)
    assert len(started) == 2
    assert not any(process.exitcode is None for process in started)


def _faults_of_a_tensor(context: RankContext, nbytes: int, reserved: bool) -> int:
    """Return the page faults of the first touch of a tensor."""
    if reserved:
        reserve(nbytes, context.ranks, context.device)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="heaps elsewhere are another allocator's")
def test_a_reserved_heap_is_not_touched_for_the_first_time_by_a_kernel() -> None:
    """64 MiB are 32 huge pages, or 16384 others; what is reserved is more than that, and stays."""
    with Session(1, timeout_s=60) as session:
        (fresh,) = session.call(_faults_of_a_tensor, 2**26, False)
        (reserved,) = session.call(_faults_of_a_tensor, 2**27, True)
    assert fresh >= 30
    assert reserved < 16
