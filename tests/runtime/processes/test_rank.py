"""The process of a rank: what it starts before its first job, and by which names it calls torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from calibrate.measure.links import LinkCase, link_schedule
from runtime.execution.groups import Groups
from runtime.execution.tensors import Storage
from runtime.processes import rank as module
from runtime.processes.launch import Session
from runtime.processes.rank import Board, RankContext, Rendezvous, Seat, serve
from runtime.run import ScheduleRun
from sim.schedule.ir.ops import AllGather, AllReduce, AllToAll, ReduceScatter
from sim.schedule.proof.check import check
from sim.words.workload import Workload
from tests.helpers import make_checked, make_model

NEW_NAMES = ("all_gather_single", "reduce_scatter_single")
OLD_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")


class Pipe:
    """Tells a rank to end at once; keeps what it says."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, answer: Any) -> None:
        self.said.append(answer)

    def recv(self) -> None:
        return None


@pytest.mark.parametrize(("given", "expected"), [(None, "32"), ("8", "8")])
def test_a_rank_on_a_gpu_has_queues_for_its_streams_and_alone_it_starts_no_nccl(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key != name})
    if given:
        os.environ[name] = given
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((str(device), os.environ[name])))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("one rank needs no process group"))
    monkeypatch.setattr(module, "Board", lambda _: Board())
    pipe = Pipe()
    serve(pipe, 0, Seat(0, 1, "cuda", Rendezvous("nowhere"), 60.0, True, ""), 3)  # type: ignore[arg-type]
    assert [answer.error for answer in pipe.said] == [""]
    assert seen == [("cuda:3", expected)]


def has_a_process_group(_: RankContext) -> bool:
    return dist.is_initialized()


@pytest.mark.gloo
def test_one_rank_has_no_process_group() -> None:
    with Session(1) as session:
        assert session.call(has_a_process_group) == [False]


@pytest.mark.parametrize("kernel", ["all_to_all", "all_gather", "reduce_scatter", "all_reduce"])
def test_communication_in_a_group_of_one_rank_is_a_copy(kernel: Any) -> None:
    """Without a process group."""
    checked = check(link_schedule(LinkCase(kernel, 2**12, "idle"), 1, make_model(8, 4), "fp32"))
    program = checked.schedule.program(0)
    op = next(op for op in program.ops if isinstance(op, AllToAll | AllGather | ReduceScatter | AllReduce))
    storage = Storage(program, torch.device("cpu"), poison=True)
    given = storage.write(op.reads[0]).normal_().clone()
    groups = Groups(checked.schedule.header.communicators, 0, None)
    assert groups.bind(op, storage)() == []
    assert torch.equal(storage.read(op.writes[0]).flatten(), given.flatten())
    groups.close()


def keep_the_names_of_older_versions(_: RankContext) -> list[bool]:
    """Take away what torch 2.13 calls these collectives; return which of the older names there are."""
    for name in NEW_NAMES:
        if hasattr(dist, name):
            delattr(dist, name)
    return [hasattr(dist, name) for name in OLD_NAMES]


@pytest.mark.gloo
def test_collectives_by_their_older_names() -> None:
    """As torch 2.11 and 2.12 have them."""
    with Session(2) as session:
        assert session.call(keep_the_names_of_older_versions) == [[True, True]] * 2
        checked = make_checked("allgather", Workload(model=make_model(8, 4), seq=32, dtype="fp64"), 2)
        kinds = {type(op).__name__ for op in checked.schedule.program(0).ops}
        assert {"AllGather", "ReduceScatter"} <= kinds
        run = ScheduleRun(session, checked)
        run.step()
        assert max(run.errors().values()) < 1e-12
        run.close()


def cores_of_rank(_: RankContext) -> list[int]:
    return sorted(os.sched_getaffinity(0))


@pytest.mark.gloo
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes")
def test_ranks_are_bound_to_cores_of_their_own_where_there_are_enough(ranks: Callable[[int], Session]) -> None:
    here = sorted(os.sched_getaffinity(0))
    for size in (2, 4):
        free = size > len(here)
        wanted = [here if free else module.cores_of(rank, size, here) for rank in range(size)]
        assert ranks(size).call(cores_of_rank) == wanted
    assert sorted(core for rank in range(2) for core in module.cores_of(rank, 2, here * 2)) == sorted(here * 2)
